"""What is public is on its page, and a name that goes is deprecated by version, once, with what to use instead."""

from __future__ import annotations

import re
import warnings
from importlib import import_module
from pathlib import Path

import pytest

import steelyard
from steelyard import errors

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
INTERNAL = {
    # examples/recommender.py looks behind the curtain on purpose.
    "steelyard.experiment.recommend_audit.watch",
    "steelyard.report.recommender.open_run",
}


def named() -> set[str]:
    """The names that the page describes: in blocks that are filled from docstrings, and in backticks."""
    blocks = re.findall(r"^::: ([\w.]+)$", PAGE, re.MULTILINE)
    return {block.rsplit(".", 1)[1] for block in blocks} | set(re.findall(r"`(\w+)`", PAGE))


def used_in_guides() -> set[tuple[str, str]]:
    """(module, name) of every import from Steelyard in guides, in the README and in examples."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*")]
    found: set[tuple[str, str]] = set()
    for page in pages:
        if page.name == "architecture.md" or not page.is_file():
            continue
        text = page.read_text(encoding="utf-8")
        for module, names in re.findall(r"from (steelyard[\w.]*) import \(?([\w, ]+)", text):
            found |= {(module, name.strip()) for name in names.split(",") if name.strip()}
        found |= {("steelyard", name) for name in re.findall(r"\bsteelyard\.([a-z_]+)\(", text)}
    return found


def test_every_public_name_is_on_its_page() -> None:
    assert not set(steelyard.__all__) - named()


def test_every_name_that_guides_import_is_on_the_page() -> None:
    used = used_in_guides()
    assert {"share_out", "PartitionSettings", "Simulation", "weigh", "Weighed", "WeighedAggregator"} <= {
        n for _, n in used
    }
    missing = {f"{module}.{name}" for module, name in used if name not in named()}
    assert not missing - INTERNAL


def test_every_block_of_the_page_is_a_name_that_exists() -> None:
    for block in re.findall(r"^::: ([\w.]+)$", PAGE, re.MULTILINE):
        module, name = block.rsplit(".", 1)
        if module.split(".")[-1] == "nvflare":
            pytest.importorskip("nvflare")
        assert hasattr(import_module(module), name) or import_module(block), block


def test_a_name_that_goes_still_works_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steelyard, "_DEPRECATED", {"weigh_clients": ("weigh", "0.3.0")})
    monkeypatch.setattr(errors, "_deprecated", set())
    with pytest.warns(FutureWarning) as shown:
        found = [steelyard.weigh_clients for _ in range(2)]
    assert found == [steelyard.weigh, steelyard.weigh]
    assert [str(each.message) for each in shown] == [
        "steelyard.weigh_clients is deprecated: use steelyard.weigh; it goes in 0.3.0"
    ]
    assert shown[0].filename == __file__


def test_every_deprecated_name_leads_to_a_public_one_and_is_on_the_page() -> None:
    for old, (new, gone_in) in steelyard._DEPRECATED.items():
        assert new in steelyard.__all__
        assert old not in steelyard.__all__
        assert f"`{old}`" in PAGE
        assert gone_in in PAGE


def test_an_unknown_name_is_no_attribute() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not hasattr(steelyard, "weigh_clients")
