"""What a report's scripts read: figures, cards of clients and raw criteria, small however long the run was."""

from __future__ import annotations

import math
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


class _Grouped:
    """A table's columns as arrays, and the rows of each client: far faster than cutting frames client by client."""

    def __init__(self, frame: Frame) -> None:
        self.columns = {name: frame[name].to_numpy() for name in frame.columns}
        self._rows = frame.groupby("client", sort=False).indices

    def rows(self, client: str) -> Any:
        return self._rows.get(client, np.zeros(0, np.int64))

    def of(self, column: str, rows: Any) -> Any:
        return self.columns[column][rows]


def _cards(view: RunView, federation: FederationView) -> ClientCards | None:
    """Return one entry per client: totals, course, flaws, why it was left out; of many, those that stand out."""
    frame = view.clients(federation)
    if not len(frame):
        return None
    flaws = view.flaws(federation)
    totals = frame.assign(weight=frame["weight"].fillna(0.0)).groupby("client", sort=False)["weight"].sum()
    kept = interesting(totals, flaws, CARDS)
    whole = float(totals.sum()) or 1.0
    shares = dict(zip((str(client) for client in totals.index), totals.to_numpy() / whole, strict=True))
    asked, tested = _Grouped(frame.assign(left_out=frame["failure"].notna())), _Grouped(view.evaluations(federation))
    entries = [_card(federation, client, shares[client], asked, tested, flaws.get(client, [])) for client in kept]
    for entry in entries:
        entry["score_on"] = _on_rows(tested, tested.rows(entry["name"])[-1:], measure_of(view.measure))
    middle = float(np.median(list(shares.values())))
    most = max(shares.values()) or 1.0
    for entry in entries:
        # Standing out: flawed, left out, or far from what everybody gets.
        far = abs(entry["share"] - middle) / most
        entry["interest"] = 2.0 * bool(entry["flaws"]) + 1.5 * bool(entry["failures"]) + far
    note = (
        f"{len(totals)} were asked: these are the flawed, the heaviest and the lightest. "
        if len(kept) < len(totals)
        else ""
    )
    longest = max(entry["asked"] for entry in entries)
    if federation.history.every > 1:
        note += f"Of this long run one round in {federation.history.every} is shown client by client. "
    note += f"Courses show {COURSE} rounds at most, evenly spaced." if longest > COURSE else ""
    template = figures.draw(view, "client", rule=federation.label, seed=federation.seed, client=entries[0]["name"])
    last = int(frame["round"].to_numpy().max())
    spec = figures.spec(template) if template is not None else None
    return {"clients": entries, "criteria": federation.criteria, "last": last, "note": note, "template": spec}


def _on_rows(tested: _Grouped, last: Any, measure: Measure) -> dict[str, int | float | bool] | None:
    """Return on how many rows a client's last test rests."""
    if not len(last):
        return None
    error = tested.of(ERROR, last) if ERROR in tested.columns else None
    found = on_rows([tested.of("score", last)], [tested.of("samples", last)], measure, [error])
    # A page has no NaN: an error on a single row has no interval.
    return None if found is None or math.isnan(found.low + found.high) else dict(found)


def _card(
    federation: FederationView, client: str, share: float, asked: _Grouped, tested: _Grouped, flaws: list[str]
) -> ClientCard:
    rows, served = asked.rows(client), tested.rows(client)
    weighed = rows[np.isfinite(asked.of("weight", rows).astype(np.float64))]
    failed = rows[asked.of("left_out", rows)].tolist()
    samples = asked.of("samples", weighed)
    course = weighed[sampled(len(weighed), COURSE)]
    shown = served[sampled(len(served), COURSE)]
    scores = tested.of("score", served)
    return {
        "name": client,
        "share": float(share),
        "asked": len(rows),
        "samples": plain(float(samples.max())) if len(samples) else None,
        "score": plain(float(scores[-1])) if len(scores) else None,
        "score_on": None,
        "failures": [(int(asked.columns["round"][row]), str(asked.columns["failure"][row])) for row in failed[:50]],
        "rounds": asked.of("round", course).tolist(),
        "weight": _short(asked.of("weight", course)),
        "criteria": [_short(asked.of(f"normalised_{name}", course)) for name in federation.criteria],
        "tested": tested.of("round", shown).tolist(),
        "scores": _short(tested.of("score", shown)),
        "flaws": flaws,
        "interest": 0.0,
    }


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
