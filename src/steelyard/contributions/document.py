"""The document of a run's contributions: each client's value in units of the measure, with a 95 % interval.

Values of rounds become one value of each client, with an interval over test rows, rounds and seeds. The variance of a
sum over rounds has three parts:

    rows    of the groups of test rows, each summed over the rounds first: the same rows are tested in every round
    rounds  of the differences between rounds that follow each other, which a slow trend does not enter
    draws   where coalitions were drawn

Estimates by Shapley also have the method's own error, which was measured against retrained coalitions (`widened`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.measures import Z, half_per_deviation
from steelyard.messages.updates import Counts, Floats
from steelyard.rounds.plan import Measure, Method
from steelyard.runs.history import RETRAINED, SOURCES, History, StoredValues, read_values

Interval = tuple[Floats, Floats]
"""A value and its standard error, one of each for every client."""
METHOD_ERROR = 0.2
"""Standard error of the estimates themselves, as a share of the clients' mean absolute value: a model trained without a
client goes another way. Of 0.05, 0.1, 0.15, ... it is the least with which 95 % of the retrained values lay inside, in
the scenes with a free rider and with noisy images, over 8 seeds; docs/results/contributions.md has the other scenes."""


@dataclass(frozen=True, eq=False)
class Series:
    """The values of one federation over its rounds."""

    seed: int
    values: Floats
    """[rounds, clients, 1 + groups]; 0 for a client that was not weighed."""
    there: NDArray[np.bool_]
    """[rounds, clients]: who was weighed."""
    errors: Floats
    """[rounds, clients]: of drawing coalitions."""
    sizes: Counts | None
    """[groups]: test rows of each; None where they are not the same in all rounds."""
    before: float
    after: float

    @classmethod
    def of(cls, stored: Sequence[StoredValues], clients: Sequence[str], rounds: Sequence[int]) -> Self:
        """Lay the values of one federation out by round and client."""
        sizes = stored[0].found.sizes
        same = all(np.array_equal(each.found.sizes, sizes) for each in stored)
        groups = len(sizes) if same else 0
        values = np.zeros((len(rounds), len(clients), 1 + groups))
        errors = np.zeros((len(rounds), len(clients)))
        there = np.zeros(errors.shape, dtype=np.bool_)
        column = {name: place for place, name in enumerate(clients)}
        for each in stored:
            row, columns = rounds.index(each.round), [column[name] for name in each.found.clients]
            values[row, columns] = each.found.values[:, : 1 + groups]
            errors[row, columns], there[row, columns] = each.found.error, True
        ends = stored[0].found.before, stored[-1].found.after
        return cls(stored[0].seed, values, there, errors, sizes if same else None, *ends)

    @property
    def sampled(self) -> bool:
        """Whether coalitions were drawn."""
        return bool(self.errors.any())

    def summed(self) -> Series:
        """Return the series of all clients together, as if they were one."""
        errors = np.zeros((len(self.values), 1))  # drawn values sum to the gain exactly
        there = np.asarray(self.there.any(axis=1, keepdims=True))
        values = self.values.sum(axis=1, keepdims=True)
        return Series(self.seed, values, there, errors, self.sizes, self.before, self.after)


def add_over_rounds(series: Series, *, mean: bool = False) -> Interval:
    """Return each client's sum over the rounds, or its mean over those in which it was weighed, and the error of it."""
    value = series.values[:, :, 0].sum(axis=0)
    variance = _of_rows(series, value) + _of_rounds(series) + np.square(series.errors).sum(axis=0)
    rounds = np.maximum(series.there.sum(axis=0), 1) if mean else 1
    return value / rounds, np.sqrt(variance) / rounds


def _of_rows(series: Series, value: Floats) -> Floats:
    if series.sizes is None or len(series.sizes) < 2:
        return np.zeros(len(value))
    groups = series.values[:, :, 1:].sum(axis=0)
    share = series.sizes / series.sizes.sum()
    count = len(share)
    return count / (count - 1) * np.square(share * (groups - value[:, None])).sum(axis=1)


def _of_rounds(series: Series) -> Floats:
    found = np.zeros(series.there.shape[1])
    for client in range(len(found)):
        mine = series.values[series.there[:, client], client, 0]
        if len(mine) > 1:
            found[client] = len(mine) / (len(mine) - 1) * np.square(np.diff(mine)).sum() / 2
    return found


def over_seeds(found: Sequence[Interval]) -> tuple[Floats, Floats, Floats]:
    """Return value, low and high: of one seed by its own error, of several by how they differ from seed to seed."""
    values = np.array([value for value, _ in found])
    value = values.mean(axis=0)
    half = Z * found[0][1] if len(found) == 1 else half_per_deviation(len(found)) * values.std(axis=0, ddof=1)
    return value, value - half, value + half


def widened(value: Floats, low: Floats, high: Floats) -> tuple[Floats, Floats, Floats]:
    """Return estimated Shapley values with the method's own error in the interval; without weight it stays 0."""
    method = Z * METHOD_ERROR * np.abs(value).mean()
    weightless = (low == 0) & (high == 0)
    half = np.where(weightless, 0.0, np.hypot((high - low) / 2, method))
    return value, value - half, value + half


UNITS = {
    "loss": "loss on the server's samples",
    "accuracy": "accuracy on the server's samples",
    "local-loss": "loss on the clients' test rows",
    "local-accuracy": "accuracy on the clients' test rows",
    "agreement": "cosine with the rule's own update, mean over classes and rounds",
}
"""What a value is counted in, by measure."""
NEAR_ZERO = (
    "An interval that holds 0 means: on these rows and rounds it cannot be told whether the client helped or harmed. "
    "It does not mean that its data are worthless: others may hold the same."
)
AGREEMENT = (
    "1: its update points where the rule's own does, class by class; 0: across it; -1: against it. That an update "
    "agrees does not say that it helped."
)


class ClientValue(TypedDict):
    """What one client added: in units of the measure, more is better."""

    client: str
    value: float
    low: float
    high: float
    verdict: str
    """helps, harms, not clear, or no weight: the rule never gave it any; of classes: agrees, opposes, not clear."""
    share: float | None
    """Of the whole gain; None unless that is clearly positive, and the value more than a place in an order."""
    rounds: int
    """In how many rounds it was weighed."""
    by_round: list[float]
    """What it added in each of `rounds`, 0 where it was not asked; the mean over seeds where there are several."""


class Contributions(TypedDict):
    """What the clients of one rule of a run added to its model."""

    run: str
    rule: str
    seeds: list[int]
    measure: str
    unit: str
    method: str
    source: str
    rounds: list[int]
    before: float
    """The measure of the model before the first of these rounds."""
    after: float
    """The measure of the model after the last of them."""
    total: float
    total_low: float
    total_high: float
    notes: list[str]
    clients: list[ClientValue]


def stored_contributions(
    folder: str | Path,
    rule: str | None = None,
    measure: Measure | None = None,
    method: Method | None = None,
    *,
    retrained: bool = False,
) -> Contributions | str:
    """Return what a run's folder already holds of its clients' contributions, or a sentence that says why nothing.

    Nothing is trained or tested. Without `rule` it is the main one's, without `measure` and `method` the first that
    the run has. `retrained` asks for the values of retrained coalitions in place of the estimates.
    """
    folder = Path(folder)
    history = History(folder)
    if measure is not None and method == "classes":
        raise UserError(f"--measure: got {measure} with --method classes, which tests no model; allowed: other methods")
    chosen = rule_of(history, rule)
    found = [each for each in read_values(folder) if each.rule == chosen and (each.source == RETRAINED) == retrained]
    measures = [measure] if measure is not None else list(UNITS)
    methods: list[Method] = [method] if method is not None else ["shapley", "leave-one-out", "classes"]
    for kind in methods:
        for unit in measures:
            mine = [each for each in found if each.found.measure == unit and each.found.method == kind]
            best = [[each for each in mine if each.source == source] for source in SOURCES]
            # What covers most rounds; of equals the first, which is the best source.
            most = max(best, key=len)
            if most:
                return _document(history, chosen, most)
    return (
        f"{folder}: what the clients of '{chosen}' added was not measured; `steelyard contributions {folder}` finds it "
        "out afterwards"
    )


def rule_of(history: History, rule: str | None) -> str:
    """Return the rule of a run that is asked for: the main one unless another is named; an unknown one is refused."""
    rules = list(dict.fromkeys(history.federations["rule"]))
    if rule is not None and rule not in rules:
        raise UserError(f"--rule: got '{rule}'{nearest(rule, rules)}; allowed: {listed(rules)}")
    return rules[0] if rule is None else rule


def _document(history: History, rule: str, stored: Sequence[StoredValues]) -> Contributions:
    first = stored[0].found
    clients = sorted({name for each in stored for name in each.found.clients})
    rounds = sorted({each.round for each in stored})
    series = [
        Series.of([each for each in stored if each.seed == seed], clients, rounds)
        for seed in sorted({each.seed for each in stored})
    ]
    mean = first.method == "classes"
    value, low, high = over_seeds([add_over_rounds(each, mean=mean) for each in series])
    if first.method == "shapley" and stored[0].source != RETRAINED:
        value, low, high = widened(value, low, high)
    whole = over_seeds([add_over_rounds(each.summed(), mean=mean) for each in series])
    total, total_low, total_high = (float(each[0]) for each in whole)
    words = ("agrees", "opposes") if mean else ("helps", "harms")
    verdicts = [_verdict(*ends, *words) for ends in zip(low.tolist(), high.tolist(), strict=True)]
    order_only = _order_only(stored, verdicts, value, total)
    shares = first.method == "shapley" and total_low > 0 and not order_only
    by_round = np.mean([each.values[:, :, 0] for each in series], axis=0)
    weighed = np.mean([each.there.sum(axis=0) for each in series], axis=0)
    rows: list[ClientValue] = [
        {
            "client": client,
            "value": float(value[at]),
            "low": float(low[at]),
            "high": float(high[at]),
            "verdict": verdicts[at],
            "share": float(value[at]) / total if shares else None,
            "rounds": round(float(weighed[at])),
            "by_round": by_round[:, at].tolist(),
        }
        for at, client in enumerate(clients)
    ]
    return {
        "run": str(history.folder),
        "rule": rule,
        "seeds": [each.seed for each in series],
        "measure": first.measure,
        "unit": UNITS[first.measure],
        "method": first.method,
        "source": SOURCES.get(stored[0].source, stored[0].source),
        "rounds": rounds,
        "before": float(np.mean([each.before for each in series])),
        "after": float(np.mean([each.after for each in series])),
        "total": total,
        "total_low": total_low,
        "total_high": total_high,
        "notes": [*_notes(history, stored, series, rounds, clear=total_low > 0), *order_only],
        "clients": sorted(rows, key=lambda row: (-row["value"], row["client"])),
    }


def _verdict(low: float, high: float, above: str, below: str) -> str:
    if low == high == 0:
        return "no weight"
    return above if low > 0 else below if high < 0 else "not clear"


UNDONE = 10.0
"""How many times the whole gain the clients' values may be, added up without their signs."""


def _order_only(stored: Sequence[StoredValues], verdicts: Sequence[str], values: Floats, total: float) -> list[str]:
    """Say that estimates are an order where they were found too sure of themselves; shares are then not shown."""
    if stored[0].source == RETRAINED or stored[0].found.method != "shapley":
        return []
    if float(np.abs(values).sum()) > UNDONE * abs(total):
        return [
            f"Only the ranking is usable: the values are over {UNDONE:g} times the whole gain. What one client "
            "spoils in a round and others mend in the next counts in every round: sizes and intervals do not hold "
            "(docs/results/contributions.md); --retrain computes them."
        ]
    if "harms" in verdicts:
        return []
    return [
        "Only the ranking is usable, and it is uncertain: no client clearly harms, and estimates of such clients "
        "correlated poorly with retrained values (about 0.3: docs/results/contributions.md); --retrain computes them."
    ]


def _notes(
    history: History, stored: Sequence[StoredValues], series: Sequence[Series], rounds: Sequence[int], *, clear: bool
) -> list[str]:
    method = stored[0].found.method
    notes = [AGREEMENT if method == "classes" else NEAR_ZERO]
    if method == "shapley" and not clear:
        notes.append("The whole gain is not clearly above 0: shares of it, in percent, would mean nothing.")
    if method == "leave-one-out":
        notes.append("Values of leaving one out do not sum to the gain: what two clients both know counts for neither.")
    if any(each.sampled for each in series):
        notes.append("Cohorts of more than 12: coalitions were drawn, and the interval counts the error of that.")
    last = history.last_round
    if stored[0].source != RETRAINED and len(rounds) < last:
        notes.append(f"Measured in {len(rounds)} of {last} rounds: the values are of these rounds alone.")
    if len(series) > 1:
        notes.append("Means over seeds, intervals over seeds; where a seed shares out data anew, a name is other data.")
    return notes
