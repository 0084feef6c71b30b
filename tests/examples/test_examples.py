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
    if path.stem == "poisoned_update":
        check_poisoned(done.stdout)


def check_poisoned(printed: str) -> None:
    """Plain averaging and caps let the attacker move the model five ways and more to its target; the others hold it."""
    assert "0.55% of the rows" in printed
    moved: dict[str, float] = {}
    accuracy: dict[str, float] = {}
    for line in printed.splitlines()[2:]:
        rule, _, moves, share = line.split()
        moved[rule], accuracy[rule] = float(moves), float(share.rstrip("%"))
    held = ("power(VP)^3", "clip(DS)", "median(DS)", "multi-krum(DS)")
    assert 5 < moved["DS"] < 6
    assert moved["capped(DS;max_shares=2)"] > 5
    assert all(accuracy[rule] < 20 for rule in ("DS", "capped(DS;max_shares=2)", "MD>DS/max"))
    assert all(moved[rule] < 1.2 and accuracy[rule] > 85 for rule in held)
