"""Faults in code of the user's own that a round runs, told in one line."""

from __future__ import annotations

import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType

from steelyard.algorithms.algorithm import Algorithm
from steelyard.errors import UserError
from steelyard.messages import Task


@contextmanager
def training_in_own_code(tasks: Sequence[Task]) -> Generator[None]:
    """Tell where an algorithm of the user's own fails while clients train; a fault of ours keeps its traceback."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        for task in tasks:
            if where := _where(error, task.algorithm):
                told = f"algorithm {task.algorithm.name}: {where} fails: {type(error).__name__}: {error}"
                raise UserError(f"round {task.round}: {told}") from error
        raise


def _where(error: Exception, algorithm: Algorithm) -> str | None:
    """Return the function and line of an algorithm's own file that an error went through last."""
    made = type(algorithm)
    if made.__module__.startswith("steelyard."):
        return None
    files = {method.__code__.co_filename for method in vars(made).values() if isinstance(method, FunctionType)}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{frames[-1].name} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else None
