"""Running the scenes of an arena, one ordinary comparison each; what is done stays, what was stopped goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from steelyard.base import files
from steelyard.base.errors import MachineError, Stopped, UserError, one_line, told_as
from steelyard.base.files import ARENA_FILE
from steelyard.base.logs import logger
from steelyard.runs.history import History
from steelyard.runs.store import held
from steelyard.studies.arena import SCENES, Arena, read_arena
from steelyard.studies.scenes import (
    FAILED,
    RIVALS,
    complete,
    left_out_for_all,
    read_figures,
    rivals_folder,
    scene_folder,
)
from steelyard.studies.study import (
    ALONE,
    How,
    Share,
    check_jobs,
    finished,
    in_processes,
    join_shares,
    run_or_resume,
    time_left,
)
from steelyard.studies.sweep import PlannedRun
from steelyard.studies.verdict import OPEN, judge

_log = logger(__name__)


def run_arena(folder: Path, how: How = ALONE) -> Arena:
    """Run the scenes of an arena's folder that are not done; a scene in which the candidate fails does not end it.

    What is said before each scene has the time that the others took as a measure of what is left. Failed scenes are
    tried again; what the machine lacks ends the arena, and a further call goes on. Missing data of any scene are said
    before the first begins.
    """
    check_jobs(how.jobs)
    arena = read_arena(folder)
    how.agree(folder, arena.scene(arena.scenes[0]))
    first = [name for name in arena.own if not complete(scene_folder(folder, name, 1))]
    arena.suite.check_data(first, arena.changes)
    with closing(held(folder)):
        try:
            for batch in range(1, len(arena.batches) + 1):
                _run_batch(arena, folder, batch, how)
        except KeyboardInterrupt:
            raise Stopped(folder, again=how.jobs > 1) from None
    return arena


def _run_batch(arena: Arena, folder: Path, batch: int, how: How) -> None:
    """Run a batch of seeds in each scene that the batches before it have not decided.

    A look is at whole batches only, so that an arena that was stopped on the way runs what it would have run.
    """
    before = judge(arena, read_figures(folder, arena, batch - 1))
    own = set(arena.own)
    wanted = [scene["scene"] for scene in before["scenes"] if scene["verdict"] in OPEN and scene["scene"] in own]
    left = [name for name in wanted if not complete(scene_folder(folder, name, batch))]
    begun = time.monotonic()

    def announce(number: int) -> None:
        position = left.index(name := arena.scenes[number])
        line = _announcement(arena, name, len(wanted) - len(left) + position + 1, len(wanted), batch)
        how.tell(line + time_left(begun, position, len(left), how.jobs))

    numbers = [arena.scenes.index(name) for name in left]
    if how.jobs > 1 and batch == 1:
        in_processes(run_scene, folder, numbers, how.jobs, announce)
        return
    for number in numbers:
        announce(number)
        _try(arena, arena.scenes[number], folder, batch, how)


def run_scene(folder: Path, number: int) -> None:
    """Run one scene of an arena, or go on with it; for the processes of `--jobs`."""
    arena = read_arena(folder)
    _try(arena, arena.scenes[number], folder, 1, ALONE)


def _announcement(arena: Arena, name: str, position: int, of: int, batch: int) -> str:
    look = f"seeds {arena.batches[batch - 1][0]} to {arena.batches[batch - 1][-1]}, " if len(arena.batches) > 1 else ""
    return f"{look}scene {position} of {of}: {name}, {arena.suite.scenes[name].about}"


def _try(arena: Arena, name: str, folder: Path, batch: int, how: How) -> None:
    """Run a scene; where it ends with a mistake of the candidate's, that is its result, and the rivals run alone."""
    run = scene_folder(folder, name, batch)
    failure = run.with_name(f"{run.name}{FAILED}")
    part = f"{SCENES}/{run.name}"
    planned = PlannedRun(part, (), arena.scene(name), arena.batches[batch - 1])
    try:
        if not finished(run):
            run_or_resume(planned, folder, how)
    except (Stopped, MachineError):
        raise
    except Exception as error:
        if not isinstance(error, UserError) and not arena.scene(name).named_code():
            raise  # a fault of ours, and no code of the user's that could be its cause
        why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        why = one_line(why.removeprefix(f"{part}: "))
    else:
        why = left_out_for_all(History(run))
    if why:
        _log.info(f"scene {name}: {arena.candidate.label} failed: {why}; the others go on without it")
        alone = PlannedRun(f"{SCENES}/{rivals_folder(run).name}", (), arena.rivals_of(name), planned.seeds)
        if not finished(rivals_folder(run)):
            run_or_resume(alone, folder, How(how.progress))
    with told_as(f"{folder}: cannot be written", "a writable folder"):
        if why and not finished(run):
            files.write(failure, f"{why}\n".encode())
        else:
            failure.unlink(missing_ok=True)


def join_arenas(folders: Sequence[Path], out: Path) -> Path:
    """Make one arena in a new folder of all parts of one, given in any order; returns the folder."""
    arenas = {folder: read_arena(folder) for folder in folders}
    shares = {
        folder: Share(
            arena.part,
            replace(arena, part=None).document(),
            [f"{SCENES}/{name}" for name in arena.own],
            [f"{SCENES}/{name}{RIVALS}" for name in arena.own],
        )
        for folder, arena in arenas.items()
    }
    return join_shares("arena", shares, out, ARENA_FILE, FAILED)
