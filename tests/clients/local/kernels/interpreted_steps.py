"""Checks of the Triton kernels in its interpreter, run as a program: kernels one by one, then whole trainings."""

import sys

import torch
from tests.clients.local import engine_cases
from tests.clients.local.kernels import interpreted, kernel_cases, pass_cases

from steelyard.clients.local.convolution.keras import KerasSteps
from steelyard.clients.local.convolution.stacked import ConvSteps
from steelyard.clients.local.engines.graph import GraphEngine
from steelyard.clients.local.engines.graph_steps import HandDerivedStep
from steelyard.clients.local.kernels import steps
from steelyard.clients.local.kernels.descent import KernelDescent
from steelyard.clients.local.kernels.passes import KernelPasses
from steelyard.learning.descent import Descent

assert interpreted
CASES = {
    "one by one": [],
    "mini": [("cnn-odd", "mini"), ("cnn-digits", "heavy")],
    "passes": [],
    "full": [("cnn-celeba", "full"), ("cnn-authors", "full"), ("cnn-digits", "full")],
}


def one_by_one() -> None:
    for case in (kernel_cases.ODD, kernel_cases.SMALL):
        found = {
            f"first {bytes_}": kernel_cases.first(case, "float32", "cpu", bytes_=bytes_) for bytes_ in (True, False)
        }
        found["second"] = kernel_cases.second(case, "float32", "cpu")
        found["head"] = kernel_cases.head(case, "float32", "cpu")
        wrong = {
            (kernel, name): size for kernel, errors in found.items() for name, size in errors.items() if size > 3e-6
        }
        assert not wrong, wrong


def keras(how: str) -> None:
    """Keras' network through the passes and the optimisers of our own, against the loop."""
    model, shape, classes = engine_cases.MODELS["keras"]
    training = engine_cases.OPTIMISERS[how].model_copy(update={"epochs": 1})
    people = engine_cases.population(shape, classes, sizes=(4, 2, 3))
    expected, start, clients = engine_cases.trained("loop", people, model, training)
    setup = clients.context.setup
    derived = KerasSteps(setup.module, setup.layout, half=False, passes=KernelPasses())
    cohort, _ = clients.cohort_builder.gather(engine_cases.tasks_of(clients.names(0), start, classes, training)[:1])
    out = torch.zeros(len(cohort), setup.layout.size)
    engine = GraphEngine(setup, lambda descent: HandDerivedStep(derived, KernelDescent.like(descent)), "stacked")
    engine.train(cohort, out)
    wanted = expected[0].payload.models
    apart = torch.linalg.vector_norm(out - wanted, dim=1) / torch.linalg.vector_norm(wanted - start, dim=1)
    assert float(apart.max()) < 1e-4, apart


def trained(name: str, how: str) -> None:
    """Two federations of unequal clients, one with class weights, against the loop; and the test of their models."""
    model, shape, classes = engine_cases.MODELS[name]
    training = engine_cases.TRAINING[how].model_copy(update={"epochs": 1})
    people = engine_cases.population(shape, classes, sizes=(4, 2, 3), bytes_=name == "cnn-digits")
    expected, start, clients = engine_cases.trained("loop", people, model, training)
    setup = clients.context.setup
    derived = ConvSteps(setup.module, setup.layout, half=False)
    cohort, _ = clients.cohort_builder.gather(engine_cases.tasks_of(clients.names(0), start, classes, training))
    out = torch.zeros(len(cohort), setup.layout.size)
    engine = GraphEngine(setup, lambda descent: steps.KernelSteps(derived, descent, "float32"), "stacked")
    losses = engine.train(cohort, out)
    wanted = torch.cat([updates.payload.models for updates in expected])
    apart = torch.linalg.vector_norm(out - wanted, dim=1) / torch.linalg.vector_norm(wanted - start, dim=1)
    assert float(apart.max()) < 1e-5, apart
    # Float32 sums in another order, over several steps.
    assert torch.allclose(torch.tensor(losses), torch.cat([torch.tensor(u.losses) for u in expected]), atol=1e-5)
    rows, dataset = torch.arange(7), clients.context.population(0).dataset
    kernels = steps.KernelSteps(derived, Descent.of(training), "float32")
    found = kernels.outputs_of(kernels.native(wanted), dataset, rows)
    # Float32 sums in another order, through every layer.
    assert torch.allclose(found, clients.evaluator.outputs(wanted, dataset, rows), atol=1e-4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(3)
    if sys.argv[1] == "one by one":
        one_by_one()
    if sys.argv[1] == "passes":
        pass_cases.passes(pass_cases.SMALL, torch.float32, "cpu")
        pass_cases.steps("cpu")
        for optimiser in engine_cases.OPTIMISERS:
            keras(optimiser)
    if sys.argv[1] == "full":
        steps.FEW = 0  # the dense layers by the library, as for many samples
    for name, how in CASES[sys.argv[1]]:
        trained(name, how)
