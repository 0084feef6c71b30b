"""Checks of the Triton kernels in its interpreter, run as a program: kernels one by one, then whole trainings."""

import sys
from dataclasses import replace
from typing import Any

import torch
import triton.runtime.interpreter as interpreter
from tests.clients.local import engine_cases
from tests.clients.local.engine_cases import Case
from tests.clients.local.kernels import kernel_cases

from steelyard.clients.local import Simulation
from steelyard.clients.local.convolution.keras import KerasSteps
from steelyard.clients.local.convolution.stacked import ConvSteps
from steelyard.clients.local.engines.graph import GraphEngine
from steelyard.clients.local.engines.graph_steps import HandDerivedStep
from steelyard.clients.local.kernels import steps
from steelyard.clients.local.kernels.descent import KernelDescent
from steelyard.clients.local.kernels.passes import KernelPasses
from steelyard.learning.descent import Descent
from steelyard.messages import Updates

_patch = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    """Numbers in loops over ranges come as arrays of one element, which newer versions of NumPy take for no index."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched
CASES = {
    "one by one": [],
    "mini": ["cnn-odd, mini", "cnn-digits, heavy"],
    "passes": [],
    "full": ["cnn-celeba, full", "cnn-authors, full", "cnn-digits, full"],
}


def one_by_one() -> None:
    for case, bytes_ in ((kernel_cases.ODD, True), (kernel_cases.SMALL, False)):
        kernel_cases.assert_near_float64(case, "float32", "cpu", bytes_=bytes_)


def small(name: str) -> tuple[Case, list[Updates], torch.Tensor, Simulation]:
    """What the loop makes of a case of three clients and one epoch."""
    what = engine_cases.case(name)
    network = name.partition(",")[0]
    _, shape, classes = engine_cases.MODELS[network]
    people = engine_cases.population(shape, classes, sizes=(4, 2, 3), bytes_=network == "cnn-digits")
    what = replace(what, people=people, training=what.training.model_copy(update={"epochs": 1}))
    return what, *engine_cases.trained(what)


def keras(how: str) -> None:
    """Keras' network through the passes and the optimisers of our own, against the loop."""
    what, expected, start, clients = small(f"keras, {how}")
    setup = clients.context.setup
    derived = KerasSteps(setup.module, setup.layout, half=False, passes=KernelPasses())
    cohort, _ = clients.cohort_builder.gather(engine_cases.tasks_of(clients.names(0), start, what, 1))
    out = torch.zeros(len(cohort), setup.layout.size)
    engine = GraphEngine(setup, lambda descent: HandDerivedStep(derived, KernelDescent.like(descent)), "stacked")
    losses = engine.train(cohort, out)
    engine_cases.assert_near(out, losses, expected[0], start, 1e-4)


def trained(name: str) -> None:
    """Two federations of unequal clients, one with class weights, against the loop; and the test of their models."""
    what, expected, start, clients = small(name)
    setup = clients.context.setup
    derived = ConvSteps(setup.module, setup.layout, half=False)
    cohort, _ = clients.cohort_builder.gather(engine_cases.tasks_of(clients.names(0), start, what))
    out = torch.zeros(len(cohort), setup.layout.size)
    engine = GraphEngine(setup, lambda descent: steps.KernelSteps(derived, descent, "float32"), "stacked")
    losses = engine.train(cohort, out)
    begin = 0
    for updates in expected:
        part = slice(begin, begin := begin + len(updates.clients))
        engine_cases.assert_near(out[part], losses[part], updates, start, 1e-5)
    wanted = torch.cat([updates.payload.models for updates in expected])
    rows, dataset = torch.arange(7), clients.context.population(0).dataset
    kernels = steps.KernelSteps(derived, Descent.of(what.training), "float32")
    found = kernels.outputs_of(kernels.native(wanted), dataset, rows)
    # Float32 sums in another order, through every layer.
    assert torch.allclose(found, clients.evaluator.outputs(wanted, dataset, rows), atol=1e-4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(3)
    if sys.argv[1] == "one by one":
        one_by_one()
    if sys.argv[1] == "passes":
        kernel_cases.passes(kernel_cases.TINY, torch.float32, "cpu")
        kernel_cases.steps("cpu")
        for optimiser in engine_cases.OPTIMISERS:
            keras(optimiser)
    if sys.argv[1] == "full":
        steps.FEW = 0  # the dense layers by the library, as for many samples
    for name in CASES[sys.argv[1]]:
        trained(name)
