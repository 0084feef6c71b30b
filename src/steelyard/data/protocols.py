"""Data sets of other libraries, recognised by what they can do: no such library is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.errors import UserError, listed, nearest
from steelyard.data.npz import channels_first

if TYPE_CHECKING:
    import pandas

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
    try:
        rows = [data[row] for row in range(len(data))]
    except (TypeError, RuntimeError) as problem:
        raise UserError(
            f"{name}: cannot be gone through item by item ({problem}); expected a data set of items"
        ) from None
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
