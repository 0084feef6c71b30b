"""Predictions by a model that left its run: of data frames, tables, images, texts and arrays.

pandas is imported inside functions, for speed of start.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from steelyard.base.documents import Document
from steelyard.base.errors import UserError, brief, no_formula
from steelyard.base.logs import logger
from steelyard.data import new_rows
from steelyard.data.memory import is_frame
from steelyard.data.new_rows import NewRows
from steelyard.data.preparation import Preparation
from steelyard.data.sources.leaf import texts_of_file
from steelyard.data.sources.npz import read_arrays
from steelyard.data.sources.source import BY_FILE, is_pattern
from steelyard.data.tables import Table, read_tables, read_text, tidy
from steelyard.learning.evaluation import predictions
from steelyard.models.document import ModelDocument

if TYPE_CHECKING:
    import pandas

Given = Any
"""A data frame, an array [rows, ...], a list of texts, or one or several paths."""
TOGETHER = 1 << 24
"""Numbers of rows that a network is given at once, activations of a network for images among them."""
MOST_ROWS = 65_536
IMAGE, ROW = "image", "row"
"""The first column of predictions."""

_log = logger(__name__)


class Predicted(Document):
    """The answer of `steelyard predict`."""

    rows: int
    columns: list[str]
    """Of the file that was written."""
    out: str
    notes: list[str]
    """What of the rows is not as it was in training."""


@dataclass(frozen=True, eq=False, repr=False)
class Predictor:
    """A network with what its document says of its rows."""

    document: ModelDocument
    network: nn.Module
    """The network with its weights, as plain torch: `model.network.state_dict()`; that alone where the run of another
    framework's app does not say how the network is built."""

    @property
    def preparation(self) -> Preparation:
        """What rows go through before the network sees them; refused where nobody told."""
        if self.document.preparation is None:
            raise UserError(
                f"{self!r}: its run knows neither the network nor what rows go through; allowed: the weights in a "
                "network of your own"
            )
        return self.document.preparation

    def predict(self, rows: Given, *, site: str | None = None) -> pandas.DataFrame:
        """Return what the model says of each row; what is wrong with the rows is logged, and in `attrs["notes"]`.

        `rows` are a data frame, an array [rows, ...], a list of texts, or paths of tables, of images or of arrays.
        `site` names a site that trained, by whose numbers a table is scaled.

            >>> model.predict(pandas.read_csv("patients.csv"))
        """
        import pandas

        read = self.read(rows, site)
        for note in read.notes:
            _log.warning(note)
        first: dict[str, Any] = {ROW: np.arange(1, len(read.features) + 1)}
        if read.names:
            first = {IMAGE: list(read.names)}
        elif read.table is not None and BY_FILE in read.table.added:
            first = {BY_FILE: read.table.frame[BY_FILE].to_numpy(), **first}
        frame = pandas.DataFrame({**first, **self.columns(self.outputs(read.features))})
        frame.attrs["notes"] = list(read.notes)
        return frame

    def read(self, given: Given, site: str | None = None) -> NewRows:
        """Return rows as the network takes them."""
        form, prepared = self.preparation.form, self.preparation
        worded = form in ("characters", "words")
        paths = _paths(given, texts=worded)
        if site is not None and form != "table":
            raise UserError(f"site: got '{site}' for {form}; allowed: tables, whose sites may have scales of their own")
        if form == "table":
            return new_rows.of_table(_table(given, paths, prepared.owner), prepared, site)
        if form == "images" and paths:
            return new_rows.of_images(paths, prepared)
        if worded:
            read = [_texts(path, len(prepared.target.names)) for path in paths]
            texts = [text for found, _ in read for text in found] if paths else given
            if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
                raise UserError(
                    f"rows: got {brief(given)}; allowed: a list of texts, or a file with a text in each line"
                )
            return replace(new_rows.of_texts(texts, prepared), labels=[one for _, mine in read for one in mine])
        if not paths:
            return new_rows.of_arrays(given, prepared)
        if form == "prepared":
            raise UserError(
                f"{paths[0]}: the nodes did not tell what rows go through (statistics in their files); allowed: an "
                "array of rows as they make them, in Python, or `steelyard federate model` at a node"
            )
        arrays = read_arrays(new_rows.one(paths))
        if "x" not in arrays:
            raise UserError(f"{paths[0]}: holds no array x; expected an .npz file with one, a row of it each")
        return replace(new_rows.of_arrays(arrays["x"], prepared, paths[0]), arrays=arrays)

    def outputs(self, features: torch.Tensor) -> torch.Tensor:
        """Return what the network says of rows, [rows, outputs], some rows at a time."""
        width = max(1, features[:1].numel()) * (32 if features.ndim > 2 else 1)
        each = max(1, min(MOST_ROWS, TOGETHER // width))
        try:
            with torch.no_grad():
                found = [self.network(part) for part in features.split(each)] if len(features) else [features[:, :1]]
        except (RuntimeError, IndexError) as error:
            raise UserError(f"model: its network does not take its own rows: {brief(str(error))}") from error
        outputs = torch.cat(found).float()
        outputs = outputs if outputs.ndim > 1 else outputs[:, None]
        if not (sound := outputs.isfinite().all(1)).all():
            row = int(sound.int().argmin()) + 1
            raise UserError(f"model: gives no finite number for row {row}; expected sound weights and values")
        return outputs

    def columns(self, outputs: torch.Tensor) -> dict[str, NDArray[Any]]:
        """Return predictions by column: classes with probabilities, labels, shares of masks, risks or values."""
        target = self.preparation.target
        names = target.names
        if target.task in ("regression", "survival"):
            return {"value" if target.task == "regression" else "risk": outputs[:, 0].numpy()}
        if target.task == "multi-label":
            shares = outputs.sigmoid().numpy()
            return {f"p_{name}": shares[:, place] for place, name in enumerate(names)}
        if target.task == "segmentation":
            masks = masks_of(outputs, len(names))
            return {f"share_{name}": (masks == place).float().mean(1).numpy() for place, name in enumerate(names)}
        single = outputs.shape[1] == 1
        shares = torch.cat([1 - outputs.sigmoid(), outputs.sigmoid()], 1) if single else outputs.softmax(1)
        numbers = (
            predictions(outputs, len(names))
            if len(names) != 2
            else (shares[:, 1] > self.document.origin.threshold).long()
        )
        found = np.array(names)[numbers.numpy()]
        return {"class": found, **{f"p_{name}": shares[:, place].numpy() for place, name in enumerate(names)}}


def csv_lines(frame: pandas.DataFrame) -> Iterator[bytes]:
    """Yield predictions as the text of a CSV, some rows at a time: pandas' own writer takes several times as long."""
    kinds = {"i": "%d", "f": "%.6g"}
    form = ",".join(kinds.get(frame[name].dtype.kind, "%s") for name in frame.columns) + "\n"
    yield (",".join(_cell(str(name)) for name in frame.columns) + "\n").encode()
    columns = [_cells(frame[name]) for name in frame.columns]
    for begin in range(0, len(frame), MOST_ROWS):
        parts = [column[begin : begin + MOST_ROWS] for column in columns]
        yield "".join(map(form.__mod__, zip(*parts, strict=True))).encode()


def _cells(column: Any) -> list[Any]:
    cells = column.tolist()
    if column.dtype.kind in "if":
        return cells
    # Few texts stand in many rows.
    known = {cell: _cell(str(cell)) for cell in set(cells)}
    return [known[cell] for cell in cells]


def _cell(text: str) -> str:
    """Return a text as a cell of a CSV, which no spreadsheet takes for a formula."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([no_formula(text)])
    return line.getvalue()


def masks_of(outputs: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the class of each pixel, [rows, pixels]."""
    return outputs.unflatten(1, (classes, -1)).argmax(1)


def _paths(given: Given, *, texts: bool) -> list[Path]:
    """Return paths that were given, none where rows themselves were: a list of words may be `texts`."""
    if isinstance(given, str | Path):
        given = [Path(given)]
    kinds = Path if texts else (str, Path)
    whole = isinstance(given, list | tuple) and bool(given) and all(isinstance(one, kinds) for one in given)
    paths = [Path(one) for one in given] if whole else []
    for path in paths:
        # New rows lie where they were said to lie: not in the folders in which an experiment's data are looked for.
        if not is_pattern(path) and not path.exists():
            raise UserError(f"{path}: no such file or folder; expected rows such as the model was trained on")
    return paths


def _texts(path: Path, classes: int) -> tuple[list[str], list[str]]:
    """Return the texts of a file, and the names of their classes where the file has them."""
    if ".json" in path.suffixes:
        return texts_of_file(path, classes)
    return read_text(path, "a text in each line").splitlines(), []


def _table(given: Given, paths: Sequence[Path], owner: str | None) -> Table:
    if paths:
        return read_tables(paths, BY_FILE if len(paths) > 1 or paths[0].is_dir() else owner, {})
    if not is_frame(given):
        raise UserError(f"rows: got {brief(given)}; allowed: a data frame, or paths of tables")
    frame = given if hasattr(given, "iloc") else given.to_pandas()
    return Table(Path("the frame"), tidy(frame, "the frame", owner))
