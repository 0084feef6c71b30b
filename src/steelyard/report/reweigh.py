"""Weighing a run's updates again by another rule, from the raw criteria that it stored: no training, and no result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from steelyard.base.errors import UserError
from steelyard.messages.updates import Floats
from steelyard.report.documents.run import Reweighed, ReweighedClient
from steelyard.report.view import FederationView, Frame, RunView
from steelyard.weighing.rule import Rule, WeighingSettings
from steelyard.weighing.words import label

LABEL = "The weights that this rule would have given to these updates; not a result: no model was trained with them."


def cohorts(frame: Frame, criteria: Sequence[str]) -> Iterator[tuple[int, list[str], Floats, Floats]]:
    """Yield (round, clients, raw [clients, criteria], recorded weights) of every round whose updates were weighed."""
    weighed = frame[frame["weight"].notna()]
    measured = np.column_stack([weighed[f"raw_{name}"].to_numpy(np.float64) for name in criteria])
    names = np.array(weighed["client"], dtype=object)
    weights = weighed["weight"].to_numpy(np.float64)
    for number, rows in sorted(weighed.groupby("round", sort=True).indices.items()):
        raw = measured[rows]
        if np.isfinite(raw).all():
            yield int(number), [str(client) for client in names[rows]], raw, weights[rows]


def federation_with(view: RunView, criteria: Sequence[str], rule: str | None, seed: int | None) -> FederationView:
    """Return the rule whose updates are weighed again: the one named, else the first that measured all the criteria."""
    if rule is not None:
        chosen = view.federation(rule, seed)
    else:
        first = view.federation(None, seed)
        able = [one for one in view.federations if one.seed == first.seed and set(criteria) <= set(one.criteria)]
        chosen = first if set(criteria) <= set(first.criteria) else next(iter(able), first)
    missing = [name for name in criteria if name not in chosen.criteria]
    if missing:
        known = "; ".join(
            f"{one.label}: {', '.join(one.criteria)}" for one in view.federations if one.seed == chosen.seed
        )
        raise UserError(f"criteria: {', '.join(missing)} not measured under '{chosen.label}'; allowed: {known}")
    return chosen


def reweigh(view: RunView, federation: FederationView, settings: WeighingSettings) -> Reweighed:
    """Return each client's share of all weight as recorded and as the rule would have given it, over the whole run."""
    if settings.policy is not None and not settings.policy.made().of_measures:
        raise UserError(
            f"rule: '{label(settings)}' looks at updates or remembers rounds; allowed for a stored run: rules of its "
            "criteria alone"
        )
    rule = Rule(settings)
    recorded: dict[str, float] = {}
    given: dict[str, float] = {}
    asked: dict[str, int] = {}
    rounds = 0
    for _, clients, raw, before in cohorts(view.clients(federation), settings.criteria):
        rounds += 1
        for client, old, new in zip(clients, before, rule.weigh(raw, clients=clients).weights, strict=True):
            recorded[client] = recorded.get(client, 0.0) + float(old)
            given[client] = given.get(client, 0.0) + float(new)
            asked[client] = asked.get(client, 0) + 1
    if not rounds:
        raise UserError(
            f"{federation.history.folder}: no weighed updates under '{federation.label}'; allowed: a run with some"
        )
    flaws = view.flaws(federation)
    old_total, new_total = sum(recorded.values()) or 1.0, sum(given.values()) or 1.0
    rows: list[ReweighedClient] = [
        {
            "client": client,
            "recorded": recorded[client] / old_total,
            "weight": given[client] / new_total,
            "rounds": asked[client],
            "flaws": flaws.get(client, []),
        }
        for client in sorted(given, key=lambda name: (-given[name], name))
    ]
    flawed = [row for row in rows if row["flaws"]]
    return {
        "run": str(federation.history.folder),
        "updates_of": federation.rule,
        "seed": federation.seed,
        "rule": label(settings),
        "rounds": rounds,
        "note": LABEL,
        "clients": rows,
        "flawed": {"recorded": sum(row["recorded"] for row in flawed), "weight": sum(row["weight"] for row in flawed)}
        if flawed
        else None,
    }
