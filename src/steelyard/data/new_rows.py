"""New rows as a model takes them, read, filled and scaled as those were that it was trained on.

What is not as it was then is refused, or said by name: columns, categories, numbers out of the range, other sites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from os.path import commonpath
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.errors import UserError, counted, first_names, nearest
from steelyard.base.settings import validated
from steelyard.data.columns import InputColumn, column_again, owners_of, side_by_side
from steelyard.data.dataset import joined
from steelyard.data.mending import mended
from steelyard.data.preparation import Floats, Preparation, Scale
from steelyard.data.scaling import as_numbers, by_channel
from steelyard.data.sources.csv import ColumnSettings
from steelyard.data.sources.images import SUFFIXES, Folders, Pictures
from steelyard.data.sources.leaf import characters, words
from steelyard.data.sources.npz import channels_first
from steelyard.data.sources.source import BY_FILE
from steelyard.data.tables import Table

FEW_ROWS, MANY_TIMES = 10, 3.0
"""Where so many rows or more have so many times the mean and the deviation of training, the unit is asked for."""


@dataclass(frozen=True, eq=False)
class NewRows:
    """Rows as a model takes them; what of them is not as it was in training, and what they were read from."""

    features: torch.Tensor
    notes: tuple[str, ...] = ()
    table: Table | None = None
    """The table that they were read from, its cells as training read them."""
    scales: Mapping[str, Scale] = field(default_factory=dict[str, Scale])
    """table: by the site that rows name, "" for none, what they were scaled by, where each site has its own scale."""
    names: Sequence[str] = ()
    """images: their paths inside the folder or zip."""
    folders: Folders | None = None
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    """The arrays of a file of arrays."""
    labels: Sequence[str] = ()
    """texts: the names of their classes, of files that have them."""


def of_table(table: Table, preparation: Preparation, site: str | None = None) -> NewRows:
    """Return the rows of a table; `site`: scaled as those of this site, which trained.

    Where every site has a scale of its own and none is named, rows go by the site that they name (`site_column`);
    those of a site that did not train, or of none, are scaled by the new rows of it.
    """
    known, owner = preparation.sites, site_column(table, preparation)
    if site is not None and site not in known:
        words = first_names(sorted(known)) if known else "none: the model holds no scale of a single site"
        raise UserError(f"site: got '{site}'{nearest(site, known)}; allowed: {words}")
    by_row = None if site is not None or owner is None else owners_of(table, owner)
    sites = np.full(len(table.frame), site or "") if by_row is None else by_row
    table = mended(table, _as_read(table, preparation, np.unique(sites).tolist(), site), owner)
    notes = [*table.notes, *_check_columns(table, preparation)]
    columns: dict[str, InputColumn] = {}
    for column in preparation.columns:
        columns[column.name], unknown = column_again(table, column)
        if unknown:
            notes.append(
                f"column '{column.name}' holds {first_names(unknown)}, which was not trained on: it counts as "
                f"empty (known: {first_names(column.levels)})"
            )
    numbers, flags = side_by_side(columns, preparation.indicators)
    notes += _out_of_range(table, preparation, numbers)
    empty = np.column_stack([column.empty for column in columns.values()])
    if empty.any() and preparation.missing in ("drop", "refuse"):
        count = counted(int(empty.any(axis=1).sum()), "row")
        notes.append(f"{count} with empty cells, and no such row was trained on: filled with means")
    if site is None and preparation.scale is not None:
        notes += _other_units(preparation, preparation.scale, numbers)
        return NewRows(joined(preparation.scale.apply(numbers), flags), tuple(notes), table)
    scaled, scales = np.zeros_like(numbers), dict[str, Scale]()
    for name in np.unique(sites).tolist():
        rows = sites == name
        mine, whose = numbers[rows], f" of '{name}'" if name else ""
        if name in known:
            scales[name] = known[name]
            notes += _other_units(preparation, known[name], mine, f" at '{name}'")
        elif len(mine) == 1:
            raise UserError(
                f"{table.path}: holds one row{whose}, which cannot be scaled by itself; allowed: many rows of a new "
                "site at once, or --site with one that trained"
            )
        else:
            scales[name] = Scale.of(mine, preparation.missing, scaled=True)
            notes.append(
                f"the rows{whose} are filled and scaled by these {len(mine):,} rows themselves, as a new site's"
            )
        scaled[rows] = scales[name].apply(mine)
    return NewRows(joined(scaled, flags), tuple(notes), table, scales)


def site_column(table: Table, preparation: Preparation) -> str | None:
    """Return the column that names the sites of new rows: that of training, or of files that are named as sites."""
    if preparation.owner in table.names:
        return preparation.owner
    by_file = BY_FILE in table.added and not preparation.sites.keys().isdisjoint(table.frame[BY_FILE])
    return BY_FILE if by_file else None


def _as_read(
    table: Table, preparation: Preparation, here: Sequence[str], site: str | None
) -> dict[str, ColumnSettings]:
    """Return how the cells of columns are read; of what differs by site, what is said of the sites that are `here`."""
    found: dict[str, ColumnSettings] = {}
    for name, fields in preparation.cells.items():
        column = validated(ColumnSettings, fields, f"preparation.cells.{name}")
        changed: dict[str, object] = {}
        for part, usual in (("factor", 1.0), ("offset", 0.0)):
            if isinstance(sites := getattr(column, part), dict):
                mine = {each: sites[each] for each in here if each in sites}
                changed[part] = mine.get(site, usual) if site is not None else mine or usual
        if name in table.names:
            found[name] = column.model_copy(update=changed)
    return found


def _check_columns(table: Table, preparation: Preparation) -> list[str]:
    """Refuse a table without columns that the model takes; return what is to be said of others."""
    wanted, names = [column.name for column in preparation.columns], table.names
    others = [name for name in names if name not in {*wanted, *preparation.known, *table.added}]
    if lacking := [name for name in wanted if name not in names]:
        raise UserError(
            f"{table.path}: lacks {first_names([repr(name) for name in lacking])}{nearest(lacking[0], others)}, which "
            f"the model takes; expected the columns {first_names(wanted, len(wanted))}"
        )
    notes: list[str] = []
    if others:
        notes.append(f"columns that the model does not take, left out: {first_names(others)}")
    if [name for name in names if name in wanted] != wanted:
        notes.append("columns are in another order than in training: taken by their names")
    return notes


def _out_of_range(table: Table, preparation: Preparation, numbers: Floats) -> list[str]:
    notes: list[str] = []
    for column, values in zip(preparation.numbers, numbers.T, strict=True):
        if column.low is None or column.high is None:
            continue
        outside = np.flatnonzero((values < column.low) | (values > column.high))
        if not len(outside):
            continue
        first, there = int(outside[0]), int((~np.isnan(values)).sum())
        units = "; is it in another unit?" if 2 * len(outside) > there else ""
        notes.append(
            f"column '{column.name}': out of the range seen in training, {column.low:g} to {column.high:g}: "
            f"{len(outside):,} of {there:,} numbers, such as {values[first]:g} in {table.row(first)}{units}"
        )
    return notes


def _other_units(preparation: Preparation, scale: Scale, numbers: Floats, where: str = "") -> list[str]:
    """Return which columns are several times larger or smaller than in training, in mean and in spread alike."""
    if preparation.normalise == "unit" or len(numbers) < FEW_ROWS:
        return []
    found, notes = Scale.of(numbers, preparation.missing, scaled=True), list[str]()
    pairs = zip(found.mean, scale.mean, found.deviation, scale.deviation, strict=True)
    for column, (mean, usual, spread, usual_spread) in zip(preparation.numbers, pairs, strict=True):
        factors = abs(mean / usual) if usual else inf, spread / usual_spread
        if min(factors) > MANY_TIMES or max(factors) < 1 / MANY_TIMES:
            notes.append(
                f"column '{column.name}'{where}: mean {mean:.4g} and deviation {spread:.4g}, in training {usual:.4g} "
                f"and {usual_spread:.4g}; is it in another unit?"
            )
    return notes


def one(paths: Sequence[Path]) -> Path:
    """Return the path; a second one is refused."""
    if len(paths) > 1:
        raise UserError(f"{paths[1]}: a second file; allowed: one folder, .zip or .npz at a time")
    return paths[0]


def of_images(paths: Sequence[Path], preparation: Preparation) -> NewRows:
    """Return the images of a folder or zip, or of files, in the order of their names, cut and scaled as in training."""
    if all(path.suffix.lower() in SUFFIXES for path in paths):
        pictures = Pictures(Path(commonpath([path.parent for path in paths])))
        names = [path.relative_to(pictures.path).as_posix() for path in paths]
    else:
        pictures = Pictures(one(paths))
        names = pictures.names
    depth, size = preparation.shape[0], preparation.shape[-1]
    read = pictures.read(names, size, "grey" if depth == 1 else "rgb")
    return replace(of_arrays(read, preparation, pictures.path), names=names, folders=Folders.of(pictures.path, names))


def of_texts(texts: Sequence[str], preparation: Preparation) -> NewRows:
    """Return texts as tokens, cut or padded to the length that was trained on."""
    length = preparation.shape[0]
    if preparation.form == "characters":
        return NewRows(torch.from_numpy(characters(texts, length)))
    return NewRows(torch.from_numpy(words(texts, length, preparation.vocabulary)))


def of_arrays(given: torch.Tensor | NDArray[Any], preparation: Preparation, where: Path | str = "rows") -> NewRows:
    """Return rows that are numbers already, [rows, ...]: images as bytes or between 0 and 1, columns, tokens."""
    wanted = tuple(preparation.shape)
    array = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
    if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
        raise UserError(f"{where}: holds what is no finite number; expected numbers")
    array = array if array.shape[1:] == wanted else channels_first(array)
    if array.shape[1:] != wanted:
        raise UserError(f"{where}: rows have shape {array.shape[1:]}; expected {wanted}")
    kinds = {"tokens": np.int64, "bytes": np.uint8 if array.dtype == np.uint8 else np.float32, "numbers": np.float32}
    values = as_numbers(torch.from_numpy(np.array(array, dtype=kinds[preparation.values])))
    notes = _out_of(values, preparation)
    return NewRows(values if preparation.scale is None else by_channel(values, preparation.scale), notes)


def _out_of(values: torch.Tensor, preparation: Preparation) -> tuple[str, ...]:
    pixels = preparation.values == "bytes"
    low, high = (0.0, 1.0) if pixels else (preparation.low, preparation.high)
    if low is None or high is None or not len(values):
        return ()
    outside = int(((values < low) | (values > high)).sum())
    if not outside:
        return ()
    return (f"out of the range seen in training, {low:g} to {high:g}: {outside:,} of {values.numel():,} numbers",)
