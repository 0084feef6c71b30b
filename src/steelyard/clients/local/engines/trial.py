"""A short trial of engines on the actual model, data and machine: do they agree with the loop, and which is fastest."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch

from steelyard.clients.local.cohort import Cohort
from steelyard.clients.local.engines.engine import Engine, SequentialEngine, TrainingSetup, train_job
from steelyard.clients.local.engines.stacked import even
from steelyard.clients.local.hardware import arithmetic
from steelyard.learning.training import ClientLoop

TRIAL_STEPS = 3
TRIAL_SECONDS = 0.3
"""About how long the plain loop would take over the clients of a trial on the CPU."""
REPEATS = 5
PATIENCE = 2.0
"""Seconds after which a trial on a slow machine repeats no more."""
AGREEMENT = {"float32": 0.02, "tf32": 0.05, "bfloat16": 0.3}
"""How far an update may be from the loop's, as a share of its size."""
EPSILON = {"float32": 2.0**-23, "tf32": 2.0**-11}
"""A rounding error, as a share of a number; bfloat16 is held to its bound alone, which is the widest."""
ROUNDING = 3.0
"""Times what rounding does to the loop itself that an engine may be from it, where that is more.

In a deep network a ReLU that goes the other way moves many in the next step. On a CPU in float32, ResNet-18's third
update is .02 to .09 of its size from itself when sums are taken in another order: 1 to 2.3 times as far as when its
start is moved by a rounding error.
"""
MARGIN = 0.1
HOPELESS = 2.0
"""Times the fastest from which an engine is not timed again."""


@dataclass
class Trial:
    """What a trial found: seconds per client by engine, and why engines were refused."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    draws: bool = False

    @property
    def best(self) -> str:
        """The fastest engine; the loop where no other agrees with it.

        Engines stand in the order in which they are likely to be fast; a later one must win by a margin, because the
        clock of a shared machine is not that exact.
        """
        best = "loop"
        for name, seconds in self.seconds.items():
            if best not in self.seconds or seconds < (1 - MARGIN) * self.seconds[best]:
                best = name
        return best

    def describe(self) -> str:
        """Say the times in one line."""
        times = [f"{name} {1e3 * seconds:.3g} ms" for name, seconds in sorted(self.seconds.items())]
        failed = [f"{name} refused ({why})" for name, why in sorted(self.refused.items())]
        return ", ".join([*times, *failed]) or "no engine but the loop applies"


def run_trial(
    setup: TrainingSetup,
    cohort: Cohort,
    engines: Mapping[str, Callable[[TrainingSetup], Engine]],
    *,
    timed: bool = True,
) -> Trial:
    """Try engines on a few steps of this cohort's first clients; use it once per model and machine."""
    updates = None if setup.training.updates is None else min(setup.training.updates, TRIAL_STEPS)
    short = replace(setup, training=setup.training.model_copy(update={"epochs": 1, "updates": updates}))
    few = _shortened(cohort, short)
    draws, changed = _alone(short, few)
    found = Trial(draws=draws)
    if draws:
        found.refused = dict.fromkeys(engines.keys() - {"loop"}, "the model draws at random while it trains")
        return found
    pair = few.take(range(min(2, len(few))))
    begun = time.perf_counter()
    expected = _trained(SequentialEngine(short), pair)
    many = few.take(range(_enough(setup, few, (time.perf_counter() - begun) / len(pair)))) if timed else pair
    rounding = cache(lambda: _rounding(short, expected, pair))  # only where an engine needs it, and once for all
    ready: dict[str, tuple[Engine, Cohort]] = {}
    for name, maker in engines.items():
        try:
            engine = maker(short)
            if changed and engine.stack_size(few) is not None:
                found.refused[name] = f"its buffer {changed[0]} changes while it trains and is not sent"
                continue
            whole = _whole_stack(engine, few)
            first = _trained(engine, whole or pair)[: len(pair)]
            why = _disagrees(first, expected, pair, AGREEMENT[setup.precision])
            if why is not None and setup.precision in EPSILON:
                why = _disagrees(first, expected, pair, max(AGREEMENT[setup.precision], rounding()))
            if why is None:
                ready[name] = engine, whole or many
                if timed and whole is None:
                    _trained(engine, many)  # the first run pays for what is made once
        except Exception as error:  # whatever a module of the user's does not let an engine do
            if isinstance(error, torch.OutOfMemoryError) and not timed:
                raise  # who asked for this engine is told of the limit
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if why is not None:
            ready.pop(name, None)
            found.refused[name] = why
    if timed:
        found.seconds = _race(ready)
    return found


def _shortened(cohort: Cohort, setup: TrainingSetup) -> Cohort:
    """The same jobs with at most a few steps each, the last of them with fewer samples than the others.

    Stacks pad such a batch, so an engine whose padding reaches the model (one that looks at its batch as a whole)
    shows here, and not in a later round.
    """
    batch = setup.training.batch_size
    populations = {id(population): copy.copy(population) for population in cohort.populations}
    for population in populations.values():
        if batch == "full":
            population.sizes = np.maximum(population.sizes - np.arange(len(population.sizes)) % 2, 1)
        else:
            population.sizes = np.minimum(population.sizes, TRIAL_STEPS * batch - batch // 2)
    return replace(cohort, populations=tuple(populations[id(population)] for population in cohort.populations))


def _alone(setup: TrainingSetup, cohort: Cohort) -> tuple[bool, list[str]]:
    """Train one client twice: does it depend on the random generator, and which buffers outside the layout change?

    In the first case clients cannot share a step, in the second no stack: there such a buffer is one for all.
    """
    loop = ClientLoop(copy.deepcopy(setup.module).to(setup.device), setup.layout)
    out = torch.empty((2, setup.layout.size), device=setup.device)
    with arithmetic(setup.precision, setup.device, autocast=True):
        for draw in range(2):
            train_job(setup, loop, cohort.take([0]), 0, out[draw : draw + 1], chance=draw)
    return not torch.equal(out[0], out[1]), loop.changed()


def _whole_stack(engine: Engine, cohort: Cohort) -> Cohort | None:
    """The jobs of one stack as it will be trained, where each size costs minutes of a compiler; else None."""
    stack = engine.stack_size(cohort) if engine.name == "stacked/compiled" else None
    return None if stack is None else cohort.take(range(even(len(cohort), stack)))


def _enough(setup: TrainingSetup, cohort: Cohort, seconds: float) -> int:
    """How many clients tell engines apart: more on a GPU, where stacks want to be seen whole; a few on a CPU."""
    if setup.device.type == "cuda":
        return min(len(cohort), 64)
    return int(np.clip(TRIAL_SECONDS / max(seconds, 1e-6), min(len(cohort), 2 * setup.threads), min(len(cohort), 128)))


def _trained(engine: Engine, cohort: Cohort) -> torch.Tensor:
    out = torch.empty((len(cohort), len(cohort.starts[0])), device=cohort.dataset.device)
    engine.train(cohort, out)
    return out


def _disagrees(found: torch.Tensor, expected: torch.Tensor, cohort: Cohort, allowed: float) -> str | None:
    """Compare the updates, not the models: a model is mostly its start, and that hides a wrong update."""
    start = cohort.start(found.device)
    moved = torch.linalg.vector_norm(expected - start, dim=1)
    apart = torch.linalg.vector_norm(found - expected, dim=1)
    # A client that does not move at all (gradient 0) is held to the size of rounding.
    if bool((apart <= allowed * moved + 1e-6).all()):
        return None
    return f"its update differs from the loop's by {float((apart / moved.clamp_min(1e-12)).max()):.2g} of its size"


def _rounding(setup: TrainingSetup, expected: torch.Tensor, cohort: Cohort) -> float:
    """How far rounding may take an update: measured on the loop, from starts that are moved by a rounding error."""
    start = cohort.start(expected.device)
    updates = expected - start
    worst = 0.0
    for seed in range(2):
        signs = torch.randint(0, 2, start.shape, generator=torch.Generator().manual_seed(seed)).to(start) * 2 - 1
        moved = start * (1 + EPSILON[setup.precision] * signs)
        apart = _trained(SequentialEngine(setup), cohort.begin_at(moved)) - moved - updates
        share = torch.linalg.vector_norm(apart, dim=1) / torch.linalg.vector_norm(updates, dim=1).clamp_min(1e-12)
        worst = max(worst, float(share.max()))
    return min(ROUNDING * worst, max(AGREEMENT.values()))


def _race(engines: Mapping[str, tuple[Engine, Cohort]]) -> dict[str, float]:
    """Best seconds per client of each engine, taken in turns so that a busy spell of the machine hits all alike."""
    best = dict.fromkeys(engines, float("inf"))
    begun = time.perf_counter()
    for repeat in range(REPEATS):
        for name, (engine, cohort) in engines.items():
            if best[name] > HOPELESS * min(best.values()) and repeat:
                continue
            _synchronise(cohort)
            started = time.perf_counter()
            _trained(engine, cohort)
            _synchronise(cohort)
            best[name] = min(best[name], (time.perf_counter() - started) / len(cohort))
        if len(engines) == 1 or (repeat and time.perf_counter() - begun > PATIENCE):
            break
    return best


def _synchronise(cohort: Cohort) -> None:
    if cohort.dataset.device.type == "cuda":
        torch.cuda.synchronize(cohort.dataset.device)
