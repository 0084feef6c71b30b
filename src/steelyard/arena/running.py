"""Running the scenes of an arena, one ordinary comparison each; what is done stays, what was stopped goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from steelyard import files
from steelyard.arena.figures import FAILED, scene_folder
from steelyard.arena.plan import SCENES, Arena, read_arena
from steelyard.errors import Stopped, UserError, one_line
from steelyard.experiment.code import Ask
from steelyard.rounds.progress import show_duration
from steelyard.runs.store import held
from steelyard.sweeps.plan import PlannedRun
from steelyard.sweeps.running import finished, run_or_resume


def run_arena(
    folder: Path,
    *,
    progress: bool = False,
    tell: Callable[[str], None] | None = None,
    ask: Ask | None = None,
    accept_changes: bool = False,
) -> Arena:
    """Run the scenes of an arena's folder that are not done; a scene in which the candidate fails does not end it.

    `tell` gets a line before each scene, with the time that the others took as a measure of what is left. Scenes that
    failed are tried again, so that a full disk costs nothing but time.
    """
    arena = read_arena(folder)
    if ask is not None and (code := arena.scene(arena.scenes[0]).named_code()):
        ask(str(folder), code)
    with closing(held(folder)):
        left = [name for name in arena.scenes if not finished(scene_folder(folder, name))]
        begun = time.monotonic()
        try:
            for number, name in enumerate(left):
                if tell is not None:
                    tell(_announcement(arena, name, number, len(left), time.monotonic() - begun))
                _try(arena, name, folder, progress, ask, accept_changes)
        except KeyboardInterrupt:
            raise Stopped(folder) from None
    return arena


def _announcement(arena: Arena, name: str, done: int, of: int, seconds: float) -> str:
    rest = f"; about {show_duration(seconds / done * (of - done))} left" if done else ""
    position = len(arena.scenes) - of + done + 1
    return f"scene {position} of {len(arena.scenes)}: {name}, {arena.suite.scenes[name].about}{rest}"


def _try(arena: Arena, name: str, folder: Path, progress: bool, ask: Ask | None, accept: bool) -> None:
    """Run a scene; where it ends with a mistake, which can only be the candidate's, that is the scene's result."""
    failure = scene_folder(folder, name).with_name(f"{name}{FAILED}")
    part = f"{SCENES}/{name}"
    try:
        run_or_resume(PlannedRun(part, (), arena.scene(name), arena.seeds), folder, None, progress, ask, accept)
    except Stopped:
        raise
    except Exception as error:
        if not isinstance(error, UserError) and not arena.scene(name).named_code():
            raise  # a fault of ours, and no code of the user's that could be its cause
        why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        try:
            files.write(failure, f"{one_line(why.removeprefix(f'{part}: '))}\n".encode())
        except OSError as problem:
            raise UserError(f"{folder}: cannot be written: {problem.strerror}; allowed: a writable folder") from problem
    else:
        with suppress(FileNotFoundError):
            failure.unlink()
