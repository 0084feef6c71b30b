"""Every command and snippet of README and docs is run as a reader would: page by page, each in an empty folder."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from tests.docs.snippets import commands, snippets
from tests.warm import ROOT, command_environment, warm_module

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
)
WITH_SNIPPETS = [
    page
    for page in PAGES
    if any("not run" not in snippet.notes for snippet in snippets((ROOT / page).read_text(encoding="utf-8")))
]


def data_folder() -> Path | None:
    named = os.environ.get("STEELYARD_DATA")
    beside = Path(named) if named else ROOT.parent / "shared" / "data"
    return beside.resolve() if beside.is_dir() else None


# Half a minute each, over data that are in no checkout; their commands are tested on small tables.
LONG = ("docs/algorithms/kgflex.md", "docs/guide/arena.md", "docs/reference/recommenders.md")


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if page in LONG else ()) for page in WITH_SNIPPETS]
)
def test_every_snippet_of_the_page_runs(page: str, tmp_path: Path):
    data = data_folder()
    environment = command_environment(
        FLWR_TELEMETRY_ENABLED="0", COLUMNS="100", STEELYARD_STATE=str(tmp_path / "state")
    )
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if data is not None:
        environment["STEELYARD_DATA"] = str(data)
    done = warm_module("tests.docs.snippets", str(ROOT / page), folder=tmp_path, timeout=280, environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    problems = json.loads((tmp_path / "problems.json").read_text(encoding="utf-8"))
    assert not problems, f"{page}\n" + "\n\n".join(problems)


@pytest.mark.parametrize("page", PAGES)
def test_commands_stand_in_fences(page: str):
    """An indented block is not highlighted, has no button to copy, and would not be run by the test above."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    loose = [
        line
        for line in text.splitlines()
        if re.match(r"    (\$ )?(steelyard|pip|python|export|flwr|flower-\w+) ", line)
    ]
    assert not loose


def test_the_parser():
    page = (
        "Text\n\n<!-- needs: mnist -->\n<!-- shortened: --seeds 1 -->\n"
        "```sh\nsteelyard run a \\\n    --seed 1  # recipes: a, b\n# no\nls\n```\n"
        '\n```toml title="x/my.toml"\nseed = 1\n```\n'
    )
    first, second = snippets(page)
    assert (first.language, first.line, first.title) == ("sh", 5, None)
    assert first.notes == {"needs": "mnist", "shortened": "--seeds 1"}
    assert commands(first.text) == ["steelyard run a --seed 1", "ls"]
    assert (second.title, second.text, second.notes) == ("x/my.toml", "seed = 1\n", {})
