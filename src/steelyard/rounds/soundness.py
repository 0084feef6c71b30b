"""A global model that is not finite, or that exploded, is never kept: the round is weighed without the culprit."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType

import numpy as np
import torch

from steelyard.base.errors import UserError, in_words
from steelyard.base.usercode import is_ours
from steelyard.messages.algorithm import Algorithm
from steelyard.messages.updates import Failure, Task, Updates

LARGEST = 1e15
"""No parameter of a model that can still learn is larger."""


class Exploded(UserError):
    """No sound global model came out of a round: the federation ends before it, and the last good model stays.

    The loop goes on with the others; a run that has no other stops with this line.
    """

    def __init__(self, federation: str, round: int, reason: str, allowed: str = "a smaller learning rate") -> None:
        self.reason = reason
        super().__init__(
            f"round {round} of {in_words(federation)}: {reason}; the model before this round is kept "
            f"(allowed: {allowed})"
        )


def is_sound(model: torch.Tensor) -> bool:
    """Whether a global model may be kept: all its numbers are finite and none is absurd."""
    if not model.numel():
        return True
    # Smallest and largest in one go need no memory of the model's size; a comparison with NaN is false.
    smallest, largest = model.aminmax()
    return bool((smallest >= -LARGEST) & (largest <= LARGEST))


def without_culprit(task: Task, updates: Updates, least: int) -> Updates:
    """Return the updates without the one farthest from the model that was sent; the client and why are noted.

    Where fewer than `least` would be left, the model is beyond repair, and that is no lack of clients.
    """
    distances = updates.payload.divergence(task.parameters)
    culprit = int(np.argmax(np.where(np.isfinite(distances), distances, np.inf)))
    if len(updates.clients) <= max(1, least):
        raise Exploded(
            task.federation, task.round, "the global model is no longer finite, whichever client is left out"
        )
    keep = [row for row in range(len(updates.clients)) if row != culprit]
    reason = f"left out: with its update ({distances[culprit]:.3g} away) the global model explodes"
    return updates.select(keep, [Failure(updates.clients[culprit], reason)])


# Faults in an algorithm of the user's own; a fault of ours keeps its traceback.


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
