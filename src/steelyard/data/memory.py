"""Data that a user already holds: tensors or arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from steelyard.base.errors import UserError, brief
from steelyard.data.dataset import Dataset
from steelyard.data.sources import FurtherTask

MOST_CLASSES = 100_000


def in_memory(
    features: torch.Tensor | ArrayLike,
    labels: torch.Tensor | ArrayLike,
    owners: Sequence[Any] | NDArray[Any] | None = None,
    *,
    held_out: ArrayLike | None = None,
    marks: Mapping[str, ArrayLike] | None = None,
    classes: int | None = None,
    name: str = "memory",
    tokens: bool = False,
) -> Dataset:
    """Build a data set from tensors or arrays; use it for any data that Steelyard has no reader for.

    Whole-number labels are classes 0, 1, 2, ... (`classes` of them, default the largest plus one); floating-point
    labels are a regression target. Labels (rows, height, width) are masks, a class for each pixel, and labels (rows,
    labels) of 0 and 1 say which of several a row has. uint8 features are pixels and are divided by 255 when used; all
    others become float32, or int64 with `tokens`. `owners` names each row's person, `held_out` marks the rows of a test
    part, `marks` are further 0/1 attributes of the rows such as "sharp".
    """
    inputs = _features(name, features, tokens)
    targets, count, task = _labels(name, labels, classes, tuple(inputs.shape[-2:]))
    if len(inputs) != len(targets):
        raise UserError(
            f"{name}: got {len(inputs)} rows of features and {len(targets)} labels; expected as many of each"
        )
    if not len(targets):
        raise UserError(f"{name}: got no rows; expected at least one")
    people = None if owners is None else owner_names(one_axis(name, "owners", owners))
    test = None if held_out is None else _numbers(name, "held_out", held_out).astype(np.bool_)
    extra = {mark: _numbers(name, mark, values).astype(np.float64) for mark, values in (marks or {}).items()}
    columns: dict[str, NDArray[Any] | None] = {"owners": people, "held_out": test, **extra}
    for column, values in columns.items():
        if values is not None and values.shape != (len(targets),):
            raise UserError(
                f"{name}: {column} has shape {values.shape}; expected one value for each of the {len(targets)} rows"
            )
    if task is None:
        return Dataset(name, inputs, targets, count, people, test, extra)
    return Dataset(name, inputs, targets, 0, people, test, extra, task=task, targets=count)


def _features(name: str, features: torch.Tensor | ArrayLike, tokens: bool) -> torch.Tensor:
    tensor = features.detach().cpu() if isinstance(features, torch.Tensor) else _tensor(name, "features", features)
    if tensor.ndim < 2:
        raise UserError(f"{name}: features has shape {tuple(tensor.shape)}; expected (rows, ...) with two or more axes")
    if not prod(tensor.shape[1:]):
        raise UserError(f"{name}: features has shape {tuple(tensor.shape)}; expected at least one number per row")
    if tensor.is_complex():
        raise UserError(f"{name}: features is complex numbers; expected real ones")
    if tokens:
        if tensor.is_floating_point() or int(tensor.min()) < 0:
            raise UserError(f"{name}: features are no tokens; expected whole numbers from 0")
        return tensor.to(torch.int64).contiguous()
    if tensor.dtype == torch.uint8:
        return tensor.contiguous()
    tensor = tensor.to(torch.float32).contiguous()
    if not bool(torch.isfinite(tensor).all()):
        raise UserError(f"{name}: features holds nan or infinite values; expected finite numbers")
    return tensor


def _labels(
    name: str, labels: torch.Tensor | ArrayLike, classes: int | None, image: tuple[int, ...]
) -> tuple[torch.Tensor, int, FurtherTask | None]:
    """Return labels, how many classes or labels there are, and the task where they are masks or several labels."""
    tensor = labels.detach().cpu() if isinstance(labels, torch.Tensor) else _tensor(name, "labels", labels)
    if tensor.ndim == 2 and tensor.shape[1] > 1:
        if not bool(((tensor == 0) | (tensor == 1)).all()):
            raise UserError(f"{name}: labels (rows, {tensor.shape[1]}) hold other values than 0 and 1; expected these")
        return tensor.to(torch.float32), tensor.shape[1], "multi-label"
    if tensor.ndim == 3 and len(tensor):
        return *_masks(name, tensor, classes, image), "segmentation"
    if tensor.ndim != 1:
        raise UserError(
            f"{name}: labels has shape {tuple(tensor.shape)}; expected one label per row, several of 0 and 1, or a mask"
        )
    return *_single(name, tensor, classes), None


def _masks(name: str, tensor: torch.Tensor, classes: int | None, image: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """Return masks as bytes (rows, pixels), and the number of classes of a pixel."""
    if tuple(tensor.shape[1:]) != image:
        raise UserError(f"{name}: masks are {tuple(tensor.shape[1:])} and images {image}; expected the same size")
    if tensor.is_floating_point() or tensor.is_complex():
        raise UserError(f"{name}: masks are no whole numbers; expected a class for each pixel")
    least, most = int(tensor.min()), int(tensor.max())
    count = most + 1 if classes is None else classes
    if least < 0 or most >= count or not 2 <= count <= 256:
        raise UserError(
            f"{name}: masks run from {least} to {most}; expected classes 0 (background) to "
            f"{255 if classes is None else count - 1}, two classes at least"
        )
    return tensor.to(torch.uint8).flatten(1), count


def _single(name: str, tensor: torch.Tensor, classes: int | None) -> tuple[torch.Tensor, int]:
    if tensor.is_floating_point():
        if classes:
            raise UserError(f"{name}: labels are floating-point numbers with classes={classes}; expected whole numbers")
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{name}: labels holds nan or infinite values; expected finite numbers")
        return tensor.to(torch.float32), 0
    if tensor.is_complex():
        raise UserError(f"{name}: labels is complex numbers; expected whole numbers, or real ones for a regression")
    tensor = tensor.to(torch.int64)
    if not len(tensor):
        return tensor, classes or 0
    least, most = int(tensor.min()), int(tensor.max())
    count = most + 1 if classes is None else classes
    if count > MOST_CLASSES:
        raise UserError(
            f"{name}: labels run up to {count - 1}; expected classes 0 to at most {MOST_CLASSES - 1}, "
            "or floating-point numbers for a regression"
        )
    if least < 0 or most >= count:
        hint = ", numbered from 0 (such as 0 and 1 in place of -1 and 1)" if least < 0 else ""
        raise UserError(f"{name}: labels run from {least} to {most}; expected classes 0 to {count - 1}{hint}")
    return tensor, count


def _numbers(name: str, part: str, values: ArrayLike) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError:
        raise UserError(f"{name}: {part} has rows of different lengths; expected one shape for all") from None
    if array.dtype.kind not in "biuf":
        raise UserError(f"{name}: {part} is {_kind(array)}; expected numbers")
    # torch knows neither other byte orders nor extended precision.
    wide = array.dtype.kind == "f" and array.dtype.itemsize > 8
    return array.astype(np.float64) if wide else array.astype(array.dtype.newbyteorder("="), copy=False)


def one_axis(name: str, part: str, values: object) -> NDArray[Any]:
    """Return values as an array of one axis; what has none or more is refused."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError):
        array = np.zeros(())
    if array.ndim != 1:
        found = f"has shape {array.shape}" if array.ndim else f"is {brief(values)}"
        raise UserError(f"{name}: {part} {found}; expected a list or an array with a value for each row")
    return array


def _kind(array: NDArray[Any]) -> str:
    """Say in plain words what an array holds."""
    words = {"U": "text", "S": "text", "c": "complex numbers", "M": "dates", "m": "spans of time", "V": "records"}
    return words.get(array.dtype.kind, "objects")


def _tensor(name: str, part: str, values: ArrayLike) -> torch.Tensor:
    array = _numbers(name, part, values)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return torch.from_numpy(np.array(array, order="C"))


def owner_names(values: NDArray[Any], word: str = "user") -> NDArray[np.str_]:
    """Return a name per row: whole numbers become word-007, zero-padded so that they sort as numbers; words stay.

    A row without a name (empty, NaN or None) is refused: it would join all such rows to one person.
    """
    values = np.asarray(values)
    if values.dtype.kind in "iu":
        if len(values) and int(values.min()) < 0:
            return np.array([f"{word}-{value}" for value in values.tolist()])
        width = max(3, len(str(int(values.max())))) if len(values) else 3
        return np.array([f"{word}-{value:0{width}d}" for value in values.tolist()])
    if values.dtype.kind == "f" and not bool(np.isfinite(values).all()):
        raise UserError(f"{word}: row {_first(~np.isfinite(values))} has no owner (nan); expected one for every row")
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind not in "biufUO":
        raise UserError(f"{word}: owners are {_kind(values)}; expected text or whole numbers")
    missing = [value is None or value != value for value in values.ravel().tolist()]
    names = np.array([str(value) for value in values.ravel().tolist()], dtype=np.str_).reshape(values.shape)
    nameless = np.array(missing, dtype=np.bool_) | (np.char.strip(names).ravel() == "")
    if nameless.any():
        raise UserError(f"{word}: row {_first(nameless)} has no owner; expected one for every row")
    return names


def _first(found: NDArray[np.bool_]) -> int:
    return int(np.flatnonzero(found.ravel())[0]) + 1
