"""Table A of the page: what was run of Flower's table, on its splits and on others, and whether it is met."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scipy.stats import ttest_ind_from_stats

from benchmarks.published.cells import ALL_MU, SPLITS, equal_sizes, split_of_flower
from benchmarks.published.figures import RULES, TABLE_A, TOLERANCE, UNSTABLE
from steelyard.report.statistics import holm

Lines = Sequence[Mapping[str, Any]]
Curves = Sequence[Sequence[float | None]]


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


def of_rule(curves: Mapping[str, Curves], rule: str) -> tuple[Curves, str] | None:
    """Return the seeds' curves of a rule, and a word on it: FedProx is the best of its μ, as published."""
    if rule != "FedProx":
        found = curves.get(rule.lower())
        return None if found is None else (found, "")
    tried = {name: found for name, found in curves.items() if name.startswith("fedprox")}
    if not tried:
        return None
    chosen = max(tried, key=lambda name: statistics.mean(best(tried[name])))
    alone = " alone" if len(tried) == 1 else f" of {len(tried)}" if len(tried) < len(ALL_MU) else ""
    return tried[chosen], f"μ {chosen.removeprefix('fedprox(mu=').removesuffix(')')}{alone}"


def unsteady(curves: Curves) -> bool:
    """Whether the best rounds of the seeds, or the last ten rounds of a seed, spread as an unstable cell's do."""
    among = [statistics.stdev(values)] if len(values := best(curves)) > 1 else []
    within = [statistics.stdev(curve[-10:]) for curve in tested(curves) if len(curve) > 1]
    return max([*among, statistics.mean(within) if within else 0.0]) >= UNSTABLE


def judged(published: tuple[float, float], curves: Curves, tolerance: float, *, may_rise: bool = False) -> str:
    """Say whether a cell is met: within two published deviations or the tolerance, whichever is larger.

    FedProx is the best of four μ, so with fewer it `may_rise`: too low is open then, and too high is a miss.
    """
    mean, deviation = published
    if deviation >= UNSTABLE:
        return "unstable here too" if unsteady(curves) else "steady here"
    apart, allowed = statistics.mean(best(curves)) - mean, max(2 * deviation, tolerance)
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


class Judged(NamedTuple):
    """A rule of a cell of table A that was run to the end."""

    data: str
    split: str
    rule: str
    values: list[float]
    about: str
    word: str

    @property
    def published(self) -> tuple[float, float]:
        """Mean and deviation, as printed."""
        return TABLE_A[self.data][self.split][self.rule]


def judgements(lines: Lines) -> dict[tuple[str, str, str], Judged]:
    """Return what is said of each rule of table A that was run to the end, by data set, split and rule."""
    found: dict[tuple[str, str, str], Judged] = {}
    for data, splits in TABLE_A.items():
        for split in SPLITS:
            ended = together([line for line in cell_of(lines, "A", data, split) if line["finished"]])
            same = "fedavg" in ended and equal_sizes(split_of_flower(data, split))
            if same:
                ended["fednova"] = ended["fedavg"]
            for rule in RULES:
                if not (known := of_rule(ended, rule)):
                    continue
                curves, about = known
                few = about.endswith("alone") or " of " in about
                word = judged(splits[split][rule], curves, TOLERANCE[data], may_rise=few)
                about = "is FedAvg" if same and rule == "FedNova" else about
                found[data, split, rule] = Judged(data, split, rule, best(curves), about, word)
    return found


def table_a(lines: Lines) -> str:
    """Return table A as Markdown."""
    rows = ["| data | split | " + " | ".join(RULES) + " |", "|---" * (2 + len(RULES)) + "|"]
    found = judgements(lines)
    for data, splits in TABLE_A.items():
        for split in SPLITS:
            cells: list[str] = []
            for rule in RULES:
                mean, deviation = splits[split][rule]
                text = f"{mean:.2f} ± {deviation:.2f}"
                if known := found.get((data, split, rule)):
                    about = f" ({known.about})" if known.about else ""
                    text += f"; **{shown(known.values)}**{about}, {known.word}"
                else:
                    text += _begun(cell_of(lines, "A", data, split), rule)
                cells.append(text)
            rows.append(f"| {data} | {split} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def counts_a(lines: Lines) -> dict[str, str]:
    """Return how many cells of table A were run, how many are met or unstable in both, and a line on all of them."""
    words = Counter(each.word for each in judgements(lines).values())
    run, all_of = words.total(), len(TABLE_A) * len(SPLITS) * len(RULES)
    said = [f"{words[word]} {word}" for word in ("met", "unstable here too", "steady here", "missed", "open")
            if words[word] or word == "met"]  # fmt: skip
    rest = [f"{all_of - run} not run"] if run < all_of else []
    counts = {"A RUN": run, "A ALL": all_of, "A MET": words["met"], "A UNSTABLE": words["unstable here too"]}
    return {**{name: str(count) for name, count in counts.items()}, "A WORDS": ", ".join(said + rest)}


_CHANCE = (
    "no learning there nor here: most rounds lie at chance, one seed ends without a finite model, and the best of 50 "
    "is a lucky round"
)
WHY: Mapping[tuple[str, str, str], str] = {
    ("mnist", "Dirichlet 0.5", "FedNova"): "a misprint, see below",
    ("mnist", "#C=1", "SCAFFOLD"): _CHANCE,
    ("fashion-mnist", "#C=1", "SCAFFOLD"): _CHANCE,
    ("fashion-mnist", "#C=2", "FedNova"): (
        "its rounds swing: our last ten lie between 63.6 and 79.7 with a mean of 74.7, and the last of all is 72.3 on "
        "average. So the best of 50 hangs on chance, more than FedAvg's"
    ),
    ("fashion-mnist", "#C=3", "SCAFFOLD"): (
        "likely one bad run there: two at about 84, as ours are, and one at about 73 have its mean and deviation"
    ),
    ("cifar10", "Dirichlet 0.5", "FedAvg"): "0.05 points beyond the bound; JPEG images would lower it, not raise it",
    ("cifar10", "#C=2", "SCAFFOLD"): "0.03 points beyond the bound",
    ("cifar10", "#C=2", "FedNova"): "not explained; with #C=3 it is 1.3 points too low, so no one-sided fault",
}
"""Why a cell is missed, by data set, split and rule: what whoever runs it finds goes here."""


SEEDS = 3
"""Of the published table."""


def differences(lines: Lines) -> dict[tuple[str, str, str], float]:
    """Return Welch's p of each cell of table A that was run, from the printed means and deviations and our seeds."""
    return {
        key: float(
            ttest_ind_from_stats(
                *each.published, SEEDS, statistics.mean(each.values), statistics.stdev(each.values), len(each.values),
                equal_var=False,
            ).pvalue
        )
        for key, each in judgements(lines).items() if len(each.values) > 1
    }  # fmt: skip


def misses(lines: Lines) -> dict[str, str]:
    """Return each cell of table A that is not met, with what was allowed and why; and what chance has to do with it."""
    rows = ["| cell | published | ours | apart | allowed | p (Welch) | why |", "|---" * 7 + "|"]
    chance = differences(lines)
    for key, each in judgements(lines).items():
        if each.word in ("met", "unstable here too"):
            continue
        mean, deviation = each.published
        apart = f"{statistics.mean(each.values) - mean:+.2f}".replace("-", "−")
        steady = each.word == "steady here"
        allowed = "unstable there" if steady else f"{max(2 * deviation, TOLERANCE[each.data]):.2f}"
        why = WHY.get(key, "fewer μ than the four of the published best" if each.word == "open" else "not explained")
        said = [f"{each.data}, {each.split}, {each.rule}", f"{mean:.2f} ± {deviation:.2f}", shown(each.values), apart]
        rows.append("| " + " | ".join([*said, allowed, f"{chance[key]:.2g}" if key in chance else "–", why]) + " |")
    small = sum(p < 0.05 for p in chance.values())
    least = min((p for p in holm(list(chance.values())) if p is not None), default=1.0)
    return {
        "MISSES": "\n".join(rows) if len(rows) > 2 else "None of those that were run.",
        "CHANCE": f"Of {len(chance)} cells {small} have p below .05, where chance alone would give "
        f"{0.05 * len(chance):.0f}; after Holm's correction the least p is {least:.2g}",
    }


def _begun(mine: Lines, rule: str) -> str:
    """Say how far a rule came in a cell that was stopped; its best round so far is no figure of the table."""
    for line in sorted(mine, key=lambda line: -line["rounds"]):
        if known := of_rule(line["curves"], rule):
            return f"; **{statistics.mean(best(known[0])):.2f}** after {line['rounds']}, stopped"
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


def wall_time(lines: Lines) -> dict[str, str]:
    """Return how much of the card's time the cells of table A took: a line's seconds, shared by those beside it."""
    ended = [line for line in lines if line["table"] == "A" and line["finished"]]
    used = sum(line["seconds"] / line.get("at_once", 1) for line in ended)
    trained = sum(len(line["curves"]) for line in ended)
    return {"WALL RULES": str(trained), "WALL": f"{used / 60:.0f}", "WALL SEED": f"{used / 60 / SEEDS:.0f}"}


def same_seeds(lines: Lines) -> dict[str, str]:
    """Return a table of rules that ran on the table's split and on the later one, and how far these are apart by split.

    Seed by seed, in the last round that both have.
    """
    rows = [
        "| data | split | rule | seeds | round | the table's split | the later one |",
        "|---|---|---|---|---|---|---|",
    ]
    apart: dict[tuple[str, str], dict[str, tuple[int, float]]] = {}
    for line in lines:
        if line["table"] != "A":
            continue
        later = together(cell_of(lines, "A-later", line["data"], line["split"]))
        for rule in sorted(set(line["curves"]) & set(later)):
            own, other = tested(line["curves"][rule]), tested(later[rule])
            rounds, seeds = min(len(curve) for curve in (*own, *other)), min(len(own), len(other))
            pairs = [[curve[rounds - 1] for curve in curves[:seeds]] for curves in (own, other)]
            figures = (", ".join(f"{value:.2f}" for value in values) for values in pairs)
            where = f"| {line['data']} | {line['split']} | `{rule}` | {seeds} | {rounds}"
            rows.append(" | ".join([where, *figures]) + " |")
            gap = statistics.mean(pairs[0]) - statistics.mean(pairs[1])
            known = apart.setdefault((line["data"], line["split"]), {})
            if rounds > known.get(rule, (0, 0.0))[0]:  # of a rule that ran twice, the one that came further
                known[rule] = rounds, gap
    told: list[str] = []
    for (data, split), known in apart.items():
        rounds, gaps = (sorted(set(each)) for each in zip(*known.values(), strict=True))
        points = f"{gaps[0]:+.1f} to {gaps[-1]:+.1f}".replace("-", "−")
        told.append(f"- {data}, {split}: {points} (round {' to '.join(map(str, rounds))})")
    return {"CHECK": "\n".join(rows), "CHECK APART": "\n".join(told) or "- not known"}


def later_again(lines: Lines) -> dict[str, str]:
    """Say how many cells were run to the end on the later split, and how many of these not yet on the table's own."""
    ended = [line for line in lines if line["table"] == "A-later" and line["finished"]]
    cells = {(line["data"], line["split"], rule) for line in ended for rule in RULES if of_rule(line["curves"], rule)}
    left = len(cells - set(judgements(lines)))
    again = "all of them were run again" if not left else f"{left} of them are still to be run again"
    return {"LATER RUN": str(len(cells)), "LATER AGAIN": again}
