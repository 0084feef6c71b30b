"""Data that a user already holds, in whatever form: arrays, a frame, or a data set of another library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from steelyard.base.errors import UserError, brief, expect, listed, nearest, texts_of
from steelyard.base.settings import validated
from steelyard.data import memory
from steelyard.data.dataset import Dataset
from steelyard.data.protocols import Columns, from_columns, from_items, from_torchvision, is_columns, is_frame
from steelyard.data.settings import DataSettings
from steelyard.data.sheets import Table, tidy
from steelyard.data.table_columns import class_note, parse_numbers
from steelyard.data.tables import table_dataset


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
    target, notes = _target(found.labels if labels is None else labels, task, name)
    people = found.owners if owners is None else owners
    options: dict[str, Any] = {"held_out": held_out, "marks": marks, "classes": classes, "name": name, "tokens": tokens}
    return replace(memory.in_memory(found.features, target, people, **options), notes=notes)


def _check_options(
    name: object, label: object, owner: object, marks: object, classes: object, task: object, ignore: object
) -> None:
    expect("in_memory: name", name, str, "text")
    for option, value in (("label", label), ("owner", owner)):
        expect(f"in_memory: {option}", value, (str, type(None)), "the name of a column")
    expect("in_memory: marks", marks, (Mapping, type(None)), "a mapping of names to values, one for each row")
    expect("in_memory: classes", classes, (int, type(None)), "a whole number of classes")
    if classes is not None and not 1 <= cast("int", classes) <= memory.MOST_CLASSES:
        raise UserError(f"in_memory: classes: got {brief(classes)}; allowed: 1 to {memory.MOST_CLASSES}")
    if not isinstance(task, str | None) or task not in ("classes", "regression", None):
        raise UserError(f"in_memory: task: got {brief(task)}; allowed: classes, regression, or None")
    texts_of(ignore, "in_memory: ignore", 'a list of columns, such as ["id"]')


def _target(labels: Any, task: str | None, name: str) -> tuple[Any, tuple[str, ...]]:
    """Return labels as numbers: words are numbered in ascending order, and a note says so."""
    if isinstance(labels, torch.Tensor):
        return labels.float() if task == "regression" else labels, ()
    try:
        values: NDArray[Any] = np.asarray(labels)
    except ValueError:
        raise UserError(f"{name}: labels have different lengths; expected one label per row") from None
    if values.dtype.kind in "USO" and all(isinstance(value, str) for value in values.reshape(-1).tolist()):
        levels, numbers = np.unique(values.astype(np.str_), return_inverse=True)
        return numbers.reshape(-1), (class_note(f"{name}: classes", levels.tolist()),)
    return values.astype(np.float32) if task == "regression" and values.dtype.kind in "biu" else values, ()


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
        values = memory.one_axis(name, role, given)
        if values.shape != (len(frame),):
            raise UserError(
                f"{name}: {role} has shape {values.shape}; expected one value for each of the {len(frame)} rows"
            )
        named[role] = f"(given {role})"
        frame = frame.assign(**{named[role]: values})
    if "labels" not in named:
        raise UserError(f"{name}: no label is named; expected label=, one of the columns {listed(columns)}")
    cells = tidy(frame, name, named.get("owner"))
    wanted = {"source": "csv", "path": Path(name), **fields, **named}
    if fields["task"] is None and fields["classes"] is None:
        numbers = parse_numbers(cells[named["labels"]])
        fractions = np.isfinite(numbers).all() and bool((numbers != np.floor(numbers)).any())
        wanted["task"] = "regression" if fractions else None
    given = {key: value for key, value in wanted.items() if value is not None}
    settings = validated(DataSettings, {"owner": None, **given}, name)
    return table_dataset(Table(Path(name), cells), settings)


def no_file(settings: DataSettings) -> Dataset:
    """Say how a data set of source "memory" is given, since there is no file to read."""
    raise UserError(
        "data.source: got 'memory', which has no file; allowed: a data set handed over in Python, "
        "experiment.run(dataset=steelyard.in_memory(...))"
    )
