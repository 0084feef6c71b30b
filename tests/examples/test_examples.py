"""Every example runs as a user would run it, prints what it found and draws its picture of the gallery."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.warm import ROOT, warm_script

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GALLERY = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")


def example(path: Path) -> Any:
    """LoRA takes longest; tests/algorithms trains its layers in less."""
    return pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem == "lora"))


@pytest.mark.parametrize("path", [example(path) for path in EXAMPLES])
def test_example(path: Path, tmp_path: Path) -> None:
    if path.stem == "privacy_budget":
        pytest.importorskip("dp_accounting")
    done = warm_script(path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    assert (tmp_path / f"{path.stem}.svg").read_text(encoding="utf-8").startswith("<svg")
    if path.stem in CHECKS:
        CHECKS[path.stem](done.stdout)


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
    shares = [float(line.split()[2].rstrip("%")) for line in printed.splitlines() if "accuracy" in line]
    assert min(shares) > 80


CHECKS = {
    "lora": check_lora,
    "poisoned_update": check_poisoned,
    "own_data": check_own_data,
    "privacy_budget": check_privacy,
}


def test_every_example_is_in_the_gallery_with_its_picture() -> None:
    names = [path.name for path in (ROOT / "examples").iterdir() if path.suffix != ".pyc" and path.name[0] not in "._"]
    names.remove("deployment")  # Files for operators, with nothing to draw; the operator's page names them.
    headings = [line.removeprefix("## ") for line in GALLERY.splitlines() if line.startswith("## ")]
    assert sorted(headings) == sorted(names)
    for part in GALLERY.split("\n## ")[1:]:
        assert "](images/" in part, part.splitlines()[0]
        picture = part.split("](")[1].split(")")[0]
        assert (ROOT / "docs" / picture).stat().st_size > 1000, picture


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
