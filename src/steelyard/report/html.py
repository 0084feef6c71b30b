"""The report: one HTML file that opens without a network. Text from runs and clients is escaped everywhere."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.base import files
from steelyard.base.errors import UserError, told_as
from steelyard.base.measures import ERROR, Measure, measure_of
from steelyard.experiment.loading import to_toml
from steelyard.report import figures
from steelyard.report.figures.look import VegaLite
from steelyard.report.figures.one_rule import interesting
from steelyard.report.recommended import TITLES, recommended
from steelyard.report.rendering import Table, asset, filled
from steelyard.report.result import Comparison
from steelyard.report.statistics import on_rows
from steelyard.report.tables import chain_line, comparison_tables, headline, main_table, privacy_lines, target_tables
from steelyard.report.view import FederationView, Frame, RunView, cohorts, plain, sampled

SCRIPTS = ("reweigh.js", "figures.js", "controls.js", "report.js")


def check_report(path: Path) -> None:
    """Refuse a report's file that no browser would open by its name; use it before anything is drawn."""
    if path.suffix not in (".html", ".htm"):
        raise UserError(f"--out: got '{path}'; allowed: a file name that ends in .html")


def write_report(view: RunView, path: Path) -> None:
    """Write the report of one run or several; the file needs nothing beside it."""
    check_report(path)
    document = html(view)
    with told_as(f"--out: {path} cannot be written", "a writable file"):
        files.write(path, document.encode("utf-8", "replace"))


def html(view: RunView) -> str:
    """Return the report as one HTML document."""
    data, extra, parts = contents(view), recommended(view), chosen_federations(view)
    data["figures"] |= extra.figures
    scripts = [figures.bundle(), *map(asset, SCRIPTS)]
    several = len(view.histories) > 1
    documents = [(name, found) for name, found in zip(view.names, view.documents, strict=True) if found.recommendation]

    def named(tables: Callable[[Comparison], list[Table]]) -> list[Table]:
        return [
            replace(table, title=f"{name}: {table.title}") if several else table
            for name, document in documents
            for table in tables(document)
        ]

    return filled(
        "report.html.j2",
        title=" and ".join(view.names),
        description="; ".join(dict.fromkeys(e.description for e in view.experiments if e.description)),
        headline=headlines(view),
        picture=sign(view),
        rules=[part.label for part in parts],
        lacking=len(view.labels) - len(parts),
        seeds=max(sum(part.label == label for part in view.federations) for label in view.labels),
        several_seeds=len({part.seed for part in view.federations}) > 1,
        kinds=figures.KINDS | TITLES,
        data=data,
        main=named(lambda document: [main_table(document)]),
        recommended=extra,
        targets=named(target_tables),
        tables=named(comparison_tables),
        readings={rule.rule: rule.reading for _, document in documents for rule in document.rules if rule.reading},
        sentences=[rule.in_words for _, document in documents for rule in document.rules if rule.in_words],
        findings=list(dict.fromkeys(line for history in view.histories for line in history.facts.finding_lines)),
        runs=_runs(view),
        missing=_missing(data),
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        embedded=embedded(data),
        scripts=scripts,
        hashes=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
    )


def embedded(data: ReportData) -> str:
    """Return JSON that no text inside it can end early: every < is written as an escape."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


class RunFacts(NamedTuple):
    """What a report says of how a run was made."""

    name: str
    facts: dict[str, str]
    toml: str


def _runs(view: RunView) -> list[RunFacts]:
    made: list[RunFacts] = []
    for name, history, document, experiment in zip(
        view.names, view.histories, view.documents, view.experiments, strict=True
    ):
        info = history.info
        kept = ("status", "device", "precision", "engine_choice", "parameters", "federation_notes")
        facts = {key.replace("_", " "): info[key] for key in kept if info.get(key)} | history.facts.versions
        more = {
            "notes": document.notes,
            "privacy": "; ".join(privacy_lines(document.privacy)),
            "chain": chain_line(document.chain),
        }
        facts |= {key: words for key, words in more.items() if words}
        made.append(RunFacts(name, facts, to_toml(experiment)))
    return made


def _missing(data: ReportData) -> list[figures.Figure]:
    """Return the figures that these runs have nothing for; each says what would give them something."""
    absent = [name for name, found in data["parts"].items() if not found]
    absent += [name for name, kind in figures.KINDS.items() if kind.of == "view" and name not in data["figures"]]
    return [figures.KINDS[name] for name in absent]


def notebook_html(view: RunView) -> str:
    """Return a run as HTML without scripts, so that it shows in any notebook and without a network."""
    chart = figures.draw(view, "server") or figures.draw(view, "accuracy")
    tables = [main_table(document) for document in view.documents if document.recommendation]
    picture = "" if chart is None else figures.svg(chart)
    return filled("notebook.html.j2", headline=headlines(view), tables=tables, chart=picture)


# The sign: a steelyard that tips with what flawed clients weigh against what their number would give them.


STEEPEST = 14.0
"""Degrees."""
LEVEL = 0.005
"""Shares that differ by no more count as equal."""


class Sign(NamedTuple):
    """The steelyard at the top: its beam's angle, where its weight slides to, and a sentence on what they show."""

    title: str
    angle: float = 0.0
    poise: float = 150.0
    plain: bool = False
    """It shows nothing: no client is flawed."""


def sign(view: RunView) -> Sign:
    """Return the sign of the main rule."""
    federation = view.federation()
    shares = view.rule(federation.label).figures
    if "flawed_weight" not in shares:
        return Sign("A steelyard, level.", plain=True)
    weight, number = shares["flawed_weight"].mean, shares["flawed_updates"].mean
    joined = "but" if number - weight > LEVEL else "and"
    words = f"faulty clients were {number:.0%} of participants {joined} got {weight:.0%} of the weight."
    title = f"Under {federation.label} {words}"
    return Sign(title, round(tilt(number, weight), 1), round(96.0 + 96.0 * (1.0 - weight), 1))


def tilt(number: float, weight: float) -> float:
    """Return the beam's angle in degrees; above 0 the load goes up: flawed clients weigh less than their number."""
    return max(-STEEPEST, min(STEEPEST, 40.0 * (number - weight)))


def headlines(view: RunView) -> list[str]:
    """Return the answer in plain sentences; several runs come one by one."""
    if len(view.documents) == 1:
        return headline(view.documents[0])
    return [f"{name}: {' '.join(headline(one))}" for name, one in zip(view.names, view.documents, strict=True)]


# What the scripts read: figures, cards of clients and raw criteria, small however long the run was.


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
    some = f"{len(totals)} were selected: these are the faulty ones, the heaviest and the lightest."
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
