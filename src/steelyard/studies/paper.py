"""A table or figure of the papers as a study: which runs and fits it needs, and the values that they leave."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

from steelyard.base import files
from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.settings import validated
from steelyard.experiment.description import Description
from steelyard.experiment.loading import load
from steelyard.experiment.recommend import RecommendDescription
from steelyard.experiment.rules import with_rules
from steelyard.report.rendering import Block
from steelyard.studies.paper_measures import of_baseline, of_lists, of_rules
from steelyard.studies.paper_table import ROWS, Entry, Found, System, Value, as_csv, entry_of, found_of, parts_of
from steelyard.studies.paper_table import read_rows as read
from steelyard.studies.study import ALONE, AnyExperiment, Cell, How, Scalar, Study, run_or_resume

VALIDATION = 0.2
"""The share of each user's training rows on which settings are chosen."""
TINY_LISTS = {"rounds.epochs": 1, "fpl.factors": 2}
TINY_RULES = {"rounds.count": 2, "training.epochs": 1, "compute.device": "cpu", "model.name": "logistic"}


class Paper(Study):
    """A table or figure, and which part of it is run; its cells are runs of all rules, or a system with a seed each."""

    kind = "a table of the papers"
    file = files.PAPER_FILE
    one = "cell"

    name: str
    only: tuple[str, ...]
    """The data."""
    seeds: int
    tiny: bool = False
    changes: tuple[str, ...] = ()
    """As `--set` has them."""
    experiment: AnyExperiment
    """Of the first data; the others are recipes too, and name no code."""

    @property
    def entry(self) -> Entry:
        """The table or figure."""
        return entry_of(self.name)

    def cells(self) -> list[Cell]:
        """Return a run for each data with all rules; of recommenders one for each point of a grid, system and seed."""
        if isinstance(self.experiment, RecommendDescription):
            return [cell for data in self.only for system in self.entry.of(data) for cell in self._of(data, system)]
        return [
            Cell(f"{data}-{first}", tuple(range(first, min(first + each, self.seeds + 1))), {}, data)
            for data in self.only
            for each in [self.entry.data[data].at_once]
            for first in range(1, self.seeds + 1, each)
        ]

    def _of(self, data: str, system: System) -> Iterator[Cell]:
        slug = f"{data}-{re.sub(r'[^A-Za-z0-9.+-]+', '-', system.name)}"
        points = list(product(*system.grid.values())) if system.grid else []
        for number, point in enumerate(points[:2] if self.tiny else points, 1):
            changes = dict(zip(system.grid, point, strict=True))
            yield Cell(f"{slug}-point-{number}", (1,), {"system": system.name, **changes}, data)
        for seed in range(1, min(self.seeds, system.seeds or self.seeds) + 1):
            yield Cell(f"{slug}-{seed}", (seed,), {"system": system.name}, data)

    def looks(self, folder: Path) -> Iterator[Sequence[Cell]]:
        """Give the points of grids first: the best of them is what the others fit."""
        yield [cell for cell in self.own if len(cell.changes) > 1]
        yield [cell for cell in self.own if len(cell.changes) < 2]

    def _system(self, cell: Cell) -> System:
        return next(each for each in self.entry.of(cell.name) if each.name == cell.changes["system"])

    def _given(self, cell: Cell, *, of_experiment: bool) -> dict[str, Any]:
        """Return the fields of a cell's experiment, which have a dot, or the settings of its baseline."""
        given = self._system(cell).given if cell.changes else {}
        own = {**given.get("all", {}), **given.get(cell.name, {})}
        return {name: value for name, value in own.items() if ("." in name) == of_experiment}

    def described(self, cell: Cell) -> Description:
        """Return the experiment of a cell, with its rules or its system's settings."""
        base, lists = self.entry.data[cell.name], bool(cell.changes)
        fields: dict[str, Any] = {**base.given, **self._given(cell, of_experiment=True)}
        if self.tiny:
            fields |= {**(TINY_LISTS if lists else TINY_RULES), **base.tiny}
        if len(cell.changes) > 1:
            fields["interactions.validation"] = VALIDATION
        changed = {change.partition("=")[0].strip() for change in self.changes}
        own = {name: None if value == "" else value for name, value in fields.items() if name not in changed}
        experiment = load(base.recipe, self.changes, cell.seeds[0]).changed(own)
        return experiment if lists else with_rules(experiment, [each.name for each in self.entry.of(cell.name)])

    def run(self, folder: Path, cell: Cell, how: How = ALONE) -> None:
        """Do a cell and keep its values; a baseline is fitted in one go."""
        experiment, measures, seed = self.described(cell), self.entry.measures, cell.seeds[0]
        if not isinstance(experiment, RecommendDescription):
            run_or_resume(folder, cell, experiment, how)
            values = [Value(cell.name, *each) for each in of_rules(folder / cell.folder, measures)]
        else:
            system = self._system(cell)
            if system.baseline:
                point = self._point(cell) or self._best(folder, cell)
                settings = {**self._given(cell, of_experiment=False), **point}
                if self.tiny and "epochs" in settings:
                    settings["epochs"] = 1
                asked = measures[:1] if self._point(cell) else measures
                measured = of_baseline(experiment, system.baseline, settings, seed, asked)
            else:
                run_or_resume(folder, cell, experiment, how)
                measured = of_lists(folder / cell.folder, measures)
            chosen = "".join(f", {name} {value}" for name, value in self._point(cell).items())
            values = [
                Value(cell.name, system.name + chosen, seed, name, at or system.at or 0.0, value)
                for name, at, value in measured
            ]
        files.write(self._kept(folder, cell), as_csv(values).encode())

    @staticmethod
    def _point(cell: Cell) -> dict[str, Scalar]:
        return {name: value for name, value in cell.changes.items() if name != "system"}

    def _best(self, folder: Path, cell: Cell) -> dict[str, Scalar]:
        """Return what of a baseline's grid is best on validation rows; empty where it has none."""
        points = [each for each in self._of(cell.name, self._system(cell)) if len(each.changes) > 1]
        found = [read(self._kept(folder, each))[0].value for each in points]
        return self._point(points[found.index(max(found))]) if found else {}

    @staticmethod
    def _kept(folder: Path, cell: Cell) -> Path:
        return folder / f"{cell.folder}.csv"

    def ended(self, folder: Path, cell: Cell) -> bool:
        """Whether the values of a cell are kept."""
        return files.is_file(self._kept(folder, cell))

    def _values(self, folder: Path) -> list[Value]:
        return list(chain(*(read(self._kept(folder, cell)) for cell in self.own if self.ended(folder, cell))))

    def answer(self, folder: Path) -> Found:
        """Return what was measured beside what is printed."""
        left = sum(not self.ended(folder, cell) for cell in self.own)
        return found_of(self.name, self._values(folder), str(folder), left=left, tiny=self.tiny)

    def write_files(self, folder: Path) -> Found:
        """Write the values of all cells into one file."""
        files.write(folder / ROWS, self.csv(self.answer(folder)).encode())
        return self.answer(folder)

    def parts(self, answer: Found) -> list[Block]:
        """Return the tables."""
        return parts_of(answer)

    def next_lines(self, answer: Found) -> Sequence[str]:
        """Return where the values are."""
        return [f"values of every seed: {Path(answer.folder) / ROWS}"]

    def csv(self, answer: Found) -> str:
        """Return the values of every seed."""
        return as_csv(self._values(Path(answer.folder)))


def plan(name: str, only: Sequence[str], seeds: int | None, changes: Sequence[str], *, tiny: bool = False) -> Paper:
    """Return the study of a table; with `tiny` one seed and settings that mean nothing."""
    entry = entry_of(name)
    for data in only:
        if data not in entry.data:
            raise UserError(f"--data: got '{data}'{nearest(data, entry.data)}; allowed: {listed(entry.data)}")
    chosen = list(only or entry.data)
    fields = {"name": name, "only": chosen, "seeds": 1 if tiny else seeds or entry.seeds, "tiny": tiny}
    return validated(Paper, {**fields, "changes": changes, "experiment": load(entry.data[chosen[0]].recipe)}, "")
