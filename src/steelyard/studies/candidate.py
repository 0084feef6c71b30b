"""What an arena tests: reading a candidate, choosing settings of rules, counting who opened the held-out seeds here."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from steelyard.algorithms.catalogue import known as algorithms
from steelyard.algorithms.catalogue import load_plugins as load_algorithms
from steelyard.base import files
from steelyard.base.errors import UserError, brief, empty_folder, listed
from steelyard.base.measures import UNKNOWN
from steelyard.base.usercode import ALGORITHMS, load_code
from steelyard.experiment.description import Description, FederationSettings
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import Ask, load, read_experiment, unnamed_folder
from steelyard.experiment.rules import parse_rules
from steelyard.report.curves import read_curves
from steelyard.report.rendering import Block, Table
from steelyard.runs.history import History
from steelyard.studies.study import ALONE, Cell, How, Study, go_on
from steelyard.studies.suite import NOT_WHOLE, Suite
from steelyard.weighing import criterion


@dataclass(frozen=True)
class Candidate:
    """A rule with its algorithm, and the name that tables have for it."""

    label: str
    settings: FederationSettings


def read_candidates(text: str, rule: str | None, suite: Suite, ask: Ask) -> list[Candidate]:
    """Read a candidate, or several settings of one of which the best is to be chosen; as many as rivals had.

    `rule` says which rule of a file is meant, in words that may join what the file defines. `ask` is called before code
    of a file runs.
    """
    scene = next(iter(suite.scenes))
    if text.endswith(".py"):
        experiment, word = _of_code(text, rule, suite.experiment(scene), ask)
    elif text.endswith(".toml"):
        experiment, word = load(text, ask=ask), rule
        if not isinstance(experiment, LearningDescription):
            raise UserError(
                f"{text}: trains no model that a server aggregates; allowed: an experiment of kind 'learning'"
            )
    else:
        if rule is not None:
            raise UserError(f"--rule: got {brief(rule)} beside the rule {brief(text)}; allowed: with a file")
        experiment, word = suite.experiment(scene), text
    found = _rules(word, experiment) if word is not None else dict([next(iter(experiment.rules().items()))])
    if len(found) > suite.tuning.budget:
        raise UserError(
            f"arena: got {len(found)} rules ({listed(found)}); allowed: one, or up to {suite.tuning.budget} settings "
            "of one, as rivals had"
        )
    return [_checked(Candidate(label, settings), suite, scene) for label, settings in found.items()]


def _rules(word: str, experiment: Description) -> dict[str, FederationSettings]:
    try:
        return parse_rules([word], experiment)
    except UserError as error:
        # The words are those of `compare --rules`; here they are the candidate.
        raise UserError(str(error).replace("--rules:", "arena:", 1)) from None


def _checked(candidate: Candidate, suite: Suite, scene: str) -> Candidate:
    if candidate.label == suite.baseline:
        raise UserError(
            f"arena: got '{suite.baseline}', the baseline of every candidate; allowed: any other rule, such as "
            f"{listed(suite.rivals[1:])}"
        )
    known = parse_rules(suite.rivals, suite.experiment(scene))
    if candidate.label in known and known[candidate.label] != candidate.settings:
        raise UserError(
            f"arena: got another rule by the name '{candidate.label}', which one of the rivals has; allowed: another "
            "weighing.name"
        )
    return candidate


def _of_code(text: str, rule: str | None, base: Description, ask: Ask) -> tuple[Description, str]:
    """Load a file of the user's own; return an experiment that names it, and the rule that is meant."""
    path = Path(text).resolve()
    if not path.is_file():
        raise UserError(f"arena: there is no file {brief(text)}; allowed: the path of a Python file, or a rule's name")
    ask(text, {"arena": text})
    load_algorithms([str(path)])
    criterion.load_plugins([str(path)])
    module = load_code(str(path), "arena", ALGORITHMS).__name__
    mine = [name for name, made in algorithms().items() if made.__module__ == module]
    measures = [name for name, each in criterion.known().items() if getattr(each.measure, "__module__", "") == module]
    if not mine and not measures:
        raise UserError(f"{text}: defines no criterion and no algorithm; allowed: one of them, as the guide shows")
    if rule is None and len(mine) + len(measures) > 1:
        raise UserError(f"{text}: defines {listed((*mine, *measures))}; allowed: --rule with the rule that is meant")
    fields = {
        "weighing.plugins": [str(path)] if measures else [],
        "algorithm": {"name": "fedavg", **({"plugins": [str(path)]} if mine else {})},
    }
    return base.changed(fields, where=text), rule or (*mine, *measures)[0]


# Choosing settings of rules: every setting in every scene, on the seeds for choosing.


TUNING = "tuning"
"""The folder in an arena's folder with one run for each scene in which settings were tried."""
BESIDE = frozenset({TUNING, files.LOCK})
"""What trying settings leaves in an arena's folder."""


class Tuning(Study):
    """Rules in the scenes of a suite, on its seeds for choosing; the answer is the mean accuracy of each rule."""

    kind = "settings that are tried"
    one = "task"

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
    return out if files.is_file(out / files.ARENA_FILE) else empty_folder(out, "--out", BESIDE)


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
            raise UserError(f"arena: training with {self.rule} diverged in every setting ({listed(self.values)})")
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
        f"On the clients' own test samples, mean over the tasks and the seeds {seeds}.",
    )
    return [answer, table]


# Who opened the held-out seeds of a suite here.


OPENED = "opened.json"


def state_folder() -> Path:
    """Return where the list lies: $STEELYARD_STATE, else steelyard/ in the user's folder for state."""
    given = os.environ.get("STEELYARD_STATE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "steelyard"


def opening(suite: str, candidate: Mapping[str, Any]) -> int:
    """Return which candidate opens the held-out seeds of a suite, counted from 1, and note it; the same has its number.

    `candidate` is its description, with code by its content.
    """
    path = state_folder() / OPENED
    digest = hashlib.sha256(json.dumps(candidate, sort_keys=True).encode()).hexdigest()
    mine = _read(path).get(suite, [])
    if digest not in mine:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.open_lock(path.with_suffix(".lock")) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # two that open at once must not get one number
                found = _read(path)
                mine = found.setdefault(suite, [])
                if digest not in mine:
                    mine.append(digest)
                    files.write(path, f"{json.dumps(found, indent=1)}\n".encode())
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written: {error.strerror}; allowed: a writable folder (STEELYARD_STATE)"
            ) from error
    return mine.index(digest) + 1


def _read(path: Path) -> dict[str, list[str]]:
    try:
        return TypeAdapter(dict[str, list[str]]).validate_json(files.read_bytes(path, 10_000_000))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}); allowed: the file as it was") from None
