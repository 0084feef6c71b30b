"""Adapters in product space: by hand, against the whole sum and its singular values, in rounds, with unequal ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.kit import assert_refused
from torch import nn

from steelyard import Experiment, in_memory
from steelyard.algorithms.flexlora import FlexLora, best_product, cut_to_ranks
from steelyard.data.dataset import Dataset
from steelyard.experiment.running import run
from steelyard.learning.parameters import Layout
from steelyard.messages.algorithm import FACTORS, ServerStep
from steelyard.messages.payloads import DenseModels
from steelyard.report.result import computed
from steelyard.runs.history import History
from steelyard.runs.kept_updates import read_round


class Adapted(nn.Module):
    """A frozen dense layer with an adapter of rank 3, named as PEFT names it, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(6, 3, False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, 5, False)})
        self.head = nn.Linear(5, 2)
        nn.init.zeros_(self.lora_B["default"].weight)  # type: ignore[arg-type]
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted = self.lora_B["default"](self.lora_A["default"](x))
        return self.head(torch.tanh(self.base(x) + adapted))


def test_two_clients_by_hand() -> None:
    # A₁ = (1 0), B₁ = (1 0)ᵀ; A₂ = (0 1), B₂ = (0 1)ᵀ; a number that is no factor: 3 and 7.
    models, weights = torch.tensor([[1.0, 0, 1, 0, 3], [0, 1, 0, 1, 7]]), np.array([0.75, 0.25])
    tensors = {FACTORS: torch.tensor([[0, 2, 1, 2, 2]])}
    average = models.new_tensor(weights) @ models
    found, kept = FlexLora().step(ServerStep(models[0], average, weights, tensors, 1.0, 0.0, models))
    # Σ wᵢBᵢAᵢ = diag(.75, .25); its best of rank 1 is diag(.75, 0), which lacks .25 of √(.75² + .25²).
    product = found[2:4, None] * found[None, :2]
    assert product.numpy() == pytest.approx(np.array([[0.75, 0], [0, 0]]), abs=1e-6)
    assert float(found[4]) == pytest.approx(4)
    # Averages are A = B = (.75 .25): each number of their product is .1875 off.
    expected = {"product_error": 0.25 / 0.625**0.5, "factor_error": 0.375 / 0.625**0.5}
    assert dict(FlexLora().figures(kept)) == pytest.approx(expected)


@pytest.mark.parametrize(("clients", "rank", "inputs", "outputs"), [(4, 3, 11, 7), (3, 4, 4, 30)])
def test_the_best_product_of_the_rank(clients: int, rank: int, inputs: int, outputs: int) -> None:
    draw = torch.Generator().manual_seed(clients)
    a = torch.randn(clients, rank, inputs, generator=draw, dtype=torch.float64)
    b = torch.randn(clients, outputs, rank, generator=draw, dtype=torch.float64)
    weights = torch.rand(clients, generator=draw, dtype=torch.float64)
    whole = torch.einsum("c,cor,cri->oi", weights, b, a)
    u, values, v = torch.linalg.svd(whole)
    found = best_product(a, b, weights, rank)
    assert torch.allclose(found.b @ found.a, u[:, :rank] * values[:rank] @ v[:rank], atol=1e-10)
    assert float(found.lost) == pytest.approx(float(values[rank:].square().sum()), abs=1e-10)
    # Both factors carry alike, and the first ranks carry most.
    assert torch.allclose(found.a.norm(dim=1), values[:rank].sqrt())
    assert torch.allclose(found.b.norm(dim=0), values[:rank].sqrt())


def test_adapters_are_found_by_their_names_and_cut_to_ranks() -> None:
    layout = Layout.of(Adapted())
    assert layout.adapters.tolist() == [[0, 18, 3, 6, 5]]
    model = torch.arange(1.0, layout.size + 1)[None].repeat(2, 1)
    cut_to_ranks(model, torch.from_numpy(layout.adapters), [1, None])
    views = layout.views(model)
    down, up = views["lora_A.default.weight"] == 0, views["lora_B.default.weight"] == 0
    assert (down.sum(dim=(1, 2)).tolist(), up.sum(dim=(1, 2)).tolist()) == ([12, 0], [10, 0])
    assert not up[0, :, 0].any()


def rows() -> Dataset:
    x = np.random.default_rng(0).normal(size=(80, 6))
    return in_memory(x, (x[:, 0] * x[:, 1] > 0).astype(np.int64))


def experiment(model: object, **algorithm: object) -> Experiment:
    return Experiment(
        data={"source": "memory"},
        partition={"clients": 4},
        model={"name": model},
        training={"learning_rate": 0.5, "epochs": 2},
        rounds={"count": 2},
        store={"keep": "updates"},
        compute={"engine": "loop", "device": "cpu"},
        algorithm={"name": "flexlora", **algorithm},
    )


def test_rounds_weigh_products_and_say_what_is_lost(tmp_path: Path) -> None:
    described = experiment(Adapted, ranks={"client-001": 1})
    folder = run(described, out=tmp_path / "run", dataset=rows())
    last = json.loads(History(folder).rounds["server_metrics"].iloc[-1])
    kept, layout = read_round(folder, 2), Layout.of(Adapted())
    (updates,) = kept.updates.values()
    assert isinstance(updates.payload, DenseModels)
    views = layout.views(updates.payload.models.double())
    a, b = views["lora_A.default.weight"], views["lora_B.default.weight"]
    assert a[1, 1:].count_nonzero() == b[1, :, 1:].count_nonzero() == 0
    values = torch.linalg.svdvals((b @ a).mean(dim=0))
    # The models are kept in float32, with numbers below 1.
    assert last["product_error"] == pytest.approx(float(values[3:].norm() / values.norm()), abs=1e-5)
    figures = computed(folder, described).rules[0].figures
    assert {name: figures[name].mean for name in last} == last


def test_a_model_without_adapters_is_refused(tmp_path: Path) -> None:
    plain = experiment("logistic")
    assert_refused(lambda: run(plain, out=tmp_path / "run", dataset=rows()), "flexlora", "without low-rank adapters")
