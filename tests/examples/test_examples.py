"""Every example runs as a user would run it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.warm import ROOT, warm_script

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path) -> None:
    done = warm_script(path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
