"""The page about others' tables, made from the lines that runs wrote: `python -m benchmarks.published.page > PAGE.md`.

Reads benchmarks/results/published/*.jsonl, or the files that are named. A cell that nobody ran says so.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published.answers import board, nova, scaffold, split_or_pixels
from benchmarks.published.figures import HEART, HOSPITALS
from benchmarks.published.flower_split import dirichlet_table, label_table, of_later_code, of_the_table
from benchmarks.published.niid_table import (
    best,
    counts_a,
    last,
    later_again,
    misses,
    same_seeds,
    table_a,
    table_later,
    wall_time,
)
from benchmarks.published.protocols import SIZES
from benchmarks.published.rules_2026 import PUBLISHED
from steelyard.base.measures import estimate, show_estimate
from steelyard.report.statistics import holm, paired_p, verdict

STORED = Path(__file__).parent.parent / "results" / "published"
TEXT = Path(__file__).with_name("page.md")
"""What is said around the tables; [[NAME]] stands for what is made here."""
DRAWS = 300


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the lines of some files; of a cell that several files have, the line with the most rounds."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if "failed" in line:
                continue
            key = (line["table"], str(line.get("cell", line.get("method"))), ",".join(sorted(line.get("curves", {}))))
            if key not in found or line.get("rounds", 0) >= found[key].get("rounds", 0):
                found[key] = line
    return list(found.values())


def table_heart(lines: Sequence[Mapping[str, Any]]) -> tuple[str, int, int]:
    """Return the table of hospitals, how many cells were run, and how many lie within one published deviation."""
    rows = ["| method | " + " | ".join(HOSPITALS) + " |", "|---" * (1 + len(HOSPITALS)) + "|"]
    mine = {line["method"]: line["accuracy"] for line in lines if line["table"] == "D"}
    run = met = 0
    for method, published in HEART.items():
        cells: list[str] = []
        for hospital, (mean, deviation) in zip(HOSPITALS, published, strict=True):
            text = f"{mean:.3f} ± {deviation:.3f}"
            if method in mine:
                values = mine[method][hospital]
                inside = abs(statistics.mean(values) - mean) <= deviation
                run, met = run + 1, met + inside
                word = "" if inside else ", missed"
                text += f"; **{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}**{word}"
            cells.append(text)
        rows.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(rows), run, met


def skew(table: Sequence[Sequence[int]]) -> float:
    """Return how far clients' labels are from all rows' labels: total variation, mean over clients by size."""
    counts = np.array(table, dtype=np.float64)
    sizes = counts.sum(axis=1)
    apart = np.abs(counts / sizes[:, None] - counts.sum(axis=0) / counts.sum()).sum(axis=1) / 2
    return float((apart * sizes).sum() / counts.sum())


def table_skew() -> str:
    """Return how skewed Flower's splits are, that of the table and that of its later code, beside splits drawn anew."""
    rows = [
        "| Dirichlet .5 | the table's split | of later code | drawn anew, mean ± deviation | below the table's |",
        "|---|---|---|---|---|",
    ]
    for data, sizes in SIZES.items():
        own, later = (skew(dirichlet_table(sizes, 10, 0.5, chance())) for chance in (of_the_table, of_later_code))
        drawn = [skew(dirichlet_table(sizes, 10, 0.5, np.random.default_rng(1000 + n))) for n in range(DRAWS)]
        less = 100 * sum(value < own for value in drawn) / DRAWS
        spread = f"{statistics.mean(drawn):.3f} ± {statistics.stdev(drawn):.3f}"
        rows.append(f"| {data} | {own:.3f} | {later:.3f} | {spread} | {less:.0f} % of {DRAWS} |")
    return "\n".join(rows)


def table_holders() -> str:
    """Return how many clients hold each label where a client has two or three: in the table's split, and later."""
    rows = ["| split | " + " | ".join(f"label {label}" for label in range(10)) + " |", "|---" * 11 + "|"]
    for each in (2, 3):
        for word, chance in (("the table's", of_the_table), ("of later code", of_later_code)):
            counts = np.array(label_table(SIZES["mnist"], 10, each, chance()))
            rows.append(f"| #C={each}, {word} | " + " | ".join(str(held) for held in (counts > 0).sum(axis=0)) + " |")
    return "\n".join(rows)


OF_2026 = {
    "fedscs": "FedSCS, noise at one",
    "nvflare-adaptive": "adaptive, Dirichlet 0.5",
    "trust-mad": "trust, three of ten hostile",
}
"""By rule: the scene that its authors judge it by."""


def scenes_2026(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a line for each scene of the rules of 2026: the one with the most rules and seeds."""
    found: dict[str, Mapping[str, Any]] = {}
    for line in (line for line in lines if line["table"] == "2026"):
        before = found.get(line["split"], {"curves": {}})
        if sum(map(len, line["curves"].values())) >= sum(map(len, before["curves"].values())):
            found[line["split"]] = line
    return list(found.values())


def gains_2026(line: Mapping[str, Any]) -> tuple[dict[str, list[float]], dict[str, tuple[list[float], float | None]]]:
    """Return each rule's last rounds, and of each but FedAvg the gains by seed with Holm's p over the scene's rules."""
    values = {rule: last(curves) for rule, curves in line["curves"].items()}
    others = [rule for rule in values if rule != "fedavg" and len(values[rule]) == len(values["fedavg"])]
    gains = {rule: [a - b for a, b in zip(values[rule], values["fedavg"], strict=True)] for rule in others}
    adjusted = holm([paired_p(gains[rule]) for rule in others])
    return values, {rule: (gains[rule], p) for rule, p in zip(others, adjusted, strict=True)}


def rules_2026(lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the rules of 2026 against FedAvg, each on its own protocol: paired over seeds, one family a scene."""
    rows = [
        "| scene | rounds | rule | published | seeds | last round here | gain (points) | p (Holm) | verdict |",
        "|---" * 9 + "|",
    ]
    told = dict.fromkeys(OF_2026, "open")
    for line in scenes_2026(lines):
        values, judged = gains_2026(line)
        stopped = "" if line["finished"] else ", stopped"
        for rule, found in values.items():
            said = ["", "", ""]
            if rule in judged:
                gains, p = judged[rule]
                gain = estimate(gains)
                said = [show_estimate(gain, 2, signed=True), "" if p is None else f"{p:.2g}"]
                said.append(verdict(gain.mean, p))
                alike = sum(map(operator.eq, line["curves"][rule], line["curves"]["fedavg"]))
                # A rule that corrected nothing in a seed was not tried there, which a small gain does not say.
                tail = f"; in {alike} of them FedAvg's figures in every round" if alike else ""
                if OF_2026.get(rule) == line["split"] and line["finished"]:
                    points = show_estimate(gain, 1, signed=True)
                    told[rule] = f"{said[2]}, {points} points ({len(found)} seeds{tail})"
                said[2] += tail.replace("of them", f"of {len(found)} seeds")
            shown = show_estimate(estimate(found), 2)
            printed = PUBLISHED.get((line["split"], rule), "–")
            head = f"| {line['split']} | {line['rounds']}{stopped} | `{rule}` | {printed} | {len(found)} | {shown} | "
            rows.append(head + " | ".join(said) + " |")
    run = sum(text != "open" for text in told.values())
    short = "against FedAvg: " + "; ".join(f"`{rule}` {text}" for rule, text in told.items())
    table = "\n".join(rows) if len(rows) > 2 else "None of these cells was run yet."
    return {"2026": table, "2026 SHORT": f"{short if run else 'open'} | {f'{run} of 3' if run else 'no'}"}


def others(lines: Sequence[Mapping[str, Any]], tables: Sequence[str]) -> str:
    """Return the best and the last round of the cells of some tables, or that none was run."""
    found = [line for line in lines if line["table"] in tables]
    if not found:
        return "None of these cells was run yet."
    rows = ["| cell | rule | seeds | rounds | best | last |", "|---|---|---|---|---|---|"]
    for line in found:
        for rule, curves in line["curves"].items():
            found_best, found_last = best(curves), last(curves)
            means = f"{statistics.mean(found_best):.2f} | {statistics.mean(found_last):.2f}" if found_best else "– | –"
            ends = [how[0] for name, how in line.get("ended", {}).items() if name.rpartition("/")[0] == rule]
            stopped = "" if line["finished"] else ", stopped"
            done = f"ended in {min(ends)}: no model was finite" if ends else f"{line['rounds']}{stopped}"
            rows.append(f"| {line['cell']} | {rule} | {len(curves)} | {done} | {means} |")
    return "\n".join(rows)


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the whole page."""
    heart, run_d, met_d = table_heart(lines)
    made = {
        "A": table_a(lines),
        **counts_a(lines),
        **misses(lines),
        "LATER": table_later(lines),
        **later_again(lines),
        "HOLDERS": table_holders(),
        **same_seeds(lines),
        **wall_time(lines),
        "HEART": heart,
        "D RUN": str(run_d),
        "D MET": str(met_d),
        "D WORD": "**reproduced**" if met_d == run_d == len(HEART) * len(HOSPITALS) else "not wholly reproduced",
        **nova(lines),
        "SKEW": table_skew(),
        **split_or_pixels(lines),
        "B": others(lines, ("B",)),
        **scaffold(lines),
        **rules_2026(lines),
        "C": others(lines, ("C",)),
        **board(lines),
    }
    text = TEXT.read_text(encoding="utf-8")
    for name, value in made.items():
        text = text.replace(f"[[{name}]]", value)
    return text


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=sorted(STORED.glob("*.jsonl")))
    print(page(read(parser.parse_args().files)), end="")


if __name__ == "__main__":
    main()
