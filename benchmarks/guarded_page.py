"""docs/results/attacks.md and its picture, from the lines of `benchmarks.guarded`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import guarded_tables as tables

Line = Mapping[str, Any]
TEMPLATE = Path(__file__).with_suffix(".md")
GUARDED = "spectral(capped(RD;max_shares=1.5))"
"""What `guarded` is, in the stages by which it was chosen."""
OLD = "centred-clip(capped(power(VP)^3;max_shares=2))"
FINAL = "guarded"
"""The name of the rule in the final stage, which runs it as it is."""
NAMES = {FINAL: "guarded", GUARDED: "guarded", OLD: "guarded until 0.1"}
PICTURE = NAMES | {FINAL: "guarded, final seeds", GUARDED: "guarded, seeds that chose"}
WITHOUT_ROWS = (
    "EQ",
    "median(EQ)",
    "centred-clip(EQ;mix)",
    "centred-clip(TR)",
    "trimmed-mean(TR;mix)",
    "spectral(EQ)",
    "spectral(TR)",
    "spectral(capped(TR;max_shares=1.5))",
)


def verdict(lines: Sequence[Line], rule: str) -> str:
    """Say in two sentences what is lost at most, beside the targets, and on what."""
    found = tables.worst(lines)[rule]
    lost = [
        f"{most[0]:.1f} points on {words} data (target {tables.ALLOWED[scheme]:.0f})"
        for scheme, words in tables.SCHEMES.items()
        if (most := found.most(scheme, 0.2)) is not None
    ]
    door = found.backdoor.get(0.2)
    backdoor = "" if door is None else f". A backdoor worked in at most {door:.1f} % (target 10)"
    cost = max(found.cost, 0.0)
    missed = ", missed" if cost > tables.MOST_COST else ""
    return (
        "With a fifth of the clients hostile and lying, `guarded` lost to the 21 attacks that were run at most "
        f"{' and '.join(lost)}{backdoor}. Where nobody is hostile it costs at most {cost:.1f} points (target "
        f"{tables.MOST_COST}{missed}), the worst of {len({each['data'] for each in lines})} data sets."
    )


def counted(lines: Sequence[Line], rule: str) -> str:
    """Say against what `guarded` was run with 60 rows at the server, by data and share of hostile clients."""
    found: dict[tuple[str, float], dict[str, set[int]]] = {}
    for each in lines:
        if each["rule"] == rule and each["attack"] != tables.CLEAN:
            attacks = found.setdefault((each["data"], each["share"]), {})
            attacks.setdefault(each["attack"].removesuffix("+inflation"), set()).update(each["seeds"])
    rows = [
        f"- {data}, {share:.0%} hostile: {', '.join(f'`{name}`' for name in sorted(attacks))} "
        f"({min(map(len, attacks.values()))} seeds or more)"
        for (data, share), attacks in sorted(found.items())
    ]
    return "\n".join(rows)


def beside(lines: Sequence[Line]) -> str:
    """Write the accuracy on MNIST of rules like byzfl's and of `guarded`, once converged: clean, and the worst."""
    rows = ["| ours, 20 clients | nobody hostile | worst at 20 % hostile |", "|---|---|---|"]
    for rule in ("trimmed-mean(TR;mix)", "centred-clip(EQ;mix)", GUARDED):
        for scheme, words in tables.SCHEMES.items():
            found = [
                (100.0 * float(np.mean(each["converged"])), each["attack"].removesuffix("+inflation"))
                for each in lines
                if (each["data"], each["rule"], each["scheme"]) == ("mnist", rule, scheme)
                and each["share"] in (0.0, 0.2)
            ]
            clean = [value for value, attack in found if attack == tables.CLEAN]
            hostile = [each for each in found if each[1] != tables.CLEAN]
            if clean and hostile:
                least, attack = min(hostile)
                rows.append(f"| {NAMES.get(rule, f'`{rule}`')}, {words} | {clean[0]:.1f} | {least:.1f} ({attack}) |")
    return "\n".join(rows)


def page(lines: Sequence[Line], machine: str) -> str:
    """Return the page: the final stage first where it was run, else the stages by which the rule was chosen."""
    final = [each for each in lines if each["stage"] == "final"]
    chosen = [each for each in lines if each["rows"] == 60 and each["stage"] != "final"]
    main, rule = ([each for each in final if each["rows"] == 60], FINAL) if final else (chosen, GUARDED)
    without = [each for each in chosen if each["rule"] in WITHOUT_ROWS]
    sizes = sorted({each["rows"] for each in lines} - {60})
    others = [
        f"### {rows} rows at the server\n\n{tables.text([each for each in lines if each['rows'] == rows])}"
        for rows in sizes
    ]
    return TEMPLATE.read_text(encoding="utf-8").format(
        verdict=verdict(main, rule),
        first=tables.of_rule(main, rule),
        rules=renamed(tables.text(chosen)),
        without=tables.text(without),
        beside=beside(chosen),
        rows=renamed("\n\n".join(others)) or "Not run with other numbers of rows.",
        counted=counted(main, rule),
        machine=machine,
    )


def renamed(text: str) -> str:
    """Return a table in which rules with a name of their own have it."""
    for rule, name in NAMES.items():
        text = text.replace(f"| `{rule}` |", f"| **{name}**: `{rule}` |")
    return text


def write(lines: Sequence[Line], folder: Path, machine: str) -> None:
    """Write the page and its picture into a folder."""
    (folder / "attacks.md").write_text(page(lines, machine), encoding="utf-8")
    tables.frontier([each for each in lines if each["rows"] == 60], PICTURE, folder / "attacks.svg")
