"""What a report's scripts read: figures, cards of clients and raw criteria, small however long the run was."""

from __future__ import annotations

from typing import Any

import numpy as np

from steelyard.report import figures
from steelyard.report.baseline import asks_clients
from steelyard.report.figures.weights import interesting
from steelyard.report.reweigh import cohorts
from steelyard.report.view import Frame, Part, RunView, plain, sampled

CARDS = 400
"""Clients with a card at most, for each rule."""
COURSE = 60
"""Points in the course of one client at most."""
UPDATES = 8000
"""Updates of one rule that the weighing control knows at most."""
RULES = 10
"""Rules with figures of their own at most."""


def contents(view: RunView) -> dict[str, Any]:
    """Return everything that the scripts of a report read, as one JSON-ready document."""
    parts = chosen_parts(view)
    drawn = {name: figures.draw(view, name) for name, kind in figures.KINDS.items() if kind.of == "view"}
    by_rule: dict[str, dict[str, Any]] = {name: {} for name, kind in figures.KINDS.items() if kind.of == "part"}
    for name, found in by_rule.items():
        for part in parts:
            chart = figures.KINDS[name].make(view, part)
            if chart is not None:
                found[part.label] = figures.spec(chart)
    return {
        "main": view.part().label,
        "measure": view.measure,
        "percent": view.measure == "accuracy",
        "themes": {"light": figures.theme(), "dark": figures.theme(dark=True)},
        "figures": {name: figures.spec(chart) for name, chart in drawn.items() if chart is not None},
        "parts": by_rule,
        "empty": {name: kind.empty for name, kind in figures.KINDS.items()},
        "clients": {part.label: found for part in parts if (found := _cards(view, part)) is not None},
        "reweigh": {part.label: found for part in parts if (found := raw_criteria(view, part)) is not None},
    }


def chosen_parts(view: RunView) -> list[Part]:
    """Return the rules that get figures of their own: one seed of each, the main one and the baseline always."""
    first: dict[str, Part] = {}
    for part in view.parts:
        if asks_clients(part.settings):
            first.setdefault(part.label, part)
    kept = list(first.values())
    if len(kept) > RULES:
        must = {view.part().label, view.baseline}
        others = [part for part in kept if part.label not in must][: RULES - len(must)]
        kept = [part for part in kept if part.label in must or part in others]
    return kept


def _short(values: Any) -> list[float | None]:
    """Return numbers with four digits: enough for a figure, and half the size."""
    return [plain(float(f"{float(value):.4g}")) for value in values]


def _cards(view: RunView, part: Part) -> dict[str, Any] | None:
    """Return one entry per client: totals, course, flaws, why it was left out; of many clients, the telling ones."""
    frame = view.clients(part)
    if not len(frame):
        return None
    flaws = view.flaws(part)
    weighed = frame[frame["weight"].notna()]
    totals = frame.assign(weight=frame["weight"].fillna(0.0)).groupby("client", sort=False)["weight"].sum()
    kept = set(interesting(totals, flaws, CARDS))
    tested = view.evaluations(part)
    tested = tested[tested["client"].isin(kept)]
    scores = {str(client): rows for client, rows in tested.groupby("client", sort=False)}
    whole = float(totals.sum()) or 1.0
    failed = frame[frame["failure"].notna()] if "failure" in frame else frame.iloc[:0]
    reasons = {str(client): rows for client, rows in failed.groupby("client", sort=False)}
    courses = {
        str(client): rows for client, rows in weighed[weighed["client"].isin(kept)].groupby("client", sort=False)
    }
    entries = [
        _card(part, client, float(totals[client]) / whole, courses.get(client), scores.get(client), reasons.get(client))
        | {"flaws": flaws.get(client, [])}
        for client in sorted(kept)
    ]
    shares = np.array([entry["share"] for entry in entries])
    for entry in entries:
        # Telling: flawed, left out, or far from what everybody gets.
        far = abs(entry["share"] - float(np.median(shares))) / (float(shares.max()) or 1.0)
        entry["interest"] = 2.0 * bool(entry["flaws"]) + 1.5 * bool(entry["failures"]) + far
    note = (
        ""
        if len(kept) == len(totals)
        else f"{len(totals)} were asked: shown are the heaviest, the lightest and flawed ones. "
    )
    long = any(len(rows) > COURSE for rows in courses.values())
    note += f"Courses show {COURSE} rounds at most, evenly spaced." if long else ""
    template = figures.draw(view, "client", rule=part.label, seed=part.seed, client=entries[0]["name"])
    last = int(frame["round"].to_numpy().max())
    spec = figures.spec(template) if template is not None else None
    return {"clients": entries, "criteria": part.criteria, "last": last, "note": note, "template": spec}


def _card(
    part: Part, client: str, share: float, weighed: Frame | None, scores: Frame | None, failed: Frame | None
) -> dict[str, Any]:
    course = weighed.iloc[sampled(len(weighed), COURSE)] if weighed is not None else None
    served = scores.iloc[sampled(len(scores), COURSE)] if scores is not None else None
    failures = [] if failed is None else list(zip(failed["round"], failed["failure"], strict=True))
    return {
        "name": client,
        "share": share,
        "asked": (0 if weighed is None else len(weighed)) + len(failures),
        "samples": None if weighed is None else plain(float(weighed["samples"].to_numpy().max())),
        "score": None if scores is None else plain(float(scores["score"].iloc[-1])),
        "failures": [[int(number), str(reason)] for number, reason in failures[:50]],
        "rounds": [] if course is None else [int(number) for number in course["round"]],
        "weight": [] if course is None else _short(course["weight"]),
        "criteria": [] if course is None else [_short(course[f"normalised_{name}"]) for name in part.criteria],
        "tested": [] if served is None else [int(number) for number in served["round"]],
        "scores": [] if served is None else _short(served["score"]),
    }


def raw_criteria(view: RunView, part: Part) -> dict[str, Any] | None:
    """Return the raw criteria of a rule's updates, for weighing them again in the browser; long runs are sampled."""
    found = list(cohorts(view.clients(part), part.criteria))
    if not found:
        return None
    total = sum(len(clients) for _, clients, _, _ in found)
    kept = [found[index] for index in sampled(len(found), max(1, UPDATES * len(found) // total))]
    names = sorted({client for _, clients, _, _ in kept for client in clients})
    index = {name: position for position, name in enumerate(names)}
    flaws = view.flaws(part)
    order = part.settings.get("priority")
    listed = [name.strip() for name in order.split(">")] if order else part.criteria
    return {
        "criteria": part.criteria,
        "order": [part.criteria.index(name) for name in listed],
        "normalise": part.settings.get("normalise", "share"),
        "clients": [{"name": name, "flaws": flaws.get(name, [])} for name in names],
        "rounds": [
            {
                "round": number,
                "clients": [index[client] for client in clients],
                "raw": raw.tolist(),
                "weights": weights.tolist(),
            }
            for number, clients, raw, weights in kept
        ],
        "note": "" if len(kept) == len(found) else f"{len(kept)} of {len(found)} rounds, evenly spaced.",
    }
