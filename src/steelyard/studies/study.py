"""A study: several runs in one folder with one answer. Planning, running, resuming and joining are the same for all.

A study is its plan: its fields are the file of its folder. What differs is which cells it has, and what they come to.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar, cast

import tomli_w
from pydantic import PlainSerializer, PlainValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from steelyard.base import files
from steelyard.base.errors import MachineError, Stopped, UserError, empty_folder, own_folder, told_as
from steelyard.base.logs import show
from steelyard.base.settings import Section, parse, validated
from steelyard.clients.ranks.group import current
from steelyard.experiment.description import READING, Description
from steelyard.experiment.loading import (
    FOLDER,
    Ask,
    build,
    content_name,
    keep_code,
    named_code,
    own_text,
    rename_code,
    resolve_code,
    unnamed_folder,
)
from steelyard.experiment.parts import Part, in_order
from steelyard.experiment.running import resume, run
from steelyard.report.rendering import Block, tables_csv
from steelyard.rounds.progress import show_duration
from steelyard.rounds.weigh import Exploded, TooFewClients
from steelyard.runs.database import exists
from steelyard.runs.history import History
from steelyard.runs.store import held

if TYPE_CHECKING:
    from steelyard.data.dataset import DatasetOrSeeded

Scalar = str | int | float | bool


def fields_of(given: object) -> Mapping[str, Any]:
    """Return what a file holds in the place of a section; anything else is refused."""
    if not isinstance(given, Mapping):
        raise PydanticCustomError("plain", "a section of fields")
    return cast("Mapping[str, Any]", given)


def _experiment(given: object, info: ValidationInfo) -> Description:
    return given if isinstance(given, Description) else build(fields_of(given), "", reading=info.context == READING)


def _part(given: object) -> Part:
    try:
        return given if isinstance(given, Part) else Part.read(str(given))
    except UserError:
        raise PydanticCustomError("plain", "NUMBER/OF, such as 3/8") from None


AnyExperiment = Annotated[
    Description,
    PlainValidator(_experiment),
    PlainSerializer(lambda experiment: experiment.model_dump(mode="json", exclude_none=True)),
]
"""An experiment of any kind as a field of a plan."""


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    folder: str
    """Inside that of the study."""
    seeds: tuple[int, ...]
    changes: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    """What its experiment has of its own, by dotted names of fields."""
    name: str = ""
    """Of an arena's run the scene."""


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


ALONE = How()
"""One run after the other, in silence."""


class Study(Section):
    """Several runs and what they come to: derive from it, name its file, and say what the cells and the answer are.

    Its fields are the plan, which its folder holds. `experiment` holds what names code of the user's own.
    """

    kind: ClassVar[str]
    """As users call it: "a sweep"."""
    file: ClassVar[str] = ""
    """What the plan is called in a folder; empty for a study without one, which only the same command continues."""
    one: ClassVar[str] = "run"
    """What a cell is called while it runs."""
    failed: ClassVar[str] = ".failed"
    """A file beside a cell's folder, of its name with this ending, says why it has no end."""
    beside: ClassVar[frozenset[str]] = frozenset()
    """What may lie in the folder before the plan does."""

    part: Annotated[Part, PlainValidator(_part), PlainSerializer(str)] | None = None
    """The share of the cells that this folder is for; without it all of them."""

    @abstractmethod
    def cells(self) -> Sequence[Cell]:
        """Return every run, in the order in which they are run."""

    @abstractmethod
    def described(self, cell: Cell) -> Description:
        """Return the experiment of a cell."""

    @abstractmethod
    def answer(self, folder: Path) -> Any:
        """Return what the runs that have ended come to; nothing is run, also none of the code that the plan names."""

    def parts(self, answer: Any) -> Sequence[Block]:
        """Return an answer as people read it; for programs it is a document itself."""
        raise NotImplementedError

    def next_lines(self, answer: Any) -> Sequence[str]:
        """Return where everything lies and what to run next, for a terminal."""
        return ()

    def csv(self, answer: Any) -> str:
        """Return an answer as CSV: its tables, unless there is a form of its own."""
        return tables_csv(self.parts(answer))

    def problem(self, answer: Any) -> str:
        """Return why an answer decides nothing, where that is a failure; empty where it is none."""
        return ""

    def write_files(self, folder: Path) -> Any:
        """Write what the folder holds beside its runs, and return the answer; called whenever all has run."""
        return self.answer(folder)

    def looks(self, folder: Path) -> Iterator[Sequence[Cell]]:
        """Give the cells to run, all at once, or some at a time where later ones depend on what those came to."""
        yield self.own

    def check(self, cells: Sequence[Cell]) -> None:
        """Refuse cells that cannot run on this machine; called before any of them does."""

    def run(self, folder: Path, cell: Cell, how: How = ALONE) -> None:
        """Run a cell, or go on with it; override it where a run without an end is an answer."""
        run_or_resume(folder, cell, self.described(cell), how)

    def ended(self, folder: Path, cell: Cell) -> bool:
        """Whether a cell has nothing left to do."""
        return finished(folder / cell.folder) or files.is_file(self.failure(folder, cell))

    def about(self, cell: Cell) -> str:
        """Return what is said of a cell before it runs."""
        return cell.folder

    def folders(self, cell: Cell) -> Sequence[str]:
        """Return the folders that a cell may have, its own first."""
        return (cell.folder,)

    def added_to(self, kept: Study) -> Self:
        """Return the study that goes on in the folder of `kept`; override it where one may add cells to another."""
        return self

    @property
    def own(self) -> Sequence[Cell]:
        """The cells that run in this folder."""
        return self.cells() if self.part is None else self.part.share(self.cells(), "runs")

    def failure(self, folder: Path, cell: Cell) -> Path:
        """Return the file that says why a cell has no end."""
        return folder / f"{cell.folder}{self.failed}"

    def note_failure(self, folder: Path, cell: Cell, why: object) -> None:
        """Write down why a cell has no end."""
        with told_as(f"{folder}: cannot be written", "a writable folder"):
            files.write(self.failure(folder, cell), f"{why}\n".encode())

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        """Whether a folder holds such a study."""
        return files.is_file(folder / cls.file)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the study that a folder holds; none of the code that it names is run."""
        path = folder / cls.file
        if not cls.is_in(folder):
            raise UserError(f"{folder}: no {cls.file} here; allowed: the folder of {cls.kind}")
        document = parse(own_text(path), str(path))
        if isinstance(experiment := document.get("experiment"), dict):
            resolve_code(cast("dict[str, Any]", experiment), folder.resolve())
        return validated(cls, document, str(path), READING)

    def document(self) -> dict[str, Any]:
        """Return the plan as its file holds it."""
        return self.model_dump(mode="json", exclude_none=True)

    def by_content(self) -> dict[str, Any]:
        """Return the plan with code by what it says, wherever it lies."""
        document = self.document()
        rename_code(document["experiment"], content_name)
        return document

    def write(self, folder: Path) -> None:
        """Make a folder that of this study; the code that it names is copied into it."""
        document = self.document()
        with told_as(f"{folder}: cannot be written", "a writable folder"):
            folder.mkdir(parents=True, exist_ok=True)
            keep_code(document["experiment"], folder / FOLDER)
            files.write(folder / self.file, tomli_w.dumps(document).encode())


StudyT = TypeVar("StudyT", bound=Study)


def difference(one: Study, other: Study) -> str | None:
    """Return the first field in which two studies differ, that of their experiment by its own name; None if in none."""
    found = _differing(one.by_content(), other.by_content())
    return None if found is None else found.removeprefix("experiment.")


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    for name in {**one, **other}:
        mine, theirs = one.get(name), other.get(name)
        if mine != theirs:
            if isinstance(mine, dict) and isinstance(theirs, dict):
                return f"{name}.{_differing(mine, theirs)}"
            return name
    return None


def folder_for(study: Study, out: str | Path | None, experiment: Description, name: str) -> Path:
    """Write the plan of a study into its folder, which is returned: a new one, or one that holds the same study.

    Without `out` it has this name and the time, where the experiment keeps its runs.
    """
    folder = unnamed_folder(experiment, name) if out is None else own_folder(Path(out), "--out")
    kept = type(study).read(folder) if study.is_in(folder) else None
    if kept is not None:
        whole = study.added_to(kept)
        if (changed := difference(kept.added_to(study), whole)) is not None:
            raise UserError(
                f"--out: {folder} holds another study, which differs in {changed}; allowed: a new folder, or "
                f"`steelyard resume {folder}`"
            )
        if whole.cells() == kept.cells():
            return folder
        study = whole
    else:
        empty_folder(folder, "--out", study.beside, f"a new folder, or the one of {study.kind}")
    there = () if kept is None else kept.own
    study.check([cell for cell in study.own if cell not in there])
    study.write(folder)
    return folder


def go_on(study: Study, folder: Path, how: How = ALONE) -> Path:
    """Run what is left of a study: runs that are done stay, one that was cut off is resumed. Returns the folder.

    Every run ends with the bits that it would have had without the stop.
    """
    check_jobs(how.jobs)
    if how.jobs > 1 and how.dataset is not None:
        have = "with a data set from Python, which other processes do not have"
        raise UserError(f"jobs: got {how.jobs} {have}; allowed: 1")
    if how.ask is not None and (code := named_code(study.document()["experiment"])):
        how.ask(str(folder), code)
    with told_as(f"{folder}: cannot be written", "a writable folder"):
        folder.mkdir(parents=True, exist_ok=True)
    with closing(held(folder)):
        try:
            for cells in study.looks(folder):
                _run(study, cells, folder, how)
        except KeyboardInterrupt:
            raise Stopped(folder, again=how.jobs > 1 or not study.file) from None
    return folder


def _run(study: Study, cells: Sequence[Cell], folder: Path, how: How) -> None:
    left = [cell for cell in cells if not study.ended(folder, cell)]
    study.check(left)
    begun = time.monotonic()

    def announce(cell: Cell) -> None:
        if how.announce is not None:
            line = f"{study.one} {list(cells).index(cell) + 1} of {len(cells)}: {study.about(cell)}"
            how.announce(line + _time_left(begun, left.index(cell), len(left), how.jobs))

    if how.jobs > 1:
        in_processes(partial(study.run, folder), left, how.jobs, announce)
        return
    for cell in left:
        announce(cell)
        study.run(folder, cell, how)


def _time_left(begun: float, position: int, of: int, jobs: int) -> str:
    """Return the end of the line before a run: the time that those before it took, for what is left; empty at first."""
    ended = max(0, position - jobs + 1)
    if not ended:
        return ""
    return f"; about {show_duration((time.monotonic() - begun) / ended * (of - ended))} left"


def finished(folder: Path) -> bool:
    """Whether a folder holds a run that has ended."""
    return exists(folder) and History(folder).facts.status == "finished"


def run_or_resume(folder: Path, cell: Cell, experiment: Description, how: How) -> None:
    """Run a cell of a folder, or go on with it where it has begun; a mistake is named with the cell."""
    target = folder / cell.folder
    try:
        if exists(target):
            accept = how.accept_changes
            resume(target, dataset=how.dataset, progress=how.progress, ask=how.ask, accept_changes=accept)
        else:
            run(experiment, out=target, seeds=cell.seeds, dataset=how.dataset, progress=how.progress)
    except (Exploded, TooFewClients):
        raise
    except UserError as error:
        kind = MachineError if isinstance(error, MachineError) else UserError
        raise kind(f"{cell.folder}: {error}") from None


def join(kind: type[StudyT], folders: Sequence[Path], out: Path) -> Path:
    """Make one study in a new folder of all parts of one, given in any order; returns the folder.

    The parts stay as they are. What is missing, doubled, not done or of another whole is named.
    """
    studies = {folder: kind.read(folder) for folder in folders}
    parts = in_order({folder: study.part for folder, study in studies.items()})
    whole = {folder: study.model_copy(update={"part": None}) for folder, study in studies.items()}
    copied: dict[str, Path] = {}
    for folder in parts:
        if (changed := difference(whole[parts[0]], whole[folder])) is not None:
            raise UserError(
                f"{folder}: is a part of another study than {parts[0]}, which differs in {changed}; allowed: parts of "
                "one"
            )
        for cell in studies[folder].own:
            if not finished(folder / cell.folder) and not files.is_file(studies[folder].failure(folder, cell)):
                raise UserError(
                    f"{folder}: {cell.folder} is not done; allowed: parts that are (`steelyard resume {folder}` goes "
                    "on with one that was stopped)"
                )
            copied |= dict.fromkeys(studies[folder].folders(cell), folder)
    out = empty_folder(out, "--out")
    try:
        for name, folder in copied.items():
            if files.is_file(reason := folder / f"{name}{kind.failed}"):
                files.write(out / f"{name}{kind.failed}", files.read_bytes(reason))
            if files.is_folder(folder / name):
                files.refuse_links(folder / name)
                shutil.copytree(folder / name, out / name)
        # Last: a folder without its plan is no study.
        whole[parts[0]].write(out)
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


# Several runs at a time, each in a process of its own.


MOST_JOBS = 256
ItemT = TypeVar("ItemT")


def check_jobs(jobs: int) -> None:
    """Refuse a number of processes that cannot be, or more than one where ranks share out each run."""
    if not 1 <= jobs <= MOST_JOBS:
        raise UserError(f"--jobs: got {jobs}; allowed: a whole number from 1 to {MOST_JOBS}")
    if jobs > 1 and current() is not None:
        raise UserError(f"--jobs: got {jobs} on several ranks, which share out each run; allowed: 1")


def in_processes(
    work: Callable[[ItemT], None], items: Sequence[ItemT], jobs: int, announce: Callable[[ItemT], None]
) -> None:
    """Do the work of each item, `jobs` at a time; the first that fails stops the others, which can go on later.

    Each process gets the same number of the processor's cores, however few runs are left: with another number of
    threads clients are stacked otherwise, and a call that goes on must give the same bits. Runs are safe against being
    killed, so that is what a stop does to them.
    """
    processes = multiprocessing.get_context("spawn")
    waiting, free = list(items), list(range(jobs))
    running: dict[Connection, tuple[BaseProcess, int]] = {}
    try:
        while waiting or running:
            while waiting and free:
                item, core = waiting.pop(0), free.pop(0)
                announce(item)
                answer, question = processes.Pipe(duplex=False)
                process = processes.Process(target=_process, args=(work, item, core, jobs, question))
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


def _process(work: Callable[[ItemT], None], item: ItemT, core: int, jobs: int, answer: Connection) -> None:
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
        work(item)
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
