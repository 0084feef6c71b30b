"""The table of engines: the name of each, what it fits, and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from steelyard.base.errors import UserError, deprecated, listed, nearest
from steelyard.clients.local.cnn.cpu import FusedEngine
from steelyard.clients.local.cnn.pooled import KERNELS as WINOGRAD_KERNELS
from steelyard.clients.local.cnn.steps import ConvSteps
from steelyard.clients.local.engines.engine import Engine, TrainingSetup
from steelyard.clients.local.engines.loop import LoopEngine
from steelyard.clients.local.engines.processes import ProcessesEngine, can_fork
from steelyard.clients.local.engines.stacked import GraphEngine, SteppedEngine, in_half_the_memory, near_the_core
from steelyard.clients.local.engines.steps import CompiledStep, HandDerivedStep, MappedStep, StackStep
from steelyard.clients.local.hardware import ready
from steelyard.clients.local.layers import has_hooks, unmasked_norms
from steelyard.clients.local.steps import DenseSteps, StackedSteps
from steelyard.learning.descent import Descent
from steelyard.learning.models import ConvNet, DenseNet
from steelyard.learning.parameters import Layout, names_of
from steelyard.messages.algorithm import Part

if TYPE_CHECKING:
    from steelyard.clients.local.cnn.gpu import KernelSteps

SMALL_BATCH = 64
"""Samples of a step up to which saving multiplications is worth a trial: beyond, what it moves leaves the caches."""


@dataclass(frozen=True)
class EngineKind:
    """One row of the table."""

    name: str
    misfit: Callable[[TrainingSetup], str | None]
    """Why the engine cannot train this model on this device; None where it can."""
    make: Callable[[TrainingSetup, int | None], Engine]
    """Make it for a setup that it fits, with so many clients in one stack (None for the engine's own number)."""
    compared: bool = False
    """Whether its updates depend on what the user's module does, so that they are compared with the sequential ones."""


class DoesNotFit(Exception):
    """An engine that cannot train this model or does not run on this device, with the reason."""


RENAMED = {
    "vmap": "stacked/vmap",
    "graph": "stacked/graph",
    "compiled": "stacked/compiled",
    "winograd": "fused/winograd",
}
"""Names of engines that are kinds of step of one engine now; records of earlier runs have them."""


def parse(wanted: str) -> tuple[str, int | None]:
    """Split "name" or "name:chunk"; use it on what a field or an earlier run's record holds."""
    name, colon, chunk = wanted.partition(":")
    names = ("auto", "stacked", *ENGINES)
    if name in RENAMED:
        deprecated(f"compute.engine '{name}'", f"'{RENAMED[name]}'", "0.4.0")
        name = RENAMED[name]
    if name not in names:
        raise UserError(
            f"compute.engine: got '{wanted}'{nearest(name, names)}; allowed: {listed(names)}, or name:chunk"
        )
    if not colon:
        return name, None
    if not chunk.isdigit() or int(chunk) < 1:
        raise UserError(f"compute.engine: got '{wanted}'; allowed after the colon: how many clients stand in one stack")
    return name, int(chunk)


def kind_of(setup: TrainingSetup, name: str) -> EngineKind:
    """Return the engine of this name; of "stacked" alone, with the kind of step that suits the network."""
    if name == "stacked":
        name = "stacked/hand" if _steps(setup) is not None else "stacked/graph" if _on_gpu(setup) else "stacked/vmap"
    return ENGINES[name]


def make(setup: TrainingSetup, name: str, chunk: int | None = None) -> Engine:
    """Make an engine by name, or raise DoesNotFit."""
    kind = kind_of(setup, name)
    why = kind.misfit(setup)
    if why is not None:
        raise DoesNotFit(why)
    return kind.make(setup, chunk)


LONG = 500_000
"""Steps of single clients in a whole run from which a compiler is worth a trial: it takes a minute or two, and saves
between .1 and .3 ms of each step on an H200."""


WORTH_PROCESSES = 2_000
"""Steps of single clients in a whole run from which processes are worth a trial: it takes up to a second."""


STACKING = frozenset({"stacked/vmap", "stacked/graph", "stacked/compiled"})
"""Engines that train any network in stacks, where its layers let them."""


def candidates(setup: TrainingSetup, steps: int) -> list[str]:
    """Return the engines worth a trial for this model on this device, the likely best first.

    `steps` are those of all clients in a round.
    """
    built_in = _steps(setup) is not None
    if _on_gpu(setup):
        compiled = ["stacked/compiled"] if setup.rounds * steps >= LONG else []
        return ["stacked"] if built_in else [*compiled, "stacked/graph", "stacked/vmap", "loop"]
    if is_convolutional(setup.module):
        small = setup.training.batch_size != "full" and setup.training.batch_size <= SMALL_BATCH
        winograd = small and _saves_products(setup)
        return [*(["fused/winograd"] if winograd else []), "fused", "threads"]
    if built_in:
        return ["stacked", "threads"]
    processes = setup.threads > 1 and setup.rounds * steps >= WORTH_PROCESSES and can_fork()
    return [*(["processes"] if processes else []), "threads", "stacked/vmap:50", "stacked/vmap:10", "loop"]


def _on_gpu(setup: TrainingSetup) -> bool:
    return setup.device.type == "cuda"


def _steps(setup: TrainingSetup) -> StackedSteps | None:
    return hand_derived_steps(setup.module, setup.layout, setup.precision)


def _saves_products(setup: TrainingSetup) -> bool:
    """Whether the way with fewer multiplications applies; half precision has matrix units, which do it no good."""
    if not is_convolutional(setup.module):
        return False
    return setup.module.conv2.kernel_size[0] in WINOGRAD_KERNELS and setup.precision != "bfloat16"


def _fits_cpu(setup: TrainingSetup) -> str | None:
    return "threads share out CPU cores" if _on_gpu(setup) else None


def _fits_gpu(setup: TrainingSetup) -> str | None:
    if not _on_gpu(setup):
        return "graphs are captured on a CUDA device"
    return _fits_padding(setup)


def _fits_padding(setup: TrainingSetup) -> str | None:
    return "its norm would count the padding of short batches" if unmasked_norms(setup.module) else None


def _fits_compiler(setup: TrainingSetup) -> str | None:
    if not _on_gpu(setup) or not ready(setup.device):
        return "programs are compiled for a CUDA device, with Triton"
    return _fits_padding(setup)


def _fits_convolutional(setup: TrainingSetup) -> str | None:
    if not _on_gpu(setup) and is_convolutional(setup.module):
        return None
    return "its steps are written out for the built-in convolutional networks on the CPU only"


def _fits_winograd(setup: TrainingSetup) -> str | None:
    why = _fits_convolutional(setup)
    if why is None and not _saves_products(setup):
        sides = listed(map(str, WINOGRAD_KERNELS))
        why = f"it saves products for kernels of side {sides} in full precision only"
    return why


def _fits_built_in(setup: TrainingSetup) -> str | None:
    return "its steps are written out for the built-in networks only" if _steps(setup) is None else None


def _make_processes(setup: TrainingSetup) -> Engine:
    """Threads, with the same bits, where there can be no processes."""
    return ProcessesEngine(setup) if can_fork() else LoopEngine(setup, setup.threads)


def _make_fused(setup: TrainingSetup, *, winograd: bool) -> Engine:
    assert is_convolutional(setup.module)  # the table says so
    return FusedEngine(setup, setup.module, winograd=winograd)


def _make_hand(setup: TrainingSetup, chunk: int | None) -> Engine:
    steps = _steps(setup)
    assert steps is not None  # the table says so

    def step(descent: Descent, part: Part) -> StackStep:
        return HandDerivedStep(steps, descent, None if part == "everything" else names_of(setup.module, part))

    def on_device(descent: Descent, part: Part) -> StackStep:
        """Kernels of our own where there are some for this network and Triton to make them; torch's operators else."""
        if part != "everything":
            return MappedStep(setup, descent, part)  # no time for the gradients of the rest
        descent = kernel_descent(descent, setup.device)
        own = kernel_steps(steps, descent, setup.precision, setup.device) if isinstance(steps, ConvSteps) else None
        return own or step(descent, part)

    if _on_gpu(setup):
        return GraphEngine(setup, on_device, "stacked/hand", chunk)
    return SteppedEngine(setup, step, "stacked/hand", chunk or setup.chunk or near_the_core(setup), setup.threads)


def _make_vmap(setup: TrainingSetup, chunk: int | None) -> Engine:
    most = chunk or setup.chunk or in_half_the_memory(setup)

    def step(descent: Descent, part: Part) -> StackStep:
        return MappedStep(setup, descent, part, products=False)

    return SteppedEngine(setup, step, "stacked/vmap", most)


def _captured(kind: type[MappedStep], name: str) -> Callable[[TrainingSetup, int | None], Engine]:
    """Return what makes the engine of mapped steps in captured graphs."""

    def make(setup: TrainingSetup, chunk: int | None) -> Engine:
        def step(descent: Descent, part: Part) -> StackStep:
            # The optimiser's own kernels take stacks without buffers between the clients' parameters.
            whole = setup.layout.trained == setup.layout.size and part == "everything"
            return kind(setup, kernel_descent(descent, setup.device) if whole else descent, part)

        return GraphEngine(setup, step, name, chunk)

    return make


def kernel_steps(steps: ConvSteps, descent: Descent, precision: str, device: torch.device) -> KernelSteps | None:
    """Return the steps through kernels of our own, or None where these do not fit the network or the device.

    Use it wherever a network is trained or tested on a GPU; torch's operators do what is left.
    """
    if not ready(device):
        return None
    # Late, for speed of start and because it imports Triton, which is not everywhere.
    from steelyard.clients.local.cnn.gpu import KernelSteps

    found = KernelSteps(steps, descent, precision)
    return found if found.fits else None


def kernel_descent(descent: Descent, device: torch.device) -> Descent:
    """Return the same local optimiser with its steps in one kernel, or as it is where there is no Triton."""
    if not ready(device):
        return descent
    from steelyard.clients.local.kernels import KernelDescent  # For speed of start; it imports Triton.

    return KernelDescent.like(descent)


ENGINES: dict[str, EngineKind] = {
    kind.name: kind
    for kind in (
        EngineKind("loop", lambda setup: None, lambda setup, chunk: LoopEngine(setup)),
        EngineKind("threads", _fits_cpu, lambda setup, chunk: LoopEngine(setup, setup.threads), compared=True),
        EngineKind("processes", _fits_cpu, lambda setup, chunk: _make_processes(setup), compared=True),
        EngineKind("stacked/hand", _fits_built_in, _make_hand),
        EngineKind("stacked/vmap", _fits_padding, _make_vmap, compared=True),
        EngineKind("stacked/graph", _fits_gpu, _captured(MappedStep, "stacked/graph"), compared=True),
        EngineKind("stacked/compiled", _fits_compiler, _captured(CompiledStep, "stacked/compiled"), compared=True),
        EngineKind("fused", _fits_convolutional, lambda setup, chunk: _make_fused(setup, winograd=False)),
        EngineKind("fused/winograd", _fits_winograd, lambda setup, chunk: _make_fused(setup, winograd=True)),
    )
}
"""Every engine by name, in the order in which messages list them."""


def is_convolutional(module: nn.Module) -> TypeGuard[ConvNet]:
    """Whether a module computes exactly what the built-in convolutional network does."""
    return isinstance(module, ConvNet) and _unchanged(module, ConvNet)


def is_dense(module: nn.Module) -> TypeGuard[DenseNet]:
    """Whether a module computes exactly what the built-in dense network does."""
    return isinstance(module, DenseNet) and _unchanged(module, DenseNet)


def _unchanged(module: nn.Module, network: type[nn.Module]) -> bool:
    # A user's subclass may add layers or compute something else, and steps written out for the network would then be
    # wrong: they are used only where both how the network is made and how it is run are the network's own, where no
    # layer was replaced or given a hook, and where every parameter is trained.
    kind = type(module)
    if kind.forward is not network.forward or kind.__init__ is not network.__init__:
        return False
    inner = [layer for layer in module.modules() if layer is not module]
    return (
        all(type(layer) in (nn.Linear, nn.Conv2d, nn.ModuleList) for layer in inner)
        and not any(has_hooks(layer) or "forward" in vars(layer) for layer in (module, *inner))
        and all(parameter.requires_grad for parameter in module.parameters())
    )


def hand_derived_steps(module: nn.Module, layout: Layout, precision: str) -> StackedSteps | None:
    """Return the hand-derived steps of a built-in network, or None for a module of which nothing is known."""
    if is_dense(module):
        return DenseSteps(module, layout)
    if is_convolutional(module):
        return ConvSteps(module, layout, half=precision == "bfloat16")
    return None
