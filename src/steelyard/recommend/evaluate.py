"""Judging recommenders: lists from files, every user's list in the loop, test items among sampled negatives.

Figures of sampled negatives compare with nothing but their like; the full ranking is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from steelyard.base.errors import UserError
from steelyard.base.randomness import stream_keys, words
from steelyard.base.settings import Section
from steelyard.messages.payloads import blocks
from steelyard.messages.updates import Evaluations, Question
from steelyard.recommend import metrics
from steelyard.recommend.histories import Floats32, Histories, Users
from steelyard.recommend.interactions import (
    Codes,
    Names,
    Table,
    ascending,
    number_rows,
    places_in,
    read_columns,
    read_table,
)
from steelyard.recommend.metrics import (
    METRICS,
    Floats,
    GroundTruth,
    PerUser,
    Scores,
    View,
    bias_disparity,
    measure,
    memberships,
    top,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Case:
    """The ground truth and one or two systems' lists, all in one numbering, and notes on what was odd in the files."""

    truth: GroundTruth
    users: tuple[str, ...]
    items: tuple[str, ...]
    lists: Codes
    against: Codes | None
    notes: tuple[str, ...]


def load(
    train: Path,
    test: Path,
    recommendations: Path,
    *,
    cutoff: int,
    threshold: float | None = None,
    catalogue: Path | None = None,
    categories: Path | None = None,
    against: Path | None = None,
) -> Case:
    """Read all files of a case into one numbering; lists are cut at `cutoff`."""
    _refuse_same(train, test, recommendations)
    if threshold is not None and not np.isfinite(threshold):
        raise UserError(f"--threshold: got {threshold}; allowed: a finite number")
    tables = {"train": read_table(train), "test": read_table(test)}
    systems = [read_table(path) for path in (recommendations, against) if path is not None]
    members = None
    if categories is not None:
        found = read_columns(categories, {"item": "item", "category": 2})
        members = memberships(found["item"], found["category"])
    notes: list[str] = []
    items = _catalogue(tables, systems, catalogue, notes)
    users = ascending([u for table in (*tables.values(), *systems) for u in set(table.texts("user"))])
    train_rows, test_rows = (number_rows(table, users, items) for table in tables.values())
    truth = GroundTruth.between(train_rows, test_rows, threshold)
    if not truth.relevant.any():
        limit = "" if threshold is None else f" rated {threshold:g} or more"
        raise UserError(f"{test}: no test interaction{limit}; allowed: at least one relevant test item")
    if members is not None:
        truth = truth.with_categories(items, members)
    lists = [_lists(table, users, items, cutoff, truth, notes) for table in systems]
    return Case(truth, tuple(users), tuple(items), lists[0], lists[1] if against else None, tuple(notes))


def _refuse_same(train: Path, test: Path, recommendations: Path) -> None:
    """Refuse one file in two roles: figures of a system that is tested on what it learnt mean nothing."""
    given = {"--train": train, "--test": test, "--recommendations": recommendations}
    known: dict[Path, str] = {}
    for option, path in given.items():
        real = path.resolve()
        if real in known:
            raise UserError(f"{option}: {path} is {known[real]} too; allowed: another file")
        known[real] = option


def _catalogue(
    tables: dict[str, Table], systems: Sequence[Table], catalogue: Path | None, notes: list[str]
) -> list[str]:
    known = {item for table in tables.values() for item in table.frame["item"].unique()}
    shown = {item for table in systems for item in table.frame["item"].unique()}
    if catalogue is None:
        if shown - known:
            notes.append(
                f"{len(shown - known)} recommended items occur in neither train nor test; they join the catalogue"
            )
        return ascending(known | shown)
    items = set(read_columns(catalogue, {"item": "item"})["item"])
    for role, others in (("recommended", shown), ("training or test", known)):
        if others - items:
            example = ascending(others - items)[0]
            raise UserError(
                f"{catalogue}: {len(others - items)} {role} items are not in the catalogue, for one {example!r}; "
                "allowed: a catalogue with every item"
            )
    return ascending(items)


def _lists(
    table: Table, users: list[str], items: list[str], cutoff: int, truth: GroundTruth, notes: list[str]
) -> Codes:
    """Return lists[users, ranks] ordered by falling score; equal scores, or none, keep the order of the file."""
    rows = number_rows(table, users, items)
    scores = rows.rating if "rating" in table else np.zeros(len(rows))
    order = np.lexsort((-scores, rows.user))
    pair = rows.user[order] * len(items) + rows.item[order]
    _, first = np.unique(pair, return_index=True)
    if len(first) < len(pair):
        notes.append(f"{table.path.name}: {len(pair) - len(first)} repeated items left out, the best rank kept")
    order = order[np.sort(first)]
    seen = np.isin(pair, truth.train_user * len(items) + truth.train_item).sum()
    if seen:
        notes.append(f"{table.path.name}: {seen} recommended items are in the user's own training set")
    counts = np.bincount(rows.user[order], minlength=len(users))
    rank = places_in(counts)
    lists = np.full((len(users), cutoff), -1, dtype=np.int64)
    within = rank < cutoff
    lists[rows.user[order][within], rank[within]] = rows.item[order][within]
    missing = int(((counts == 0) & (truth.relevant > 0)).sum())
    if missing:
        notes.append(f"{table.path.name}: {missing} users with relevant test items have no list; they count as 0")
    return lists


def figures(case: Case, cutoffs: Sequence[int]) -> dict[str, dict[str, object]]:
    """Return all metrics by cutoff and name: the document that `--format json` prints, nan as None."""
    document: dict[str, dict[str, object]] = {}
    for cutoff in cutoffs:
        view = case.truth.view(case.lists, cutoff)
        block: dict[str, object] = {name: _plain(value) for name, value in measure(view).items()}
        block["users"] = int(view.judged.sum())
        block["catalogue"] = case.truth.items
        if case.truth.categories:
            bias = bias_disparity(view)
            block["bias_disparity"] = _by_name(bias.categories, bias.disparity)
            block["bias_source"] = _by_name(bias.categories, bias.source)
            block["bias_recommended"] = _by_name(bias.categories, bias.recommended)
        if case.against is not None:
            other = case.truth.view(case.against, cutoff)
            outcomes = {m.name: compare_views(m, view, other) for m in METRICS if isinstance(m, PerUser)}
            block["against"] = {
                name: {
                    "difference": _plain(outcome.difference),
                    "t_test_p": _plain(outcome.t_p),
                    "wilcoxon_p": _plain(outcome.wilcoxon_p),
                }
                for name, outcome in outcomes.items()
            }
        document[str(cutoff)] = block
    return document


def _by_name(names: Sequence[str], values: np.ndarray) -> dict[str, float | None]:
    return {name: _plain(float(value)) for name, value in zip(names, values, strict=True)}


def _plain(value: float) -> float | None:
    """A number that JSON can hold; nan, a metric that is not defined here, becomes null."""
    return value if np.isfinite(value) else None


@dataclass(frozen=True)
class Comparison:
    """Two systems on the same users: the mean difference (first − second) and two-sided p-values."""

    users: int
    difference: float
    t: float
    t_p: float
    wilcoxon_p: float


def compare(first: Floats, second: Floats) -> Comparison:
    """Compare per-user values by Student's paired t-test and Wilcoxon's signed-rank test.

    Use it before calling one system better. Equal values for every user give p = 1 in both tests.
    """
    # For speed of start: few evaluations compare two systems.
    from scipy import stats

    if first.shape != second.shape:
        raise UserError(f"compare: got {len(first)} and {len(second)} users; allowed: the same users in the same order")
    difference = np.asarray(first - second, dtype=np.float64)
    if len(difference) < 2 or not difference.any():
        return Comparison(len(difference), float(difference.mean()) if len(difference) else 0.0, 0.0, 1.0, 1.0)
    if np.ptp(difference) == 0:
        # Every user gains the same: no spread, so the t statistic is infinite.
        t, t_p = float(np.copysign(np.inf, difference[0])), 0.0
    else:
        outcome = stats.ttest_rel(first, second)
        t, t_p = float(outcome.statistic), float(outcome.pvalue)
    wilcoxon_p: float = stats.wilcoxon(first, second).pvalue  # pyright: ignore[reportAttributeAccessIssue]
    return Comparison(len(difference), float(difference.mean()), t, t_p, float(wilcoxon_p))


def compare_views(metric: PerUser, first: View, second: View) -> Comparison:
    """Compare two systems' lists under one metric, over the users who have a relevant test item."""
    return compare(metric.per_user(first)[first.judged], metric.per_user(second)[second.judged])


def write_lists(
    path: Path,
    users: Sequence[str] | Names,
    items: Sequence[str] | Names,
    lists: Codes,
    scores: NDArray[np.floating] | None = None,
) -> None:
    """Write lists[users, ranks] as a TSV with header; without scores, minus the rank stands for one."""
    with path.open("w", encoding="utf-8") as out:
        out.write("user\titem\tscore\n")
        for row, name in enumerate(users):
            for rank, item in enumerate(lists[row].tolist()):
                if item >= 0:
                    score = -rank if scores is None else float(scores[row, rank])
                    out.write(f"{name}\t{items[item]}\t{score:.9g}\n")


def best_unseen(
    histories: Histories, scores: Scores, cutoff: int, cells: int = 1 << 22
) -> tuple[Codes, NDArray[np.float64]]:
    """Return each user's k best items that are not in her history, and their scores; users go through in blocks.

    `scores(users)` gives the scores of all items; ties go by ascending item number. Use it for any system: FPL and
    every baseline get their lists here. `cells` is how many scores are held at a time.
    """
    lists: list[Codes] = []
    values: list[NDArray[np.float64]] = []
    for block in blocks(histories.users, histories.catalogue, cells):
        users = np.arange(block.start, block.stop)
        found = scores(users)
        best = top(found, histories.seen(users), cutoff)
        lists.append(best)
        values.append(np.take_along_axis(found, np.maximum(best, 0), axis=1).astype(np.float64))
    return np.concatenate(lists), np.concatenate(values)


# Leave-one-out with sampled negatives: the protocol of X. He et al., *Neural Collaborative Filtering*, 2017. Each
# user's newest item is held out and ranked among 99 drawn ones; HR@k asks whether it is among the first k, nDCG@k adds
# how far up. It is cheap, but its figures are much higher than those of the full ranking, and may order systems
# differently (W. Krichene, S. Rendle, *On Sampled Metrics for Item Recommendation*, 2020).


_CELLS = 1 << 22
"""Scores or words held at a time."""


@dataclass(frozen=True)
class Sampled:
    """How many negatives stand beside each test item, and the seed that they are drawn by, the same in every run."""

    count: int = 99
    seed: int = 42


def draw_negatives(truth: GroundTruth, names: Sequence[str], sampled: Sampled) -> Codes:
    """Return [users, count]: distinct items that each user neither trained on nor is tested on; -1 where none is left.

    Every item gets a word of the user's own stream and those with the smallest words are drawn, so a draw depends on
    the user's name, the seed and her items alone, whoever else there is.
    """
    keys = stream_keys(sampled.seed, 0, names, "sampled negatives")
    found = np.full((truth.users, sampled.count), -1, dtype=np.int64)
    drawn = min(sampled.count, truth.items)
    for block in blocks(truth.users, truth.items, _CELLS):
        taken = np.zeros((block.stop - block.start, truth.items), dtype=np.bool_)
        for user, item in ((truth.train_user, truth.train_item), (truth.test_user, truth.test_item)):
            inside = (user >= block.start) & (user < block.stop)
            taken[user[inside] - block.start, item[inside]] = True
        order = np.where(taken, np.uint64(0xFFFFFFFFFFFFFFFF), words(keys[block], truth.items))
        chosen = np.argsort(order, axis=1, kind="stable")[:, :drawn]
        found[block, :drawn] = np.where(np.take_along_axis(taken, chosen, axis=1), -1, chosen)
    return found


def ranks(truth: GroundTruth, negatives: Codes, scores: Scores) -> Codes:
    """Return the rank, from 0, of each relevant test item among its user's negatives; ties by ascending item number."""
    found = np.empty(len(truth.test_user), dtype=np.int64)
    for block in blocks(truth.users, truth.items, _CELLS):
        pairs = np.flatnonzero((truth.test_user >= block.start) & (truth.test_user < block.stop))
        if not len(pairs):
            continue
        known = scores(np.arange(block.start, block.stop))
        table = np.nan_to_num(known, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        row, item = truth.test_user[pairs] - block.start, truth.test_item[pairs]
        others = negatives[truth.test_user[pairs]]
        mine, theirs = table[row, item][:, None], table[row[:, None], others]
        ahead = (theirs > mine) | ((theirs == mine) & (others < item[:, None]))
        found[pairs] = (ahead & (others >= 0)).sum(axis=1)
    return found


def per_user(truth: GroundTruth, ranks: Codes, cutoff: int) -> dict[str, Floats]:
    """Return HR@k and nDCG@k of every user, means over her test items: one of them in leave-one-out."""
    inside = ranks < cutoff
    gains = {"hit_rate": inside.astype(np.float64), "ndcg": np.where(inside, 1.0 / np.log2(ranks + 2.0), 0.0)}
    tests = np.maximum(truth.relevant, 1)
    return {name: np.bincount(truth.test_user, gain, truth.users) / tests for name, gain in gains.items()}


# How a model is judged in the loop.


SCORES: Mapping[str, PerUser] = {
    metric.name: metric
    for metric in (metrics.NDCG(), metrics.Precision(), metrics.Recall(), metrics.HitRate(), metrics.UserF1())
}
"""The metrics that can score a user's list in the loop."""

ModelScores = Callable[["torch.Tensor", Codes], Floats32]
"""Gives a model's scores of all items for some users, [users, items]."""


class RankingSettings(Section):
    """[ranking]: how each user's list is judged."""

    cutoff: int = Field(default=10, ge=1, le=10_000)
    """k: length of the list."""
    score: Literal["ndcg", "precision", "recall", "hit_rate", "f1_per_user"] = "ndcg"
    """The score of a user in the loop; the others are recorded beside it."""
    threshold: float | None = None
    """A test item is relevant from this rating on; default: every test item is."""
    protocol: Literal["full", "sampled"] = "full"
    """full: rank all items that the user did not train on. sampled: rank each relevant test item among a few drawn ones
    (with split = "newest": leave-one-out of the NCF papers); its figures compare with nothing but their like."""
    negatives: int = Field(default=99, ge=1, le=1_000_000)
    """For protocol = "sampled": how many items that she never took are drawn for each user, by `split_seed`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.protocol == "sampled" and self.score not in ("ndcg", "hit_rate"):
            raise UserError(f"score: got '{self.score}' with protocol = 'sampled'; allowed with it: ndcg, hit_rate")
        return self


@dataclass(frozen=True, eq=False)
class Judge:
    """Judges any model that scores all items for a user; use it in the clients of a recommender."""

    users: Users
    cutoff: int = 10
    score: str = "ndcg"
    """The name of the score among the metrics."""
    sampled: Sampled | None = None
    """Rank each test item among so many sampled negatives; None: the full ranking."""

    @cached_property
    def tested(self) -> Codes:
        """Users with a relevant test item, in the order of their names."""
        names = self.users.histories.names
        order = np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.int64)
        return order[self.users.truth.relevant[order] > 0]

    @cached_property
    def _negatives(self) -> Codes:
        assert self.sampled is not None
        return draw_negatives(self.users.truth, self.users.histories.names, self.sampled)

    def lists(self, scores: Scores, cutoff: int) -> tuple[Codes, Floats]:
        """Return every user's list of unseen items, best first, and their scores; users in the order of histories."""
        return best_unseen(self.users.histories, scores, cutoff, cells=1 << 23)

    def measure(self, scores: Scores) -> dict[str, Floats]:
        """Return each metric by name, one value per user of `tested`."""
        if self.sampled is not None:
            truth = self.users.truth
            found = per_user(truth, ranks(truth, self._negatives, scores), self.cutoff)
            return {name: values[self.tested] for name, values in found.items()}
        view = self.users.truth.view(self.lists(scores, self.cutoff)[0], self.cutoff)
        return {name: metric.per_user(view)[self.tested] for name, metric in SCORES.items()}

    def answer(self, question: Question, scores: ModelScores) -> Evaluations:
        """Return the score of every candidate model, and all metrics of the first."""
        found = [self.measure(lambda users, model=model: scores(model, users)) for model in question.models]
        own = np.stack([each[self.score] for each in found])
        prefix = "" if self.sampled is None else "sampled_"
        return Evaluations(
            federation=question.federation,
            round=question.round,
            clients=tuple(self.users.histories.names[user] for user in self.tested.tolist()),
            # Every user counts once, so that the overall score is the metric's mean over users.
            samples=np.ones(len(self.tested), dtype=np.int64),
            scores=own,
            losses=1.0 - own,
            metrics={f"{prefix}{name}@{self.cutoff}": values for name, values in found[0].items()},
        )
