"""Running a sweep into a folder, one run for each point of its grid, and going on with one that was stopped."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from steelyard.base import files
from steelyard.base.errors import MachineError, Stopped, UserError, brief, own_folder, told_as
from steelyard.base.logs import show
from steelyard.clients.ranks.group import current
from steelyard.experiment.description import Description
from steelyard.experiment.loading import Ask, read_experiment, unnamed_folder
from steelyard.experiment.parts import Part, in_order
from steelyard.experiment.running import resume, run
from steelyard.rounds.progress import show_duration
from steelyard.rounds.weigh import Exploded, TooFewClients
from steelyard.runs.database import exists
from steelyard.runs.history import History
from steelyard.runs.store import held
from steelyard.studies.sweep import (
    SWEEP_FILE,
    PlannedRun,
    Sweep,
    difference,
    differing,
    is_sweep,
    read_sweep,
    write_plan,
    write_sweep,
)

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
    return exists(folder) and History(folder).facts.status == "finished"


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


# Several runs at a time, each in a process of its own.


Work = Callable[[Path, int], None]
"""What a process does: a folder, and the number of the run in it."""


MOST_JOBS = 256


def check_jobs(jobs: int) -> None:
    """Refuse a number of processes that cannot be, or more than one where ranks share out each run."""
    if not 1 <= jobs <= MOST_JOBS:
        raise UserError(f"--jobs: got {jobs}; allowed: a whole number from 1 to {MOST_JOBS}")
    if jobs > 1 and current() is not None:
        raise UserError(f"--jobs: got {jobs} on several ranks, which share out each run; allowed: 1")


def in_processes(work: Work, folder: Path, numbers: Sequence[int], jobs: int, announce: Callable[[int], None]) -> None:
    """Do each of the numbered runs, `jobs` at a time; the first that fails stops the others, which can go on later.

    Each process gets the same number of the processor's cores, however few runs are left: with another number of
    threads clients are stacked otherwise, and a call that goes on must give the same bits. Runs are safe against being
    killed, so that is what a stop does to them.
    """
    processes = multiprocessing.get_context("spawn")
    waiting, free = list(numbers), list(range(jobs))
    running: dict[Connection, tuple[BaseProcess, int]] = {}
    try:
        while waiting or running:
            while waiting and free:
                number, core = waiting.pop(0), free.pop(0)
                announce(number)
                answer, question = processes.Pipe(duplex=False)
                process = processes.Process(target=_process, args=(work, folder, number, core, jobs, question))
                process.start()
                question.close()
                running[answer] = (process, core)
            for answer in wait(list(running)):
                assert isinstance(answer, Connection)
                process, core = running.pop(answer)
                free.append(core)
                _check(answer, process)
    finally:
        for process, _ in running.values():
            process.kill()
        for process, _ in running.values():
            process.join()


def time_left(begun: float, position: int, of: int, jobs: int) -> str:
    """Return the end of the line before a run: the time that those before it took, for what is left; empty at first."""
    ended = max(0, position - jobs + 1)
    if not ended:
        return ""
    return f"; about {show_duration((time.monotonic() - begun) / ended * (of - ended))} left"


def _check(answer: Connection, process: BaseProcess) -> None:
    try:
        problem: str | None = answer.recv()
    except EOFError:
        process.join()
        raise UserError(
            f"--jobs: a run's process ended with code {process.exitcode}, as when memory is short; allowed: fewer jobs"
        ) from None
    finally:
        answer.close()
    process.join()
    if problem is not None:
        raise UserError(problem)


def _process(work: Work, folder: Path, number: int, core: int, jobs: int, answer: Connection) -> None:
    show()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ctrl-C reaches every process of the terminal: the first one stops the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // jobs)
        first = core * share % len(cores)
        os.sched_setaffinity(0, cores[first : first + share])
    try:
        work(folder, number)
    except UserError as error:
        answer.send(str(error))
    else:
        answer.send(None)
    answer.close()


def _end_with_parent() -> None:
    """End this process once the one that began it is gone: killed, it can stop nobody, and a second call goes on."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "work is done in a process that was begun for it"
    parent.join()
    os._exit(1)


# The parts of a sweep or an arena, put together.


@dataclass(frozen=True)
class Share:
    """What one folder holds of several runs that were shared out."""

    part: Part | None
    whole: dict[str, Any]
    """The plan of all runs, as its file holds it without a part."""
    runs: list[str]
    """The folders, in this one, of the runs that are its own."""
    further: Sequence[str] = ()
    """Folders that belong to some of them, where they are there."""


def join_sweeps(folders: Sequence[Path], out: Path) -> Path:
    """Make one sweep in a new folder of all parts of one, given in any order; returns the folder."""
    sweeps = {folder: read_sweep(folder) for folder in folders}
    shares = {
        folder: Share(
            sweep.part, replace(sweep, part=None).document(), [sweep.parts[number].folder for number in sweep.own]
        )
        for folder, sweep in sweeps.items()
    }
    return join_shares("sweep", shares, out, SWEEP_FILE, DIVERGED)


def join_shares(
    kind: Literal["arena", "sweep"], shares: Mapping[Path, Share], out: Path, plan_file: str, failed: str
) -> Path:
    """Make one folder of all shares of one whole, given in any order; returns the folder.

    A run without an end has a file beside it, of its name with the ending `failed`, that says why. The shares stay as
    they are. What is missing, doubled, not done or of another whole is named.
    """
    parts = in_order({folder: share.part for folder, share in shares.items()})
    whole = shares[parts[0]].whole
    runs: dict[str, Path] = {}
    for folder in parts:
        if (field := differing(whole, shares[folder].whole)) is not None:
            raise UserError(
                f"{folder}: is a part of another {kind} than {parts[0]}, which differs in {field}; allowed: parts of "
                "one"
            )
        for name in shares[folder].runs:
            if not finished(folder / name) and not files.is_file(folder / f"{name}{failed}"):
                raise UserError(
                    f"{folder}: {name} is not done; allowed: parts that are (`steelyard resume {folder}` goes on with "
                    "one that was stopped)"
                )
            runs[name] = folder
        runs |= dict.fromkeys(shares[folder].further, folder)
    out = own_folder(out, "--out")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out: {out} is not empty; allowed: a new folder")
    try:
        for run, folder in runs.items():
            if files.is_file(reason := folder / f"{run}{failed}"):
                files.write(out / f"{run}{failed}", files.read_bytes(reason))
            if (folder / run).exists():
                files.refuse_links(folder / run)
                shutil.copytree(folder / run, out / run)
        # Last: a folder without it is no sweep and no arena.
        write_plan(out / plan_file, whole)
    except BaseException as error:
        # The parts are whole: nothing is lost, and the next call finds the folder free.
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(error, OSError):
            raise MachineError(f"{out}: cannot be written: {_reason(error)}; allowed: a writable folder") from error
        raise
    return out


def _reason(error: OSError) -> str:
    """Say why a folder could not be copied: of all its files, the first."""
    if isinstance(error, shutil.Error):
        return str(error.args[0][0][-1])
    return error.strerror or str(error)
