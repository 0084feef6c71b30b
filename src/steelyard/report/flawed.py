"""Where the weight went: how much of it flawed clients got, and one sentence that says what that did to the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from steelyard.report.documents.run import FlawedShares, RuleSummary
from steelyard.runs.history import History

SMALL = 0.02
"""Rules within this of each other, on one seed, count as equal."""


def flaws_of(history: History, seed: int) -> dict[str, list[str]]:
    """Return what is wrong with each flawed client of a seed, in plain words; empty for a run without flaws."""
    found: dict[str, list[str]] = {}
    for row in history.flaws.to_dict("records"):
        if int(row["seed"]) == seed:
            found.setdefault(str(row["client"]), []).append(str(row["flaw"]))
    return found


def flawed_shares(history: History, rule: str, seed: int) -> FlawedShares | None:
    """Return the share of all weight, of all samples and of all updates that flawed clients had; None without flaws."""
    flawed = flaws_of(history, seed)
    if not flawed:  # before the clients' table is read, which is large in a long run
        return None
    found = history.cohorts(rule, seed)
    weighed = ~np.isnan(found.weight)
    if not weighed.any():
        return None
    theirs = np.isin(found.client, [index for index, name in enumerate(found.clients) if name in flawed])[weighed]
    weight, samples = found.weight[weighed], found.samples[weighed]
    return {
        "weight": float(weight[theirs].sum() / (weight.sum() or 1.0)),
        "samples": float(samples[theirs].sum() / (samples.sum() or 1.0)),
        "updates": float(theirs.mean()),
    }


def sentence(rules: Sequence[RuleSummary], flaws: Mapping[str, Sequence[str]], clients: int, rows: str) -> str:
    """Say in one plain sentence what weighing did: who was flawed, what say they got, what the model became.

    `rows` is what the server's reporting rows are called.
    """
    scored = [(rule, value) for rule in rules if (value := rule["server"].get("accuracy")) is not None]
    base, low = next(((rule, value) for rule, value in scored if rule["fedavg"]), (None, 0.0))
    others = [(rule, value) for rule, value in scored if rule is not base and rule["asks_clients"]]
    if base is None or not others:
        return ""
    best, high = max(others, key=lambda pair: pair[1])
    if high - low < SMALL:
        return (
            f"No rule is more than {100 * SMALL:.0f} points better than {base['rule']} ({low:.1%}): where clients "
            "are of equal worth there is little to gain from weighing them."
        )
    reached = f"{best['rule']} reached {high:.1%} on {rows}, {base['rule']} {low:.1%}"
    if base["flawed"] is None or best["flawed"] is None:
        return (
            f"{reached}: {100 * (high - low):.0f} points on one seed, which may be chance; "
            "steelyard compare --seeds 10 shows."
        )
    counted = Counter(flaw for found in flaws.values() for flaw in found)
    return (
        f"{len(flaws)} of {clients} clients are flawed ({counted.most_common(1)[0][0]}). By size alone they got "
        f"{base['flawed']['weight']:.0%} of the weight and the model {low:.1%} on {rows}; {best['rule']} gave them "
        f"{best['flawed']['weight']:.0%} and reached {high:.1%}."
    )
