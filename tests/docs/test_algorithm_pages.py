"""Pages of policies and personal algorithms have five parts: assumptions, use, equation, published figures, ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.made import generated
from tests.warm import ROOT

from steelyard.algorithms.catalogue import known as algorithms
from steelyard.weighing.policies.catalogue import known as policies

PERSONAL = sorted(name for name, made in algorithms().items() if made.personal)
PARTS = {
    "what it assumes": r"\*\*It assumes\*\*",
    "when it helps": r"\*\*It helps\*\*|\*\*Use it ",
    "its equation": r"(?m)^    .*[=←∝θ]",
    "the published figure": r"\*\*Published",
    "ours": r"\*\*Ours",
}


def made_pages() -> dict[str, str]:
    return {Path(path).stem: text for path, text in generated().policy_pages().items()}


def test_each_policy_has_a_page() -> None:
    assert set(made_pages()) == set(policies())


@pytest.mark.parametrize("name", [*PERSONAL, *policies()])
def test_every_page_has_its_five_parts(name: str) -> None:
    written = ROOT / "docs" / "algorithms" / f"{name}.md"
    page = written.read_text(encoding="utf-8") if name in PERSONAL else made_pages()[name]
    assert [part for part, pattern in PARTS.items() if not re.search(pattern, page)] == []
