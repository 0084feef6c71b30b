"""Tables to learn from: a row per sample, a column to predict, one that says whose row it is, and inputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError, first_names, listed, nearest
from steelyard.data.cells import (
    LARGEST,
    MOST_SHOWN,
    in_order,
    marked,
    numbered,
    numbering,
    parse_numbers,
    plain,
)
from steelyard.data.dataset import Dataset, RawColumns, of_arrays, owner_names
from steelyard.data.mending import BEYOND, left_out
from steelyard.data.preparation import Column
from steelyard.data.sources.source import COMPLETE
from steelyard.data.tables import Table

if TYPE_CHECKING:
    from steelyard.data.sources.csv import Csv

_TIME_ABOVE = "expected a time above 0; data.unlabelled = 'drop' leaves such rows out"
_EVENT_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_TEST_WORDS = {"true": True, "1": True, "test": True, "false": False, "0": False, "train": False}


def table_dataset(table: Table, settings: Csv) -> Dataset:
    """Return a frame as a data set; use it for frames that were read from a file or handed over in Python.

    Inputs are first the columns of numbers, in the file's order, then a 0/1 column for each level of each category,
    then the indicators of missing cells.
    """
    inputs = input_names(table, settings)
    columns = {name: input_column(table, name, settings) for name in inputs}
    empty = np.column_stack([column.empty for column in columns.values()])
    kept, notes = _kept_rows(table, inputs, empty, settings)
    left, said = left_out(table, settings, inputs)
    kept, notes = kept[~left[kept]], [*notes, *said]
    notes += survival_note(table, settings.labels, inputs) if settings.event is None else []
    labels, found, names = _labels(table, settings, kept)
    owners = None if settings.owner is None else owners_of(table, settings.owner)[kept]
    test = None if settings.held_out is None else _held_out(table, settings.held_out, settings.held_out_is, kept)
    marks = {COMPLETE: 1.0 - empty.mean(axis=1)}
    marks |= {mark: _mark(table, column) for mark, column in settings.marks.items()}
    dataset = of_arrays(
        _raw(columns, settings, kept),
        labels,
        owners,
        held_out=test,
        marks={name: values[kept] for name, values in marks.items()},
        classes=settings.class_count,
        name=table.path.name,
    )
    task = "survival" if settings.task == "survival" else dataset.task
    dataset = replace(dataset, notes=(*table.notes, *notes, *found), task=task)
    described = settings.preparation(
        [column.described for column in columns.values()],
        dataset.shape,
        dataset.kind,
        names or [str(number) for number in range(dataset.classes)],
        known=[name for name in table.names if name not in columns],
    )
    return replace(dataset, preparation=described)


def by_name(dataset: Dataset) -> Dataset:
    """Return a table with its inputs in the order of their names, whatever order its file has them in.

    Use it where files of several owners never meet: all of them train one model. It is not scaled yet.
    """
    raw, described = dataset.raw, dataset.described
    if raw is None:
        return dataset
    sizes = [len(column.levels) for column in described.columns if column.kind == "category"]
    *blocks, rest = np.split(raw.flags, np.cumsum(sizes), axis=1)
    worded = [column.name for column in described.columns if column.kind == "category"]
    columns = sorted(described.columns, key=lambda column: column.name)
    names = tuple(column.name for column in columns if column.kind == "number")
    flags = [blocks[worded.index(column.name)] for column in columns if column.kind == "category"]
    ordered = replace(
        raw,
        numbers=raw.numbers[:, [raw.names.index(name) for name in names]],
        flags=np.concatenate([*flags, rest], axis=1),
        names=names,
    )
    return replace(dataset, raw=ordered, preparation=described.model_copy(update={"columns": columns}))


def input_names(table: Table, settings: Csv) -> list[str]:
    """Return the columns that are inputs; a name that is no column, or has two roles, is refused."""
    names = [str(name) for name in table.frame.columns]
    further = {f"further_labels.{place}": name for place, name in enumerate(settings.further_labels)}
    single: dict[str, str | None] = {
        role: getattr(settings, role) for role in ("labels", "event", "owner", "held_out")
    } | further
    several: dict[str, Sequence[str]] = {
        "categories": settings.categories or (),
        "ignore": settings.ignore,
        "indicators": settings.indicators,
        "levels": tuple(settings.levels),
        **{f"marks.{mark}": (column.removeprefix("not "),) for mark, column in settings.marks.items()},
    }
    roles: dict[str, str] = {}
    for field, named in {**{field: (name,) for field, name in single.items() if name}, **several}.items():
        for name in named:
            if name not in names:
                raise UserError(
                    f"data.{field}: found no column '{name}' in {table.path}{nearest(name, names)}; "
                    f"allowed: {first_names(names, MOST_SHOWN)}"
                )
            if field in single:
                if name in roles:
                    raise UserError(
                        f"data.{field}: got '{name}', which is data.{roles[name]} too; allowed: another column"
                    )
                roles[name] = field
            elif field in ("categories", "indicators", "levels") and (name in roles or name in settings.ignore):
                used = f"data.{roles.get(name, 'ignore')}"
                raise UserError(f"data.{field}: got '{name}', which is {used} and no input; allowed: input columns")
    # Whether a label is beyond its limit is known no sooner than the label.
    no_inputs = {*roles, *settings.ignore, BEYOND.format(settings.labels)}
    inputs = [name for name in names if name not in no_inputs]
    if not inputs:
        raise UserError(
            f"{table.path}: no column is left as an input; expected at least one beside label, owner and ignore"
        )
    return inputs


def _kept_rows(
    table: Table, inputs: list[str], empty: NDArray[np.bool_], settings: Csv
) -> tuple[NDArray[np.int64], list[str]]:
    """Return the rows to use, by what is to become of empty cells, and what to note about those."""
    rows, total = np.arange(len(empty)), int(empty.sum())
    if not total:
        return rows, []
    note = f"{table.path.name}: {total:,} of {empty.size:,} input cells are empty"
    if settings.missing == "refuse":
        row, column = (int(index) for index in np.argwhere(empty)[0])
        raise UserError(
            f"{table.path}: column '{inputs[column]}' is empty in {table.row(row)}, and data.missing is 'refuse'; "
            "allowed: full rows, or missing = mean, zero or drop"
        )
    if settings.missing != "drop":
        return rows, [f"{note}; numbers are filled with {'their mean' if settings.missing == 'mean' else '0'}"]
    rows = rows[~empty.any(axis=1)]
    if not len(rows):
        raise UserError(
            f"{table.path}: every row has an empty cell, and data.missing is 'drop'; allowed: mean, zero, or "
            "data.ignore for columns that are mostly empty"
        )
    return rows, [f"{note}; {len(empty) - len(rows):,} of {len(empty):,} rows left out"]


def _raw(columns: dict[str, InputColumn], settings: Csv, kept: NDArray[np.int64]) -> RawColumns:
    numbers, flags = side_by_side(columns, settings.indicators)
    filled = "zero" if settings.missing == "zero" else "mean"
    names = tuple(name for name, column in columns.items() if column.numbers is not None)
    return RawColumns(numbers[kept], flags[kept], settings.normalise, filled, names, settings.scales)


def side_by_side(
    columns: Mapping[str, InputColumn], indicators: Iterable[str]
) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Return the numbers of a table's inputs, and its 0/1 columns: of categories, then of cells that are missing."""
    count = len(next(iter(columns.values())).empty)
    numbers = [column.numbers for column in columns.values() if column.numbers is not None]
    flags = [column.levels for column in columns.values() if column.levels is not None]
    flags += [columns[name].empty.astype(np.float32)[:, None] for name in indicators]
    return (
        np.column_stack(numbers) if numbers else np.zeros((count, 0)),
        np.concatenate(flags, axis=1) if flags else np.zeros((count, 0), dtype=np.float32),
    )


def refuse_any(
    table: Table, column: str, rows: NDArray[np.int64] | Sequence[int], wanted: str, field: str = ""
) -> None:
    """Refuse the first of these rows, if there are any: file, column, the field that names it, its cell, the row."""
    if not len(rows):
        return
    row = int(rows[0])
    cell = table.frame[column].iloc[[row]]
    text = "" if cell.isna().any() else str(cell.iloc[0]).strip()
    role = f" (data.{field})" if field else ""
    holds = f"holds {text[:40]!r}" if text else "is empty"
    raise UserError(f"{table.path}: column '{column}'{role} {holds} in {table.row(row)}; {wanted}")


def _labels(table: Table, settings: Csv, kept: NDArray[np.int64]) -> tuple[NDArray[Any], list[str], Sequence[str]]:
    """Return the labels of the kept rows, as numbers of classes or a target, what to note, and names of the classes."""
    if settings.task == "multi-label":
        columns = {"labels": settings.labels}
        columns |= {f"further_labels.{place}": name for place, name in enumerate(settings.further_labels)}
        found = {name: yes_or_no(table, field, name, kept) for field, name in columns.items()}
        counts = ", ".join(f"{name} in {int(has.sum()):,}" for name, has in found.items())
        return np.column_stack(list(found.values())), [f"{table.path.name}: labels of rows: {counts}"], list(found)
    cells: Any = table.frame[settings.labels].iloc[kept]
    refuse = partial(refuse_any, table, settings.labels, field="labels")
    unlabelled = kept[cells.isna().to_numpy()]
    count = f"a label in every row, and {len(unlabelled):,} have none; data.unlabelled = 'drop' leaves them out"
    refuse(unlabelled, f"expected {count}")
    numbers = parse_numbers(cells)
    bad = kept[~(np.abs(numbers) < LARGEST)]
    above = settings.positive_above
    if settings.task != "classes" or above is not None or settings.classes is not None:
        refuse(bad, "expected a number")
        if settings.task == "regression":
            return numbers, [], ()
        if settings.event is not None:
            return *times_of(table, settings.labels, settings.event, kept, numbers), ()
        if above is not None:
            return numbers > above, [], [f"{settings.labels} {sign} {above:g}" for sign in ("<=", ">")]
    if len(bad) and not np.isnan(numbers).any():
        # Numbers throughout, some of them beyond all counting: a slip, not a class of that name.
        refuse(bad, "expected finite numbers")
    if not len(bad) and bool((numbers != np.floor(numbers)).any()):
        refuse(
            kept[numbers != np.floor(numbers)],
            "expected whole numbers or words for classes, data.positive_above, or data.task = 'regression'",
        )
    if settings.classes is not None:
        return numbers.astype(np.int64), [], ()
    if known := [plain(text) for text in settings.agreed.get(settings.labels, ())]:
        codes, texts = _factorized(table, settings.labels, cells)
        found = np.array([known.index(text) if text in known else -1 for text in texts])[codes]
        refuse(kept[found < 0], f"allowed by data.agreed: {listed(known)}")
        return found, [], known
    where = f"{table.path}: column '{settings.labels}' (data.labels)"
    return _class_numbers(cells, where, f"{table.path.name}: classes of '{settings.labels}'", settings.positive)


def times_of(
    table: Table, time: str, event: str, kept: NDArray[np.int64], times: NDArray[np.float64]
) -> tuple[NDArray[np.float64], list[str]]:
    """Return times with a minus where the event had not come until then (`losses.cox`), and how often it came."""
    refuse_any(table, time, kept[~(times > 0)], _TIME_ABOVE, "labels")
    came = yes_or_no(table, "event", event, kept)
    if not came.any():
        raise UserError(f"{table.path}: column '{event}' (data.event) says of no row that the event came")
    note = f"{table.path.name}: the event came in {int(came.sum()):,} of {len(came):,} rows"
    return np.where(came, times, -times), [note]


def yes_or_no(
    table: Table, field: str, column: str, kept: NDArray[np.int64], known: Mapping[str, bool] = _EVENT_WORDS
) -> NDArray[np.bool_]:
    """Return a column of true/false, 1/0 or yes/no (or other words that are `known`) for the kept rows."""
    words = [plain(str(value)).lower() for value in table.frame[column].iloc[kept].tolist()]
    strange = [row for row, word in zip(kept.tolist(), words, strict=True) if word not in known]
    refuse_any(table, column, strange, f"allowed: {listed(known)}", field)
    return np.array([known[word] for word in words])


def _held_out(table: Table, column: str, values: Sequence[str], kept: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of the kept rows are of the test part: by words that say so, or by the values that were named."""
    if not values:
        return yes_or_no(table, "held_out", column, kept, _TEST_WORDS)
    found: Any = table.frame[column].iloc[kept]
    refuse_any(table, column, kept[found.isna().to_numpy()], "expected a value in every row", "held_out")
    cells, named = [plain(str(value)) for value in found.tolist()], list(map(plain, values))
    there = sorted(set(cells))
    missing = [value for value in named if value not in there]
    if missing or len(set(named)) == len(there):
        fault = f"has no '{missing[0]}'" if missing else "has no other value, so that nothing is left to train on"
        allowed = f"allowed: some of {first_names(there, MOST_SHOWN)}"
        raise UserError(f"data.held_out_is: column '{column}' {fault}; {allowed}")
    return np.isin(cells, named)


def _class_numbers(
    cells: Any, where: str, title: str, positive: object
) -> tuple[NDArray[np.int64], list[str], list[str]]:
    """Number the labels that there are in ascending order, numbers before words; of two the positive one is last."""
    # For speed of start: much of the package reads no tables.
    import pandas

    codes, texts = pandas.factorize(cells)
    texts = [plain(str(text)) for text in texts]
    if len(set(texts)) < 2:
        raise UserError(f"{where} holds '{texts[0][:40]}' in every row; expected two classes or more, or data.classes")
    of_text, levels = numbered(texts)
    if positive is not None:
        name = plain(str(positive))
        if name not in levels or len(levels) != 2:
            raise UserError(
                f"data.positive: got '{name}'{nearest(name, levels)}, and {where} holds "
                f"{first_names(levels, MOST_SHOWN)}; allowed: one of two classes"
            )
        if name == levels[0]:
            of_text, levels = 1 - of_text, levels[::-1]
    return of_text[codes], numbering(title, levels), levels


def owners_of(table: Table, name: str) -> NDArray[np.str_]:
    """Return whose row each is, by a column."""
    cells: Any = table.frame[name]
    nameless = cells.isna().to_numpy() | (cells.astype(str).str.strip() == "").to_numpy()
    refuse_any(table, name, np.flatnonzero(nameless), "expected an owner in every row", "owner")
    # For speed of start: much of the package reads no tables.
    import pandas

    codes, found = pandas.factorize(cells)
    values: NDArray[Any] = np.asarray(found)
    if values.dtype.kind == "f" and bool(np.all(values == np.floor(values))):
        values = values.astype(np.int64)
    if values.dtype.kind in "iu":
        return owner_names(values, name)[codes]
    return np.array([str(value).strip() for value in values.tolist()])[codes]


def _mark(table: Table, column: str) -> NDArray[np.float64]:
    name = column.removeprefix("not ")
    values = as_numbers(table, name, guess=False)
    assert values is not None
    return marked(values, name, column, table.path)


# The input columns of a table: numbers with empty cells, and categories as 0/1 columns.


_MOST_LEVELS = 100


@dataclass(frozen=True, eq=False)
class InputColumn:
    """One input: numbers with NaN for empty cells, or 0/1 columns of its levels."""

    described: Column
    empty: NDArray[np.bool_]
    numbers: NDArray[np.float64] | None
    levels: NDArray[np.float32] | None


def input_column(table: Table, name: str, settings: Csv) -> InputColumn:
    """Return one input column, as numbers or as a category; use it for every column that is no label, owner or so."""
    named = settings.is_category(name)
    numbers = None if named else as_numbers(table, name, guess=settings.may_be_text(name))
    if numbers is not None:
        if np.isnan(numbers).all():
            raise UserError(f"{table.path}: column '{name}' is empty in all rows; expected values, or data.ignore")
        return _of_numbers(Column(name=name, kind="number"), numbers)
    return _category(table, name, settings, named)


def column_again(table: Table, column: Column) -> tuple[InputColumn, list[str]]:
    """Return a column of new rows as those were read that were trained on, and the values that were not known then.

    Those count as empty.
    """
    if column.kind == "number":
        numbers = as_numbers(table, column.name, guess=False)
        assert numbers is not None
        return _of_numbers(column, numbers), []
    codes, texts = _factorized(table, column.name, table.frame[column.name])
    return _of_levels(column, codes, texts), [text for text in texts if text and text not in column.levels]


def _of_numbers(column: Column, numbers: NDArray[np.float64]) -> InputColumn:
    return InputColumn(column, np.isnan(numbers), numbers, None)


def _of_levels(column: Column, codes: NDArray[np.int64], texts: Sequence[str]) -> InputColumn:
    index = {level: number for number, level in enumerate(column.levels)}
    # the last entry stands for factorize's -1, an empty cell.
    of_code = np.array([*(index.get(text, -1) for text in texts), -1])
    level = of_code[codes]
    flags = (level[:, None] == np.arange(len(column.levels))).astype(np.float32)
    return InputColumn(column, level < 0, None, flags)


def as_numbers(table: Table, name: str, *, guess: bool) -> NDArray[np.float64] | None:
    """Return a column as numbers, or None for a column of text where that may be one (`guess`)."""
    cells: Any = table.frame[name]
    there: NDArray[np.bool_] = cells.notna().to_numpy()
    numbers = parse_numbers(cells)
    bad = there & ~(np.abs(numbers) < LARGEST)
    if bad.any():
        words = there & np.isnan(numbers)
        if guess and 2 * int(words.sum()) > int(there.sum()):
            return None
        wanted = "a number with a decimal point (or name the column in data.categories or data.ignore)"
        if not words.any():
            wanted = f"finite numbers (or name it in data.columns.{name}.missing)"
        refuse_any(table, name, np.flatnonzero(words if words.any() else bad), f"expected {wanted}")
    return numbers


def _factorized(table: Table, name: str, cells: Any) -> tuple[NDArray[np.int64], list[str]]:
    """Return for each cell the place of its text among those that there are, -1 for an empty one; and these texts."""
    # For speed of start: much of the package reads no tables.
    import pandas

    try:
        codes, found = pandas.factorize(cells)
    except TypeError:
        raise UserError(
            f"{table.path}: column '{name}' holds lists or tables; expected one value in each cell (or name the column "
            "in data.ignore)"
        ) from None
    return codes, [plain(str(value)) for value in found.tolist()]


def _category(table: Table, name: str, settings: Csv, named: bool) -> InputColumn:
    codes, texts = _factorized(table, name, table.frame[name])
    agreed = settings.agreed.get(name, ())
    levels = [plain(text) for text in settings.levels.get(name, agreed)] or sorted(set(texts) - {""}, key=in_order)
    if not named and len(levels) > _MOST_LEVELS:
        raise UserError(
            f"{table.path}: column '{name}' is text with {len(levels)} different values; expected at most "
            f"{_MOST_LEVELS} for a category (or name it in data.ignore or data.categories)"
        )
    if not levels:
        raise UserError(f"{table.path}: column '{name}' is empty in all rows; expected values, or data.ignore")
    strange = [place for place, text in enumerate(texts) if text and text not in levels]
    if strange and not agreed:
        refuse_any(table, name, np.flatnonzero(codes == strange[0]), f"allowed by data.levels: {listed(levels)}")
    return _of_levels(Column(name=name, kind="category", levels=levels), codes, texts)


# The time to an event.


_TIME = re.compile(r"(^|_)(t|time|days|weeks|months|years|duration|survival|follow_?up|os|pfs|dfs|tte)(_|$)")
_EVENT = re.compile(r"(^|_)(e|event|status|deaths?|dead|died|deceased|censor(ed|ing)?|relapsed?|recurrence|vital)(_|$)")


def survival_pair(frame: Any, label: str | None = None) -> tuple[str, str] | None:
    """Return the columns that look like the time to an event and whether it came, one of them the label if named."""
    names = {str(name): re.sub(r"[^a-z]+", "_", str(name).lower()) for name in frame.columns}
    events = [name for name, plain in names.items() if _EVENT.search(plain) and frame[name].nunique() == 2]
    times = [name for name, plain in names.items() if _TIME.search(plain) and name not in events]
    times = [name for name in times if frame[name].nunique() > 2 and bool((parse_numbers(frame[name]) >= 0).any())]
    pairs = [(time, event) for time in times for event in events]
    return next((pair for pair in pairs if label is None or label in pair), None)


def survival_line(time: str, event: str) -> str:
    """Say how data of the time to an event is learnt as such."""
    return (
        f"'{time}' and '{event}' look like the time to an event; data.task = 'survival' with labels = '{time}' and "
        f"event = '{event}' learns both (Cox regression): here, what did not happen until then counts as never"
    )


def survival_note(table: Table, label: str, inputs: Sequence[str]) -> list[str]:
    """Return what to say where the label is one half of a time and an event: it is learnt, but not as such."""
    pair = survival_pair(table.frame, label)
    if pair is None:
        return []
    other = pair[0] if label == pair[1] else pair[1]
    leak = f"; the input '{other}' gives the answer away: name it in data.ignore" if other in inputs else ""
    return [f"{table.path.name}: {survival_line(*pair)}{leak}"]
