"""The page about others' tables, made from the lines that runs wrote: `python -m benchmarks.published.page > PAGE.md`.

Reads benchmarks/results/published/*.jsonl, or the files that are named. A cell that nobody ran says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published.cells import SIZES, SPLITS
from benchmarks.published.figures import HEART, HOSPITALS, RULES, TABLE_A, TOLERANCE, UNSTABLE
from benchmarks.published.flower_split import dirichlet_table
from steelyard.intervals import estimate, show_estimate
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


def tested(curves: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Return each seed's tested rounds in percent; a seed that ended before its first test is left out."""
    found = [[100 * value for value in curve if value is not None] for curve in curves]
    return [curve for curve in found if curve]


def best(curves: Sequence[Sequence[float | None]]) -> list[float]:
    """Return the best round of each seed in percent."""
    return [max(curve) for curve in tested(curves)]


def last(curves: Sequence[Sequence[float | None]]) -> list[float]:
    """Return the last round of each seed that was tested, in percent."""
    return [curve[-1] for curve in tested(curves)]


def of_rule(line: Mapping[str, Any], rule: str) -> tuple[list[float], str] | None:
    """Return the seeds' best figures of a rule, and a word on it: FedProx is the best of its μ, as published."""
    if rule != "FedProx":
        found = line["curves"].get(rule.lower())
        return None if found is None else (best(found), "")
    tried = {name: best(found) for name, found in line["curves"].items() if name.startswith("fedprox")}
    if not tried:
        return None
    chosen = max(tried, key=lambda name: statistics.mean(tried[name]))
    return tried[chosen], chosen.removeprefix("fedprox(mu=").removesuffix(")")


def judged(published: tuple[float, float], mine: Sequence[float], tolerance: float) -> str:
    """Say whether a cell is met: within two published deviations or the tolerance, whichever is larger."""
    mean, deviation = published
    if deviation >= UNSTABLE:
        spread = statistics.stdev(mine) if len(mine) > 1 else 0.0
        return "unstable here too" if spread >= UNSTABLE else "steady here"
    return "met" if abs(statistics.mean(mine) - mean) <= max(2 * deviation, tolerance) else "missed"


def table_a(lines: Sequence[Mapping[str, Any]]) -> tuple[str, int, int]:
    """Return table A as Markdown, how many of its cells were run, and how many of those are met."""
    rows = ["| data | split | " + " | ".join(RULES) + " |", "|---" * (2 + len(RULES)) + "|"]
    run = met = 0
    for data, splits in TABLE_A.items():
        for split in SPLITS:
            mine = [
                line for line in lines if (line["table"], line.get("data"), line.get("split")) == ("A", data, split)
            ]
            cells: list[str] = []
            for rule in RULES:
                published = splits[split][rule]
                text = f"{published[0]:.2f} ± {published[1]:.2f}"
                ended = [line for line in mine if line["finished"]]
                known = next((found for line in ended if (found := of_rule(line, rule)) is not None), None)
                if known is None:
                    begun = [
                        f"; **{statistics.mean(f[0]):.2f}** after {m['rounds']}"
                        for m in mine
                        if (f := of_rule(m, rule))
                    ]
                    cells.append("".join([text, *begun[:1]]))
                    continue
                values, word = known
                word_on = judged(published, values, TOLERANCE[data])
                run, met = run + 1, met + (word_on != "missed")
                shown = f"{statistics.mean(values):.2f}" + (
                    f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else " (one seed)"
                )
                cells.append(f"{text}; **{shown}**{f' (μ {word})' if word else ''}, {word_on}")
            rows.append(f"| {data} | {split} | " + " | ".join(cells) + " |")
    return "\n".join(rows), run, met


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
    """Return how skewed Flower's one split is beside splits that are drawn anew."""
    rows = [
        "| Dirichlet .5 | Flower's split | drawn anew, mean ± deviation | less skewed than Flower's |",
        "|---|---|---|---|",
    ]
    for data, sizes in SIZES.items():
        own = skew(dirichlet_table(sizes, 10, 0.5))
        drawn = [skew(dirichlet_table(sizes, 10, 0.5, np.random.default_rng(1000 + n))) for n in range(DRAWS)]
        less = 100 * sum(value < own for value in drawn) / DRAWS
        spread = f"{statistics.mean(drawn):.3f} ± {statistics.stdev(drawn):.3f}"
        rows.append(f"| {data} | {own:.3f} | {spread} | {less:.0f} % of {DRAWS} |")
    return "\n".join(rows)


def nova(lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Say whether FedNova's figure on MNIST at Dirichlet .5 can be one: a best round can only rise with more rounds."""
    cells = [line for line in lines if line.get("cell") == "A-mnist-Dirichlet-05" and "fednova" in line["curves"]]
    if not cells:
        return {"NOVA": "open", "NOVA RUN": "no"}
    line = max(cells, key=lambda line: line["rounds"])
    values, rounds = best(line["curves"]["fednova"]), line["rounds"]
    above = min(values) > sum(TABLE_A["mnist"]["Dirichlet 0.5"]["FedNova"])
    word = "that, or of another FedNova" if above else "not shown"
    shown = ", ".join(f"{value:.2f}" for value in values)
    told = f"{word}: the best round only rises, and after {rounds} rounds it is {shown}"
    where = "on a GPU" if "cuda" in line["device"] else "on a CPU"
    return {"NOVA": told, "NOVA RUN": f"{rounds} of 50 rounds, seeds: {len(values)}, {where}"}


SPLIT_AND_PIXELS = {
    ("between 0 and 1", "Flower's"): "A-cifar10-Dirichlet-05",
    ("between 0 and 1", "a split a seed"): "A-drawn-cifar10-Dirichlet-05",
    ("normalised", "Flower's"): "A-normalised-cifar10-Dirichlet-05-split-42",
    ("normalised", "a split a seed"): "A-normalised-cifar10-Dirichlet-05-drawn",
}
"""FedAvg on CIFAR-10 at Dirichlet .5: the two things in which Flower's baseline and NIID-Bench differ, both ways."""


def split_or_pixels(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return FedAvg's best rounds by split and by pixels, as far as they were run."""
    known = {line["cell"]: line for line in lines if "fedavg" in line.get("curves", {})}
    rows = ["| pixels | Flower's one split | a split a seed |", "|---|---|---|"]
    for pixels in ("between 0 and 1", "normalised"):
        cells: list[str] = []
        for split in ("Flower's", "a split a seed"):
            line = known.get(SPLIT_AND_PIXELS[pixels, split])
            cells.append(
                "not run"
                if line is None
                else f"{', '.join(f'{value:.2f}' for value in best(line['curves']['fedavg']))} after {line['rounds']}"
            )
        rows.append(f"| {pixels} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def rules_2026(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the rules of 2026 against FedAvg on their own scene: paired over seeds, one family of tests a scene."""
    rows = ["| scene | rule | seeds | best of 10 rounds | gain (points) | p (Holm) | verdict |", "|---" * 7 + "|"]
    for line in (line for line in lines if line["table"] == "2026"):
        values = {rule: best(curves) for rule, curves in line["curves"].items()}
        others = [rule for rule in values if rule != "fedavg" and len(values[rule]) == len(values["fedavg"])]
        gains = {rule: [a - b for a, b in zip(values[rule], values["fedavg"], strict=True)] for rule in others}
        adjusted = dict(zip(others, holm([paired_p(gains[rule]) for rule in others]), strict=True))
        for rule, found in values.items():
            said = ["", "", ""]
            if rule in gains:
                gain, p = estimate(gains[rule]), adjusted[rule]
                said = [show_estimate(gain.as_json(), 2, signed=True), "" if p is None else f"{p:.2g}"]
                said.append(verdict(gain.mean, p))
            shown = show_estimate(estimate(found).as_json(), 2)
            done = f"{line['split']}, {line['rounds']} rounds"
            rows.append(f"| {done} | `{rule}` | {len(found)} | {shown} | " + " | ".join(said) + " |")
    return "\n".join(rows) if len(rows) > 2 else "None of these cells was run yet."


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
            done = f"ended in {min(ends)}: no model was finite" if ends else str(line["rounds"])
            rows.append(f"| {line['cell']} | {rule} | {len(curves)} | {done} | {means} |")
    return "\n".join(rows)


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the whole page."""
    a, run_a, met_a = table_a(lines)
    heart, run_d, met_d = table_heart(lines)
    made = {
        "A": a,
        "A RUN": str(run_a),
        "A MET": str(met_a),
        "HEART": heart,
        "D RUN": str(run_d),
        "D MET": str(met_d),
        **nova(lines),
        "SKEW": table_skew(),
        "DRAWN": split_or_pixels(lines),
        "B": others(lines, ("B",)),
        "2026": rules_2026(lines),
        "C": others(lines, ("C",)),
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
