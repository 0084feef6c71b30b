"""Running a sweep into a folder, one run for each point of its grid, and going on with one that was stopped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.base import files
from steelyard.base.errors import MachineError, Stopped, UserError, brief, own_folder, told_as
from steelyard.experiment.code import Ask
from steelyard.experiment.description import Description
from steelyard.experiment.folders import unnamed_folder
from steelyard.experiment.loading import read_experiment
from steelyard.experiment.running import resume, run
from steelyard.rounds.drafting import TooFewClients
from steelyard.rounds.soundness import Exploded
from steelyard.runs.history import History
from steelyard.runs.store import exists, held
from steelyard.sweeps.jobs import check_jobs, in_processes
from steelyard.sweeps.plan import PlannedRun, Sweep
from steelyard.sweeps.plan_file import difference, is_sweep, read_sweep, write_sweep

if TYPE_CHECKING:
    from steelyard.data.dataset import DatasetOrSeeded

DIVERGED = ".diverged"
"""A file beside a run's folder, of its name with this ending, says why the run has no end: a model exploded."""
TEST = "test"
"""The folder in a sweep's folder with the run of the best point on the test set."""


@dataclass(frozen=True)
class How:
    """How the runs of one folder are done: what is shown and said, what code was agreed to, how many go at a time."""

    progress: bool = False
    announce: Callable[[str], None] | None = None
    """Gets a line before each run."""
    ask: Ask | None = None
    """Is called with the code that the folder names, before it runs."""
    accept_changes: bool = False
    jobs: int = 1
    """So many runs go at a time, in processes of their own."""
    dataset: DatasetOrSeeded | None = None

    def tell(self, line: str) -> None:
        """Say what comes next, where somebody listens."""
        if self.announce is not None:
            self.announce(line)

    def agree(self, folder: Path, experiment: Description) -> None:
        """Ask about the code that an experiment of this folder names."""
        if self.ask is not None and (code := experiment.named_code()):
            self.ask(str(folder), code)


ALONE = How()
"""One run after the other, in silence."""


def sweep(planned: Sweep, out: str | Path | None = None, how: How = ALONE) -> Path:
    """Run every point of a sweep into a folder, which is returned; in a folder that holds the same sweep, go on."""
    folder = _folder(planned, out)
    if is_sweep(folder):
        changed = difference(read_sweep(folder), planned)
        if changed is not None:
            raise UserError(
                f"--out: {folder} holds another sweep, which differs in {changed}; allowed: a new folder, or "
                f"`steelyard resume {folder}`"
            )
    else:
        write_sweep(planned, folder)
    return resume_sweep(folder, how)


def resume_sweep(folder: Path, how: How = ALONE) -> Path:
    """Go on with a sweep that was stopped or killed: runs that are done stay, one that was cut off is resumed.

    Every run ends with the bits that it would have had without the stop.
    """
    check_jobs(how.jobs)
    if how.jobs > 1 and how.dataset is not None:
        have = "with a data set from Python, which other processes do not have"
        raise UserError(f"jobs: got {how.jobs} {have}; allowed: 1")
    found = read_sweep(folder)
    how.agree(folder, found.experiment)
    with closing(held(folder)):
        parts = found.parts
        left = [number for number in found.own if not done(folder, parts[number].folder)]

        def announce(number: int) -> None:
            how.tell(f"run {number + 1} of {len(parts)}: {parts[number].folder}")

        try:
            if how.jobs > 1:
                in_processes(run_part, folder, left, how.jobs, announce)
                return folder
            for number in left:
                announce(number)
                _try(parts[number], folder, how)
        except KeyboardInterrupt:
            raise Stopped(folder, again=how.jobs > 1) from None
    return folder


def run_part(folder: Path, number: int) -> None:
    """Run one point of a sweep, or go on with it; for the processes of `--jobs`."""
    _try(read_sweep(folder).parts[number], folder, ALONE)


def diverged(folder: Path, run: str) -> bool:
    """Whether a run of a sweep has no end because a model exploded."""
    return files.is_file(folder / f"{run}{DIVERGED}")


def done(folder: Path, run: str) -> bool:
    """Whether a run of a sweep has nothing left to do."""
    return diverged(folder, run) or finished(folder / run)


def _try(part: PlannedRun, folder: Path, how: How) -> None:
    """Run a point; a learning rate at which training explodes is an answer, not a reason to stop the sweep."""
    try:
        run_or_resume(part, folder, how)
    except (Exploded, TooFewClients) as error:
        with told_as(f"{folder}: cannot be written", "a writable folder"):
            files.write(folder / f"{part.folder}{DIVERGED}", f"{error}\n".encode())


def run_on_test(folder: Path, best: Description, *, progress: bool = False) -> Path:
    """Run the experiment that a sweep has chosen on the test set, with the sweep's seeds, or go on with it."""
    target = folder / TEST
    if exists(target) and not _same_choice(read_experiment(target), best):
        raise UserError(f"{target}: holds a run of another choice; allowed: remove it and try again")
    try:
        return run_or_resume(PlannedRun(TEST, (), best, read_sweep(folder).seeds), folder, How(progress))
    except KeyboardInterrupt:
        raise Stopped(folder) from None


def _same_choice(kept: Description, best: Description) -> bool:
    """Whether a run is that of an experiment; the share of clients that the run came to may have been left open."""
    rounds = (
        best.rounds
        if best.rounds.fraction is not None
        else best.rounds.model_copy(update={"fraction": kept.rounds.fraction})
    )
    return kept.model_dump() == best.model_copy(update={"rounds": rounds}).model_dump()


def finished(folder: Path) -> bool:
    """Whether a folder holds a run that has ended."""
    return exists(folder) and History(folder).info.get("status") == "finished"


def run_or_resume(part: PlannedRun, folder: Path, how: How) -> Path:
    """Run one part into its folder, or go on with it where it has begun; a mistake is named with the part."""
    target = folder / part.folder
    try:
        if exists(target):
            accept = how.accept_changes
            return resume(target, dataset=how.dataset, progress=how.progress, ask=how.ask, accept_changes=accept)
        return run(part.experiment, out=target, seeds=part.seeds, dataset=how.dataset, progress=how.progress)
    except (Exploded, TooFewClients):
        raise
    except UserError as error:
        kind = MachineError if isinstance(error, MachineError) else UserError
        raise kind(f"{part.folder}: {error}") from None


def _folder(planned: Sweep, out: str | Path | None) -> Path:
    """Return the folder of a sweep: that of an earlier one, or one without anything in it."""
    if out is None:
        return unnamed_folder(planned.experiment, f"{planned.experiment.name}-sweep")
    folder = own_folder(Path(out), "--out")
    if folder.is_dir() and any(folder.iterdir()) and not is_sweep(folder):
        raise UserError(f"--out: {brief(str(folder))} is not empty and holds no sweep; allowed: a new folder")
    return folder
