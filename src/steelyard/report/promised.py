"""What a run promised to its clients and what it has spent, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from steelyard.errors import UserError
from steelyard.runs.reader import History


def promised(history: History) -> dict[str, Any] | None:
    """Return a run's record of its promise; None where it made none, or has not ended yet."""
    text = history.info.get("privacy")
    if not text:
        return None
    try:
        found = json.loads(text)
        promise_lines(found)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{history.folder}: its record of privacy cannot be read; allowed: as it was") from None
    return found


def promise_lines(document: Mapping[str, Any] | None) -> list[str]:
    """Return one line for each rule, and one for all of them together where there are several."""
    if document is None:
        return []
    budget = "" if document["budget"] is None else f" of {document['budget']:g}"
    where = {"central": "noise by the server", "local": "noise by the devices"}[document["model"]]
    told = f"at δ = {document['delta']:g} (client-level, {document['neighbours']}; {where}, {document['accountant']})"
    epsilons = {str(name): float(value) for name, value in document["epsilon"].items()}
    ended = {
        name: f"; stopped after round {round}, another would pass the budget"
        for name, round in document["ended"].items()
    }
    if len(epsilons) == 1:
        ((name, spent),) = epsilons.items()
        return [f"ε {spent:.4g}{budget} {told}{ended.get(name, '')}"]
    lines = [f"{name}: ε {spent:.4g}{budget} {told}{ended.get(name, '')}" for name, spent in epsilons.items()]
    return [*lines, f"all of these together have told ε {float(document['together']):.4g} of any one client"]
