"""The tables of docs/results/kgflex.md in Markdown, from the cells that were measured, the thesis' rows beside them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.cold_start import names_of, rows
from benchmarks.kgflex_plan import FACTORS, HOPS, Cell, settled
from benchmarks.kgflex_thesis import METRICS, NAMES, TABLE

TITLES = ("nDCG", "coverage", "Gini", "ACLT", "PopREO", "PopRSP")
DATA = {"yahoo": "Yahoo! Movies", "books": "Facebook Books", "ml1m": "MovieLens 1M"}
WORDS = {
    "random": "random",
    "popular": "most popular",
    "vsm": "VSM",
    "item-knn": "item-kNN",
    "user-knn": "user-kNN",
    "vae": "MultiVAE",
    "bpr-mf": "BPR-MF",
    "mf": "MF",
    "neumf": "NeuMF",
    "kahfm": "kaHFM",
}
KGFLEX = {
    "chosen": "**KGFlex**, chosen",
    "thesis": "**KGFlex**, thesis' limits",
    "EX": "chosen, weighed by `EX`",
    "DS": "chosen, weighed by `DS`",
}
TOPS = {"None": "all", "100": "best 100", "50": "best 50", "10": "best 10", "5": "best 5"}
_FIGURES = Mapping[str, Mapping[str, float]]


def pages(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the lines of all tables for which there is a cell, data set by data set."""
    for data, title in DATA.items():
        mine = [cell for cell in cells if cell["data"] == data]
        if mine:
            yield from (f"## {title}", "")
            for table in (
                main_table(mine, data),
                entropy(mine),
                seeds(mine),
                search(mine),
                hops(mine),
                kept(mine),
                cold(mine),
            ):
                lines = list(table)
                yield from [*lines, ""] if lines else []


def number(metric: str, value: float) -> str:
    """Write a figure as the page does: counts whole, shares without the leading 0."""
    if metric == "item_coverage":
        return f"{value:.0f}"
    text = f"{value:.4f}" if metric in ("ndcg", "gini") else f"{value:.3f}"
    return text.removeprefix("0") if value < 1 else text


def row(name: str, several: Sequence[_FIGURES]) -> str:
    """Write one system's line: means over its seeds, at 10 and at 1."""
    told = f"{name} ({len(several)} seeds)" if len(several) > 1 else name
    values = [
        number(metric, statistics.mean(each[cutoff][metric] for each in several))
        for metric in METRICS
        for cutoff in ("10", "1")
    ]
    return f"| {told} | {' | '.join(values)} |"


def main_table(cells: Sequence[Cell], data: str) -> Iterator[str]:
    """Yield Table 6.1: each baseline of ours, the thesis' row below it in italics, then KGFlex."""
    of_system = {name: tested(cells, name) for name in (*WORDS, *KGFLEX)}
    if not any(of_system.values()):
        return
    yield "| | " + " | ".join(f"{title}@10 | @1" for title in TITLES) + " |"
    yield "|---" * (1 + 2 * len(TITLES)) + "|"
    for name, words in WORDS.items():
        for settings, figures in of_system[name].items():
            yield row(f"{words}{settings}", figures)
        if name in NAMES:
            yield printed(f"{words} in the thesis", data, name)
    for name, words in KGFLEX.items():
        for figures in of_system[name].values():
            yield row(words, figures)
    yield printed("KGFlex in the thesis", data, "KGFlex")


def printed(name: str, data: str, system: str) -> str:
    """Write a line of the thesis, in italics."""
    return f"| *{name}* | " + " | ".join(f"*{value}*" for value in TABLE[data][system]) + " |"


def tested(cells: Sequence[Cell], name: str) -> dict[str, list[_FIGURES]]:
    """Return a system's figures on the test part by its settings in words, those of all seeds together."""
    found: dict[str, list[_FIGURES]] = {}
    for cell in sorted(cells, key=lambda each: each.get("seed", 1)):
        if cell["stage"] == "baseline" and cell["system"] == name and not cell["validation"] and "0" in cell["found"]:
            told = ", ".join(f"{value:g} {setting}" for setting, value in cell["settings"].items())
            found.setdefault(f", {told}" if told else "", []).append(cell["found"]["0"])
        if cell["stage"] == "test" and cell["name"] == name:
            last = cell["found"].get(str(max(cell["epochs"])))
            found.setdefault("", []).extend([last] if last else [])
    return {settings: figures for settings, figures in found.items() if figures}


def entropy(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield Figure 6.2 as a table: hit rate against Shannon entropy, both at 10."""
    lines: list[str] = []
    for name, words in {**WORDS, **KGFLEX}.items():
        for figures in tested(cells, name).values():
            ten = [each["10"] for each in figures]
            if all({"hit_rate", "shannon_entropy"} <= each.keys() for each in ten):
                rate = statistics.mean(each["hit_rate"] for each in ten)
                lines.append(f"| {words} | {rate:.4f} | {statistics.mean(e['shannon_entropy'] for e in ten):.3f} |")
    if lines:
        yield from ("| | HR@10 | Shannon entropy@10 |", "|---|---|---|", *lines)


def seeds(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield what was chosen, and nDCG@10 and coverage of every seed of KGFlex."""
    data = cells[0]["data"]
    for name in ("chosen", "thesis"):
        found = settled(cells, data, name)
        if found is not None:
            yield f"{name}: `{json.dumps(found[0])}`, {found[1]} epochs"
    for name, words in KGFLEX.items():
        for figures in tested(cells, name).values():
            each = [f"{number('ndcg', f['10']['ndcg'])} ({f['10']['item_coverage']:.0f})" for f in figures]
            yield f"{words}, nDCG@10 (coverage) of the seeds: {', '.join(each)}"


def search(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the search: nDCG@10 on the validation part after each number of epochs, the best first."""
    tried = [cell for cell in cells if cell["stage"] == "search" and looks(cell)]
    if not tried:
        return
    epochs = sorted({epoch for cell in tried for epoch in looks(cell)})
    same = {name for name in tried[0]["set"] if len({json.dumps(cell["set"].get(name)) for cell in tried}) == 1}
    yield "| settings (validation rows) | " + " | ".join(f"{epoch} epochs" for epoch in epochs) + " |"
    yield "|---" * (1 + len(epochs)) + "|"
    for cell in sorted(tried, key=lambda each: -max(looks(each).values())):
        told = ", ".join(
            f"{name.split('.')[1]} {show(value)}" for name, value in cell["set"].items() if name not in same
        )
        scores = [number("ndcg", looks(cell)[epoch]) if epoch in looks(cell) else "–" for epoch in epochs]
        yield f"| {told} | {' | '.join(scores)} |"


def show(value: object) -> str:
    """Write a setting's value."""
    return json.dumps(value).strip('"')


def looks(cell: Cell) -> dict[int, float]:
    """Return nDCG@10 of a cell by epoch."""
    return {int(epoch): figures["10"]["ndcg"] for epoch, figures in cell["found"].items() if epoch.isdigit()}


def hops(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield Figure 6.3: nDCG@10 and coverage by hops and length of vectors."""
    found = {
        (cell["hops"], cell["factors"]): cell["found"][str(max(cell["epochs"]))]["10"]
        for cell in cells
        if cell["stage"] == "ablation" and str(max(cell["epochs"])) in cell["found"]
    }
    if not found:
        return
    yield "| factors | one hop | two hops | both |"
    yield "|---|---|---|---|"
    for factors in FACTORS:
        told = [found.get((name, factors)) for name in HOPS]
        shown = ["not run" if f is None else f"{number('ndcg', f['ndcg'])}, {f['item_coverage']:.0f}" for f in told]
        yield f"| {factors} | {' | '.join(shown)} |"


def kept(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield Table 6.2 of the chosen settings: quartiles over users."""
    found = [
        cell["found"]["kept"]
        for cell in cells
        if cell["stage"] == "test" and cell.get("name") == "chosen" and "kept" in cell["found"]
    ]
    if not found:
        return
    yield "| what lists keep | " + " | ".join(TOPS.values()) + " |"
    yield "|---" * (1 + len(TOPS)) + "|"
    for name, words in (("again", "the list would select them again"), ("shown", "an item of the list has them")):
        told = [", ".join(f"{100 * share:.3g}" for share in found[0][name][top]) + " %" for top in TOPS]
        yield f"| {words} | {' | '.join(told)} |"
    yield ""
    stay = f"{100 * found[0]['cloud']:.0f}"
    yield f"of the 100 most prominent features, {stay} stay; {found[0]['features_per_user']} a user"


def cold(cells: Sequence[Cell]) -> Iterable[str]:
    """Return the table of new items, mean and standard deviation over the draws."""
    found: dict[str, list[dict[str, float]]] = {}
    for name in names_of():
        mine = [
            cell["found"]["0"] for cell in cells if cell["stage"] == "cold" and cell["system"] == name and cell["end"]
        ]
        if mine:
            found[name] = mine
    return list(rows(found)) if found else []
