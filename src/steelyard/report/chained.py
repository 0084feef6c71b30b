"""What a run's chain of rounds shows, in words: its head, or what is not as it was written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steelyard.errors import printable
from steelyard.runs.reader import History


def chained(history: History) -> dict[str, Any]:
    """Return the head of a run's chain, the round that it follows, and the first problem ("" where there is none)."""
    found = history.chain
    return {"head": found.head, "round": found.round, "problem": found.problem}


def chain_line(document: Mapping[str, Any]) -> str:
    """Return one line on a chain: the warning, or the head; empty before the first checkpoint."""
    if document["problem"]:
        return f"CHANGED since it was written: {printable(document['problem'])}; what is shown is what is there now"
    return f"chain head after round {document['round']}: {document['head']}" if document["head"] else ""
