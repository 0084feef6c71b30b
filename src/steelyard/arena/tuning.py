"""Choosing settings: every setting of a rule in every scene, on the seeds for choosing and the clients' own test rows.

Neither the seeds that report nor the server's rows have a part in it. Rivals were tuned so once, with at most as many
settings each as the suite's budget has, and are frozen with the suite; a candidate may try as many.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from steelyard.arena.suite import Suite
from steelyard.base.errors import Stopped, UserError, listed
from steelyard.experiment.federations import FederationSettings
from steelyard.experiment.loading import read_experiment
from steelyard.experiment.rule_words import parse_rules
from steelyard.report.recorded_curves import read_curves
from steelyard.runs.history import History
from steelyard.sweeps.jobs import check_jobs, in_processes, time_left
from steelyard.sweeps.plan import PlannedRun
from steelyard.sweeps.running import ALONE, How, finished, run_or_resume

TUNING = "tuning"
"""The folder in an arena's folder with one run for each scene in which settings were tried."""


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
    suite: Suite,
    folder: Path,
    scenes: Sequence[str],
    changes: Sequence[str] = (),
    how: How = ALONE,
) -> list[Tried]:
    """Try the settings of every rival that has some, and return what came out; what is done already stays."""
    first = suite.experiment(next(iter(suite.scenes)), changes)
    groups = {name: parse_rules(words, first) for name, words in suite.tuning.settings.items()}
    every = {label: settings for group in groups.values() for label, settings in group.items()}
    found = tune(suite, every, folder, scenes, changes, how)
    return [
        Tried(name, {each: found[each] for each in group}, next((each for each in group if each in suite.rivals), ""))
        for name, group in groups.items()
    ]


def tune(
    suite: Suite,
    rules: Mapping[str, FederationSettings],
    folder: Path,
    scenes: Sequence[str],
    changes: Sequence[str] = (),
    how: How = ALONE,
) -> dict[str, float]:
    """Run rules in the scenes, on the seeds for choosing, and return the mean accuracy of each; nan where it exploded.

    Accuracy is that of the last rounds on the clients' own test rows, the mean over seeds and scenes.
    """
    check_jobs(how.jobs)
    seeds = suite.choose[: suite.tuning.seeds]
    begun = time.monotonic()
    left = [name for name in scenes if not finished(folder / TUNING / name)]
    suite.check_data(left, changes)
    planned = [
        PlannedRun(f"{TUNING}/{name}", (), suite.comparison(name, rules, seeds[0], changes), seeds) for name in left
    ]

    def tell(number: int) -> None:
        ending = time_left(begun, number, len(left), how.jobs)
        how.tell(f"choosing among {len(rules)} settings, scene {number + 1} of {len(left)}: {left[number]}{ending}")

    try:
        if how.jobs > 1:
            in_processes(partial(_run, planned, ALONE), folder, range(len(left)), how.jobs, tell)
        else:
            for number in range(len(left)):
                tell(number)
                _run(planned, how, folder, number)
    except KeyboardInterrupt:
        raise Stopped(folder, again=True) from None
    found = [_accuracies(folder / TUNING / name) for name in scenes]
    for name, run in zip(scenes, found, strict=True):
        if set(run) != set(rules):
            raise UserError(f"{folder / TUNING / name}: holds other settings; allowed: a new folder")
    return {rule: math.fsum(run[rule] for run in found) / len(found) for rule in rules}


def _run(planned: Sequence[PlannedRun], how: How, folder: Path, number: int) -> None:
    run_or_resume(planned[number], folder, how)


def _accuracies(run: Path) -> dict[str, float]:
    history, last = History(run), read_experiment(run).rounds.last
    values: dict[str, list[float]] = {}
    for curve in read_curves(history):
        ended = (curve.rule, curve.seed) in history.ended
        values.setdefault(curve.rule, []).append(math.nan if ended else float(curve.overall[-last:].mean()))
    return {rule: math.fsum(each) / len(each) for rule, each in values.items()}
