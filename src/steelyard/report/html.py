"""The report: one HTML file that opens without a network. Text from runs and clients is escaped everywhere."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from steelyard.base import files
from steelyard.base.errors import told_as
from steelyard.experiment.loading import to_toml
from steelyard.report import figures
from steelyard.report.assets import text
from steelyard.report.contents import ReportData, chosen_federations, contents
from steelyard.report.notices import chain_line, privacy_lines
from steelyard.report.recommended import TITLES, recommended
from steelyard.report.rendering import Table, filled
from steelyard.report.result import Comparison
from steelyard.report.tables import comparison_tables, headline, main_table, target_tables
from steelyard.report.view import RunView

SCRIPTS = ("reweigh.js", "figures.js", "controls.js", "report.js")


def write_report(view: RunView, path: Path) -> None:
    """Write the report of one run or several; the file needs nothing beside it."""
    document = html(view)
    with told_as(f"--out: {path} cannot be written", "a writable file"):
        files.write(path, document.encode("utf-8", "replace"))


def html(view: RunView) -> str:
    """Return the report as one HTML document."""
    data, extra, parts = contents(view), recommended(view), chosen_federations(view)
    data["figures"] |= extra.figures
    scripts = [figures.bundle(), *(text(name) for name in SCRIPTS)]
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
        sentences=[rule.in_words for _, document in documents for rule in document.rules if rule.in_words],
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
        kept = ("status", "device", "precision", "engine_choice", "parameters")
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
    words = f"flawed clients were {number:.0%} of participants {joined} got {weight:.0%} of the weight."
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
