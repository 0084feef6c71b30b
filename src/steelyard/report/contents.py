"""What a report's scripts read: figures, cards of clients and raw criteria, small however long the run was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.base.measures import ERROR, Measure, measure_of
from steelyard.report import figures
from steelyard.report.curves import on_rows
from steelyard.report.figures.look import VegaLite
from steelyard.report.figures.one_rule import interesting
from steelyard.report.view import FederationView, Frame, RunView, cohorts, plain, sampled

CARDS = 400
"""Clients with a card at most, for each rule."""
COURSE = 40
"""Points in the course of one client at most."""
UPDATES = 5000
"""Updates of one rule that the weighing control knows at most."""
RULES = 10
"""Rules with figures of their own at most."""


def contents(view: RunView) -> ReportData:
    """Return everything that the scripts of a report read, as one JSON-ready document."""
    federations = chosen_federations(view)
    drawn = {name: figures.draw(view, name) for name, kind in figures.KINDS.items() if kind.of == "view"}
    kinds = [name for name, kind in figures.KINDS.items() if kind.of == "federation"]
    by_rule: dict[str, dict[str, VegaLite]] = {name: {} for name in kinds}
    for name, found in by_rule.items():
        for federation in federations:
            chart = figures.KINDS[name].drawn(view, federation)
            if chart is not None:
                found[federation.label] = figures.spec(chart)
    return {
        "main": view.federation().label,
        "measure": view.measure,
        "percent": measure_of(view.measure).percent,
        "direction": measure_of(view.measure).direction,
        "themes": {"light": figures.theme(), "dark": figures.theme(dark=True)},
        "figures": {name: figures.spec(chart) for name, chart in drawn.items() if chart is not None},
        "parts": by_rule,
        "empty": {name: kind.empty for name, kind in figures.KINDS.items()},
        "clients": {one.label: found for one in federations if (found := _cards(view, one)) is not None},
        "reweigh": {one.label: found for one in federations if (found := raw_criteria(view, one)) is not None},
    }


def chosen_federations(view: RunView) -> list[FederationView]:
    """Return the rules that get figures of their own: one seed of each, the main one and the baseline always."""
    first: dict[str, FederationView] = {}
    for federation in view.federations:
        if federation.settings.asks_clients:
            first.setdefault(federation.label, federation)
    kept = list(first.values())
    if len(kept) > RULES:
        must = {view.federation().label, view.baseline}
        others = [one for one in kept if one.label not in must][: RULES - len(must)]
        kept = [one for one in kept if one.label in must or one in others]
    return kept


def _short(values: Any) -> list[float | None]:
    """Return numbers with four digits: enough for a figure, and half the size."""
    numbers = np.asarray(values, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        unit = 10.0 ** (3 - np.floor(np.log10(np.abs(numbers))))
        shown = np.where(numbers == 0, 0.0, np.round(numbers * unit) / unit)
    return [value if math.isfinite(value) else None for value in shown.tolist()]


def _by_client(frame: Frame, clients: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return each client's columns as arrays: far faster than cutting frames client by client."""
    columns = {name: frame[name].to_numpy() for name in frame.columns}
    rows = frame.groupby("client", sort=False).indices
    none = np.zeros(0, np.int64)
    return {client: {name: values[rows.get(client, none)] for name, values in columns.items()} for client in clients}


def _cards(view: RunView, federation: FederationView) -> ClientCards | None:
    """Return one entry per client: totals, course, flaws, why it was left out; of many, those that stand out."""
    frame = view.clients(federation)
    if not len(frame):
        return None
    flaws, measure = view.flaws(federation), measure_of(view.measure)
    totals = frame["weight"].fillna(0.0).groupby(frame["client"], sort=False).sum()
    kept = interesting(totals, flaws, CARDS)
    shares = totals / (float(totals.sum()) or 1.0)
    far = (shares - shares.median()).abs() / (float(shares.max()) or 1.0)
    asked = _by_client(frame.assign(left_out=frame["failure"].notna()), kept)
    tested = _by_client(view.evaluations(federation), kept)
    entries = [
        _card(federation, measure, client, float(shares[client]), asked[client], tested[client], flaws.get(client, []))
        for client in kept
    ]
    for entry in entries:
        # Standing out: flawed, left out, or far from what everybody gets.
        entry["interest"] = 2.0 * bool(entry["flaws"]) + 1.5 * bool(entry["failures"]) + float(far[entry["name"]])
    every, longest = federation.history.every, max(entry["asked"] for entry in entries)
    some = f"{len(totals)} were asked: these are the flawed, the heaviest and the lightest."
    notes = [
        some if len(kept) < len(totals) else "",
        f"Of this long run one round in {every} is shown client by client." if every > 1 else "",
        f"Courses show {COURSE} rounds at most, evenly spaced." if longest > COURSE else "",
    ]
    template = figures.draw(view, "client", rule=federation.label, seed=federation.seed, client=entries[0]["name"])
    return {
        "clients": entries,
        "criteria": federation.criteria,
        "last": int(frame["round"].to_numpy().max()),
        "note": " ".join(filter(None, notes)),
        "template": figures.spec(template) if template is not None else None,
    }


def _card(
    federation: FederationView,
    measure: Measure,
    client: str,
    share: float,
    asked: Mapping[str, Any],
    tested: Mapping[str, Any],
    flaws: list[str],
) -> ClientCard:
    weighed = np.flatnonzero(np.isfinite(asked["weight"].astype(np.float64)))
    course = weighed[sampled(len(weighed), COURSE)]
    failed = np.flatnonzero(asked["left_out"])[:50]
    samples, scores = asked["samples"][weighed], tested["score"]
    shown = sampled(len(scores), COURSE)
    return {
        "name": client,
        "share": share,
        "asked": len(asked["round"]),
        "samples": plain(float(samples.max())) if len(samples) else None,
        "score": plain(float(scores[-1])) if len(scores) else None,
        "score_on": _last_test(tested, measure) if len(scores) else None,
        "failures": [(int(asked["round"][row]), str(asked["failure"][row])) for row in failed],
        "rounds": asked["round"][course].tolist(),
        "weight": _short(asked["weight"][course]),
        "criteria": [_short(asked[f"normalised_{name}"][course]) for name in federation.criteria],
        "tested": tested["round"][shown].tolist(),
        "scores": _short(scores[shown]),
        "flaws": flaws,
        "interest": 0.0,
    }


def _last_test(tested: Mapping[str, Any], measure: Measure) -> dict[str, int | float | bool] | None:
    """Return on how many rows a client's last test rests."""
    error = tested[ERROR][-1:] if ERROR in tested else None
    found = on_rows([tested["score"][-1:]], [tested["samples"][-1:]], measure, [error])
    # A page has no NaN: an error on a single row has no interval.
    return None if found is None or math.isnan(found.low + found.high) else dict(found)


def raw_criteria(view: RunView, federation: FederationView) -> RawCriteria | None:
    """Return the raw criteria of a rule's updates, for weighing them again in the browser; long runs are sampled."""
    found = list(cohorts(view.clients(federation), federation.criteria))
    # One criterion that is the same for all: no rule weighs it otherwise.
    if not found or federation.criteria == ["EQ"]:
        return None
    total = sum(len(clients) for _, clients, _, _ in found)
    kept = [found[index] for index in sampled(len(found), max(1, UPDATES * len(found) // total))]
    names = sorted({client for _, clients, _, _ in kept for client in clients})
    index = {name: position for position, name in enumerate(names)}
    flaws = view.flaws(federation)
    order = federation.settings.priority
    listed = [name.strip() for name in order.split(">")] if order else federation.criteria
    return {
        "criteria": federation.criteria,
        "order": [federation.criteria.index(name) for name in listed],
        "normalise": federation.settings.normalise,
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


class ClientCard(TypedDict):
    """One client under one rule: its totals, its course over the rounds, its flaws, why it was left out."""

    name: str
    share: float
    asked: int
    samples: float | None
    score: float | None
    score_on: dict[str, int | float | bool] | None
    """The fields of `OnRows`."""
    failures: list[tuple[int, str]]
    rounds: list[int]
    weight: list[float | None]
    criteria: list[list[float | None]]
    tested: list[int]
    scores: list[float | None]
    flaws: list[str]
    interest: float


class ClientCards(TypedDict):
    """The clients of one rule, and the figure that each of them fills."""

    clients: list[ClientCard]
    criteria: list[str]
    last: int
    note: str
    template: VegaLite | None


class NamedClient(TypedDict):
    """A client and what is wrong with it."""

    name: str
    flaws: list[str]


class RawRound(TypedDict):
    """The raw criteria of one round's updates, and the weights that they were given."""

    round: int
    clients: list[int]
    raw: list[list[float]]
    weights: list[float]


class RawCriteria(TypedDict):
    """The updates of one rule, to be weighed again in a browser."""

    criteria: list[str]
    order: list[int]
    normalise: str
    clients: list[NamedClient]
    rounds: list[RawRound]
    note: str


class Themes(TypedDict):
    """How figures look, by day and by night."""

    light: VegaLite
    dark: VegaLite


class ReportData(TypedDict):
    """Everything that the scripts of a report read."""

    main: str
    measure: str
    percent: bool
    direction: str
    themes: Themes
    figures: dict[str, VegaLite]
    parts: dict[str, dict[str, VegaLite]]
    empty: dict[str, str]
    clients: dict[str, ClientCards]
    reweigh: dict[str, RawCriteria]
