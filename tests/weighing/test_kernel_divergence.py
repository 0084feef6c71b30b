"""MK by hand, beside MD on the same models, and refused where nobody knows the layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from steelyard.errors import UserError
from steelyard.learning.parameters import Layout
from steelyard.update_payloads import DenseModels, ServerTest
from steelyard.weighing import criteria as registry
from steelyard.weighing.built_in import model_divergence
from steelyard.weighing.kernel_divergence import kernel_divergence
from steelyard.weighing.view import CohortView


def view(changes: torch.Tensor, module: nn.Module) -> CohortView:
    layout = Layout.of(module)
    origin = layout.read(module)
    payload = DenseModels(origin + changes)
    return CohortView(
        samples=np.ones(len(changes), np.int64),
        divergence_of=lambda: payload.divergence(origin),
        validation_of=lambda: ServerTest(np.zeros(0), np.zeros((0, 0))),
        kernel_norms_of=lambda: payload.kernel_norms(origin, layout.kernels),
    )


def test_it_is_the_mean_over_kernels_and_leaves_biases_out() -> None:
    # Two layers of weights [2, 2] and [1, 2], each followed by its bias: positions 0-3, 4-5, 6-7, 8.
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    changes = torch.zeros(3, 9)
    changes[0, :4] = 3.0  # a norm of 6 in the first kernel
    changes[1, 0], changes[1, 6] = 4.0, 10.0
    changes[2, [4, 5, 8]] = 7.0  # biases alone
    found = view(changes, network)
    assert kernel_divergence(found) == pytest.approx([1 / 2, 1 / 8**0.5, 1.0], abs=1e-6)
    # One norm over all is the larger, so MD lies below.
    assert (model_divergence(found) < kernel_divergence(found)).all()


def test_kernels_across_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.update_payloads.AT_ONCE", {"cpu": 6})
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    changes = torch.randn(2, 23, generator=torch.Generator().manual_seed(1))
    norms = view(changes, network).kernel_norms
    assert norms[:, 0] == pytest.approx(changes[:, :12].norm(dim=1).numpy(), abs=1e-5)
    assert norms[:, 1] == pytest.approx(changes[:, 15:21].norm(dim=1).numpy(), abs=1e-5)


def test_what_is_not_there_is_one_line() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(2))

    with pytest.raises(UserError, match="criterion MK: the network has no kernels"):
        kernel_divergence(view(torch.zeros(1, 2), Scale()))
    blind = CohortView(np.ones(1, np.int64), lambda: np.ones(1), lambda: ServerTest(np.zeros(0), np.zeros((0, 0))))
    with pytest.raises(UserError, match="knows no layers"):
        kernel_divergence(blind)
    assert registry.known()["MK"].needs.layers
