"""Checks of the Triton kernels in its interpreter, run as a program: the local optimisers, and whole trainings."""

from typing import Any

import torch
import triton.runtime.interpreter as interpreter
from tests.clients.local import engine_cases, kernel_cases

from steelyard.clients.local.cnn import gpu
from steelyard.clients.local.cnn.steps import ConvSteps
from steelyard.clients.local.engines.stacked import GraphEngine

_patch = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    """Numbers in loops over ranges come as arrays of one element, which newer versions of NumPy take for no index."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def trained(name: str) -> None:
    """Two federations of unequal clients, one with class weights, against the loop."""
    what = engine_cases.case(name)
    expected, start, clients = engine_cases.trained(what)
    setup = clients.context.setup
    derived = ConvSteps(setup.module, setup.layout, half=False)  # type: ignore[arg-type]
    cohort, _ = clients.context.cohort(engine_cases.tasks_of(clients.names(0), start, what))
    out = torch.zeros(len(cohort), setup.layout.size)
    engine = GraphEngine(setup, lambda descent: gpu.KernelSteps(derived, descent, "float32"), "stacked")
    losses, begin = engine.train(cohort, out), 0
    for updates in expected:
        part = slice(begin, begin := begin + len(updates.clients))
        engine_cases.assert_near(out[part], losses[part], updates, start, 1e-5)


if __name__ == "__main__":
    interpreter._patch_lang_tensor = _patched
    torch.set_num_threads(1)
    torch.manual_seed(3)
    kernel_cases.steps("cpu")
    trained("cnn-odd, mini")
    trained("cnn-digits, corrected")  # images as bytes, and gradients that are written down
    gpu.FEW = 0  # the dense layers by the library, as for many samples
    trained("cnn-authors, mini")
