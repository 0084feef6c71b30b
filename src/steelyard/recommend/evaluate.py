"""Scoring any system's lists from files: what `steelyard recommend evaluate` does, for use from Python as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steelyard.base.errors import UserError
from steelyard.recommend.interactions import Codes, ascending
from steelyard.recommend.metrics import METRICS, PerUser, bias_disparity, measure
from steelyard.recommend.ranking import Floats, GroundTruth, View, memberships
from steelyard.recommend.reading import Table, number_rows, read_columns, read_table


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
    for words, others in (("recommended", shown), ("training or test", known)):
        if others - items:
            example = ascending(others - items)[0]
            raise UserError(
                f"{catalogue}: {len(others - items)} {words} items are not in the catalogue, for one {example!r}; "
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
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
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
