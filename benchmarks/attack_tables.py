"""The page of what hostile clients do under each rule, from the cells that `benchmarks.attacks` measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steelyard.experiment.attacking import ATTACKS, CLEAN, INFLATION
from steelyard.report.statistics import estimate

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "10 clients, IID": {"clients": 10, "scheme": "iid"},
    "10 clients, Dirichlet 0.5": {"clients": 10, "scheme": "dirichlet", "alpha": 0.5},
    "100 clients, IID": {"clients": 100, "scheme": "iid"},
    "100 clients, Dirichlet 0.5": {"clients": 100, "scheme": "dirichlet", "alpha": 0.5},
}
GUARDED = "guarded"
Cells = Mapping[tuple[str, str, float], Mapping[str, Any]]
"""What was measured, by setting, attack and share."""
LYING = [name if name == INFLATION else f"{name}+{INFLATION}" for name in ATTACKS]
HONEST = [name for name in ATTACKS if name != INFLATION]
ALLOWED = {"iid": 3.0, "dirichlet": 6.0}
"""Points of accuracy that the recommended rule may lose at 20 % hostile and lying."""


def mean(values: Sequence[float]) -> float:
    """Return the mean over seeds."""
    return math.fsum(values) / len(values)


def read(folder: Path) -> dict[tuple[str, str, float], dict[str, Any]]:
    """Return all cells that are there."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return {(cell["setting"], cell["attack"], cell["share"]): cell for cell in found}


def lost(known: Cells, key: tuple[str, str, float], rule: str) -> float:
    """Return how many points a rule lost to an attack, against itself without hostile clients, over the seeds."""
    clean = known[key[0], CLEAN, 0.0]["rules"][rule]["accuracy"]
    return 100 * (mean(clean) - mean(known[key]["rules"][rule]["accuracy"]))


def target_table(known: Cells) -> list[str]:
    """Write what the recommended rule loses to every attack at 20 % hostile and lying, setting by setting."""
    settings = [name for name in SETTINGS if (name, CLEAN, 0.0) in known]
    lines = ["| attack | " + " | ".join(settings) + " |", "|---" * (len(settings) + 1) + "|"]
    clean = [estimate([100 * v for v in known[name, CLEAN, 0.0]["rules"][GUARDED]["accuracy"]]) for name in settings]
    lines.append("| without hostile clients (%) | " + " | ".join(f"{e.mean:.1f} ± {e.half:.1f}" for e in clean) + " |")
    worst: dict[str, float] = {}
    for attack in LYING:
        cells_: list[str] = []
        for name in settings:
            key = (name, attack, 0.2)
            if key not in known:
                cells_.append("–")
                continue
            points = lost(known, key, GUARDED)
            worst[name] = max(worst.get(name, -math.inf), points)
            missed = points > ALLOWED[SETTINGS[name]["scheme"]]
            cells_.append(f"**{signed(-points)}**" if missed else signed(-points))
        lines.append(f"| {attack} | " + " | ".join(cells_) + " |")
    bounds = [f"{worst.get(name, math.nan):.1f} of {ALLOWED[SETTINGS[name]['scheme']]:g}" for name in settings]
    return [*lines, "| **most lost, of what may be** | " + " | ".join(bounds) + " |"]


def signed(points: float) -> str:
    """Write a difference in points with its sign."""
    return f"{points:+.1f}".replace("-", "−") if round(points, 1) else "0.0"


def rule_table(known: Cells, setting: str, share: float) -> list[str]:
    """Write accuracy under each rule for one setting and share, a line per attack; the best, as rounded, in bold."""
    attacks = [attack for attack in LYING if (setting, attack, share) in known]
    if not attacks or (setting, CLEAN, 0.0) not in known:
        return []
    rules = list(known[setting, CLEAN, 0.0]["rules"])
    title = f"### {setting}, {share * 100:.0f} % hostile and lying"
    lines = [
        title,
        "",
        "| attack | " + " | ".join(f"`{rule}`" for rule in rules) + " |",
        "|---" * (len(rules) + 1) + "|",
    ]
    for attack in [CLEAN, *attacks]:
        row = known[setting, attack, 0.0 if attack == CLEAN else share]["rules"]
        values = {rule: mean(row[rule]["accuracy"]) for rule in rules if rule in row}
        best = f"{100 * max(values.values()):.1f}"
        shown = [f"{100 * values[rule]:.1f}" if rule in values else "–" for rule in rules]
        shown = [f"**{text}**" if text == best else text for text in shown]
        lines.append(f"| {attack} | " + " | ".join(shown) + " |")
    door = f"backdoor+{INFLATION}"
    if door in attacks:
        row = known[setting, door, share]["rules"]
        rates = [
            f"{100 * mean(row[rule]['backdoor']):.0f}" if row.get(rule, {}).get("backdoor") else "–" for rule in rules
        ]
        lines.append("| *the backdoor works (%)* | " + " | ".join(rates) + " |")
    return [*lines, ""]


def weight_table(known: Cells) -> list[str]:
    """Write the weight that clients who only lie had at 20 %: all together, and the largest of one in any round."""
    lines = ["| setting | rule | weight of all liars | largest of one | cap |", "|---|---|---|---|---|"]
    for name, setting in SETTINGS.items():
        cell = known.get((name, INFLATION, 0.2))
        for rule in ("fedavg", GUARDED) if cell else ():
            row = cell["rules"][rule] if cell else {}
            cap = f"{100 * 2 / setting['clients']:.1f} %" if rule == GUARDED else "none"
            together, one = 100 * row["weight"], 100 * row["largest"]
            lines.append(f"| {name} | `{rule}` | {together:.1f} % | {one:.1f} % | {cap} |")
    over = [
        f"{cell['setting']}, {cell['attack']}, {cell['share']:.0%}"
        for cell in known.values()
        if (cell["rules"][GUARDED]["largest"] or 0.0) > 2 / SETTINGS[cell["setting"]]["clients"] + 1e-9
    ]
    return [
        *lines,
        "",
        f"Cells in which a hostile client's weight under `guarded` was over the cap: {len(over)} of {len(known)}.",
    ]


def worst_table(known: Cells, share: float) -> list[str]:
    """Write the least accuracy of each rule over all attacks that lie, and how often the backdoor worked."""
    settings = [name for name in SETTINGS if all((name, attack, share) in known for attack in LYING)]
    if not settings:
        return []
    lines = [
        f"### {share * 100:.0f} % hostile and lying",
        "",
        "| rule | " + " | ".join(f"{name}: least | backdoor" for name in settings) + " |",
        "|---" * (2 * len(settings) + 1) + "|",
    ]
    for rule in known[settings[0], CLEAN, 0.0]["rules"]:
        shown: list[str] = []
        for name in settings:
            least = min(mean(known[name, attack, share]["rules"][rule]["accuracy"]) for attack in LYING)
            door = mean(known[name, f"backdoor+{INFLATION}", share]["rules"][rule]["backdoor"])
            shown += [f"{100 * least:.1f}", f"{100 * door:.0f}"]
        lines.append(f"| `{rule}` | " + " | ".join(shown) + " |")
    return [*lines, ""]


def told_truly(known: Cells) -> list[str]:
    """Say what changes where hostile clients do not lie: which rules, in how many pairs of cells."""
    pairs = [(cell, known[s, f"{a}+{INFLATION}", h]) for (s, a, h), cell in known.items() if a in HONEST]
    moved = {
        rule
        for truly, lying in pairs
        for rule in truly["rules"]
        if truly["rules"][rule]["accuracy"] != lying["rules"][rule]["accuracy"]
    }
    alike = all(truly["rules"]["fedavg"]["accuracy"] == truly["rules"]["EQ"]["accuracy"] for truly, _ in pairs)
    names = ", ".join(f"`{rule}`" for rule in sorted(moved)) or "none"
    text = f"Rules whose accuracy differs at all between lying and not lying ({len(pairs)} pairs of cells): {names}."
    if alike:
        text += " Without lies `fedavg` equals `EQ` in all of them: every client has as many rows."
    return [text, ""] if pairs else []


def page(known: Cells) -> str:
    """Write all tables as Markdown."""
    seeds = sorted({cell["seeds"] for cell in known.values()})
    count = f"{len(known)} cells, {' or '.join(map(str, seeds))} seeds each"
    parts = [f"## The recommended rule at 20 % hostile and lying\n\nPoints of accuracy, `guarded` ({count}).\n"]
    parts += [*target_table(known), "", "## Weight of liars", "", *weight_table(known), ""]
    parts += ["## The worst attack on each rule", "", WORST, ""]
    parts += [line for share in (0.1, 0.2, 0.3) for line in worst_table(known, share)]
    parts += ["## Hostile clients that do not lie", "", *told_truly(known)]
    tables = [line for share in (0.2, 0.1, 0.3) for setting in SETTINGS for line in rule_table(known, setting, share)]
    parts += ["## Every attack under every rule: accuracy (%)", "", *tables]
    return "\n".join(parts).rstrip() + "\n"


WORST = "Least accuracy (%) over the ten attacks, and how often the backdoor works (%)."
MARK = "<!-- written by benchmarks.attacks: what follows is replaced -->"
