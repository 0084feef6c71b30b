"""How many rows an update rests on, where training forgets: what pulls a model back undoes the steps before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steelyard.base.tallies import quotient
from steelyard.learning.settings import TrainingSettings
from steelyard.messages.algorithm import Algorithm

_MOST_STEPS = 100_000
"""Steps that are looked at; earlier ones weigh as much as these, or nothing."""
_HUGE = 1e100
_FEDAVG = Algorithm()


def effective_rows(
    size: int, training: TrainingSettings, algorithm: Algorithm = _FEDAVG, rates: Sequence[float] = (1.0,)
) -> float:
    """Return the effective number of rows behind an update of a client with so many; at most that many.

    A gradient of size 1 moves the model by h(t) when t steps have followed it: with weight decay λ and an algorithm's
    pull μ a step multiplies what was before by 1 − η(λ + μ), so that with η(λ + μ) = 1 the last batch is all that is
    left. Each row of a batch of b has the weight h(t)/b, and (Σw)² / Σw² is the number of equal weights that vary as
    these do (Kish 1965). `rates` are what η is multiplied by over the rounds; the worst of them counts. Use it to judge
    settings, before anything is trained.

    An algorithm that corrects steps moves the model along a vector that the server sends or can bring about. It can
    keep the model where gradients vanish until a step of its choice, so no more than one batch is sure to count.
    """
    batch, each_epoch, steps = _steps(size, training)
    last = size - batch * (each_epoch - 1)
    if algorithm.corrects != "nothing":
        return float(last if steps >= each_epoch else batch)
    damping, rate = training.weight_decay + algorithm.pull, training.learning_rate * np.unique(rates)
    moved, speed, total, squares = np.zeros((4, len(rate)))
    speed += 1.0
    for age in range(min(steps, _MOST_STEPS)):
        speed = speed if age == 0 else training.momentum * speed + damping * moved
        moved = moved - rate * speed
        if (np.abs(moved) + np.abs(speed)).max() > _HUGE:  # Steps that grow without end: only proportions matter.
            scale = np.maximum(np.abs(moved) + np.abs(speed), 1.0)
            moved, speed, total, squares = moved / scale, speed / scale, total / scale, squares / scale**2
        total = total + np.abs(moved)
        squares = squares + moved**2 / (last if (steps - age) % each_epoch == 0 else batch)
    behind = quotient(total**2, squares, 0.0)
    return min(float(size), float(behind.min()))


def effective_rows_of(
    count: int, size: int, training: TrainingSettings, algorithm: Algorithm = _FEDAVG, rates: Sequence[float] = (1.0,)
) -> float:
    """Return how many of `count` of a client's `size` rows, a class say, are at least behind an update.

    Rows that a round does not visit may all be among them. Use it where weights of classes can leave nothing but one
    class in an update.
    """
    behind = effective_rows(size, training, algorithm, rates)
    batch, _, steps = _steps(size, training)
    visited = min(size, steps * batch) if algorithm.corrects == "nothing" else behind
    return behind * (max(0.0, count - (size - visited)) / visited)


def _steps(size: int, training: TrainingSettings) -> tuple[int, int, int]:
    """Return the rows of a batch, the batches of an epoch, and the steps of a round."""
    batch = size if training.batch_size == "full" else min(training.batch_size, size)
    each_epoch = -(-size // batch)
    return batch, each_epoch, training.updates or training.epochs * each_epoch
