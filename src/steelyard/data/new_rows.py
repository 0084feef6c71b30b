"""New rows as a model takes them, read, filled and scaled as those were that it was trained on.

What is not as it was then is refused, or said by name: columns, categories, numbers out of the range, other sites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.errors import UserError, first_names, nearest
from steelyard.base.settings import validated
from steelyard.data.columns import InputColumn, column_again, owners_of, side_by_side
from steelyard.data.dataset import joined
from steelyard.data.mending import mended
from steelyard.data.preparation import Floats, Preparation, Scale
from steelyard.data.scaling import as_numbers, by_channel
from steelyard.data.sources.csv import ColumnSettings
from steelyard.data.sources.images import Folders, Pictures
from steelyard.data.sources.leaf import characters, words
from steelyard.data.sources.npz import channels_first
from steelyard.data.tables import Table

if TYPE_CHECKING:
    from pathlib import Path

OTHER_UNITS = 0.5
"""Where more than this share of a column is out of the range of training, its unit is asked for."""


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

    Where every site has a scale of its own and none is named, rows go by the site that they name in the column of
    owners; those of a site that did not train, or of none, are scaled by the new rows of it.
    """
    table = mended(table, _as_read(table, preparation, site), _owner(table, preparation))
    notes = _check_columns(table, preparation)
    columns: dict[str, InputColumn] = {}
    for column in preparation.columns:
        columns[column.name], unknown = column_again(table, column)
        if unknown:
            notes.append(
                f"column '{column.name}' holds {first_names(unknown)}, which was not trained on: it counts as "
                f"empty (known: {first_names(column.levels)})"
            )
    notes += _out_of_range(table, preparation, columns)
    numbers, flags = side_by_side(columns, preparation.indicators)
    empty = np.column_stack([column.empty for column in columns.values()])
    if empty.any() and preparation.missing in ("drop", "refuse"):
        count = int(empty.any(axis=1).sum())
        notes.append(f"{count:,} rows have empty cells, and no such row was trained on: filled with means")
    scaled, said, scales = _scaled(table, preparation, numbers, site)
    return NewRows(joined(scaled, flags), (*notes, *said), table, scales)


def _owner(table: Table, preparation: Preparation) -> str | None:
    return preparation.owner if preparation.owner in table.names else None


def _as_read(table: Table, preparation: Preparation, site: str | None) -> dict[str, ColumnSettings]:
    """Return how the cells of columns are read; of what differs by site, what is said of the sites that are here."""
    owner = _owner(table, preparation)
    here = [] if owner is None else owners_of(table, owner).tolist()
    found: dict[str, ColumnSettings] = {}
    for name, fields in preparation.cells.items():
        column = validated(ColumnSettings, fields, f"preparation.cells.{name}")
        usual = {"factor": 1.0, "offset": 0.0}
        given = {part: getattr(column, part) for part in usual}
        by_site = {part: sites for part, sites in given.items() if isinstance(sites, dict)}
        changed: dict[str, object] = {}
        for part, sites in by_site.items():
            mine = {each: number for each, number in sites.items() if each in here}
            changed[part] = sites.get(site, usual[part]) if site is not None else mine or usual[part]
        if name in table.names:
            found[name] = column.model_copy(update=changed)
    return found


def _check_columns(table: Table, preparation: Preparation) -> list[str]:
    """Refuse a table without columns that the model takes; return what is to be said of others."""
    wanted, names = [column.name for column in preparation.columns], table.names
    if lacking := [name for name in wanted if name not in names]:
        raise UserError(
            f"{table.path}: lacks {first_names([repr(name) for name in lacking])}{nearest(lacking[0], names)}, which "
            f"the model takes; expected the columns {first_names(wanted, len(wanted))}"
        )
    notes: list[str] = []
    if others := [name for name in names if name not in wanted and name not in preparation.known]:
        notes.append(f"columns that the model does not take, left out: {first_names(others)}")
    if [name for name in names if name in wanted] != wanted:
        notes.append("columns are in another order than in training: taken by their names")
    return notes


def _out_of_range(table: Table, preparation: Preparation, columns: dict[str, InputColumn]) -> list[str]:
    notes: list[str] = []
    for column in preparation.numbers:
        values = columns[column.name].numbers
        assert values is not None
        if column.low is None or column.high is None:
            continue
        outside = np.flatnonzero((values < column.low) | (values > column.high))
        if not len(outside):
            continue
        first, there = int(outside[0]), int((~np.isnan(values)).sum())
        units = "; is it in another unit?" if len(outside) > OTHER_UNITS * there else ""
        notes.append(
            f"column '{column.name}': out of the range seen in training, {column.low:g} to {column.high:g}: "
            f"{len(outside):,} of {there:,} numbers, such as {values[first]:g} in {table.row(first)}{units}"
        )
    return notes


def _scaled(
    table: Table, preparation: Preparation, numbers: Floats, site: str | None
) -> tuple[Floats, list[str], dict[str, Scale]]:
    """Return numbers filled and scaled, by the scale of all, of a site, or of these rows; notes; the scales by site."""
    known = preparation.sites
    if site is not None and site not in known:
        words = first_names(sorted(known)) if known else "none: the model holds no scale of a single site"
        raise UserError(f"site: got '{site}'{nearest(site, known)}; allowed: {words}")
    if site is None and preparation.scale is not None:
        return preparation.scale.apply(numbers), [], {}
    owner = _owner(table, preparation)
    sites = np.full(len(numbers), site or "") if site or owner is None else owners_of(table, owner)
    found, notes, scales = np.zeros_like(numbers), list[str](), dict[str, Scale]()
    for name in np.unique(sites).tolist():
        rows = sites == name
        scale = known.get(name)
        if scale is None:
            scale = Scale.of(numbers[rows], preparation.missing, scaled=True)
            whose = f"the rows of '{name}'" if name else "the rows"
            notes.append(f"{whose} are filled and scaled by these {int(rows.sum()):,} rows themselves, as a new site's")
        scales[name] = scale
        found[rows] = scale.apply(numbers[rows])
    return found, notes, scales


def of_images(pictures: Pictures, preparation: Preparation) -> NewRows:
    """Return all images of a folder or zip, in the order of `pictures.names`, cut and scaled as in training."""
    depth, size = preparation.shape[0], preparation.shape[-1]
    read = pictures.read(pictures.names, size, "grey" if depth == 1 else "rgb")
    folders = Folders.of(pictures.path, pictures.names)
    return replace(of_arrays(read, preparation, pictures.path), names=pictures.names, folders=folders)


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
