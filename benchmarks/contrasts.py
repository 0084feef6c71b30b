"""The papers' claims as contrasts that were named before they were run: ten seeds, one family, and equivalence.

    python -m benchmarks.papers results --parts power-mnist-noniid-1,power-mnist-noniid-6 --seconds 500
    python -m benchmarks.contrasts results

Reads what `benchmarks.papers` left in OUT under names that begin with "power" and prints a table in Markdown: for each
contrast the gain in accuracy after the last round, with its 95 % interval over seeds, p of a paired t-test and of two
one-sided tests that the gain lies within one point, both after Holm's correction over the whole family. A contrast with
fewer seeds than planned is shown and not tested; it counts in the family. About half of the clients choose the order of
online adjustment, so its contrast is read on the test rows of the others alone, for both rules. OUT/scores.json
keeps what was read: where runs of several machines are put together, it stands for those that are not there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.kit import start
from benchmarks.papers import NAMED
from steelyard.base.measures import estimate
from steelyard.report.statistics import ALPHA, equivalence_p, holm, paired_p
from steelyard.runs.history import History
from steelyard.weighing.order import chooses

SEEDS, MARGIN = 10, 0.01
"""Seeds that each contrast was planned with, and the gain within which two rules count as equal: one point."""
FLOAT32 = "float32"
OTHERS = ", clients that do not choose"
"""What an experiment is called where it is read on the clients alone whose tests choose no order."""


@dataclass(frozen=True)
class Contrast:
    """One claim: in an experiment a rule is ahead of another."""

    experiment: str
    rule: str
    against: str

    @property
    def words(self) -> str:
        """The contrast as the table names it."""
        return f"{self.experiment}: {self.rule} against {self.against}"


def contrasts() -> list[Contrast]:
    """Return the whole family, in the order of the table."""
    found: list[Contrast] = []
    for experiment, words in NAMED.items():
        base, *rules = words.split(",")
        found += [Contrast(experiment + OTHERS * rule.startswith("online"), rule, base) for rule in rules]
    # Simulation 1 has no adaptive loss: there AdaFed is its weights.
    found.append(Contrast("adafed-1", "adafed", "fedavg"))
    for name in ("adafed-2", "adafed-3"):
        found += [Contrast(name, "adafed-weights", "fedavg"), Contrast(name, "adafed", "adafed-weights")]
    return found


Scores = dict[tuple[str, str, int], float]
"""Accuracy after the last round, by experiment, rule and seed."""


def read(out: Path, planned: Sequence[str]) -> Scores:
    """Return the scores of all parts that have ended; those in float32 stand under another experiment."""
    found: Scores = {}
    for name in planned:
        folder = out / name
        if not (folder / "run.sqlite").is_file():
            continue
        history = History(folder)
        experiment = name.removeprefix("power-").rpartition("-")[0] + (f" ({FLOAT32})" if FLOAT32 in name else "")
        last = int(history.info["rounds"])
        rows = history.rounds
        ended = rows[rows["round"] == last]
        for rule, seed, score in zip(ended["rule"], ended["seed"], ended["accuracy"], strict=True):
            found[experiment, str(rule), int(seed)] = float(score)
        found |= _reporting(history, experiment, last)
    return found


def _reporting(history: History, experiment: str, last: int) -> Scores:
    """Return the scores on the test rows of clients that choose no order, where a rule of the run has one chosen."""
    if not any("-apart(" in str(rule) for rule in history.federations["rule"]):
        return {}
    rows = history.evaluations
    rows = rows[(rows["round"] == last) & ~rows["client"].map(chooses)]
    return {
        (experiment + OTHERS, str(rule), int(seed)): float(np.average(group["score"], weights=group["samples"]))
        for (rule, seed), group in rows.groupby(["rule", "seed"])
    }


def kept(out: Path, planned: Sequence[str]) -> Scores:
    """Return the scores of the runs and those that the file has of others, and write all of them there."""
    path = out / "scores.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    found = {(str(name), str(rule), int(seed)): float(score) for name, rule, seed, score in before} | read(out, planned)
    lines = [json.dumps([*key, score]) for key, score in sorted(found.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    return found


def differences(scores: Scores, contrast: Contrast) -> list[float]:
    """Return the gain of each seed that both rules have."""
    seeds = sorted(
        seed for experiment, rule, seed in scores if (experiment, rule) == (contrast.experiment, contrast.rule)
    )
    pairs = [
        ((contrast.experiment, contrast.rule, seed), (contrast.experiment, contrast.against, seed)) for seed in seeds
    ]
    return [scores[one] - scores[other] for one, other in pairs if other in scores]


def table(scores: Scores, family: Sequence[Contrast], seeds: int = SEEDS, margin: float = MARGIN) -> str:
    """Return the family as Markdown: what is done is tested, what is not says so."""
    gains = {contrast: differences(scores, contrast) for contrast in family}
    whole = [len(values) >= seeds for values in gains.values()]
    # One family, whatever of it is done: a contrast that is not tested yet counts as one that shows nothing.
    tried = [
        (paired_p(v), equivalence_p(v, margin)) if w else (1.0, 1.0) for v, w in zip(gains.values(), whole, strict=True)
    ]
    adjusted = zip(*(holm(column) for column in zip(*tried, strict=True)), strict=True)
    tests = {contrast: pair for contrast, pair, w in zip(gains, adjusted, whole, strict=True) if w}
    lines = ["| contrast | seeds | gain (points) | p | equal within | verdict |", "|---|---|---|---|---|---|"]
    for contrast, values in gains.items():
        cells = [contrast.words, f"{len(values)} of {seeds}", *_cells(values, *tests.get(contrast, (None, None)))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(values: Sequence[float], p: float | None, same: float | None) -> tuple[str, str, str, str]:
    if not values:
        return "", "", "", "not run"
    found = estimate([100 * value for value in values])
    gain = f"{found.mean:+.2f}" + (f" ± {found.half:.2f}" if len(values) > 1 else "")
    if p is None or same is None:
        return gain, "", "", "not tested: seeds are missing"
    verdict = "not to be told, nor equal"
    if p < ALPHA:
        verdict = "ahead" if found.mean > 0 else "behind"
    if same < ALPHA:
        verdict = f"{verdict}, by less than a point" if p < ALPHA else "equal within a point"
    return gain, f"{p:.2g}", f"{same:.2g}", verdict


def main(out: Annotated[Path, typer.Argument(help="the folder that benchmarks.papers wrote")]) -> None:
    """Read what is there and print it."""
    from benchmarks.papers import power_parts

    scores = kept(out, list(power_parts()))
    print(table(scores, contrasts()))
    for (experiment, rule, _), value in scores.items():
        if FLOAT32 in experiment:
            print(f"{experiment}: {rule}: {100 * value:.2f} %")


if __name__ == "__main__":
    start(main)
