"""What is wrong with the data of an experiment, said before anybody trains: its sites, and how rows are shared out.

What reads data is imported inside functions, for speed of start.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steelyard.base.documents import Document
from steelyard.base.errors import UserError, counted, first_names, listed, nearest
from steelyard.data.cells import LARGEST, parse_numbers, plain
from steelyard.data.findings import NAMES, Finding, compared, drift, found, in_order
from steelyard.data.profile import (
    ColumnProfile,
    SiteProfile,
    by_chance,
    counts_rows,
    edges_of,
    profile_column,
    profile_labels,
    repeats,
    row_marks,
    together,
)
from steelyard.data.sources.csv import Csv
from steelyard.experiment.learning import LearningDescription

if TYPE_CHECKING:
    from steelyard.data.dataset import Dataset, DatasetOrSeeded, Population
    from steelyard.data.tables import Table
    from steelyard.experiment.description import Description

MOST_SITES = 50
"""Of more sites the largest are compared column by column."""
FEW_SITES = 20
"""Up to so many owners are sites, each of which is meant to take part; more are people."""
FEW_SHARED = 0.01
"""Below this share of the test rows, rows that are trained on too are no reason to stop."""
_SMALL = 2_000_000
"""Tables of fewer cells are also read whole, as a run reads them."""


class DataCheck(Document):
    """What `steelyard check` found, the most harmful first."""

    experiment: str
    """The experiment's name."""
    sites: dict[str, int]
    """Rows of each site."""
    findings: list[Finding]
    """What is wrong, or may be."""
    drift: dict[str, dict[str, float]] = {}  # noqa: RUF012  pydantic gives each model its own copy of a default
    """Population stability index of each column at each site against the others: how differently it is spread."""

    @property
    def errors(self) -> list[Finding]:
        """What stops a run."""
        return [finding for finding in self.findings if finding.level == "error" and not finding.accepted]

    def lines(self) -> list[str]:
        """Return what people are told, a line for each finding and one that sums up."""
        found_lines: list[str] = []
        for finding in self.findings:
            how = f"{finding.level}, accepted" if finding.accepted else finding.level
            mend = f"; see {finding.mend}" if finding.mend else ""
            found_lines.append(f"{how}: {finding.name}: {said(finding)}{mend}")
        sites = [count for name, count in self.sites.items() if name]
        among = f" at {len(sites):,} sites" if sites else ""
        counts = {level: sum(each.level == level for each in self.findings) for level in ("error", "warning", "note")}
        some = [counted(count, level) for level, count in counts.items() if count]
        return [*found_lines, f"{sum(self.sites.values()):,} rows{among}: {', '.join(some) or 'nothing found'}"]

    def accepting(self, names: Sequence[str]) -> DataCheck:
        """Return the same with what is accepted by name; a name that is no finding's is refused."""
        for name in names:
            if name not in NAMES:
                raise UserError(f"--accept: got '{name}'{nearest(name, NAMES)}; allowed: {listed(NAMES)}")
        marked = [each.model_copy(update={"accepted": each.name in names}) for each in self.findings]
        return self.model_copy(update={"findings": marked})

    def refuse(self) -> None:
        """Refuse to go on with data that are wrong for certain; call it before anything is written."""
        if not self.errors:
            return
        first, more = self.errors[0], len(self.errors) - 1
        if first.name == "unreadable":
            raise UserError(first.sentence)
        also = f"; {counted(more, 'further error')}" if more else ""
        mend = f"{first.mend}, or " if first.mend else ""
        raise UserError(
            f"data: {said(first)}{also}; allowed: {mend}--accept {first.name} (steelyard check shows everything)"
        )


def said(finding: Finding) -> str:
    """Return a finding as one sentence with its row."""
    return f"{finding.sentence}{f' (first in {finding.row})' if finding.row else ''}"


def check_data(experiment: Description, dataset: DatasetOrSeeded | None = None) -> DataCheck:
    """Look at the data of an experiment, each site alone and all against each other; nothing is trained."""
    dataset = dataset(experiment.seed) if callable(dataset) else dataset
    if not isinstance(experiment, LearningDescription):
        kind = experiment.kind_name()
        raise UserError(f"check: got an experiment of kind '{kind}'; allowed: kind 'learning', which has columns")
    return looked_at(experiment, dataset, most_cells=_SMALL)[0]


def looked_at(
    experiment: Description,
    dataset: Dataset | None = None,
    accept: Sequence[str] = (),
    *,
    most_cells: int | None = None,
) -> tuple[DataCheck, Dataset | None]:
    """Return what is wrong with data, and what was read for it whole, so that a run need not read it again.

    A table of more than `most_cells` is not turned into what a model takes. Use `check_data` where nothing is run.
    """
    looked, rows = DataCheck(experiment=experiment.name, sites={}, findings=[]).accepting(accept), None
    if not isinstance(experiment, LearningDescription):
        return looked, None
    data = experiment.data
    try:
        if isinstance(data, Csv) and dataset is None:
            from steelyard.data.columns import table_dataset
            from steelyard.data.scaling import load

            table = data.table()
            looked = check_table(experiment, table, data).accepting(accept)
            if not looked.errors and (most_cells is None or table.frame.size < most_cells):
                rows = load(data, table_dataset(table, data))
        elif dataset is not None or most_cells is not None:
            looked = _check_dataset(experiment, dataset).accepting(accept)
    except UserError as problem:
        # Where something else explains it, that is enough.
        refused = [] if looked.errors else [found("unreadable", str(problem))]
        looked = looked.model_copy(update={"findings": in_order([*looked.findings, *refused])})
    return looked, rows


def _check_dataset(experiment: LearningDescription, dataset: Dataset | None) -> DataCheck:
    """Look at data that are no table file: their columns, where they have some, and how they are shared out."""
    from steelyard.data.memory import as_table
    from steelyard.data.partition import share_out
    from steelyard.data.scaling import load

    rows = load(experiment.data) if dataset is None else dataset
    population = share_out(rows, experiment.partition, experiment.seed)
    table = as_table(rows)
    if table is None:
        sizes = {client.client: len(client.train) + len(client.test) for client in population.clients}
        findings = in_order(_of_population(experiment, population))
        return DataCheck(experiment=experiment.name, sites=sizes, findings=findings)
    looked = check_table(experiment, *table, population)
    # No field of an experiment says how cells that are at hand are meant.
    mended = [
        each.model_copy(update={"mend": ""}) if each.mend.startswith("data.") else each for each in looked.findings
    ]
    return looked.model_copy(update={"findings": mended})


# Tables.


@dataclass(frozen=True, eq=False)
class _Sites:
    """Whose rows a table has; rows that are left out are nobody's."""

    table: Table
    data: Csv
    inputs: list[str]
    names: list[str]
    rows: list[NDArray[np.int64]]
    """By site."""
    left: NDArray[np.bool_]

    @classmethod
    def of(cls, table: Table, data: Csv) -> _Sites:
        import pandas

        from steelyard.data.columns import input_names
        from steelyard.data.mending import left_out

        inputs = input_names(table, data)
        left, _ = left_out(table, data, inputs)
        if data.owner is None:
            return cls(table, data, inputs, [""], [np.flatnonzero(~left)], left)
        codes, found_names = pandas.factorize(table.frame[data.owner])
        order = np.argsort(np.where(left, -1, codes), kind="stable")
        cuts = np.searchsorted(np.where(left, -1, codes)[order], np.arange(len(found_names) + 1))
        rows = [order[cuts[number] : cuts[number + 1]] for number in range(len(found_names))]
        return cls(table, data, inputs, [plain(str(name)) for name in found_names], rows, left)

    def profiles(self) -> tuple[list[SiteProfile], NDArray[np.bool_], list[str]]:
        """Return the profiles of the largest sites, which rows have an empty input, and inputs that count the rows.

        A column is done after the other, so that no second table lies in memory.
        """
        frame, data = self.table.frame, self.data
        largest = sorted(range(len(self.rows)), key=lambda number: -len(self.rows[number]))[:MOST_SITES]
        chosen = [number for number in sorted(largest) if len(self.rows[number])]
        targets, empty = self._targets(), np.zeros(len(frame), dtype=np.bool_)

        def of_column(name: str) -> tuple[list[ColumnProfile], NDArray[np.bool_], bool]:
            cells: Any = frame[name]
            if data.is_category(name):
                cells, numbers = cells.astype(object), np.full(len(cells), np.nan)
            else:
                numbers = parse_numbers(cells)
            edges, profiled = edges_of(numbers), list[ColumnProfile]()
            numeric = bool((np.abs(numbers) < LARGEST).all())
            for at in (self.rows[number] for number in chosen):
                own = numbers[at]
                profiled.append(profile_column(cells.iloc[at], own, edges, [each[at] for each in targets]))
            counting = counts_rows(numbers, name) or all(counts_rows(numbers[self.rows[at]], name) for at in chosen)
            return profiled, np.zeros(len(cells), np.bool_) if numeric else cells.isna().to_numpy(), counting

        columns, counters = dict[str, list[ColumnProfile]](), list[str]()
        with ThreadPoolExecutor(2) as pool:
            for name, (profiled, absent, counting) in zip(self.inputs, pool.map(of_column, self.inputs), strict=True):
                # In this thread alone, for two that write into one array lose what the other writes.
                columns[name], empty = profiled, empty | absent
                counters += [name] * counting
        labels = frame[data.labels]
        if (above := data.positive_above) is not None:
            words = {True: f"above {above:g}", False: f"up to {above:g}"}
            labels = labels.where(labels.isna(), (parse_numbers(labels) > above).astype(object)).replace(words)
        profiles = [
            SiteProfile(
                self.names[number],
                len(self.rows[number]),
                data.labels,
                profile_labels(labels.iloc[self.rows[number]], classes=data.task not in ("regression", "survival")),
                {name: found[place] for name, found in columns.items() if found[place].missing < found[place].rows},
            )
            for place, number in enumerate(chosen)
        ]
        return profiles, empty, counters

    def _targets(self) -> list[NDArray[Any]]:
        """Return what leaking columns are held against: classes by number, the number to predict, time and event."""
        import pandas

        data, frame = self.data, self.table.frame
        if data.positive_above is not None:
            return [(parse_numbers(frame[data.labels]) > data.positive_above).astype(np.int64)]
        numbers = [] if data.task in ("classes", "multi-label") else [parse_numbers(frame[data.labels])]
        named = {"classes": data.labels, "survival": data.event}.get(data.task)
        return numbers + ([] if named is None else [pandas.factorize(frame[named])[0].astype(np.int64)])

    def marks(self) -> tuple[NDArray[np.uint64], float]:
        """Return a mark for each row, and how many pairs of equal rows chance explains."""
        used = [*self.inputs, self.data.labels, *filter(None, [self.data.event])]
        columns = [self.table.frame[name] for name in used]
        marks = row_marks(columns)
        return marks, by_chance(columns) if repeats(marks).any() else 0.0


def check_table(
    experiment: LearningDescription, table: Table, data: Csv, population: Population | None = None
) -> DataCheck:
    """Look at a table that was read; `population`: how its rows are shared out, where that is known."""
    sites = _Sites.of(table, data)
    profiles, empty, counters = sites.profiles()
    left = sites.left | empty if data.missing == "drop" else sites.left
    marks, chance = sites.marks()
    rows_of = dict(zip(sites.names, sites.rows, strict=True))
    profiles = [
        replace(profile, repeated=_not_by_chance(repeats(marks[rows_of[profile.site]]), chance)) for profile in profiles
    ]
    findings = compared(profiles, task=data.task) if profiles else []
    findings = [one for one in findings if one.column not in counters or one.name == "gives-the-label-away"]
    findings += _of_roles(sites, left)
    for name in counters:
        sentence = f"column '{name}' is another whole number in each row: it counts or names them"
        findings.append(found("counts-rows", sentence, column=name, mend="data.ignore"))
    try:
        shared, row_of = (population, np.arange(len(left))) if population else _shared_out(experiment, sites, left)
        findings += _of_parts(experiment, shared, row_of, marks, chance)
    except UserError as problem:
        if all(finding.level != "error" for finding in findings):
            findings.append(found("unreadable", str(problem)))
    named = [
        finding.model_copy(update={"row": table.row(int(finding.row) - 1)}) if finding.row else finding
        for finding in findings
    ]
    sizes = {name: len(rows) for name, rows in zip(sites.names, sites.rows, strict=True)}
    return DataCheck(experiment=experiment.name, sites=sizes, findings=in_order(named), drift=_drift_of(profiles))


def _not_by_chance(repeated: NDArray[np.bool_], chance: float) -> int:
    count = int(repeated.sum())
    return count if count > 10 * chance else 0


def _drift_of(profiles: Sequence[SiteProfile]) -> dict[str, dict[str, float]]:
    if len(profiles) < 2:
        return {}
    pool, result = together(profiles), dict[str, dict[str, float]]()
    for profile in profiles:
        others = pool.plus(profile, -1).columns
        result[profile.site] = {
            name: round(drift(column, others[name])[0], 4)
            for name, column in profile.columns.items()
            if column.bulk + sum(column.words.values()) and others[name].bulk + sum(others[name].words.values())
        }
    return result


def _of_roles(sites: _Sites, left: NDArray[np.bool_]) -> list[Finding]:
    """Return what is wrong with the label, the owner and columns that belong together; `left`: rows not used."""
    from steelyard.data.columns import survival_line, survival_pair

    data, frame, findings = sites.data, sites.table.frame, list[Finding]()
    labels, rows = frame[data.labels], ~sites.left
    if (unlabelled := labels.isna().to_numpy() & rows).any():
        sentence = f"label '{data.labels}' is empty in {int(unlabelled.sum()):,} of {len(frame):,} rows"
        findings.append(_at_row("labels-empty", sentence, unlabelled, data.labels, "data.unlabelled"))
    if data.task == "survival" and (zero := (parse_numbers(labels) <= 0) & rows).any():
        sentence = f"time '{data.labels}' is 0 or less in {counted(int(zero.sum()), 'row')}"
        findings.append(_at_row("times-of-zero", sentence, zero, data.labels, "data.unlabelled"))
    pair = survival_pair(frame) if data.task != "survival" else None
    if pair is not None and data.labels in pair:
        findings.append(found("survival-columns", survival_line(*pair), column=data.labels, mend="data.task"))
    elif pair is not None and (taken := [name for name in pair if name in sites.inputs]):
        sentence = f"{listed(taken)}: an input that is known only afterwards, the time to an event or whether it came"
        findings.append(found("survival-columns", sentence, column=taken[0], mend="data.ignore"))
    if data.owner is not None and len(frame) >= FEW_SITES and len(sites.names) > 0.9 * len(frame):
        sentence = f"owner '{data.owner}' names {len(sites.names):,} owners in {len(frame):,} rows: it counts rows"
        findings.append(found("owner-counts-rows", sentence, column=data.owner, mend="data.owner"))
    for name, at in zip(sites.names, sites.rows, strict=True):
        if name and left[at].all():
            mend = "data.missing" if len(at) else "data.unlabelled"
            findings.append(found("cannot-train", f"the site '{name}' has no row left", site=name, mend=mend))
    return findings


def _at_row(name: str, sentence: str, rows: NDArray[np.bool_], column: str, mend: str) -> Finding:
    figures = {"rows": float(rows.sum())}
    return found(name, sentence, column=column, row=str(int(np.argmax(rows)) + 1), mend=mend, figures=figures)


# How rows are shared out.


def _shared_out(
    experiment: LearningDescription, sites: _Sites, left: NDArray[np.bool_]
) -> tuple[Population, NDArray[np.int64]]:
    """Share out the rows of a table as a run does, without their inputs; return the table's row of each, too."""
    from steelyard.data.columns import table_dataset
    from steelyard.data.partition import share_out
    from steelyard.data.scaling import load

    data, table = sites.data, sites.table
    roles = [*filter(None, (data.labels, data.event, data.owner, data.held_out)), *data.further_labels]
    # The one input is the row's number: so it is known afterwards which rows they are.
    frame = table.frame[roles].assign(**{_ROW: np.where(left, np.nan, np.arange(len(left)))})
    plain_fields = {"categories": None, "levels": {}, "ignore": (), "indicators": (), "marks": {}}
    reading = {**plain_fields, "columns": {}, "missing": "drop", "duplicates": "keep", "unlabelled": "refuse"}
    dataset = load(data, table_dataset(replace(table, frame=frame), data.model_copy(update=reading)))
    assert dataset.raw is not None
    row_of = dataset.raw.numbers[:, 0].astype(np.int64)
    return share_out(replace(dataset, raw=None), experiment.partition, experiment.seed), row_of


def _of_parts(
    experiment: LearningDescription,
    population: Population,
    row_of: NDArray[np.int64],
    marks: NDArray[np.uint64],
    chance: float,
) -> list[Finding]:
    """Return who cannot train, and rows in train and test; `row_of`: the table's row of each that was shared out."""
    import pandas

    findings = _of_population(experiment, population)
    is_trained, is_tested = np.zeros((2, len(row_of)), dtype=np.bool_)
    for client in population.clients:
        is_trained[client.train], is_tested[client.test] = True, True
    is_tested[np.concatenate([population.server, population.report])] = True
    trained, tested = np.flatnonzero(is_trained), np.flatnonzero(is_tested & ~is_trained)
    both = pandas.Series(marks[row_of[tested]]).isin(marks[row_of[trained]]).to_numpy()
    if _not_by_chance(both, chance):
        shown = np.zeros(len(marks), dtype=np.bool_)
        shown[row_of[tested[both]]] = True
        sentence = f"{int(both.sum()):,} of {len(tested):,} test rows are rows that are trained on too"
        finding = _at_row("rows-in-train-and-test", sentence, shown, "", "data.duplicates")
        # A row or two of many change no verdict, and large registers hold them.
        few = both.sum() < FEW_SHARED * len(tested)
        findings.append(finding.model_copy(update={"level": "warning"}) if few else finding)
    return findings


_ROW = "(row)"


def _of_population(experiment: LearningDescription, population: Population) -> list[Finding]:
    """Return who cannot train, or takes no part."""
    findings = _left_out(experiment, population)
    survival = population.dataset.task == "survival"
    if survival and experiment.training.batch_size == 1:
        sentence = "Cox's loss holds the rows of a step against each other, and a step has one row: nothing is learnt"
        findings.append(found("cannot-train", sentence, mend="training.batch_size"))
    for client in population.clients:
        labels = population.train_labels(client)
        why = "no row to train on" if not len(labels) else ""
        if survival and len(labels) and not bool((labels > 0).any()):
            why = f"no event in {len(labels):,} rows to train on: Cox's loss learns nothing"
        if why:
            sentence = f"the site '{client.client}' has {why}"
            findings.append(found("cannot-train", sentence, site=client.client, mend="partition.minimum"))
    return findings


def _left_out(experiment: LearningDescription, population: Population) -> list[Finding]:
    """Return owners that have too few rows to be a client."""
    owners, partition = population.dataset.owners, experiment.partition
    if owners is None or not partition.needs_owners or partition.client_count is not None:
        return []
    people, counts = np.unique(owners, return_counts=True)
    rows = dict(zip(people.tolist(), counts.tolist(), strict=True))
    few = {name: count for name, count in rows.items() if name not in population.by_name}
    if not few:
        return []
    asked = "minimum" in partition.model_fields_set or len(people) > FEW_SITES
    shown = first_names([f"'{name}' ({counted(count, 'row')})" for name, count in few.items()])
    sentence = (
        f"{len(few):,} of {len(people):,} sites have fewer than {partition.minimum} rows and take no part: {shown}"
    )
    figures = {"sites": float(len(few)), "of": float(len(people))}
    name = "left-out" if asked else "cannot-train"
    return [
        found(name, sentence, site=next(iter(few)) if len(few) == 1 else "", mend="partition.minimum", figures=figures)
    ]
