"""Which engine trains a cohort: the one asked for, the one found before on this machine, or the fastest in a trial.

What was found stands in a small file, so that later runs choose the same.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import inspect
import json
import os
import platform
import textwrap
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from steelyard.base.errors import UserError
from steelyard.base.files import cache_folder
from steelyard.base.logs import doing
from steelyard.clients.local.cohort import Cohort
from steelyard.clients.local.engines.engine import Engine, TrainingSetup
from steelyard.clients.local.engines.loop import LoopEngine, train_job
from steelyard.clients.local.engines.stacked import even
from steelyard.clients.local.engines.table import STACKING, DoesNotFit, candidates, kind_of, make, parse
from steelyard.clients.local.hardware import arithmetic
from steelyard.clients.local.layers import has_hooks
from steelyard.learning import losses
from steelyard.learning.training import ClientLoop
from steelyard.messages.algorithm import Algorithm
from steelyard.messages.updates import Floats


def choice_key(setup: TrainingSetup, cohort: Cohort, engines: Sequence[str]) -> str:
    """Return a name for this model, this kind of work, this machine and the engines there are to choose from."""
    cuda = setup.device.type == "cuda"
    facts = {
        "model": of_module(setup.module),
        "features": tuple(cohort.dataset.features.shape[1:]),
        "augment": repr(cohort.dataset.augment),
        "training": setup.training.model_dump(mode="json", exclude={"learning_rate"}),
        "loss": of_loss(cohort.loss.name),
        "clients": _rough(len(cohort)),
        "samples": _rough(int(cohort.sizes.max())),
        "device": torch.cuda.get_device_name(setup.device) if cuda else platform.processor() or platform.machine(),
        "machine": platform.node(),
        "precision": setup.precision,
        "threads": setup.threads,
        "chunk": setup.chunk,
        "torch": torch.__version__,
        "engines": list(engines),
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()


def _rough(number: int) -> int:
    """The next power of two: a few clients more or less do not call for another trial."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Choice:
    """An engine as compute.engine takes it, and what every run that takes it should tell of it."""

    engine: str
    notes: tuple[str, ...] = ()


def kept_choice(name: str) -> Choice | None:
    """Return what is kept under this name, or None."""
    return _choice(_load().get(name))


def _choice(found: Any) -> Choice | None:
    """What an entry holds; None for an older one, which has no notes."""
    if not isinstance(found, dict) or not isinstance(found.get("engine"), str):
        return None
    return Choice(found["engine"], tuple(map(str, found["notes"]))) if isinstance(found.get("notes"), list) else None


def keep_choice(name: str, choice: Choice, why: str) -> Choice:
    """Keep a choice and return the one that holds: of two runs that try at the same time, the first decides."""
    try:
        with _locked():
            known = _load()
            if (first := _choice(known.get(name))) is not None:
                return first
            known[name] = {"engine": choice.engine, "why": why, "notes": list(choice.notes)}
            target = cache_folder() / "engines.json"
            fresh = target.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(known, indent=1, sort_keys=True))
            fresh.replace(target)
    except OSError:
        pass  # nowhere to keep it: the run's own record still says what was chosen
    return choice


def _load() -> dict[str, Any]:
    try:
        known = json.loads((cache_folder() / "engines.json").read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


@contextmanager
def _locked() -> Generator[None]:
    cache_folder().mkdir(parents=True, exist_ok=True)
    with open(cache_folder() / "engines.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# What a choice depends on in a module and in a loss: kinds of layers, what is trained, modes, and source.


_PLAIN = (bool, int, float, str, type(None))


def of_module(module: nn.Module) -> list[Any]:
    """Return what tells one module from another that has the same class and shapes; plain values, for a key.

    Two modules with equal fingerprints train alike: the same layers with the same settings, the same parameters
    frozen, and the same code.
    """
    layers = [
        (name, _kind(layer), layer.extra_repr(), layer.training, has_hooks(layer), _settings(layer))
        for name, layer in module.named_modules()
    ]
    parameters = [(name, list(value.shape), value.requires_grad) for name, value in module.named_parameters()]
    buffers = [(name, list(value.shape), str(value.dtype)) for name, value in module.named_buffers()]
    own = {type(layer) for layer in module.modules() if not type(layer).__module__.startswith("torch.")}
    return [layers, parameters, buffers, sorted(of_code(kind) for kind in own)]


def of_loss(name: str) -> str:
    """Return what tells one loss from another; for a loss of the user's its source counts, not only its name."""
    return name if name in losses.LOSSES else f"{name} {of_code(losses.own(name))}"


def of_code(code: type | Callable[..., Any]) -> str:
    """Return a digest of the file that defines a class or function, or of its compiled code where there is no file."""
    try:
        module = inspect.getmodule(code)
        text = inspect.getsource(code if module is None or module.__name__ == "__main__" else module)
    except (OSError, TypeError):
        functions = [value for value in getattr(code, "__dict__", {}).values() if hasattr(value, "__code__")]
        text = repr([_compiled(value) for value in (code, *functions)])
    return hashlib.blake2b(f"{_kind(code)} {text}".encode(), digest_size=12).hexdigest()


def _compiled(function: object) -> tuple[str, str]:
    body = getattr(function, "__code__", None)
    return ("", "") if body is None else (body.co_code.hex(), repr(body.co_names))


def _kind(value: object) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}"


def _settings(layer: nn.Module) -> list[tuple[str, Any]]:
    """The plain numbers and words that a layer holds, such as a dropout rate that its forward uses."""
    held = ((name, value) for name, value in vars(layer).items() if not name.startswith("_"))
    return sorted((name, repr(value)) for name, value in held if isinstance(value, (*_PLAIN, tuple)))


class ChosenEngine:
    """The engine of a run; the choice falls at the first cohort and holds for the rest."""

    def __init__(self, setup: TrainingSetup, wanted: str) -> None:
        self.setup = setup
        self.name, self.chunk = parse(wanted)
        self.engine: Engine | None = None
        self.choice = wanted
        self.reason = "asked for"
        self.notes: list[str] = []

    def train(self, cohort: Cohort, out: torch.Tensor) -> Floats:
        """Train a cohort with the engine of this run."""
        try:
            return self._settled(cohort).train(cohort, out)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"compute.memory_gb: engine {self.choice} ran out of memory on {self.setup.device} with a limit of "
                f"{self.setup.memory / 1e9:.1f} GB; allowed: a lower limit or a smaller compute.chunk"
            ) from error

    def settled(self, cohort: Cohort) -> str:
        """Return what is chosen for this run, as compute.engine takes it; the choice falls now where it has not."""
        self._settled(cohort)
        return self.choice

    def _settled(self, cohort: Cohort) -> Engine:
        if self.engine is None:
            with doing("trying out engines"):
                self.engine = self._choose(cohort)
        return self.engine

    def _choose(self, cohort: Cohort) -> Engine:
        if self.name == "auto":
            return self._automatic(cohort)
        try:
            engine = make(self.setup, self.name, self.chunk)
            if kind_of(self.setup, self.name).compared:
                self._must_agree(engine, cohort)
        except DoesNotFit as why:
            return self._fall_back(str(why))
        self.choice = with_stack_size(self.name, engine.chunk)
        return engine

    def _must_agree(self, engine: Engine, cohort: Cohort) -> None:
        """A module that draws, keeps running means or branches on its data does not stack: better slow than wrong."""
        again = {self.name: lambda setup: make(setup, self.name, engine.chunk)}
        found = run_trial(self.setup, cohort, again, timed=False)
        if self.name in found.refused:
            raise DoesNotFit(found.refused[self.name])

    def _fall_back(self, why: str) -> Engine:
        note = f"engine {self.name} does not take this model ({why}); clients are trained one after another"
        warnings.warn(note, stacklevel=2)
        self.notes.append(note)
        self.choice, self.reason = "loop", f"{self.name} does not take this model: {why}"
        return LoopEngine(self.setup)

    def _automatic(self, cohort: Cohort) -> Engine:
        names = candidates(self.setup, int(cohort.counts.sum()))
        key = choice_key(self.setup, cohort, names)
        known = kept_choice(key)
        if known is None:
            known = self._tried(key, names, cohort)
        else:
            self.reason = "found by an earlier trial on this machine"
        self.choice = known.engine
        self.notes += known.notes
        return make(self.setup, *parse(known.engine))

    def _tried(self, key: str, names: list[str], cohort: Cohort) -> Choice:
        """Try the engines, keep the winner for later runs, and return the choice that holds.

        It names the size of the stacks too, which free memory may change from run to run.
        """
        found = run_trial(
            self.setup, cohort, {name: (lambda setup, name=name: make(setup, *parse(name))) for name in names}
        )
        engine = make(self.setup, *parse(found.best))
        best = with_stack_size(parse(found.best)[0], engine.stack_size(cohort))
        self.reason = f"fastest in a trial, {MARGIN:.0%} counting as equal: {found.describe()}"
        return keep_choice(key, Choice(best, notes_of(found, best)), found.describe())

    def describe(self) -> Mapping[str, str]:
        """Return what was chosen and why."""
        facts = {"engine_choice": self.choice, "engine_reason": self.reason}
        return facts | ({"engine_notes": "; ".join(self.notes)} if self.notes else {})


def notes_of(found: Trial, best: str) -> tuple[str, ...]:
    """Return what a run should tell of a trial: that nothing stacks, or that no program could be compiled."""
    singly = "in processes of their own" if best == "processes" else "in threads" if best == "threads" else ""
    how = f"clients are trained singly, {singly}" if singly else "clients are trained one after another"
    if found.draws:
        return (f"the model draws at random while it trains; {how}",)
    stacks = [name for name in found.refused if parse(name)[0] in STACKING]
    if stacks and not any(parse(name)[0] in STACKING for name in found.seconds):
        return (f"no engine stacks this model ({_brief(found.refused[stacks[-1]])}); {how}",)
    if why := found.refused.get("stacked/compiled"):
        return (f"engine stacked/compiled is left out ({_brief(why)}); {best.partition(':')[0]} is used",)
    return ()


def _brief(why: str) -> str:
    """The first sentence of a reason, cut where it is long; the run's record has all of it."""
    return textwrap.shorten(why.removeprefix("DoesNotFit: ").partition(". ")[0], 160, placeholder=" …")


def with_stack_size(name: str, chunk: int | None) -> str:
    """Return "name:chunk", or "name" for an engine without a fixed size of its stacks."""
    return name if chunk is None else f"{name}:{chunk}"


# The trial: a few steps on the actual model, data and machine. Which engines agree with the loop, and which is fastest?


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
    few = _shortened(cohort)
    draws, changed = _alone(setup, few)
    found = Trial(draws=draws)
    if draws:
        found.refused = dict.fromkeys(engines.keys() - {"loop"}, "the model draws at random while it trains")
        return found
    pair = few.take(range(min(2, len(few))))
    begun = time.perf_counter()
    expected = _trained(LoopEngine(setup), pair)
    many = few.take(range(_enough(setup, few, (time.perf_counter() - begun) / len(pair)))) if timed else pair
    rounding = cache(lambda: _rounding(setup, expected, pair))  # only where an engine needs it, and once for all
    ready: dict[str, tuple[Engine, Cohort]] = {}
    for name, maker in engines.items():
        try:
            engine = maker(setup)
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


def _shortened(cohort: Cohort) -> Cohort:
    """The same jobs with at most a few steps of ordinary training each, the last with fewer samples than the others.

    Stacks pad such a batch, so an engine whose padding reaches the model (one that looks at its batch as a whole)
    shows here, and not in a later round.
    """
    training = cohort.training
    updates = None if training.updates is None else min(training.updates, TRIAL_STEPS)
    populations = {id(population): copy.copy(population) for population in cohort.populations}
    for population in populations.values():
        if training.batch_size == "full":
            population.sizes = np.maximum(population.sizes - np.arange(len(population.sizes)) % 2, 1)
        else:
            most = TRIAL_STEPS * training.batch_size - training.batch_size // 2
            population.sizes = np.minimum(population.sizes, most)
    return replace(
        cohort,
        tasks=tuple(replace(task, algorithm=Algorithm()) for task in cohort.tasks),
        populations=tuple(populations[id(population)] for population in cohort.populations),
        training=training.model_copy(update={"epochs": 1, "updates": updates}),
    )


def _alone(setup: TrainingSetup, cohort: Cohort) -> tuple[bool, list[str]]:
    """Train one client twice: does it depend on the random generator, and which buffers outside the layout change?

    In the first case clients cannot share a step, in the second no stack: there such a buffer is one for all.
    """
    loop = ClientLoop(copy.deepcopy(setup.module).to(setup.device), setup.layout)
    out = torch.empty((2, setup.layout.size), device=setup.device)
    with arithmetic(setup.precision, setup.device, autocast=True):
        for draw in range(2):
            train_job(loop, cohort, 0, out[draw], draw)
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
        apart = _trained(LoopEngine(setup), cohort.begin_at(moved)) - moved - updates
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
