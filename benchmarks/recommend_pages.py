"""The tables and figures of docs/results/recommend.md, written from the lines of recommend_tables.

    python -m benchmarks.recommend_pages OUT [--figures docs/results]

Prints Markdown: accuracy and diversity beside the thesis' figures, paired tests, the curves over π, communication,
bias, and the second protocol. Settings are named as they were chosen on the validation rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks.recommend_plan import SHARES, VARIANTS, best
from benchmarks.recommend_systems import SHOWN, UPDATED, Line
from benchmarks.recommend_tables import read_lines
from benchmarks.recommend_thesis import BASELINE_NAMES, THESIS, TITLES
from steelyard.recommend.significance import compare

Lines = Sequence[Line]


def pick(lines: Lines, system: str, use: str = "test", **settings: Any) -> list[Line]:
    """Return the lines of a system with these settings, by seed."""
    found = [
        line
        for line in lines
        if (line["use"], line["system"]) == (use, system)
        and all(line["settings"].get(name) == value for name, value in settings.items())
    ]
    return sorted(found, key=lambda line: line["seed"])


def rows_of(lines: Lines) -> list[tuple[str, str, str, list[Line]]]:
    """Return (name, settings in words, thesis' name, lines by seed) of every row of a data set's table."""
    found: list[tuple[str, str, str, list[Line]]] = []
    for system in BASELINE_NAMES:
        mine = pick(lines, system)
        if mine:
            found.append((system, words(mine[0]), system, mine))
    for mode, counted in VARIANTS:
        if not pick(lines, mode, epoch=counted):
            continue
        top = best(lines, mode, epoch=counted)["settings"]["pi"]
        name = mode if not mode.endswith("+") else f"{mode} ({counted})"
        thesis = mode if counted == "tables" or not mode.endswith("+") else ""
        for pi in dict.fromkeys((top, 1.0)):
            mine = pick(lines, mode, epoch=counted, pi=pi)
            if mine:
                found.append((f"{name}, π = {pi:g}", words(mine[0]), thesis if pi == top else "", mine))
    return found


def words(line: Line) -> str:
    """Return a line's settings in short."""
    names = {"neighbours": "k", "rate": "α", "factors": "f", "rounds": "epochs"}
    parts = [f"{names[name]} {value:g}" for name, value in line["settings"].items() if name in names]
    return ", ".join([*parts, *([] if line["epoch"] is None else [f"epoch {line['epoch']}"])])


def value(lines: Lines, name: str, digits: int = 5) -> str:
    """Return the mean over seeds, with the standard deviation where there are several."""
    values = [line[name] for line in lines]
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def accuracy(data: str, lines: Lines) -> str:
    """Tables 4.2 and 4.3: accuracy and diversity, ours and the thesis'."""
    rows: list[list[str]] = []
    for name, settings, thesis, mine in rows_of(lines):
        printed = THESIS.get(data, {}).get(thesis, ("–",) * 4)
        own = [value(mine, "precision"), value(mine, "recall"), value(mine, "ndcg")]
        wide = [value(mine[:1], "item_coverage", 0), value(mine[:1], "gini")]
        rows.append([name, settings, *own, *wide, *(str(each) for each in printed)])
    header = ["system", "chosen", "P@10", "R@10", "nDCG@10", "coverage", "Gini"]
    return table([*header, "thesis P", "R", "coverage", "Gini"], rows)


def grid(lines: Lines) -> str:
    """The thesis' grid (§4.5.3): BPR-MF on the validation rows, P@10 at the best epoch, by rate and factors."""
    mine = pick(lines, "bpr-mf", "validation")
    rates = sorted({line["settings"]["rate"] for line in mine})
    sizes = sorted({line["settings"]["factors"] for line in mine})
    rows: list[list[str]] = []
    for rate in rates:
        cells = [best(mine, "bpr-mf", rate=rate, factors=size) for size in sizes]
        rows.append([f"α = {rate:g}", *(f"{line['precision']:.5f} ({line['epoch']})" for line in cells)])
    return table(["validation P@10 (epoch)", *(f"{size} factors" for size in sizes)], rows) if rows else ""


def hits(lines: Lines) -> np.ndarray:
    """Return P@10 of each user, the mean over seeds."""
    return np.mean([[int(mark, 11) / 10 for mark in line["hits"]] for line in lines], axis=0)


def paired(lines: Lines) -> str:
    """Paired tests over users between systems, P@10 averaged over seeds."""
    by_name: dict[str, list[Line]] = {}
    for name, _, _, mine in rows_of(lines):
        by_name.setdefault(name.split(",")[0], mine)
    pairs = (
        *(("sFPL", "bpr-mf"), ("sFPL", "popular"), ("sFPL+ (tables)", "sFPL"), ("pFPL+ (tables)", "pFPL")),
        *(("pFPL", "sFPL"), ("pFPL+ (tables)", "sFPL+ (tables)"), ("sFPL+ (tables)", "sFPL+ (formula)")),
        *(("pFPL+ (tables)", "pFPL+ (formula)"), ("pFPL+ (tables)", "fcf"), ("user-knn", "pFPL+ (tables)")),
        *(("item-knn", "user-knn"),),
    )
    rows: list[list[str]] = []
    for first, second in pairs:
        if first in by_name and second in by_name:
            outcome = compare(hits(by_name[first]), hits(by_name[second]))
            marks = [f"{outcome.difference:+.5f}", number(outcome.t_p), number(outcome.wilcoxon_p)]
            rows.append([f"{first} − {second}", *marks])
    return table(["P@10", "difference", "p (t-test)", "p (Wilcoxon)"], rows)


def number(p: float) -> str:
    """Return a p-value."""
    return "< .0001" if p < 0.0001 else f"{p:.4f}"[1:] if p < 1 else "1"


def over_shares(lines: Lines, give: Callable[[Line], str]) -> list[list[str]]:
    """Return one row per mode with a cell per π, seed 1."""
    rows: list[list[str]] = []
    for mode, counted in VARIANTS:
        cells = {line["settings"]["pi"]: give(line) for line in pick(lines, mode, epoch=counted) if line["seed"] == 1}
        if cells:
            name = mode if not mode.endswith("+") else f"{mode} ({counted})"
            rows.append([name, *(cells.get(pi, "–") for pi in SHARES)])
    return rows


def curves(lines: Lines) -> str:
    """Figures 4.2 and 4.3 and Table 4.4 as numbers: F1, coverage and communication over π."""
    header = [f"{pi:g}" for pi in SHARES]
    parts = (
        ("F1@10", lambda line: f"{line['f1']:.4f}"),
        ("coverage", lambda line: f"{line['item_coverage']:.0f}"),
        ("P@10", lambda line: f"{line['precision']:.5f}"),
        ("TCC / 10⁹", lambda line: f"{line['tcc'] / 1e9:.1f}"),
    )
    return "\n".join(table([f"{name}, π =", *header], over_shares(lines, give)) for name, give in parts)


def spread_of(lines: Lines, field: str, ranks: Sequence[int]) -> str:
    """Figures 4.4 and 4.5 as numbers: updates sent for the k-th item, or lists' share of the first k items."""
    rows: list[list[str]] = []
    for mode, counted in VARIANTS[:4]:
        for pi in (0.0, 0.1, 0.5, 1.0):
            for line in pick(lines, mode, epoch=counted, pi=pi)[:1]:
                name = f"{mode}, π = {pi:g}"
                rows.append([name, *(f"{line[field].get(str(k), 0):.2g}" for k in ranks)])
    return table([field, *map(str, ranks)], rows)


def bias(lines: Lines) -> str:
    """Table 4.6: bias disparity by category, at the chosen settings."""
    rows: list[list[str]] = []
    names: list[str] = []
    for name, _, _, mine in rows_of(lines):
        if "bias" in mine[0]:
            names = sorted(mine[0]["bias"])
            rows.append([name, *(f"{mine[0]['bias'][each]:+.2f}" for each in names)])
    return table(["BD", *names], rows) if rows else ""


def one_out(lines: Lines) -> str:
    """The second protocol beside the full ranking of the same lists."""
    rows = [
        [
            *(line["system"], words(line)),
            *(f"{line['sampled_hit_rate']:.4f}", f"{line['sampled_ndcg']:.4f}"),
            *(f"{line['hit_rate']:.4f}", f"{line['ndcg']:.4f}"),
        ]
        for line in lines
        if line["use"] == "newest"
    ]
    header = ["system", "chosen", "HR@10 among 99", "nDCG@10 among 99", "HR@10 in full", "nDCG@10 in full"]
    return table(header, rows) if rows else ""


def main() -> None:
    """Print the tables; with --figures write the pictures too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--figures", type=Path, help="folder for the pictures of Figures 4.2 to 4.4")
    chosen = parser.parse_args()
    lines = read_lines(chosen.out / "lines.jsonl")
    for data, title in TITLES.items():
        mine = [line for line in lines if line["data"] == data]
        if not any(line["use"] == "test" for line in mine):
            continue
        print(f"## {title}\n\n{accuracy(data, mine)}\n{grid(mine)}\n{paired(mine)}\n{curves(mine)}")
        print(spread_of(mine, "updates", UPDATED), spread_of(mine, "shown", SHOWN), bias(mine), one_out(mine), sep="\n")
    if chosen.figures is not None:
        from benchmarks.recommend_figures import draw

        draw(lines, chosen.figures)


if __name__ == "__main__":
    main()
