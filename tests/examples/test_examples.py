"""Every example and notebook runs as a user would run it and shows what it promises; operators' files are sound."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from tests.warm import ROOT, warm_script

from steelyard import __version__
from steelyard.cli.main import command_line

EXAMPLES = ROOT / "examples"
DEPLOYMENT = EXAMPLES / "deployment"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path) -> None:
    if path.stem == "privacy_budget":
        pytest.importorskip("dp_accounting")
    done = warm_script(path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    assert (tmp_path / f"{path.stem}.svg").read_text(encoding="utf-8").startswith("<svg")
    CHECKS.get(path.stem, len)(done.stdout)


def check_poisoned(printed: str) -> None:
    """Plain averaging and caps let the attacker move the model five ways and more to its target; the others hold it."""
    assert "0.55% of the rows" in printed
    found = {
        rule: (float(moves), float(share.rstrip("%")))
        for rule, _, moves, share in map(str.split, printed.splitlines()[2:])
    }
    for rule in ("power(VP)^3", "clip(DS)", "median(DS)", "multi-krum(DS)"):
        moved, accuracy = found[rule]
        assert moved < 1.2
        assert accuracy > 85
    for rule in ("DS", "capped(DS;max_shares=2)"):
        moved, accuracy = found[rule]
        assert moved > 5
        assert accuracy < 20
    assert found["DS"][0] < 6
    assert found["MD>DS/max"][1] < 20


def check_own_data(printed: str) -> None:
    """The wrong hospital is noticed: a rule that asks the server's rows is recommended."""
    assert any(line.startswith("Use ") and "VP" in line.split(":")[0] for line in printed.splitlines())


def check_privacy(printed: str) -> None:
    """More epsilon leaves more accuracy, and no run spends more than its budget."""
    found = [(float(line.split("epsilon")[1].split(":")[0]), line.split()[-1]) for line in printed.splitlines()]
    assert [round(spent) for spent, _ in found] == [1, 2, 4, 8] * 2
    accuracy = [float(share.rstrip("%")) for _, share in found]
    assert accuracy[3] > accuracy[0] + 10
    assert accuracy[7] > accuracy[4] + 10


def check_lora(printed: str) -> None:
    """Weighing products loses less than averages of the factors would, and the report shows it."""
    (line,) = [line for line in printed.splitlines() if line.startswith("lost of the products")]
    product, factors = (float(part.rstrip("%;").rstrip("%")) for part in line.split() if "%" in part)
    assert product < factors


CHECKS = {
    "lora": check_lora,
    "poisoned_update": check_poisoned,
    "own_data": check_own_data,
    "privacy_budget": check_privacy,
}


def test_every_example_is_in_the_gallery_with_its_picture() -> None:
    gallery = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8").split("\n## ")[1:]
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix != ".pyc" and path.name[0] not in "._"}
    assert {part.splitlines()[0] for part in gallery} == names - {"deployment"}  # which has nothing to draw
    for part in gallery:
        picture = re.search(r"\]\((images/[^)]+)\)", part)
        assert picture is not None, part
        assert (ROOT / "docs" / picture[1]).is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said", "made"),
    [
        ("first_steps", "Use VP>CARE>DS: accuracy is ", "compared.html"),
        ("hospitals", "fedavg", "record.html"),
    ],
)
def test_the_cells_of_a_notebook_run_in_their_order(name: str, said: str, made: str, tmp_path: Path) -> None:
    """As a script in a warm process: a kernel takes ten seconds to start."""
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    script = re.sub(r"^!(.*)$", r'__import__("os").system(f"\1")', "\n".join(cells), flags=re.MULTILINE)
    (tmp_path / "cells.py").write_text(script, encoding="utf-8")
    done = warm_script(tmp_path / "cells.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout, "the notebook ends with an answer"
    assert (tmp_path / made).is_file()


def composed() -> dict[str, Any]:
    return pytest.importorskip("yaml").safe_load((DEPLOYMENT / "compose.yaml").read_text())


def test_a_server_and_three_hospitals_may_do_no_more_than_they_must() -> None:
    services = composed()["services"]
    assert sorted(services) == ["hospital-a", "hospital-b", "hospital-c", "server"]
    for name, part in services.items():
        assert (part["read_only"], part["cap_drop"], part["init"]) == (True, ["ALL"], True)
        assert ("ports" in part) == (name == "server")  # Nobody calls a node.
        folders = {volume.split(":")[0] for volume in part["volumes"]}
        assert folders & {f"./{each}" for each in services} == {f"./{name}"}  # No part sees the folder of another.
        assert (DEPLOYMENT / part["build"]["dockerfile"]).is_file()
    container = (DEPLOYMENT / "Containerfile").read_text()
    assert f"STEELYARD_VERSION={__version__}" in container
    assert container.index("\nUSER") > container.index("\nRUN")
    assert ":latest" not in container


def test_every_command_of_a_deployment_is_one_of_ours_with_options_that_it_has() -> None:
    commands = {name: list(part["command"]) for name, part in composed()["services"].items()}
    for unit in DEPLOYMENT.glob("*.service"):
        text = unit.read_text()
        (line,) = re.findall(r"^ExecStart=\S+/steelyard federate (.*)$", text, re.MULTILINE)
        commands[unit.name] = line.split()
    main = command_line()
    assert isinstance(main, click.Group)
    group = main.commands["federate"]
    assert isinstance(group, click.Group)
    for where, words in commands.items():
        group.commands[words[0]].make_context(words[0], words[1:])  # Raises where an option or an argument is wrong.
        assert words[0] == ("serve" if "server" in where else "node"), where
