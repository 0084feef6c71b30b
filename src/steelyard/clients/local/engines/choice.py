"""Which engine trains a cohort: the one asked for, the one found before on this machine, or the fastest in a trial."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.local import kernels
from steelyard.clients.local.convolution.stacked import ConvSteps
from steelyard.clients.local.convolution.winograd import KERNELS as WINOGRAD
from steelyard.clients.local.device_data.cohort import Cohort, Workshop
from steelyard.clients.local.engines import choice_file as choices
from steelyard.clients.local.engines.engine_trial import MARGIN, Engine, Trial, run_trial
from steelyard.clients.local.engines.fused import FusedEngine
from steelyard.clients.local.engines.graph import ByHand, ByMap, GraphEngine, Stepper
from steelyard.clients.local.engines.sequential import LoopEngine, ThreadsEngine
from steelyard.clients.local.engines.stacked import StackedEngine
from steelyard.clients.local.engines.vmap import VmapEngine
from steelyard.clients.local.settings import Precision
from steelyard.clients.local.steps.dense import Architecture, architecture_of
from steelyard.clients.local.steps.gradients import Sgd
from steelyard.errors import UserError, listed, nearest
from steelyard.learning.models import ConvNet

NAMES = ("auto", "loop", "threads", "vmap", "graph", "fused", "winograd", "stacked")

SMALL_BATCH = 64
"""Samples of a step up to which saving multiplications is worth a trial: beyond, what it moves leaves the caches."""


class NotForThis(Exception):
    """An engine that cannot train this model or does not run on this device, with the reason."""


def parse(wanted: str) -> tuple[str, int | None]:
    """Split "name" or "name:chunk"; use it on what a field or an earlier run's record holds."""
    name, colon, chunk = wanted.partition(":")
    if name not in NAMES:
        raise UserError(
            f"compute.engine: got '{wanted}'{nearest(name, NAMES)}; allowed: {listed(NAMES)}, or name:chunk"
        )
    if not colon:
        return name, None
    if not chunk.isdigit() or int(chunk) < 1:
        raise UserError(f"compute.engine: got '{wanted}'; allowed after the colon: how many clients stand in one stack")
    return name, int(chunk)


def make(shop: Workshop, name: str, chunk: int | None = None) -> Engine:
    """Make an engine by name, or raise NotForThis."""
    cuda = shop.device.type == "cuda"
    if name == "loop":
        return LoopEngine(shop)
    if name == "threads":
        if cuda:
            raise NotForThis("threads share out CPU cores")
        return ThreadsEngine(shop)
    if name == "vmap":
        return VmapEngine(shop, chunk)
    if name == "graph":
        if not cuda:
            raise NotForThis("graphs are captured on a CUDA device")
        return GraphEngine(shop, ByMap(shop, Sgd.of(shop.training)), "graph", chunk)
    if name in ("fused", "winograd"):
        if cuda or type(shop.module) is not ConvNet:
            raise NotForThis("its steps are written out for the built-in convolutional networks on the CPU only")
        if name == "winograd" and not saves_products(shop.module, shop.precision):
            raise NotForThis(
                f"it saves products for kernels of side {listed(map(str, WINOGRAD))} in full precision only"
            )
        return FusedEngine(shop, shop.module, winograd=name == "winograd")
    steps = architecture_of(shop.module, shop.layout, shop.precision)
    if steps is None:
        raise NotForThis("its steps are written out for the built-in networks only")
    if cuda:
        return GraphEngine(shop, _stepper(shop, steps), "stacked", chunk)
    return StackedEngine(shop, steps, chunk)


def saves_products(module: ConvNet, precision: Precision) -> bool:
    """Whether the way with fewer multiplications applies; half precision has matrix units, which do it no good."""
    return module.conv2.kernel_size[0] in WINOGRAD and precision != "bfloat16"


def _stepper(shop: Workshop, steps: Architecture) -> Stepper:
    """Kernels of our own where there are some for this network and Triton to make them; torch's operators else."""
    sgd = Sgd.of(shop.training)
    own = kernels.steps_for(steps, sgd, shop.precision, shop.device) if isinstance(steps, ConvSteps) else None
    return own or ByHand(steps, sgd)


def candidates(shop: Workshop) -> list[str]:
    """Return the engines worth a trial for this model on this device, the likely best first."""
    built_in = architecture_of(shop.module, shop.layout, shop.precision) is not None
    if shop.device.type == "cuda":
        return ["stacked"] if built_in else ["graph", "vmap", "loop"]
    if type(shop.module) is ConvNet:
        small = shop.training.batch_size != "full" and shop.training.batch_size <= SMALL_BATCH
        winograd = small and saves_products(shop.module, shop.precision)
        return [*(["winograd"] if winograd else []), "fused", "threads"]
    if built_in:
        return ["stacked", "threads"]
    return ["threads", "vmap:50", "vmap:10", "loop"]


class Engines:
    """Keeps the engine of a run; the choice falls at the first cohort and holds for the rest."""

    def __init__(self, shop: Workshop, wanted: str) -> None:
        self.shop = shop
        self.name, self.chunk = parse(wanted)
        self.engine: Engine | None = None
        self.choice = wanted
        self.reason = "asked for"
        self.notes: list[str] = []

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Train a cohort with the engine of this run."""
        if self.engine is None:
            self.engine = self._choose(cohort)
        try:
            return self.engine.train(cohort, out)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"compute.memory_gb: engine {self.choice} ran out of memory on {self.shop.device} with a limit of "
                f"{self.shop.memory / 1e9:.1f} GB; allowed: a lower limit or a smaller compute.chunk"
            ) from error

    def _choose(self, cohort: Cohort) -> Engine:
        if self.name == "auto":
            return self._automatic(cohort)
        try:
            engine = make(self.shop, self.name, self.chunk)
            if self.name in ("vmap", "graph", "threads"):
                self._must_agree(engine, cohort)
        except NotForThis as why:
            return self._fall_back(str(why))
        self.choice = named(engine, self.name)
        return engine

    def _must_agree(self, engine: Engine, cohort: Cohort) -> None:
        """A module that draws, keeps running means or branches on its data does not stack: better slow than wrong."""
        found = run_trial(self.shop, cohort, {self.name: lambda shop: _like(shop, engine)}, timed=False)
        if self.name in found.refused:
            raise NotForThis(found.refused[self.name])

    def _fall_back(self, why: str) -> Engine:
        note = f"engine {self.name} does not take this model ({why}); clients are trained one after another"
        warnings.warn(note, stacklevel=2)
        self.notes.append(note)
        self.choice = "loop"
        return LoopEngine(self.shop)

    def _automatic(self, cohort: Cohort) -> Engine:
        names = candidates(self.shop)
        key = choices.key(self.shop, cohort, names)
        known = choices.read(key)
        if known is None:
            wanted = {name: (lambda shop, name=name: make(shop, *parse(name))) for name in names}
            found = run_trial(self.shop, cohort, wanted)
            known = choices.write(key, self._settled(found, cohort), found.describe())
            self.reason = f"fastest in a trial, {MARGIN:.0%} counting as equal: {found.describe()}"
            if found.draws:
                self.notes.append("the model draws at random while it trains; clients are trained one after another")
        else:
            self.reason = "found by an earlier trial on this machine"
        self.choice = known
        return make(self.shop, *parse(known))

    def _settled(self, found: Trial, cohort: Cohort) -> str:
        """Name the winner together with the size of its stacks, which free memory may change from run to run."""
        engine = make(self.shop, *parse(found.best))
        return named(engine, parse(found.best)[0], cohort)

    def describe(self) -> Mapping[str, str]:
        """Return what was chosen and why."""
        said = {"engine_choice": self.choice, "engine_reason": self.reason}
        return said | ({"engine_notes": "; ".join(self.notes)} if self.notes else {})


def named(engine: Engine, name: str, cohort: Cohort | None = None) -> str:
    """Return "name" or "name:chunk", whichever says all there is to say."""
    chunk = getattr(engine, "chunk", None)
    if chunk is None and isinstance(engine, GraphEngine) and cohort is not None:
        chunk = engine.fitting(cohort)
    return name if chunk is None else f"{name}:{chunk}"


def _like(shop: Workshop, engine: Engine) -> Engine:
    return make(shop, getattr(engine, "name", "loop"), getattr(engine, "chunk", None))
