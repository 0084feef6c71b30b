"""Which engine trains a cohort: the one asked for, the one found before on this machine, or the fastest in a trial."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Mapping

import torch

from steelyard.base.errors import UserError
from steelyard.base.logs import doing
from steelyard.clients.local.device_data.cohort import Cohort
from steelyard.clients.local.device_data.schedule import step_counts
from steelyard.clients.local.engines import choice_file
from steelyard.clients.local.engines.engine import Engine, TrainingSetup
from steelyard.clients.local.engines.engine_trial import MARGIN, Trial, run_trial
from steelyard.clients.local.engines.sequential import SequentialEngine
from steelyard.clients.local.engines.table import ENGINES, STACKING, DoesNotFit, candidates, make, parse
from steelyard.messages.updates import Floats


class ChosenEngine:
    """The engine of a run; the choice falls at the first cohort and holds for the rest."""

    def __init__(self, setup: TrainingSetup, wanted: str) -> None:
        self.setup = setup
        self.name, self.chunk = parse(wanted)
        self.engine: Engine | None = None
        self.choice = wanted
        self.reason = "asked for"
        self.notes: list[str] = []

    def train(self, cohort: Cohort, out: torch.Tensor) -> Floats:
        """Train a cohort with the engine of this run."""
        try:
            return self._settled(cohort).train(cohort, out)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"compute.memory_gb: engine {self.choice} ran out of memory on {self.setup.device} with a limit of "
                f"{self.setup.memory / 1e9:.1f} GB; allowed: a lower limit or a smaller compute.chunk"
            ) from error

    def settled(self, cohort: Cohort) -> str:
        """Return what is chosen for this run, as compute.engine takes it; the choice falls now where it has not."""
        self._settled(cohort)
        return self.choice

    def _settled(self, cohort: Cohort) -> Engine:
        if self.engine is None:
            with doing("trying out engines"):
                self.engine = self._choose(cohort)
        return self.engine

    def _choose(self, cohort: Cohort) -> Engine:
        if self.name == "auto":
            return self._automatic(cohort)
        try:
            engine = make(self.setup, self.name, self.chunk)
            if ENGINES[self.name].compared:
                self._must_agree(engine, cohort)
        except DoesNotFit as why:
            return self._fall_back(str(why))
        self.choice = with_stack_size(self.name, engine.chunk)
        return engine

    def _must_agree(self, engine: Engine, cohort: Cohort) -> None:
        """A module that draws, keeps running means or branches on its data does not stack: better slow than wrong."""
        again = {self.name: lambda setup: make(setup, self.name, engine.chunk)}
        found = run_trial(self.setup, cohort, again, timed=False)
        if self.name in found.refused:
            raise DoesNotFit(found.refused[self.name])

    def _fall_back(self, why: str) -> Engine:
        note = f"engine {self.name} does not take this model ({why}); clients are trained one after another"
        warnings.warn(note, stacklevel=2)
        self.notes.append(note)
        self.choice, self.reason = "loop", f"{self.name} does not take this model: {why}"
        return SequentialEngine(self.setup)

    def _automatic(self, cohort: Cohort) -> Engine:
        names = candidates(self.setup, int(step_counts(cohort.sizes, self.setup.training).sum()))
        key = choice_file.key(self.setup, cohort, names)
        known = choice_file.read(key)
        if known is None:
            known = self._tried(key, names, cohort)
        else:
            self.reason = "found by an earlier trial on this machine"
        self.choice = known.engine
        self.notes += known.notes
        return make(self.setup, *parse(known.engine))

    def _tried(self, key: str, names: list[str], cohort: Cohort) -> choice_file.Choice:
        """Try the engines, keep the winner for later runs, and return the choice that holds.

        It names the size of the stacks too, which free memory may change from run to run.
        """
        found = run_trial(
            self.setup, cohort, {name: (lambda setup, name=name: make(setup, *parse(name))) for name in names}
        )
        engine = make(self.setup, *parse(found.best))
        best = with_stack_size(parse(found.best)[0], engine.stack_size(cohort))
        self.reason = f"fastest in a trial, {MARGIN:.0%} counting as equal: {found.describe()}"
        return choice_file.write(key, choice_file.Choice(best, notes_of(found, best)), found.describe())

    def describe(self) -> Mapping[str, str]:
        """Return what was chosen and why."""
        facts = {"engine_choice": self.choice, "engine_reason": self.reason}
        return facts | ({"engine_notes": "; ".join(self.notes)} if self.notes else {})


def notes_of(found: Trial, best: str) -> tuple[str, ...]:
    """Return what a run should tell of a trial: that nothing stacks, or that no program could be compiled."""
    singly = "in processes of their own" if best == "processes" else "in threads" if best == "threads" else ""
    how = f"clients are trained singly, {singly}" if singly else "clients are trained one after another"
    if found.draws:
        return (f"the model draws at random while it trains; {how}",)
    stacks = [name for name in found.refused if parse(name)[0] in STACKING]
    if stacks and not any(parse(name)[0] in STACKING for name in found.seconds):
        return (f"no engine stacks this model ({_brief(found.refused[stacks[-1]])}); {how}",)
    if why := found.refused.get("compiled"):
        return (f"engine compiled is left out ({_brief(why)}); {best.partition(':')[0]} is used",)
    return ()


def _brief(why: str) -> str:
    """The first sentence of a reason, cut where it is long; the run's record has all of it."""
    return textwrap.shorten(why.removeprefix("DoesNotFit: ").partition(". ")[0], 160, placeholder=" …")


def with_stack_size(name: str, chunk: int | None) -> str:
    """Return "name:chunk", or "name" for an engine without a fixed size of its stacks."""
    return name if chunk is None else f"{name}:{chunk}"
