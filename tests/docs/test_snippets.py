"""Every command and snippet of README and docs is run as a reader would: page by page, each in an empty folder."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from tests.docs.pages import written_pages
from tests.docs.snippets import snippets
from tests.warm import ROOT, command_environment, warm_module


def data_folder() -> Path | None:
    named = os.environ.get("STEELYARD_DATA")
    beside = Path(named) if named else ROOT.parent / "shared" / "data"
    return beside.resolve() if beside.is_dir() else None


# These show Python, commands and a refusal; all others take minutes together.
QUICK = ("README.md", "docs/guide/troubleshooting.md")
PAGES = [page for page, text in written_pages().items() if any("not run" not in each.notes for each in snippets(text))]


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page not in QUICK)) for page in PAGES])
def test_every_snippet_of_the_page_runs(page: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = command_environment(COLUMNS="100", STEELYARD_STATE=str(tmp_path / "state")) | {"PATH": path}
    if (data := data_folder()) is not None:
        environment["STEELYARD_DATA"] = str(data)
    done = warm_module("tests.docs.snippets", str(ROOT / page), folder=tmp_path, timeout=280, environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    problems = json.loads((tmp_path / "problems.json").read_text(encoding="utf-8"))
    assert not problems, f"{page}\n" + "\n\n".join(problems)


def test_commands_stand_in_fences() -> None:
    """An indented block is not highlighted, has no button to copy, and would not be run by the test above."""
    loose = re.compile(r"^    (?:\$ )?(?:steelyard|pip|python|export|flwr|flower-\w+) .*", re.MULTILINE)
    fences = re.compile(r"```.*?```", re.DOTALL)
    found = {page: loose.findall(fences.sub("", text)) for page, text in written_pages().items()}
    assert {page: lines for page, lines in found.items() if lines} == {}
