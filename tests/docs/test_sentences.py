"""Pages are written in plain sentences: none has more words than a reader takes in at once."""

from __future__ import annotations

from tests.docs.sentences import long_sentences
from tests.warm import ROOT

NAMED = (
    "goes by the client that it was taken from",
    "its lower accuracy becomes the reference",
    "stands above the experiment",
    "share neither a user nor an item",
    "with a fifth hostile and lying",
)
"""Of sentences that readers had to read twice."""


def pages() -> dict[str, str]:
    """Return all pages that people read, by path, without the list of changes."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_no_sentence_is_too_long() -> None:
    assert {path: found for path, text in pages().items() if (found := long_sentences(text))} == {}


def test_the_sentences_that_nobody_understood_are_gone() -> None:
    joined = {path: " ".join(text.split()) for path, text in pages().items()}
    assert {path: found for path, text in joined.items() if (found := [part for part in NAMED if part in text])} == {}


def test_a_long_sentence_is_found_and_short_ones_are_not() -> None:
    assert len(long_sentences("word " * 41 + "end.")) == 1
    assert not long_sentences("word " * 38 + "end. " + "word " * 38 + "end.")
    assert not long_sentences("| " + "word " * 30 + "| " + "word " * 30 + "|")
