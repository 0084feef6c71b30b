"""What CONTRIBUTING says of adding things is true: its own blocks, put where they say, are found and used."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tests.warm import ROOT, warm_script

BLOCK = re.compile(r"```python\n# (at the end of|the file) (src/\S+)\n(.*?)```", re.DOTALL)

USED = """
import json
import numpy as np
import steelyard
from steelyard import Experiment
from steelyard.recommend.interactions import build
from steelyard.recommend.metrics import measure
from steelyard.recommend.ranking import GroundTruth

experiment = Experiment(
    data={"source": "stripes"},
    partition={"scheme": "iid", "clients": 4},
    model={"name": "logistic"},
    rounds={"count": 1},
    compute={"engine": "loop", "device": "cpu"},
)
result = experiment.compare(["FEW", "least(FEW,DS)", "fedhalf", "shortest"], out="run", progress=False)
rules = list(result.table["rules"])
rows = build(["a", "a", "b"], ["x", "y", "x"])
shown = measure(GroundTruth.between(rows, rows).view(np.array([[0, 1], [0, -1]]), 2))["items_shown"]
print(json.dumps({"rules": rules, "data": result.experiment.data.source, "shown": shown, "file": steelyard.__file__}))
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with every example of CONTRIBUTING in it."""
    place = tmp_path_factory.mktemp("adding")
    shutil.copytree(ROOT / "src", place / "src")  # with bytecode, which Python takes for files that did not change
    for where, path, code in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text()):
        file = place / path
        assert file.exists() == (where == "at the end of"), path
        before = file.read_text() + "\n\n" if file.exists() else ""
        file.write_text(before + code)
    return place


def test_each_kind_has_an_example() -> None:
    found = [Path(path).name for _, path, _ in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text())]
    examples = [
        "built_in.py",
        "scores.py",
        "fedhalf.py",
        "catalogue.py",
        "shortest.py",
        "catalogue.py",
        "stripes.py",
        "sources.py",
        "metrics.py",
    ]
    assert found == examples


def test_the_examples_are_found_and_used(changed: Path) -> None:
    (changed / "used.py").write_text(USED, encoding="utf-8")
    ran = warm_script(changed / "used.py", folder=changed / "src", fresh=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(changed)
    assert set(found["rules"]) >= {"FEW", "least(FEW,DS)", "fedhalf", "shortest"}
    assert (found["data"], found["shown"]) == ("stripes", 2)
