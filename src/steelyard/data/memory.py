"""Data that a user already holds, in whatever form: arrays, a frame, or a data set of another library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from steelyard.base.errors import UserError, brief, expect, listed, nearest, texts_of
from steelyard.base.settings import validated
from steelyard.data import dataset
from steelyard.data.cells import MOST_CLASSES, numbered, numbering, parse_numbers
from steelyard.data.columns import table_dataset
from steelyard.data.dataset import Dataset
from steelyard.data.sources.csv import Csv
from steelyard.data.sources.npz import channels_first
from steelyard.data.tables import Table, tidy

if TYPE_CHECKING:
    import pandas


def in_memory(
    features: Any,
    labels: torch.Tensor | ArrayLike | None = None,
    owners: Sequence[Any] | NDArray[Any] | None = None,
    *,
    label: str | None = None,
    owner: str | None = None,
    held_out: str | ArrayLike | None = None,
    marks: Mapping[str, Any] | None = None,
    classes: int | None = None,
    name: str = "memory",
    task: Literal["classes", "regression"] | None = None,
    normalise: Literal["unit", "standard", "client"] = "client",
    categories: Sequence[str] | None = None,
    ignore: Sequence[str] = (),
    missing: Literal["mean", "zero", "drop", "refuse"] = "mean",
    tokens: bool = False,
) -> Dataset:
    """Build a data set from what you hold; use it for any data that Steelyard has no reader for.

    `features` may be

    - tensors or arrays, with `labels` and, if known, `owners`, one for each row;
    - a pandas (or polars) frame, `label` and `owner` naming its columns; all other columns are inputs, but for those in
      `ignore`. `categories`, `missing`, `normalise`, and columns named by `held_out` and `marks`, mean what they mean
      in a `[data]` section of source csv. A label with fractions is a regression target;
    - a torch Dataset whose items are (sample, label) or (sample, label, owner), or mappings; images may be PIL's;
    - a torchvision data set; without a transform its `data` and `targets` are taken as they are;
    - one split of a Hugging Face data set, `label` and `owner` naming its columns.

    Whole-number labels are classes 0, 1, 2, ... (`classes` of them, default the largest plus one); floating-point
    labels are a regression target. Labels [rows, labels] of 0 and 1 are several for each row, [rows, height, width] are
    masks: a class for each pixel. uint8 features are pixels and are divided by 255 when used; all others become
    float32, or int64 with `tokens`, for networks with an embedding. `owners` names each row's person, `held_out` marks
    the rows of a test part, `marks` are further 0/1 attributes of the rows such as "sharp".

        >>> steelyard.in_memory(numpy.zeros((4, 3)), [0, 1, 0, 1], ["ann", "ann", "bob", "bob"])  # a row each
        Dataset('memory': 4 samples of 3, 2 classes, 2 owners)

    Raises:
        UserError: rows and labels differ in number, numbers are not finite, no column is named, or a kind
            of data is not known.
    """
    expect("in_memory: tokens", tokens, bool, "true or false")
    if hasattr(features, "toarray"):
        raise UserError(f"{name}: features is a sparse matrix; expected an array: features.toarray()")
    _check_options(name, label, owner, marks, classes, task, ignore)
    found: Columns | None = None
    frame: Any = None
    if is_columns(features):
        found = from_columns(features, label, owner, name)
        frame, label = found.frame, found.label
    elif is_frame(features):
        frame = features if hasattr(features, "iloc") else features.to_pandas()
    if frame is not None:
        roles = {
            "labels": labels if label is None else label,
            "owner": owners if owner is None else owner,
            "held_out": held_out,
        }
        fields = {"categories": categories, "ignore": tuple(ignore), "missing": missing, "normalise": normalise}
        return _from_frame(frame, roles, {**fields, "task": task, "classes": classes, "marks": dict(marks or {})}, name)
    if found is None and labels is not None:
        found = Columns(features, labels)
    found = found or from_torchvision(features) or from_items(features, label, owner, name)
    if isinstance(held_out, str):
        raise UserError(
            f"{name}: held_out is the word '{held_out}', and this is no frame; expected a value for each row"
        )
    target, names = _target(found.labels if labels is None else labels, task, name)
    people = found.owners if owners is None else owners
    options: dict[str, Any] = {"held_out": held_out, "marks": marks, "classes": classes, "name": name, "tokens": tokens}
    made = dataset.of_arrays(found.features, target, people, **options)
    if not names:
        return made
    described = made.described
    named = [*names, *described.target.names[len(names) :]]
    prepared = described.model_copy(update={"target": described.target.model_copy(update={"names": named})})
    return replace(made, notes=tuple(numbering(f"{name}: classes", names)), preparation=prepared)


def _check_options(
    name: object, label: object, owner: object, marks: object, classes: object, task: object, ignore: object
) -> None:
    expect("in_memory: name", name, str, "text")
    for option, value in (("label", label), ("owner", owner)):
        expect(f"in_memory: {option}", value, (str, type(None)), "the name of a column")
    expect("in_memory: marks", marks, (Mapping, type(None)), "a mapping of names to values, one for each row")
    expect("in_memory: classes", classes, (int, type(None)), "a whole number of classes")
    if classes is not None and not 1 <= cast("int", classes) <= MOST_CLASSES:
        raise UserError(f"in_memory: classes: got {brief(classes)}; allowed: 1 to {MOST_CLASSES}")
    if not isinstance(task, str | None) or task not in ("classes", "regression", None):
        raise UserError(f"in_memory: task: got {brief(task)}; allowed: classes, regression, or None")
    texts_of(ignore, "in_memory: ignore", 'a list of columns, such as ["id"]')


def _target(labels: Any, task: str | None, name: str) -> tuple[Any, list[str]]:
    """Return labels as numbers: words are numbered in ascending order, and their names."""
    if isinstance(labels, torch.Tensor):
        return labels.float() if task == "regression" else labels, []
    try:
        values: NDArray[Any] = np.asarray(labels)
    except ValueError:
        raise UserError(f"{name}: labels have different lengths; expected one label per row") from None
    if values.dtype.kind in "USO" and all(isinstance(value, str) for value in values.reshape(-1).tolist()):
        return numbered(values.astype(np.str_).ravel().tolist())
    return values.astype(np.float32) if task == "regression" and values.dtype.kind in "biu" else values, []


def _from_frame(frame: Any, roles: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> Dataset:
    """Read a frame as source csv reads a file; a role is the name of a column, or one value for each row."""
    frame = frame.rename(columns=lambda column: str(column).strip())
    columns = [str(column) for column in frame.columns]
    named: dict[str, str] = {}
    for role, given in roles.items():
        if given is None:
            continue
        if isinstance(given, str):
            if given not in columns:
                raise UserError(
                    f"{name}: found no column '{given}' for {role}{nearest(given, columns)}; allowed: {listed(columns)}"
                )
            named[role] = given
            continue
        values = dataset.one_axis(name, role, given)
        if values.shape != (len(frame),):
            raise UserError(
                f"{name}: {role} has shape {values.shape}; expected one value for each of the {len(frame)} rows"
            )
        named[role] = f"(given {role})"
        frame = frame.assign(**{named[role]: values})
    if "labels" not in named:
        raise UserError(f"{name}: no label is named; expected label=, one of the columns {listed(columns)}")
    cells = tidy(frame, name, named.get("owner"))
    wanted = {"path": Path(name), **fields, **named}
    if fields["task"] is None and fields["classes"] is None:
        numbers = parse_numbers(cells[named["labels"]])
        fractions = np.isfinite(numbers).all() and bool((numbers != np.floor(numbers)).any())
        wanted["task"] = "regression" if fractions else None
    given = {key: value for key, value in wanted.items() if value is not None}
    settings = validated(Csv, {"owner": None, **given}, name)
    return table_dataset(Table(Path(name), cells), settings)


def as_table(dataset: Dataset) -> tuple[Table, Csv] | None:
    """Return rows at hand as a table, so that they are looked at as tables are; None where a row has no columns."""
    if len(dataset.shape) != 1 or dataset.tokens:
        return None
    # For speed of start: arrays need no pandas.
    import pandas

    raw, described, labels = dataset.raw, dataset.described, dataset.labels.numpy()
    columns: dict[str, NDArray[Any]] = {}
    if raw is None:
        columns = {f"column {place}": values for place, values in enumerate(dataset.features.numpy().T, 1)}
    else:
        columns = dict(zip(raw.names, raw.numbers.T, strict=True))
        begin = 0
        for column in described.columns:
            if column.kind == "category":
                flags = raw.flags[:, begin : begin + len(column.levels)]
                levels = np.array([*column.levels, None], dtype=object)
                columns[column.name] = levels[np.where(flags.any(axis=1), flags.argmax(axis=1), -1)]
                begin += len(column.levels)
    categories = [name for name, values in columns.items() if values.dtype == object]
    target = described.target
    roles: dict[str, NDArray[Any]] = {target.label or "label": labels}
    fields: dict[str, Any] = {"labels": target.label or "label"}
    if dataset.kind == "classes":
        roles[fields["labels"]] = np.array(target.names, dtype=object)[labels]
    elif dataset.kind == "survival":
        fields["event"] = target.event or "event"
        roles = {fields["labels"]: np.abs(labels), fields["event"]: labels > 0}
    elif dataset.kind == "multi-label":
        fields |= {"labels": target.names[0], "further_labels": target.names[1:]}
        roles = dict(zip(target.names, labels.T, strict=True))
    if dataset.owners is not None:
        fields["owner"] = described.owner or "owner"
        roles[fields["owner"]] = dataset.owners.astype(object)
    frame = pandas.DataFrame({**columns, **roles}, copy=False)
    given = {"path": Path(dataset.name), "owner": None, "task": dataset.kind, "categories": categories, **fields}
    return Table(Path(dataset.name), frame), validated(Csv, given, dataset.name)


# Data sets of other libraries, recognised by what they can do: no such library is imported here.


INPUTS = ("image", "img", "images", "pixel_values", "features", "x", "input", "inputs")
"""Names under which data sets keep the sample, in the order in which they are looked for."""
LABELS = ("label", "labels", "target", "targets", "y", "class", "fine_label")


@dataclass(frozen=True, eq=False)
class Columns:
    """What a foreign data set holds, one entry per row; `frame` and `label` instead where it is a table."""

    features: Any
    labels: Any
    owners: Any = None
    frame: pandas.DataFrame | None = None
    label: str | None = None


def is_frame(data: Any) -> bool:
    """Whether this is a pandas frame, or another that turns into one (polars, pyarrow)."""
    return (hasattr(data, "iloc") and hasattr(data, "columns")) or callable(getattr(data, "to_pandas", None))


def is_columns(data: Any) -> bool:
    """Whether this is a data set of named columns as Hugging Face's are."""
    return hasattr(data, "column_names") and callable(getattr(data, "with_format", None))


def from_columns(data: Any, label: str | None, owner: str | None, name: str) -> Columns:
    """Return the columns of a Hugging Face data set: a column of images or vectors, or a table of single values."""
    names: Any = data.column_names
    if isinstance(names, Mapping):
        raise UserError(
            f"{name}: got a data set of several parts ({listed(map(str, names))}); expected one of them, such as "
            f"data['{next(iter(names), 'train')}']"
        )
    plain = data.with_format(None)
    known = [str(column) for column in names]
    chosen = _choose(label, LABELS, known, "label", name)
    people = None if owner is None else list(plain[_choose(owner, (), known, "owner", name)])
    inputs = [column for column in known if column not in (chosen, owner)]
    sample = next((column for column in INPUTS if column in inputs), inputs[0] if len(inputs) == 1 else None)
    if sample is not None and _is_sample(plain[0][sample]):
        return Columns(stacked(list(plain[sample]), name), list(plain[chosen]), people)
    # For speed of start: arrays need no pandas.
    import pandas

    frame = pandas.DataFrame({column: list(plain[column]) for column in known})
    return Columns(None, None, frame=frame, label=chosen)


def from_torchvision(data: Any) -> Columns | None:
    """Return `data` and `targets` of a torchvision data set that has no transform; None for anything else."""
    features, labels = getattr(data, "data", None), getattr(data, "targets", None)
    transformed = any(getattr(data, part, None) is not None for part in ("transform", "target_transform", "transforms"))
    if features is None or labels is None or transformed or not hasattr(features, "shape"):
        return None
    return Columns(torch.from_numpy(channels_first(np.asarray(features)).copy()), labels)


def from_items(data: Any, label: str | None, owner: str | None, name: str) -> Columns:
    """Go through the items of a torch Dataset: (sample, label), (sample, label, owner), or mappings with such keys."""
    tensors: Any = getattr(data, "tensors", None)
    if isinstance(tensors, tuple) and len(tensors) in (2, 3):
        return Columns(tensors[0], tensors[1], np.asarray(tensors[2]) if len(tensors) == 3 else None)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or isinstance(data, str | bytes | Mapping):
        raise UserError(
            f"{name}: got {type(data).__name__} and no labels; expected arrays with labels, a frame with label=, or a "
            "data set with a length and items of (sample, label)"
        )
    rows: list[Any] = []
    try:
        rows.extend(data[row] for row in range(len(data)))
    except Exception as problem:
        # Whatever it raises, it is the user's own: one that holds fewer items than its length among them.
        why = f"{type(problem).__name__}: {problem}"
        raise UserError(f"{name}: item {len(rows)} cannot be read ({why}); expected items up to its length") from None
    if not rows:
        raise UserError(f"{name}: got no rows; expected at least one")
    if isinstance(rows[0], Mapping):
        known = [str(key) for key in rows[0]]
        target = _choose(label, LABELS, known, "label", name)
        inputs = [key for key in known if key not in (target, owner)]
        sample = _choose(inputs[0] if len(inputs) == 1 else None, INPUTS, inputs, "sample", name)
        people = None if owner is None else [row[_choose(owner, (), known, "owner", name)] for row in rows]
        parts = ([row[sample] for row in rows], [row[target] for row in rows], people)
    else:
        width = len(rows[0]) if isinstance(rows[0], Sequence) and not isinstance(rows[0], str) else 0
        for number, row in enumerate(rows):
            if width not in (2, 3) or not isinstance(row, Sequence) or len(row) != width:
                raise UserError(
                    f"{name}: item {number} is {_kind_of(row)}; expected (sample, label) or (sample, label, owner)"
                )
        columns = [list(column) for column in zip(*rows, strict=True)]
        parts = (columns[0], columns[1], columns[2] if width == 3 else None)
    features, labels, owners = parts
    return Columns(stacked(features, name), _scalars(labels), None if owners is None else _scalars(owners))


def stacked(samples: Sequence[Any], name: str) -> torch.Tensor:
    """Return samples of one shape as one tensor; pictures become bytes, channels first, grey only if all are."""
    if all(_is_picture(sample) for sample in samples):
        grey = all(sample.mode in ("1", "L", "LA") for sample in samples)
        samples = [sample.convert("L" if grey else "RGB") for sample in samples]
    arrays = [sample.detach().cpu().numpy() if isinstance(sample, torch.Tensor) else sample for sample in samples]
    try:
        values = [np.atleast_1d(np.asarray(array)) for array in arrays]
    except ValueError:
        raise UserError(f"{name}: a sample has rows of different lengths; expected one shape for all") from None
    for number, value in enumerate(values):
        if value.dtype.kind not in "biuf":
            raise UserError(f"{name}: sample {number} is {_kind_of(samples[number])}; expected numbers or a picture")
        if value.shape != values[0].shape:
            raise UserError(
                f"{name}: sample {number} has shape {value.shape}, sample 0 {values[0].shape}; expected one shape for "
                "all, as a transform that resizes gives"
            )
    together = np.stack(values)
    if together.dtype == np.uint8 or together.ndim == 4:
        together = channels_first(together) if together.ndim > 2 else together
    return torch.from_numpy(np.ascontiguousarray(together))


def _choose(given: str | None, usual: Sequence[str], known: Sequence[str], role: str, name: str) -> str:
    if given is not None:
        if given not in known:
            raise UserError(f"{name}: found no '{given}' for {role}{nearest(given, known)}; allowed: {listed(known)}")
        return given
    found = next((column for column in usual if column in known), None)
    if found is None:
        hint = f"{role}=, one of" if role != "sample" else "one of the names " + listed(usual) + " among"
        raise UserError(f"{name}: cannot tell the {role} among {listed(known)}; expected {hint} these")
    return found


def _is_picture(value: Any) -> bool:
    return callable(getattr(value, "convert", None)) and hasattr(value, "mode") and hasattr(value, "size")


def _is_sample(value: Any) -> bool:
    """Whether a cell holds a whole sample: a picture or several numbers."""
    several = isinstance(value, torch.Tensor | np.ndarray | list | tuple)
    return _is_picture(value) or (several and np.ndim(value) > 0)


def _scalars(values: Sequence[Any]) -> NDArray[Any] | list[Any]:
    return [value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value for value in values]


def _kind_of(value: Any) -> str:
    length = f" of {len(value)}" if isinstance(value, Sequence) and not isinstance(value, str) else ""
    return f"{type(value).__name__}{length}"
