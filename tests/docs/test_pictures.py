"""The pictures of the pages are there, and the diagrams are those that docs/diagrams.py draws."""

from __future__ import annotations

import re
import sys
from importlib import import_module

import pytest
from tests.warm import ROOT

PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def test_diagrams_are_as_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    diagrams = import_module("diagrams")
    try:
        for name, draw in diagrams.DIAGRAMS.items():
            kept = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
            assert kept == draw().svg(), f"{name}: python docs/diagrams.py draws another one"
    finally:
        sys.modules.pop("diagrams")


def test_no_picture_is_kept_for_nothing() -> None:
    shown = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    }
    kept = {path.resolve() for path in (ROOT / "docs" / "images").rglob("*.*")}
    assert kept - shown == set()
