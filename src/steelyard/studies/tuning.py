"""Choosing settings of rules for the arena: every setting in every scene, on the seeds for choosing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.base.errors import UserError, listed, own_folder
from steelyard.base.files import ARENA_FILE, LOCK, is_file
from steelyard.base.measures import UNKNOWN
from steelyard.experiment.description import Description, FederationSettings
from steelyard.experiment.loading import read_experiment, unnamed_folder
from steelyard.experiment.rules import parse_rules
from steelyard.report.curves import read_curves
from steelyard.report.rendering import Block, Table
from steelyard.runs.history import History
from steelyard.studies.study import ALONE, Cell, How, Study, go_on
from steelyard.studies.suite import NOT_WHOLE, Suite

TUNING = "tuning"
"""The folder in an arena's folder with one run for each scene in which settings were tried."""
BESIDE = frozenset({TUNING, LOCK})
"""What trying settings leaves in an arena's folder."""


class Tuning(Study):
    """Rules in the scenes of a suite, on its seeds for choosing; the answer is the mean accuracy of each rule."""

    kind = "settings that are tried"
    one = "scene"

    suite: Suite
    rules: dict[str, FederationSettings]
    scenes: tuple[str, ...]
    changes: tuple[str, ...] = ()

    def cells(self) -> list[Cell]:
        """Return a run for each scene."""
        seeds = self.suite.choose[: self.suite.tuning.seeds]
        return [Cell(f"{TUNING}/{name}", seeds, name=name) for name in self.scenes]

    def described(self, cell: Cell) -> Description:
        """Return the experiment of a scene with all settings as its rules."""
        return self.suite.comparison(cell.name, self.rules, cell.seeds[0], self.changes)

    def check(self, cells: Sequence[Cell]) -> None:
        """Read the data of the scenes."""
        self.suite.check_data([cell.name for cell in cells], self.changes)

    def about(self, cell: Cell) -> str:
        """Say how many settings are tried."""
        return f"{cell.name}, choosing among {len(self.rules)} settings"

    def answer(self, folder: Path) -> dict[str, float]:
        """Return the mean accuracy of each rule over the scenes; nan where it exploded.

        Accuracy is that of the last rounds on the clients' own test rows, the mean over seeds.
        """
        found = [_accuracies(folder / cell.folder) for cell in self.cells()]
        for cell, run in zip(self.cells(), found, strict=True):
            if set(run) != set(self.rules):
                raise UserError(f"{folder / cell.folder}: holds other settings; allowed: a new folder")
        return {rule: math.fsum(run[rule] for run in found) / len(found) for rule in self.rules}


def _accuracies(run: Path) -> dict[str, float]:
    history, last = History(run), read_experiment(run).rounds.last
    values: dict[str, list[float]] = {}
    for curve in read_curves(history):
        ended = (curve.rule, curve.seed) in history.ended
        values.setdefault(curve.rule, []).append(math.nan if ended else float(curve.overall[-last:].mean()))
    return {rule: math.fsum(each) / len(each) for rule, each in values.items()}


def tuning_folder(suite: Suite, out: Path | None) -> Path:
    """Return the folder in which settings are tried: the one given, which may hold them already, else a new one."""
    if out is None:
        return unnamed_folder(suite.experiment(next(iter(suite.scenes))), "arena")
    folder = own_folder(out, "--out")
    arena = is_file(folder / ARENA_FILE)
    if folder.exists() and not arena and any(entry.name not in BESIDE for entry in folder.iterdir()):
        raise UserError(f"--out: {folder} is not empty; allowed: a new folder")
    return folder


@dataclass(frozen=True)
class Tried:
    """A rule's settings with their mean accuracy over the scenes; nan where a model exploded."""

    rule: str
    values: Mapping[str, float]
    frozen: str = ""
    """The setting that the suite has; empty for a candidate."""

    @property
    def best(self) -> str:
        """The setting to use: of those that are best the frozen one, else the first."""
        sound = {label: value for label, value in self.values.items() if not math.isnan(value)}
        if not sound:
            raise UserError(f"arena: every setting of {self.rule} exploded ({listed(self.values)}); allowed: others")
        return max(sound, key=lambda label: (sound[label], label == self.frozen))


def tune_rivals(
    suite: Suite, folder: Path, scenes: Sequence[str], changes: Sequence[str] = (), how: How = ALONE
) -> list[Tried]:
    """Try the settings of every rival that has some, and return what came out; what is done already stays."""
    first = suite.experiment(next(iter(suite.scenes)), changes)
    groups = {name: parse_rules(words, first) for name, words in suite.tuning.settings.items()}
    every = {label: settings for group in groups.values() for label, settings in group.items()}
    tuning = Tuning(suite=suite, rules=every, scenes=tuple(scenes), changes=tuple(changes))
    found = tuning.answer(go_on(tuning, folder, how))
    return [
        Tried(name, {each: found[each] for each in group}, next((each for each in group if each in suite.rivals), ""))
        for name, group in groups.items()
    ]


def tuning_parts(suite: Suite, found: Sequence[Tried], *, whole: bool = True) -> list[Block]:
    """Return which of each rival's settings did best, beside the one that is frozen with the suite."""
    marks = {True: "yes", False: ""}
    rows = [
        (
            label,
            UNKNOWN if math.isnan(value) else f"{100 * value:.2f}",
            marks[label == tried.best],
            marks[label in suite.rivals],
        )
        for tried in found
        for label, value in tried.values.items()
    ]
    other = [tried.rule for tried in found if tried.best not in suite.rivals]
    answer = f"Other settings than the frozen ones are best for {listed(other)}." if other else "As frozen."
    seeds = listed(map(str, suite.choose[: suite.tuning.seeds]))
    table = Table(
        f"Settings of the rivals: suite {suite.name}, version {suite.version}{'' if whole else NOT_WHOLE}",
        ("setting", "accuracy (%)", "best", "frozen"),
        tuple(rows),
        f"On the clients' own test rows, mean over the scenes and the seeds {seeds}.",
    )
    return [answer, table]
