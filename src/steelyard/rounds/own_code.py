"""Faults in an algorithm of the user's own, told in one line; a fault of ours keeps its traceback."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType

from steelyard.base.errors import UserError, in_words
from steelyard.base.usercode import is_ours
from steelyard.messages.algorithm import Algorithm
from steelyard.messages.updates import Task


@contextmanager
def told_in_one_line(line: Callable[[Exception], str | None]) -> Generator[None]:
    """Raise an error as the line that is given for it; one without a line goes on as it is."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (found := line(error)) is None:
            raise
        raise UserError(found) from error


def training_fault(tasks: Sequence[Task], error: Exception) -> str | None:
    """Return where one of the tasks' algorithms fails while clients train, which cohorts of several may do at once."""
    for task in tasks:
        if where := _where(error, task.algorithm):
            told = f"algorithm {task.algorithm.name}: {where} fails: {type(error).__name__}: {error}"
            return f"round {task.round}: {told}"
    return None


def step_fault(algorithm: Algorithm, task: Task, error: Exception) -> str | None:
    """Return that the server's step of an algorithm fails, and why."""
    if is_ours(type(algorithm)):
        return None
    return (
        f"round {task.round} of {in_words(task.federation)}: algorithm {algorithm.name}: its step fails: "
        f"{type(error).__name__}: {error}; allowed: the new parameters, and a dict of what the server keeps"
    )


def _where(error: Exception, algorithm: Algorithm) -> str | None:
    """Return the function and line of an algorithm's own file that an error went through last."""
    made = type(algorithm)
    if is_ours(made):
        return None
    files = {method.__code__.co_filename for method in vars(made).values() if isinstance(method, FunctionType)}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{frames[-1].name} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else None
