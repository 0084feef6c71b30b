"""Table A of the page: what was run of Flower's table, on its splits and on others, and whether it is met."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.published.cells import ALL_MU, SPLITS, equal_sizes, split_of_flower
from benchmarks.published.figures import RULES, TABLE_A, TOLERANCE, UNSTABLE

Lines = Sequence[Mapping[str, Any]]
Curves = Sequence[Sequence[float | None]]
AT_ONCE = 3
"""Cells that ran beside each other on the card."""


def tested(curves: Curves) -> list[list[float]]:
    """Return each seed's tested rounds in percent; a seed that ended before its first test is left out."""
    found = [[100 * value for value in curve if value is not None] for curve in curves]
    return [curve for curve in found if curve]


def best(curves: Curves) -> list[float]:
    """Return the best round of each seed in percent."""
    return [max(curve) for curve in tested(curves)]


def last(curves: Curves) -> list[float]:
    """Return the last round of each seed that was tested, in percent."""
    return [curve[-1] for curve in tested(curves)]


def of_rule(curves: Mapping[str, Curves], rule: str) -> tuple[list[float], str] | None:
    """Return the seeds' best figures of a rule, and a word on it: FedProx is the best of its μ, as published."""
    if rule != "FedProx":
        found = curves.get(rule.lower())
        return None if found is None else (best(found), "")
    tried = {name: best(found) for name, found in curves.items() if name.startswith("fedprox")}
    if not tried:
        return None
    chosen = max(tried, key=lambda name: statistics.mean(tried[name]))
    alone = " alone" if len(tried) == 1 else f" of {len(tried)}" if len(tried) < len(ALL_MU) else ""
    return tried[chosen], f"μ {chosen.removeprefix('fedprox(mu=').removesuffix(')')}{alone}"


def judged(published: tuple[float, float], mine: Sequence[float], tolerance: float, *, may_rise: bool = False) -> str:
    """Say whether a cell is met: within two published deviations or the tolerance, whichever is larger.

    FedProx is the best of four μ, so with fewer it `may_rise`: too low is open then, and too high is a miss.
    """
    mean, deviation = published
    if deviation >= UNSTABLE:
        spread = statistics.stdev(mine) if len(mine) > 1 else 0.0
        return "unstable here too" if spread >= UNSTABLE else "steady here"
    apart, allowed = statistics.mean(mine) - mean, max(2 * deviation, tolerance)
    return "met" if abs(apart) <= allowed else "open" if may_rise and apart < 0 else "missed"


def shown(values: Sequence[float]) -> str:
    """Write mean and deviation, as the published table does."""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else " (one seed)"
    return f"{statistics.mean(values):.2f}{spread}"


def cell_of(lines: Lines, table: str, data: str, split: str) -> Lines:
    """Return the lines of a cell: a choice of its rules may lie in a line of its own."""
    return [line for line in lines if (line["table"], line.get("data"), line.get("split")) == (table, data, split)]


def together(lines: Lines) -> dict[str, Curves]:
    """Return the curves of some lines by rule."""
    return {rule: curves for line in lines for rule, curves in line["curves"].items()}


def table_a(lines: Lines) -> tuple[str, Counter[str]]:
    """Return table A as Markdown, and how often each judgement stands in it."""
    rows = ["| data | split | " + " | ".join(RULES) + " |", "|---" * (2 + len(RULES)) + "|"]
    words: Counter[str] = Counter()
    for data, splits in TABLE_A.items():
        for split in SPLITS:
            mine = cell_of(lines, "A", data, split)
            ended = together([line for line in mine if line["finished"]])
            same = "fedavg" in ended and equal_sizes(split_of_flower(data, split))
            if same:
                ended["fednova"] = ended["fedavg"]
            cells: list[str] = []
            for rule in RULES:
                published = splits[split][rule]
                text = f"{published[0]:.2f} ± {published[1]:.2f}"
                if known := of_rule(ended, rule):
                    values, about = known
                    about = "is FedAvg" if same and rule == "FedNova" else about
                    few = about.endswith("alone") or " of " in about
                    word = judged(published, values, TOLERANCE[data], may_rise=few)
                    words[word] += 1
                    text += f"; **{shown(values)}**{f' ({about})' if about else ''}, {word}"
                else:
                    text += _begun(mine, rule)
                cells.append(text)
            rows.append(f"| {data} | {split} | " + " | ".join(cells) + " |")
    return "\n".join(rows), words


def _begun(mine: Lines, rule: str) -> str:
    """Say how far a rule came in a cell that was stopped; its best round so far is no figure of the table."""
    for line in sorted(mine, key=lambda line: -line["rounds"]):
        if known := of_rule(line["curves"], rule):
            return f"; **{statistics.mean(known[0]):.2f}** after {line['rounds']}, stopped"
    return ""


SUMMARIES = {
    "best": max,
    "last": lambda curve: curve[-1],
    "mean of the last ten": lambda curve: statistics.mean(curve[-10:]),
}


def table_later(lines: Lines) -> str:
    """Return what was run on the splits of Flower's later code beside the figures of its table, in three summaries."""
    rows = [
        "| data | split | rule | Flower's table | " + " | ".join(SUMMARIES) + " |",
        "|---" * (4 + len(SUMMARIES)) + "|",
    ]
    for data, splits in TABLE_A.items():
        for split in SPLITS:
            for line in cell_of(lines, "A-later", data, split):
                for rule in RULES:
                    name = next((name for name in line["curves"] if name.startswith(rule.lower())), None)
                    if name is None:
                        continue
                    seeds = tested(line["curves"][name])
                    means = [statistics.mean(map(summary, seeds)) for summary in SUMMARIES.values()]
                    mean, deviation = splits[split][rule]
                    done = "" if line["finished"] else f", stopped after {line['rounds']}"
                    figures = " | ".join(f"{value:.2f}" for value in means)
                    rows.append(f"| {data} | {split}{done} | `{name}` | {mean:.2f} ± {deviation:.2f} | {figures} |")
    return "\n".join(rows) if len(rows) > 2 else "None of these cells was run yet."


def rate(lines: Lines) -> dict[str, str]:
    """Return how long the finished cells of both tables took and what all of table A would take, as an estimate."""
    ended = [line for line in lines if line["table"] in ("A", "A-later") and line["finished"]]
    trained = sum(len(line["curves"]) for line in ended)
    each = sum(line["seconds"] for line in ended) / max(trained, 1) / AT_ONCE  # seconds of the card a rule of a split
    equal = sum(equal_sizes(split_of_flower(data, split)) for data in TABLE_A for split in SPLITS)
    few = len(TABLE_A) * len(SPLITS) * len(RULES) - equal
    many = few + len(TABLE_A) * len(SPLITS) * (len(ALL_MU) - 1)
    return {
        "RATE CELLS": str(trained),
        "RATE SECONDS": f"{sum(line['seconds'] for line in ended):,.0f}",
        "RATE HOUR": f"{3600 / each:.0f}" if each else "–",
        "RATE ALL": f"{few * each / 60:.0f}",
        "RATE ALL MU": f"{many * each / 60:.0f}",
        "RATE MANY": str(many),
    }


def same_seeds(lines: Lines) -> str:
    """Return a table of rules that ran on the table's split and on the later one: seed by seed, as far as both came."""
    rows = [
        "| data | split | rule | seeds | round | the table's split | the later one |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        if line["table"] != "A":
            continue
        later = together(cell_of(lines, "A-later", line["data"], line["split"]))
        for rule in sorted(set(line["curves"]) & set(later)):
            own, other = tested(line["curves"][rule]), tested(later[rule])
            rounds, seeds = min(len(curve) for curve in (*own, *other)), min(len(own), len(other))
            figures = (", ".join(f"{curve[rounds - 1]:.2f}" for curve in curves[:seeds]) for curves in (own, other))
            where = f"| {line['data']} | {line['split']} | `{rule}` | {seeds} | {rounds}"
            rows.append(" | ".join([where, *figures]) + " |")
    return "\n".join(rows)
