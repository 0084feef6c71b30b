"""A look at somebody's data, tables or images: what an experiment for them is proposed from.

A look at tables finds the label, owners, the kinds of columns and empty cells.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from steelyard.base.errors import UserError, counted, listed, nearest, without_controls
from steelyard.base.settings import validated
from steelyard.data.cells import LARGEST, limit_of, parse_numbers
from steelyard.data.columns import survival_line, survival_pair, table_dataset
from steelyard.data.dataset import Dataset
from steelyard.data.mending import mended
from steelyard.data.profile import counts_rows
from steelyard.data.sources.csv import Csv
from steelyard.data.sources.images import FOLDER, LAYOUT, Folders, Images, Pictures, beside, paired
from steelyard.data.sources.source import BY_FILE, COMPLETE, TaskKind, is_pattern
from steelyard.data.tables import Table, read_tables

MOST_NAMED = 5
LONGEST = 40


@dataclass(frozen=True)
class DataSummary:
    """One data set as it was found; `fields` are those of `[data]` beside its source and path, with their comments."""

    source: str
    rows: int
    shape: tuple[int, ...]
    task: TaskKind
    classes: Mapping[str, int]
    """Rows of each class, in the order of the classes; empty for a regression."""
    owners: Mapping[str, int] | None
    """Rows of each owner."""
    held_out: int
    """Rows of the data's own test part."""
    owners_held_out: bool
    """Whether each owner has rows in it."""
    fields: Mapping[str, tuple[Any, str]]
    account: tuple[str, ...]
    """Lines for people."""
    empty: float = 0.0
    """Share of the input cells that are empty."""
    positive: bool = False
    """Whether a regression's target is above 0 in every row."""
    hints: tuple[str, ...] = field(default=())
    """What the user may want to do next about the data."""


def shown(text: object) -> str:
    """Return a name from somebody's data as a line can show it: no control characters, not too long."""
    plain = without_controls(str(text))
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 3]}..."


def few(names: Sequence[object], most: int = MOST_NAMED) -> str:
    """List some names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(shown(name) for name in names[:most]) + more


def by_size(counts: Mapping[str, int]) -> str:
    """Say how many rows each of some classes or owners has, the biggest first."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return few([f"{shown(name)} {count:,}" for name, count in ordered])


def sizes(counts: Mapping[str, int], word: str) -> str:
    """Say how many owners there are and how large."""
    return f"{word}: {len(counts):,}, of {min(counts.values()):,} to {max(counts.values()):,} rows: {by_size(counts)}"


def _of_table(dataset: Dataset, fields: Mapping[str, tuple[Any, str]]) -> DataSummary:
    """Return what a table that was read whole holds."""
    labels = dataset.labels.numpy()
    tested = np.zeros(len(labels), dtype=np.bool_) if dataset.held_out is None else dataset.held_out
    owners = None if dataset.owners is None else dict(sorted(Counter(dataset.owners.tolist()).items()))
    return DataSummary(
        source="csv",
        rows=len(dataset),
        shape=dataset.shape,
        task=dataset.kind,
        classes={str(number): int((labels == number).sum()) for number in range(dataset.classes)},
        owners=owners,
        held_out=int(tested.sum()),
        owners_held_out=_in_both_parts(dataset.owners, tested),
        fields=fields,
        account=(),
        empty=1.0 - float(dataset.marks[COMPLETE].mean()),
        positive=dataset.kind == "regression" and bool((labels > 0).all()),
    )


LABELS = ("target", "label", "class", "y", "outcome", "diagnosis")
OWNERS = re.compile(
    r"hospital|clinic|site|cent(er|re)|user|client|owner|device|patient|person|writer|bank|store|subject"
)
MOST_CLASSES = 20
"""Whole numbers with more different values than this are a number to predict, not classes."""
_MOST_LEVELS = 100
_MOST_WORDS = 5
_FEW_ROWS = 30
"""An owner with fewer rows has no mean and deviation worth scaling by."""


@dataclass(frozen=True)
class Column:
    """One column that may be an input."""

    name: str
    kind: str
    """number, category, or why it is left out."""
    empty: float
    levels: int
    words: tuple[str, ...] = ()
    """Words among its numbers, taken to mean that nothing was recorded."""
    mixed: bool = False
    """A category half of which looks like numbers: it must be named."""


def look_at_table(paths: Sequence[Path], label: str | None, owner: str | None) -> DataSummary:
    """Look at one table or several; the label is a usual name where none is given, each of several is an owner."""
    named = {option: name for option, name in (("--label", label), ("--owner", owner)) if name}
    table = read_tables(paths, owner or BY_FILE, named)
    if owner is None and table.starts is not None:
        owner = BY_FILE
    elif owner is None and BY_FILE in table.added:
        table = replace(table, frame=table.frame.drop(columns=BY_FILE), added=())
    frame, path = table.frame, table.path
    label = _label(table, label)
    if owner is not None:
        _known(table, table.names, owner, "--owner")
        if owner == label:
            raise UserError(f"--owner: got '{shown(owner)}', which is the label too; allowed: another column")
    part = next((name for name in table.names if name not in (label, owner) and _is_part(frame[name])), None)
    pair = survival_pair(frame, label)
    event = pair[1] if pair is not None and label == pair[0] else None
    columns = [_column(frame[name], name) for name in table.names if name not in (label, event, owner, part)]
    columns = [
        replace(column, kind="gives the answer away") if pair and column.name in pair else column for column in columns
    ]
    afterwards = survival_pair(frame) if pair is None else None
    columns = [
        replace(column, kind="known only afterwards") if afterwards and column.name in afterwards else column
        for column in columns
    ]
    fields: dict[str, tuple[Any, str]] = {"labels": (label, "the column to predict")}
    task, label_line = _task(frame[label], label)
    if event is not None:
        fields["task"] = ("survival", "the time until something happened, or until the patient was last seen")
        fields["event"] = (event, "whether it happened then")
        label_line = f"label '{shown(label)}': the time to an event, which came where '{shown(event)}' says so"
    elif task == "regression":
        fields["task"] = (task, "a number to predict, not a class")
    if owner is not None:
        own = table.added and owner == BY_FILE
        fields["owner"] = (owner, f"{'each file is' if own else 'whose row it is:'} one client{'' if own else ' each'}")
    if part is not None:
        fields["held_out"] = (part, "marks the rows of the test part")
    if not any(column.kind in ("number", "category") for column in columns):
        why = f" (left out: {'; '.join(_why(columns))})" if columns else ""
        raise UserError(f"{path}: has no column that may be an input{why}; expected one of numbers or categories")
    fields |= _column_fields(columns)
    unlabelled = int(frame[label].isna().to_numpy().sum())
    if event is not None:
        unlabelled += int((parse_numbers(frame[label]) <= 0).sum())
    if unlabelled:
        without = "time above 0" if event else "label"
        fields["unlabelled"] = ("drop", f"{counted(unlabelled, 'row')} without a {without}")
    settings = _settings(path, fields, "standard")
    dataset = table_dataset(mended(table, settings.columns, owner), settings)
    account = [*table.notes, f"{path.name}: {len(frame):,} rows, {len(table.names) - len(table.added)} columns"]
    account += [label_line, *_input_lines(columns)]
    summary = _of_table(dataset, fields)
    if summary.owners is not None:
        if len(summary.owners) < 2:
            raise UserError(f"--owner: column '{shown(owner)}' names one owner only; expected two or more")
        account.append(sizes(summary.owners, f"owners, by '{shown(owner)}'"))
    if part is not None:
        account.append(f"test part, by '{shown(part)}': {summary.held_out:,} rows")
    fields["normalise"] = _scaling(summary)
    hints = [*([survival_line(*pair)] if pair and event is None else []), *_hints(columns, frame, owner)]
    return replace(summary, fields=fields, account=tuple(account), hints=tuple(hints))


def _settings(path: Path, fields: dict[str, tuple[Any, str]], normalise: str) -> Csv:
    document = {name: value for name, (value, _) in fields.items()}
    return validated(Csv, {"path": path, "normalise": normalise, **document}, "new")


def _known(table: Table, names: Sequence[str], name: str, option: str) -> None:
    if name not in names:
        raise UserError(
            f"{option}: found no column '{shown(name)}' in {table.path}{nearest(name, names)}; "
            f"allowed: {few(names, 12)}"
        )


def _label(table: Table, label: str | None) -> str:
    names = [name for name in table.names if name not in table.added]  # Which file a row is from is no answer.
    if label is not None:
        _known(table, names, label, "--label")
        return label
    usual = [name for name in names if name.lower() in LABELS]
    pair = survival_pair(table.frame)
    if not usual and pair is not None:
        return pair[0]
    if len(usual) != 1:
        raise UserError(
            f"--label: got nothing, and {table.path} has {len(usual) or 'no'} columns called {listed(LABELS)}; "
            f"allowed: one of {few(names, 12)}"
        )
    return usual[0]


def _is_part(cells: Any) -> bool:
    """Whether a column divides the rows into train and test, in these words."""
    return _says_train_or_test(cells) and bool(cells.notna().all())


def _says_train_or_test(cells: Any) -> bool:
    if cells.dtype.kind in "iuf":
        return False
    return {str(value).strip().lower() for value in cells.dropna().unique()[:4].tolist()} == {"train", "test"}


def _task(cells: Any, name: str) -> tuple[str, str]:
    """Say whether the label is a class or a number, and what to note about it."""
    numbers = parse_numbers(cells)
    there = cells.notna().to_numpy()
    values = numbers[there]
    title = f"label '{shown(name)}'"
    distinct = int(cells.nunique())
    if len(values) and bool(np.isfinite(values).all()):
        fractions = bool((values != np.floor(values)).any())
        if fractions or distinct > MOST_CLASSES:
            spread = f"from {values.min():g} to {values.max():g}, mean {values.mean():g}, deviation {values.std():g}"
            return "regression", f"{title}: a number, {spread}"
    if distinct > max(_MOST_LEVELS, len(cells) // 2) or (distinct > len(cells) // 2 and distinct > MOST_CLASSES):
        raise UserError(
            f"--label: column '{shown(name)}' is text with {distinct:,} different values in {len(cells):,} rows; "
            "expected classes or numbers"
        )
    counts = {str(value): int(count) for value, count in cells.value_counts().items()}
    return "classes", f"{title}: {distinct} classes: {by_size(counts)} rows"


def _column(cells: Any, name: str) -> Column:
    there = cells.notna().to_numpy()
    empty = 1.0 - float(there.mean())
    if not there.any():
        return Column(name, "empty in all rows", empty, 0)
    try:
        levels = int(cells.nunique())
    except TypeError:
        return Column(name, "lists or tables in its cells", empty, 0)
    if levels == 1 and there.all():
        return Column(name, "the same in all rows", empty, levels)
    if _says_train_or_test(cells):
        return Column(name, "train or test, but not for all rows", empty, levels)
    numbers = parse_numbers(cells)
    bad = there & ~(np.abs(numbers) < LARGEST)
    infinite = bad & ~np.isnan(numbers)
    if not bad.any():
        return Column(name, "numbers the rows" if counts_rows(numbers, name) else "number", empty, levels)
    words = sorted({str(cell).strip() for cell in cells[bad].tolist()})
    if infinite.any() and len(words) > _MOST_WORDS:
        return Column(name, "numbers too large to count with", empty, levels)
    if 2 * int(bad.sum()) <= int(there.sum()):
        if len(words) <= _MOST_WORDS and all(isinstance(cell, str) for cell in cells[bad & ~infinite].tolist()):
            return Column(name, "number", empty + float(bad.mean()), levels, words=tuple(words))
        if levels <= _MOST_LEVELS:
            return Column(name, "category", empty, levels, mixed=True)
    if levels > _MOST_LEVELS or (levels > MOST_CLASSES and 2 * levels > int(there.sum())):
        return Column(name, f"text with {levels:,} different values", empty, levels)
    return Column(name, "category", empty, levels)


def _column_fields(columns: Sequence[Column]) -> dict[str, tuple[Any, str]]:
    fields: dict[str, tuple[Any, str]] = {}
    left = [column for column in columns if column.kind not in ("number", "category")]
    if left:
        fields["ignore"] = ([column.name for column in left], "no inputs: " + "; ".join(_why(left)))
    if any(column.mixed for column in columns):
        named = [column.name for column in columns if column.kind == "category"]
        fields["categories"] = (named, "a 0/1 column for each of their values; some hold numbers and words")
    meant: dict[str, dict[str, Any]] = {}
    for column in columns:
        if column.words:
            limits = all(np.isfinite(limit_of(word)) for word in column.words)
            meant[column.name] = {"limits": True} if limits else {"missing": list(column.words)}
    if meant:
        fields["columns"] = (meant, "limits: cells such as <5 are the number in them; missing: not recorded")
    holes = [column for column in columns if column.kind in ("number", "category") and column.empty > 0]
    if holes:
        fields["missing"] = ("mean", "empty cells: the column's mean; or zero, drop, refuse")
        often = [column.name for column in holes if column.empty >= 0.05 and column.kind == "number"]
        if often:
            fields["indicators"] = (often, "one more 0/1 column each: 1 where it is empty")
    return fields


def _why(left: Sequence[Column]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for column in left:
        reasons.setdefault(column.kind, []).append(column.name)
    return [f"{few(names)} ({reason})" for reason, names in reasons.items()]


def _input_lines(columns: Sequence[Column]) -> list[str]:
    inputs = [column for column in columns if column.kind in ("number", "category")]
    categories = [column for column in inputs if column.kind == "category"]
    line = f"inputs: {len(inputs) - len(categories)} of numbers"
    if categories:
        named = few([f"{shown(column.name)} ({column.levels} values)" for column in categories])
        line += f", {len(categories)} of categories: {named}"
    lines = [line]
    holes = sorted((column for column in inputs if column.empty > 0), key=lambda column: -column.empty)
    if holes:
        worst = few([f"{shown(column.name)} {column.empty:.0%}" for column in holes])
        lines.append(f"empty cells: {sum(column.empty for column in inputs) / len(inputs):.1%}, most in {worst}")
    if taken := [f"{shown(column.name)} {few(column.words)}" for column in inputs if column.words]:
        lines.append(f"taken as empty: {'; '.join(taken)}")
    left = [column for column in columns if column.kind not in ("number", "category")]
    return [*lines, f"left out: {'; '.join(_why(left))}"] if left else lines


def _scaling(summary: DataSummary) -> tuple[str, str]:
    if summary.owners is not None and np.median(list(summary.owners.values())) >= _FEW_ROWS:
        return "client", "each owner scales by its own training rows, nothing is shared; or standard: over all"
    if summary.owners is not None:
        return ("standard", "over the training rows of all, as most owners have few; or client: each by its own")
    return "standard", "mean 0, deviation 1 over the training rows of all clients; or client: each by its own"


def _hints(columns: Sequence[Column], frame: Any, owner: str | None) -> list[str]:
    hints: list[str] = []
    coded = [
        column.name
        for column in columns
        if column.kind == "number" and 2 < column.levels <= 8 and _is_coded(parse_numbers(frame[column.name]))
    ]
    if coded:
        hints.append(f"if these few whole numbers are codes, name them in data.categories: {few(coded)}")
    if owner is None:
        likely = [
            column.name
            for column in columns
            if OWNERS.search(column.name.lower()) and 1 < column.levels <= len(frame) // 2
        ]
        if likely:
            hints.append(f"whose row is it? perhaps --owner {shown(likely[0])}")
    return hints


def _is_coded(numbers: Any) -> bool:
    values = numbers[np.isfinite(numbers)]
    return bool((values == np.floor(values)).all() and (values >= 0).all() and (values < 100).all())


# Images.


SAMPLED = 64
"""Images that are opened; the others are only counted."""
LARGEST_SIDE = 64
MOST_IMAGES = 20_000
"""More than this many are not needed for a first run."""


def look_at_images(path: Path, label: str | None, owner: str | None) -> DataSummary:
    """Look at images; without a label masks or the folders are the classes, with one a column of the table beside."""
    pictures = Pictures(path)
    pairs, _ = paired(pictures.names)
    masked = label is None and bool(pairs)
    by_table = label not in (None, FOLDER)
    folders = Folders.of(path, [image for image, _ in pairs] if masked else pictures.names)
    fields: dict[str, tuple[Any, str]] = {}
    if masked:
        fields["task"] = ("segmentation", "a class for each pixel, from a mask of the same name")
    elif by_table:
        fields["labels"] = (label, "")
    elif folders.by_class:
        fields["labels"] = (FOLDER, "the class is the folder that holds the image")
    else:
        table = " (there is a table beside them: name its column with --label)" if beside(path) else ""
        raise UserError(f"--images: '{path}' has no folder for each class{table}; expected {LAYOUT}")
    whose = "whose image it is: one client each" if by_table else "whose image it is: the folder around its own"
    if not by_table and owner not in (None, FOLDER):
        raise UserError(
            f"--owner: got '{shown(owner)}' with images in folders; allowed: folder (as in OWNER/CLASS/IMAGE), or "
            "--label and --owner for columns of a table beside the images"
        )
    if owner is not None or (folders.by_owner and not by_table):
        fields["owner"] = (owner or FOLDER, whose)
    if folders.splits and not by_table:
        fields["held_out"] = (FOLDER, "train/ and test/ are the source's own two parts")
    settings = validated(Images, {"path": path, **{name: value for name, (value, _) in fields.items()}}, "new")
    found = settings.listing(pictures)
    if by_table:
        fields["labels"] = (label, f"the column of {shown(found.table.name)} to predict")
        fields |= {} if found.owners is None else {"owner": (owner or "identity", whose)}
    size, grey, dimensions = _sizes(pictures)
    if masked:
        size = max(16, size // 4 * 4)
    of_network = ", a multiple of 4 for the network" if masked else ""
    fields["size"] = (size, f"pixels{of_network}; images are {dimensions}")
    if grey:
        fields["colours"] = ("grey", "one channel: all images that were opened are grey")
    rows = len(found.images)
    if rows > MOST_IMAGES:
        share = round(MOST_IMAGES / rows, 3)
        fields["share"] = (share, f"of {rows:,} images, for a first run; 1.0 takes all")
    counts = np.bincount(found.labels, minlength=len(found.names)).tolist()
    classes = {name: count for name, count in zip(found.names, counts, strict=False) if count}
    owners, tested = None, np.zeros(rows, np.bool_) if found.held_out is None else found.held_out
    what = f"images{' with masks' if masked else ''}"
    account = [f"{path.name}: {rows:,} {what}, {dimensions}, {'grey' if grey else 'colour'}"]
    by_folder = "" if by_table else " by folder"
    if classes:
        account.append(f"classes{by_folder}: {len(classes)}: {by_size(classes)} images")
    if found.owners is not None:
        owners = dict(sorted(Counter(found.owners.tolist()).items()))
        account.append(sizes(owners, f"owners{by_folder}"))
    if tested.any():
        account.append(f"test part by folder: {int(tested.sum()):,} images")
    return DataSummary(
        source="images",
        rows=rows,
        shape=(1 if grey else 3, size, size),
        task="segmentation" if masked else "classes",
        classes=classes,
        owners=owners,
        held_out=int(tested.sum()),
        owners_held_out=_in_both_parts(found.owners, tested),
        fields=fields,
        account=tuple(account),
    )


def _in_both_parts(owners: Any, tested: Any) -> bool:
    """Whether each owner has rows of both parts."""
    return owners is not None and set(owners[tested].tolist()) == set(owners[~tested].tolist())


def _sizes(pictures: Pictures) -> tuple[int, bool, str]:
    """Open some images: return the side to scale to, whether all are grey, and their sizes in words."""
    picked = [pictures.names[int(index)] for index in np.linspace(0, len(pictures.names) - 1, SAMPLED)]
    kinds = [_kind(pictures, name) for name in dict.fromkeys(picked)]
    sides = [min(width, height) for width, height, _ in kinds]
    several = {(width, height) for width, height, _ in kinds}
    least, most = (f"{w}×{h}" for w, h in (min(several), max(several)))
    size = int(np.clip(np.median(sides), 8, LARGEST_SIDE)) // 4 * 4
    grey = all(mode in ("1", "L", "LA") for _, _, mode in kinds)
    return size, grey, least if len(several) == 1 else f"{least} to {most}"


def _kind(pictures: Pictures, name: str) -> tuple[int, int, str]:
    # For speed of start: few data sets are image files. `read` says what is lacking or broken.
    pictures.read([name], 4)
    from PIL import Image

    path = pictures.path
    if path.is_file():
        with zipfile.ZipFile(path) as archive:
            content = archive.read(name)
    else:
        content = (path / name).read_bytes()
    with Image.open(io.BytesIO(content)) as image:
        return image.width, image.height, image.mode


Form = Literal["csv", "parquet", "images"]
_EXPECTED: dict[Form, str] = {
    "csv": "a table (.csv, .xlsx, .sav, .dta) with names of columns, or a folder of such files",
    "parquet": "a .parquet file",
    "images": "a folder or .zip of images, in a folder for each class",
}


def look(form: Form, paths: Sequence[Path], label: str | None = None, owner: str | None = None) -> DataSummary:
    """Look at data of one form, of several paths if they are tables; use it before an experiment is proposed."""
    for path in paths:
        if not path.exists() and not (form == "csv" and is_pattern(path)):
            raise UserError(f"--{form}: found no '{path}'; expected {_EXPECTED[form]}")
    if paths[0].suffix.lower() in (".json", ".jsonl"):
        raise UserError(f"--{form}: got '{paths[0]}', which is JSON; expected {_EXPECTED[form]}")
    if form == "images":
        return look_at_images(paths[0], label, owner)
    if form == "parquet" and paths[0].suffix.lower() not in (".parquet", ".pq"):
        raise UserError(f"--parquet: got '{paths[0]}'; expected a .parquet file")
    return look_at_table(paths, label, owner)
