"""The report: one HTML file that opens without a network. Text from runs and clients is escaped everywhere."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from string import Template

from steelyard.base import files
from steelyard.base.errors import told_as
from steelyard.experiment.loading import to_toml
from steelyard.report import figures
from steelyard.report.assets import text
from steelyard.report.contents import ReportData, chosen_federations, contents
from steelyard.report.decide import Verdict, flawed_lines
from steelyard.report.figures import svg
from steelyard.report.notices import (
    chain_line,
    chain_of,
    privacy_lines,
    privacy_of,
    single_client_lines,
    single_client_rounds,
)
from steelyard.report.recommended import TITLES, Recommended, recommended
from steelyard.report.rendering import Table, as_html
from steelyard.report.tables import comparison_tables, main_table
from steelyard.report.view import RunView, flawed_means
from steelyard.runs.history import History

_ROUNDS = "Rounds until a share"
"""What the titles of the tables of rounds to target hold."""
_OF_ONE_RULE = {
    "contributions": "What each client added",
    "listening": "Who listens to whom",
    "orders": "Priorities that moved",
    "classes": "The classes",
    "split": "Who holds what",
}
SCRIPTS = ("reweigh.js", "figures.js", "controls.js", "report.js")


def write_report(view: RunView, path: Path) -> None:
    """Write the report of one run or several; the file needs nothing beside it."""
    document = html(view)
    with told_as(f"--out: {path} cannot be written", "a writable file"):
        files.write(path, document.encode("utf-8", "replace"))


def html(view: RunView) -> str:
    """Return the report as one HTML document."""
    data = contents(view)
    extra = recommended(view)
    data["figures"] |= extra.figures
    title = " and ".join(view.names)
    picture, caption = sign(view)
    sections = _sections(view, data, extra)
    nav = "".join(f'<a href="#{name}">{escape(words)}</a>' for name, words, _ in sections)
    body = "".join(f'<section id="{name}"><h2>{escape(words)}</h2>{inner}</section>' for name, words, inner in sections)
    scripts = [figures.bundle(), *(text(name) for name in SCRIPTS)]
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"
    described = "; ".join(dict.fromkeys(e.description for e in view.experiments if e.description))
    style = text("style.css") + text("control.css")
    tags = "".join(f"<script>{script}</script>" for script in scripts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · Steelyard</title><style>{style}</style></head><body>"
        f'<header><div class="mast"><div><h1>{escape(title)}</h1><p>{escape(described)}</p></div>{picture}</div>'
        f'<div class="headline">{"".join(f"<p>{escape(line)}</p>" for line in headline(view))}</div>'
        + (f'<p class="tilt">{escape(caption)}</p>' if caption else "")
        + f"<nav aria-label='Sections'>{nav}</nav></header><main>{body}"
        "<noscript><p>The figures of this report are drawn by scripts inside it; the tables need none.</p></noscript>"
        f"</main><footer>Made by Steelyard, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; opens without a network.</footer>"
        f'<script type="application/json" id="report-data">{embedded(data)}</script>{tags}</body></html>'
    )


def embedded(data: ReportData) -> str:
    """Return JSON that no text inside it can end early: every < is written as an escape."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _sections(view: RunView, data: ReportData, extra: Recommended) -> list[tuple[str, str, str]]:
    """Return (id, heading, inner HTML) of each section that the runs have something to show for."""
    drawn, by_rule = data["figures"], data["parts"]
    chooser = _chooser(view)
    found: list[tuple[str, str, str]] = []
    result = _main_tables(view)
    curves = "".join(_figure(name) for name in ("accuracy", "server", "adapters", "time", "bytes") if name in drawn)
    found.append(("result", "What came out", f'{result}<div class="two">{curves}</div>'))
    if extra.tables or extra.notes:
        found.append(("recommended", "What was recommended", _recommended(extra)))
    weighed = "".join(_part(name) for name in ("weights", "criteria") if by_rule[name])
    flawed = _figure("flawed") if "flawed" in drawn else ""
    if weighed:
        found.append(("weights", "Who counted, when and why", chooser + weighed + flawed))
    if data["clients"]:
        found.append(("clients", "Client by client", _cards(chooser)))
    if data["reweigh"]:
        found.append(("weigh-again", "Weigh again, without training", _again()))
    if "targets" in drawn:
        found.append(("targets", "How soon", _figure("targets") + _target_tables(view)))
    if "devices" in drawn:
        found.append(("devices", "How the devices are served", _figure("devices")))
    for name, words in _OF_ONE_RULE.items():
        if by_rule[name]:
            more = "".join(_figure(each) for each in ("macro-f1", "class-f1") if name == "classes" and each in drawn)
            found.append((name, words, chooser + _part(name) + more))
    found.append(("tables", "Every table", _all_tables(view)))
    found.append(("experiment", "What was run", _experiments(view, data)))
    return found


def _chooser(view: RunView) -> str:
    parts = chosen_federations(view)
    if len(parts) < 2:
        return ""
    options = "".join(f'<option value="{escape(part.label)}">{escape(part.label)}</option>' for part in parts)
    seeds = max(sum(part.label == label for part in view.federations) for label in view.labels)
    left = len(view.labels) - len(parts)
    note = f" <span>for the first of {seeds} seeds</span>" if seeds > 1 else ""
    lacking = "1 rule has no figures of its own" if left == 1 else f"{left} rules have no figures of their own"
    note += f" <span>{lacking} here</span>" if left > 0 else ""
    return f'<p class="tools"><label>Shown for the rule <select class="rule">{options}</select></label>{note}</p>'


def _figure(name: str) -> str:
    return _framed(name, f'data-figure="{name}"')


def _part(name: str) -> str:
    return _framed(name, f'data-part="{name}"')


def _framed(name: str, attribute: str) -> str:
    kind = figures.KINDS.get(name)
    title, caption = (kind.title, kind.caption) if kind else TITLES[name]
    return (
        f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(caption)}</p></figcaption>"
        f'<button type="button" class="save" aria-label="save {escape(title)} as SVG">SVG</button>'
        f'<div class="drawing" {attribute}></div><p class="note"></p></figure>'
    )


def _recommended(extra: Recommended) -> str:
    notes = "".join(f'<p class="empty">{escape(note)}</p>' for note in extra.notes)
    drawn = "".join(_figure(name) for name in extra.figures)
    return "".join(as_html(table) for table in extra.tables) + f'<div class="two">{drawn}</div>{notes}'


def _cards(chooser: str) -> str:
    return (
        f'{chooser}<div class="tools"><label>Search <input id="cards-search" type="search" placeholder="name or flaw">'
        "</label>"
        '<label>Order <select id="cards-sort"></select></label><span id="cards-count" role="status"></span></div>'
        '<div id="cards"></div><p><button type="button" id="cards-more">more clients</button></p>'
    )


def _again() -> str:
    return (
        '<div class="again"><div><p>The raw criteria of every update are stored, so another rule can be tried on them '
        "at once: choose a score, and move the criteria with the arrows or by dragging.</p></div>"
        f'{drawn(0.0, 150.0, "Tips with what flawed clients would weigh.")}</div><div id="reweigh"></div>'
    )


def _main_tables(view: RunView) -> str:
    """The table behind each run's recommendation; nothing for a run without a tested round."""
    several = len(view.histories) > 1
    found = [
        main_table(document, f"{name}: " if several else "")
        for name, document in zip(view.names, view.documents, strict=True)
        if document is not None
    ]
    return "".join(as_html(table) for table in found)


def _tables(view: RunView) -> list[Table]:
    several = len(view.histories) > 1
    return [
        replace(table, title=f"{name}: {table.title}") if several else table
        for name, document in zip(view.names, view.documents, strict=True)
        if document is not None
        for table in comparison_tables(document)
    ]


def _target_tables(view: RunView) -> str:
    found = [as_html(table) for table in _tables(view) if _ROUNDS in table.title]
    several = len({part.seed for part in view.federations}) > 1  # intervals need the whole width
    return "".join(found) if several else f'<div class="two">{"".join(f"<div>{part}</div>" for part in found)}</div>'


def _all_tables(view: RunView) -> str:
    made = "".join(as_html(table) for table in _tables(view) if _ROUNDS not in table.title)
    verdicts = [verdict["sentence"] for document in view.documents if document for verdict in document["verdicts"]]
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in verdicts)
    spoken = f"<details><summary>Each rule against the baseline, in words</summary><ul>{sentences}</ul></details>"
    return f"{spoken if verdicts else ''}<details><summary>Devices, server, samples, curves</summary>{made}</details>"


def _experiments(view: RunView, data: ReportData) -> str:
    parts: list[str] = []
    for name, history, experiment in zip(view.names, view.histories, view.experiments, strict=True):
        info = history.info
        kept = ("status", "device", "precision", "engine_choice", "parameters")
        facts = {key.replace("_", " "): info[key] for key in kept if info.get(key)} | history.facts.versions
        facts |= {"notes": history.notes} if history.notes else {}
        facts |= {"privacy": "; ".join(lines)} if (lines := privacy_lines(privacy_of(history))) else {}
        facts |= {"chain": line} if (line := chain_line(chain_of(history))) else {}
        rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items())
        heading = f"<h3>{escape(name)}</h3>" if len(view.histories) > 1 else ""
        toml = escape(to_toml(experiment))
        parts.append(
            f'{heading}<dl class="facts">{rows}</dl><details><summary>The experiment, every field resolved</summary>'
            f'<pre tabindex="0">{toml}</pre></details>'
        )
    missing = _missing(data)
    return "".join(parts) + missing


def _missing(data: ReportData) -> str:
    """Say which figures these runs have nothing for, and what would give them something."""
    absent = [name for name, found in data["parts"].items() if not found]
    absent += [n for n, kind in figures.KINDS.items() if kind.of == "view" and n not in data["figures"]]
    if not absent:
        return ""
    lines = "".join(f"<li>{escape(figures.KINDS[n].title)}: {escape(figures.KINDS[n].empty)}</li>" for n in absent)
    return f"<h3>Not in this report</h3><ul class='note'>{lines}</ul>"


def notebook_html(view: RunView) -> str:
    """Return a run as HTML without scripts, so that it shows in any notebook and without a network."""
    chart = figures.draw(view, "server")
    chart = figures.draw(view, "accuracy") if chart is None else chart
    sentences = "".join(f"<p>{escape(line)}</p>" for line in headline(view))
    return f"<div>{sentences}{_main_tables(view)}{'' if chart is None else svg(chart)}</div>"


# The sign: a steelyard that tips with what flawed clients weigh against what their number would give them.


STEEPEST = 14.0
"""Degrees."""
LEVEL = 0.005
"""Shares that differ by no more are shown as equal."""


def sign(view: RunView) -> tuple[str, str]:
    """Return the sign as SVG, and one sentence that says what its tilt shows."""
    federation = view.federation()
    shares = flawed_means(view, federation.label)
    if shares is None:
        return drawn(0.0, 150.0, "A steelyard, level.").replace('class="sign"', 'class="sign plain"'), ""
    weight, number = shares["weight"], shares["updates"]
    shown = (
        f"Under {federation.label} flawed clients were {number:.0%} of those asked and got {weight:.0%} of the weight"
    )
    less = number - weight
    caption = shown + (
        "." if abs(less) <= LEVEL else ": the beam tips them up." if less > 0 else ": they tip the beam."
    )
    return drawn(tilt(number, weight), 96.0 + 96.0 * (1.0 - weight), caption), caption


def tilt(number: float, weight: float) -> float:
    """Return the beam's angle in degrees; above 0 the load goes up: flawed clients weigh less than their number."""
    return max(-STEEPEST, min(STEEPEST, 40.0 * (number - weight)))


def drawn(angle: float, poise: float, title: str) -> str:
    """Return the sign with its beam at an angle and its sliding weight at a position."""
    return Template(text("sign.svg")).substitute(
        angle=f"{angle:.1f}", back=f"{-angle:.1f}", poise=f"{poise:.1f}", title=escape(title)
    )


# The sentences at the top.


def headline(view: RunView) -> list[str]:
    """Return the answer in plain sentences, the recommendation first; several runs come one by one.

    Before it stands only what makes it doubtful: that the run was changed.
    """
    if len(view.histories) > 1:
        parts = zip(view.names, view.histories, strict=True)
        return [f"{name}: {' '.join(headline(RunView([history])))}" for name, history in parts]
    history, document = view.histories[0], view.documents[0]
    changed, single = _changed(history), single_client_lines(single_client_rounds(history))
    if document is None:
        return [*changed, *_state(view), *single, "No round has been tested: no accuracy is known."]
    found = document["recommendation"]
    return [*changed, found.sentence, *single, *ended_lines(history), *_flawed(view, found)]


def _changed(history: History) -> list[str]:
    found = chain_of(history)
    return [f"{chain_line(found)}."] if found["problem"] else []


def _state(view: RunView) -> list[str]:
    lines: list[str] = []
    for name, history in zip(view.names, view.histories, strict=True):
        facts = history.facts
        if facts.status != "finished":
            last = int(history.rounds["round"].to_numpy().max()) if len(history.rounds) else 0
            planned = "" if facts.rounds is None else f" of {facts.rounds}"
            lines.append(f"{name} is {facts.status}: round {last}{planned}.")
    return lines


def ended_lines(history: History) -> list[str]:
    """Return a sentence for each rule and seed that ended before the others because its model exploded."""
    return [
        f"{rule}, seed {seed}, ended in round {round}: {reason}. Its figures are those of its last tested model."
        for (rule, seed), (round, reason) in history.ended.items()
    ]


def _flawed(view: RunView, found: Verdict) -> list[str]:
    federation = view.federation()
    known = {label: shares["weight"] for label in view.labels if (shares := flawed_means(view, label))}
    clients = view.evaluations(federation)["client"].nunique() or view.clients(federation)["client"].nunique()
    return flawed_lines(view.flaws(federation), clients, known, found)
