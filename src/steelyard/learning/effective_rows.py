"""How many rows an update rests on, where training forgets: what pulls a model back undoes the steps before."""

from __future__ import annotations

from steelyard.learning.settings import TrainingSettings

_MOST_STEPS = 100_000
"""Steps that are looked at; earlier ones weigh as much as these, or nothing."""
_HUGE = 1e100


def effective_rows(size: int, training: TrainingSettings) -> float:
    """Return the effective number of rows behind an update of a client with so many; at most that many.

    A gradient of size 1 moves the model by h(t) when t steps have followed it: with weight decay λ a step multiplies
    what was before by 1 − ηλ, so that with ηλ = 1 the last batch is all that is left. Each row of a batch of b has the
    weight h(t)/b, and (Σw)² / Σw² is the number of equal weights that vary as these do (Kish 1965). Use it to judge
    settings, before anything is trained.
    """
    batch = size if training.batch_size == "full" else min(training.batch_size, size)
    each_epoch = -(-size // batch)
    last = size - batch * (each_epoch - 1)
    moved, speed, total, squares = 0.0, 1.0, 0.0, 0.0
    steps = training.updates or training.epochs * each_epoch
    for age in range(min(steps, _MOST_STEPS)):
        speed = speed if age == 0 else training.momentum * speed + training.weight_decay * moved
        moved -= training.learning_rate * speed
        if abs(moved) + abs(speed) > _HUGE:  # Steps that grow without end: only their proportions matter.
            moved, speed, total, squares = moved / _HUGE, speed / _HUGE, total / _HUGE, squares / _HUGE**2
        total += abs(moved)
        squares += moved**2 / (last if (steps - age) % each_epoch == 0 else batch)
    return min(float(size), total**2 / squares) if squares > 0 else 0.0
