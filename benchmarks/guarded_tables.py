"""What the lines of `benchmarks.guarded` say: the worst case of each candidate, which are the best, and the page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

PLAIN, CLEAN = "EQ", "clean"
TIMES = ("early", "converged")
SETTING = ("stage", "data", "scheme", "rows")
ALLOWED = {"iid": 3.0, "dirichlet": 5.0}
"""The most points that may be lost with a fifth hostile."""
MOST_COST = 1.5
"""The most points that a defence may cost where nobody is hostile."""
SCHEMES = {"iid": "IID", "dirichlet": "Dirichlet 0.5"}
Line = Mapping[str, Any]


@dataclass
class Worst:
    """The worst of one rule over all that was run with it; figures are points of accuracy, means over seeds."""

    cost: float = -100.0
    """The most that it costs where nobody is hostile, against the plain mean, early or once converged."""
    lost: dict[tuple[str, str, float], tuple[float, str]] = field(
        default_factory=dict[tuple[str, str, float], tuple[float, str]]
    )
    """By data, scheme and share: the most that an attack took from the same rule, and which attack, when."""
    backdoor: dict[float, float] = field(default_factory=dict[float, float])
    """By share: how often a backdoor worked at most, in %."""
    false_alarms: float | None = None
    """The most rounds in which honest clients were under alarm, in %; None for rules without a detector."""
    met: int = 0
    """In how many cells it was attacked: a rule that met less stands higher than it would."""
    below: float = -100.0
    """The most below the plain mean without hostile clients, with a fifth hostile: cost and loss together."""

    def most(self, scheme: str, share: float, data: str | None = None) -> tuple[float, str] | None:
        """Return the most that was lost, over all data or on one; None where nothing was run."""
        found = [
            (lost, attack if data else f"{attack}, {name}")
            for (name, how, part), (lost, attack) in self.lost.items()
            if (how, part) == (scheme, share) and data in (None, name)
        ]
        return max(found, default=None)


def by_seed(line: Line, time: str) -> dict[int, float]:
    """Return a line's accuracy early or at the end, by seed."""
    return dict(zip(line["seeds"], line[time], strict=True))


def points(better: Mapping[int, float], worse: Mapping[int, float]) -> float | None:
    """Return the mean difference over the seeds that both have, in points; None without any.

    Rules of one setting may have been run on other days, with more seeds or fewer.
    """
    apart = [better[seed] - value for seed, value in worse.items() if seed in better]
    return 100.0 * float(np.mean(apart)) if apart else None


def worst(lines: Sequence[Line]) -> dict[str, Worst]:
    """Return the worst of each rule."""
    clean: dict[tuple[object, ...], dict[int, float]] = defaultdict(dict)
    for each in lines:
        if each["attack"] == CLEAN:
            for time in TIMES:
                clean[*(each[name] for name in SETTING), each["rule"], time] |= by_seed(each, time)
    found: dict[str, Worst] = defaultdict(Worst)
    for each in lines:
        setting, rule = tuple(each[name] for name in SETTING), each["rule"]
        mine = found[rule]
        mine.met += each["attack"] != CLEAN
        if "alarms" in each:
            hit = 100.0 * float(np.mean([honest for honest, _ in each["alarms"]]))
            mine.false_alarms = max(mine.false_alarms or 0.0, hit)
        if each.get("backdoor"):
            share = each["share"]
            mine.backdoor[share] = max(mine.backdoor.get(share, 0.0), 100.0 * float(np.mean(each["backdoor"])))
        key = (each["data"], each["scheme"], each["share"])
        for time in TIMES:
            reached = by_seed(each, time)
            lost, behind = (points(clean[*setting, name, time], reached) for name in (rule, PLAIN))
            if each["attack"] == CLEAN:
                mine.cost = mine.cost if behind is None else max(mine.cost, behind)
                continue
            if lost is not None:
                attack = f"{each['attack'].removesuffix('+inflation')}, {time}"
                mine.lost[key] = max(mine.lost.get(key, (-100.0, "")), (lost, attack))
            if each["share"] == 0.2 and behind is not None:
                mine.below = max(mine.below, behind)
    return dict(found)


def ranked(lines: Sequence[Line]) -> list[tuple[str, Worst]]:
    """Return the rules from the least to the most that they are below the plain mean in their worst case."""
    return sorted(worst(lines).items(), key=lambda item: item[1].below)


def best(lines: Sequence[Line], rules: Sequence[str], count: int) -> list[str]:
    """Return the plain mean and so many of these rules, the best first, by the worst case.

    Only rules that were run against everything that any was run against: a rule cannot be the best by what it missed.
    """
    met = Counter(each["rule"] for each in lines)
    whole = max((met[name] for name in rules if name != PLAIN), default=0)
    order = [name for name, _ in ranked(lines) if name in rules and name != PLAIN and met[name] == whole]
    return [PLAIN, *order[:count]]


def worst_attacks(lines: Sequence[Line], rules: Sequence[str], count: int) -> list[str]:
    """Return so many of the attacks, those first that take the most from any of these rules."""
    most: dict[str, float] = {}
    for attack in {each["attack"] for each in lines} - {CLEAN}:
        found = worst([each for each in lines if each["attack"] in (attack, CLEAN)])
        losses = [lost for name in rules if name in found and name != PLAIN for lost, _ in found[name].lost.values()]
        if losses:
            most[attack] = max(losses)
    return sorted(most, key=lambda attack: -most[attack])[:count]


def _cell(found: tuple[float, str] | None) -> str:
    return "not run" if found is None else f"{found[0]:.1f} ({found[1]})"


def text(lines: Sequence[Line]) -> str:
    """Write the worst cases of all rules as a table, the best rule first."""
    shares = sorted({share for _, found in ranked(lines) for *_, share in found.lost})
    keys = [(scheme, share) for scheme in SCHEMES for share in shares]
    heads = ["rule", "clean cost", *(f"{SCHEMES[scheme]}, {share:.0%}" for scheme, share in keys)]
    heads += [*(f"backdoor, {share:.0%}" for share in shares), "false alarms", "cells"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, found in ranked(lines):
        if not found.lost:  # the plain mean where only the others were attacked
            continue
        doors = [f"{found.backdoor[share]:.0f} %" if share in found.backdoor else "" for share in shares]
        alarms = "" if found.false_alarms is None else f"{found.false_alarms:.1f} %"
        lost = [_cell(found.most(*key)) for key in keys]
        cells = [f"`{name}`", f"{found.cost:.1f}", *lost, *doors, alarms, str(found.met)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def of_rule(lines: Sequence[Line], rule: str) -> str:
    """Write the worst cases of one rule by data, as the first table of the page."""
    found = worst(lines)[rule]
    shares = sorted({share for *_, share in found.lost})
    rows = [
        f"| data | {' | '.join(f'{share:.0%} hostile' for share in shares)} | may be, at 20 % |",
        "|---" * (len(shares) + 2) + "|",
    ]
    for data in sorted({data for data, *_ in found.lost}):
        for scheme, words in SCHEMES.items():
            cells = [_cell(found.most(scheme, share, data)) for share in shares]
            rows.append(f"| {data}, {words} | {' | '.join(cells)} | {ALLOWED[scheme]:.0f} |")
    return "\n".join(rows)


FEWEST = 5
"""Rules that met fewer attacks have no place in the picture."""


def frontier(lines: Sequence[Line], names: Mapping[str, str], path: Path) -> None:
    """Draw what each rule costs where nobody is hostile against the most that it loses with a fifth hostile."""
    rows: list[dict[str, Any]] = []
    for rule, found in ranked(lines):
        losses = [lost for (*_, share), (lost, _) in found.lost.items() if share == 0.2]
        if losses and rule != PLAIN and found.met >= FEWEST:
            kind = "a backdoor works" if found.backdoor.get(0.2, 100.0) > 10 else "a backdoor works in at most 10 %"
            rows.append({"rule": names.get(rule, rule), "cost": found.cost, "lost": max(losses), "kind": kind})
    for row in rows:
        # Only the frontier of each kind has names: whoever another rule beats in both has none.
        beaten = [o for o in rows if o["kind"] == row["kind"] and o["cost"] < row["cost"] and o["lost"] < row["lost"]]
        row["label"] = "" if beaten and row["rule"] not in names.values() else row["rule"]
    base = alt.Chart(pd.DataFrame(rows)).encode(
        alt.X("cost:Q", title="points of accuracy that it costs where nobody is hostile"),
        alt.Y("lost:Q", title="most points lost, a fifth hostile", scale=alt.Scale(type="symlog")),
    )
    legend = alt.Legend(orient="top", title=None)
    dots = base.mark_point(filled=True, size=80).encode(
        alt.Color("kind:N", legend=legend), alt.Shape("kind:N", legend=legend)
    )
    labels = base.mark_text(align="left", dx=7, fontSize=11).encode(text="label:N")
    chart = (dots + labels).properties(width=720, height=420, title="The frontier: less of both is better")
    chart.save(str(path))
