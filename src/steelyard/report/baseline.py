"""Which rule the others are held against: federated averaging by dataset size, where it is among them."""

from __future__ import annotations

import json

from steelyard.errors import UserError, listed, nearest
from steelyard.report.documents import RecordedRule
from steelyard.runs.reader import History


def is_fedavg(settings: RecordedRule) -> bool:
    """Say whether recorded settings of a rule are FedAvg: dataset size alone, neither fitted, adapted nor sharpened."""
    sharpened = settings.get("score") == "power" and settings.get("power") not in (None, 1)
    adapts = (settings.get("loss") or {}).get("adapt", "none") != "none"
    return (
        list(settings["criteria"]) == ["DS"]
        and not (sharpened or adapts or settings.get("fit"))
        and settings.get("normalise", "share") != "rank"
        and asks_clients(settings)
    )


def asks_clients(settings: RecordedRule) -> bool:
    """Say whether a rule asks clients at all; the control "server-only" does not."""
    return settings.get("trained_by", "clients") == "clients"


def find_baseline(history: History, wanted: str | None) -> str:
    """Return the rule that the others are held against: the one asked for, else FedAvg, else the first."""
    rules = {str(row["rule"]): json.loads(row["settings"]) for row in history.federations.to_dict("records")}
    if wanted is not None:
        if wanted not in rules:
            raise UserError(f"--baseline: got '{wanted}'{nearest(wanted, rules)}; allowed: {listed(rules)}")
        return wanted
    return next((name for name, settings in rules.items() if is_fedavg(settings)), next(iter(rules)))
