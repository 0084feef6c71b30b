"""What the lines of `benchmarks.guarded` say: the worst case of each candidate, and which are the best."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PLAIN = "EQ"
CLEAN = "clean"
TIMES = ("early", "converged")
SETTING = ("stage", "data", "scheme", "rows")
Line = Mapping[str, Any]


@dataclass
class Worst:
    """The worst of one rule: points lost to an attack against the same rule without it, by scheme and share."""

    cost: float = -100.0
    """The most accuracy that it costs where nobody is hostile, against the plain mean, once converged."""
    lost: dict[tuple[str, float], tuple[float, str]] = field(default_factory=dict[tuple[str, float], tuple[float, str]])
    backdoor: dict[float, float] = field(default_factory=dict[float, float])
    below: float = -100.0
    """The most points below the plain mean without hostile clients, with a fifth hostile: cost and loss together."""


def points(better: Sequence[float], worse: Sequence[float]) -> float:
    """Return the mean difference over seeds, in points."""
    return 100.0 * float(np.mean(np.subtract(better, worse)))


def worst(lines: Sequence[Line]) -> dict[str, Worst]:
    """Return the worst of each rule over everything that was run with it."""
    clean = {(*(each[name] for name in SETTING), each["rule"]): each for each in lines if each["attack"] == CLEAN}
    found: dict[str, Worst] = defaultdict(Worst)
    for each in lines:
        setting, rule = tuple(each[name] for name in SETTING), each["rule"]
        mine, before, plain = found[rule], clean.get((*setting, rule)), clean.get((*setting, PLAIN))
        if each["attack"] == CLEAN:
            if plain is not None:
                mine.cost = max(mine.cost, points(plain["converged"], each["converged"]))
            continue
        if before is None:
            continue
        for time in TIMES:
            lost, key = points(before[time], each[time]), (each["scheme"], each["share"])
            where = f"{each['attack']}, {each['data']}, {time}"
            mine.lost[key] = max(mine.lost.get(key, (-100.0, "")), (lost, where))
            if each["share"] == 0.2 and plain is not None:
                mine.below = max(mine.below, points(plain[time], each[time]))
        if each.get("backdoor"):
            share = each["share"]
            mine.backdoor[share] = max(mine.backdoor.get(share, 0.0), 100.0 * float(np.mean(each["backdoor"])))
    return dict(found)


def ranked(lines: Sequence[Line]) -> list[tuple[str, Worst]]:
    """Return the rules from the least to the most that they are below the plain mean in their worst case."""
    return sorted(worst(lines).items(), key=lambda item: item[1].below)


def best(lines: Sequence[Line], rules: Sequence[str], count: int) -> list[str]:
    """Return the plain mean and so many of these rules, the best first, by the worst case."""
    order = [name for name, _ in ranked(lines) if name in rules and name != PLAIN]
    return [PLAIN, *order[:count]]


def text(lines: Sequence[Line]) -> str:
    """Write the worst cases as a table."""
    keys = sorted({key for _, found in ranked(lines) for key in found.lost})
    heads = ["rule", "clean cost", *(f"{scheme} {share:.0%}" for scheme, share in keys), "backdoor 20 %", "below plain"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, found in ranked(lines):
        lost = [f"{found.lost[key][0]:.1f} ({found.lost[key][1]})" if key in found.lost else "" for key in keys]
        door = f"{found.backdoor[0.2]:.0f} %" if 0.2 in found.backdoor else ""
        rows.append(f"| `{name}` | {found.cost:.1f} | {' | '.join(lost)} | {door} | {found.below:.1f} |")
    return "\n".join(rows)
