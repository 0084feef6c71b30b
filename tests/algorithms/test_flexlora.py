"""Adapters in product space: by hand, against the whole sum and its singular values, in rounds, with unequal ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from steelyard import Experiment, in_memory
from steelyard.algorithms.algorithm import FACTORS, ServerStep
from steelyard.algorithms.flexlora import FlexLora, best_product, cut_to_ranks
from steelyard.data.dataset import Dataset
from steelyard.errors import UserError
from steelyard.experiment.running import run
from steelyard.learning.parameters import Layout
from steelyard.report.summary import summarise
from steelyard.runs.kept_updates import read_round
from steelyard.runs.reader import History
from steelyard.update_payloads import DenseModels


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


def stepped(models: torch.Tensor, weights: list[float], rows: list[list[int]]) -> tuple[torch.Tensor, dict[str, float]]:
    given = np.array(weights)
    average = models.new_tensor(given) @ models
    tensors = {FACTORS: torch.tensor(rows)}
    found, kept = FlexLora().step(ServerStep(models[0], average, given, tensors, 1.0, 0.0, models))
    return found, dict(FlexLora().figures(kept))


def test_two_clients_by_hand() -> None:
    # A₁ = (1 0), B₁ = (1 0)ᵀ; A₂ = (0 1), B₂ = (0 1)ᵀ; a number that is no factor: 3 and 7.
    models = torch.tensor([[1.0, 0, 1, 0, 3], [0, 1, 0, 1, 7]])
    found, figures = stepped(models, [0.75, 0.25], [[0, 2, 1, 2, 2]])
    # Σ wᵢBᵢAᵢ = diag(.75, .25); its best of rank 1 is diag(.75, 0), which lacks .25 of √(.75² + .25²).
    product = found[2:4, None] * found[None, :2]
    assert product.tolist() == [pytest.approx([0.75, 0], abs=1e-7), pytest.approx([0, 0], abs=1e-7)]
    assert float(found[4]) == 4
    # Averages are A = B = (.75 .25): each number of their product is .1875 off.
    assert figures == pytest.approx({"product_error": 0.25 / 0.625**0.5, "factor_error": 0.375 / 0.625**0.5})


@pytest.mark.parametrize(("clients", "rank", "inputs", "outputs"), [(4, 3, 11, 7), (9, 2, 5, 8), (1, 3, 6, 6), (3, 4, 4, 30)])  # fmt: skip  # noqa: E501
def test_the_best_product_of_the_rank(clients: int, rank: int, inputs: int, outputs: int) -> None:
    draw = torch.Generator().manual_seed(clients)
    a = torch.randn(clients, rank, inputs, generator=draw, dtype=torch.float64)
    b = torch.randn(clients, outputs, rank, generator=draw, dtype=torch.float64)
    weights = torch.rand(clients, generator=draw, dtype=torch.float64)
    whole = sum(weights[i] * b[i] @ a[i] for i in range(clients))
    assert isinstance(whole, torch.Tensor)
    u, values, v = torch.linalg.svd(whole)
    best = u[:, :rank] * values[:rank] @ v[:rank]
    found = best_product(a, b, weights, rank)
    assert torch.allclose(found.b @ found.a, best, atol=1e-10)
    assert float(found.lost) == pytest.approx(float(values[rank:].square().sum()), abs=1e-10)
    assert float(found.apart(a[:1], b[:1])) == pytest.approx(float((whole - b[0] @ a[0]).square().sum()))
    # Both factors carry alike, and the first ranks carry most.
    norms = found.a.norm(dim=1)
    assert torch.allclose(norms, found.b.norm(dim=0))
    assert torch.equal(norms, norms.sort(descending=True).values)


def test_directions_without_weight_can_be_trained_again() -> None:
    a = torch.eye(3, 5, dtype=torch.float64)[None]
    b = torch.zeros(1, 4, 3, dtype=torch.float64)
    b[0, 0, 0] = 2
    found = best_product(a, b, torch.ones(1, dtype=torch.float64), 3)
    assert found.b.count_nonzero(dim=0).tolist() == [1, 0, 0]
    assert found.a.norm(dim=1).tolist() == pytest.approx([2**0.5, 1, 1])


def test_adapters_are_found_by_their_names() -> None:
    layout = Layout.of(Adapted())
    assert layout.adapters.tolist() == [[0, 18, 3, 6, 5]]
    assert Layout.of(nn.Linear(2, 2)).adapters.shape == (0, 5)
    model = torch.arange(1.0, layout.size + 1)[None].repeat(2, 1)
    cut_to_ranks(model, torch.from_numpy(layout.adapters), [1, None])
    views = layout.views(model)
    assert (views["lora_A.default.weight"] == 0).sum(dim=(1, 2)).tolist() == [12, 0]
    assert views["lora_B.default.weight"][0, :, 0].count_nonzero() == 5
    assert (views["lora_B.default.weight"] == 0).sum(dim=(1, 2)).tolist() == [10, 0]


def experiment(**changes: object) -> Experiment:
    document = {
        "data": {"source": "memory"},
        "partition": {"clients": 4},
        "model": {"name": Adapted},
        "training": {"learning_rate": 0.5, "epochs": 2},
        "rounds": {"count": 3},
        "store": {"keep": "updates"},
        "compute": {"engine": "vmap", "device": "cpu"},
        **changes,
    }
    return Experiment.model_validate(document)


def rows() -> Dataset:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(80, 6))
    return in_memory(x, (x[:, 0] * x[:, 1] > 0).astype(np.int64))


def test_rounds_weigh_products_and_say_what_is_lost(tmp_path: Path) -> None:
    described = experiment(algorithm={"name": "flexlora", "ranks": {"client-001": 1}})
    folder = run(described, out=tmp_path / "run", dataset=rows())
    rounds = History(folder).rounds
    told = [json.loads(text) for text in rounds[rounds["round"] > 0]["server_metrics"]]
    assert all(0 < one["product_error"] < one["factor_error"] < 2 for one in told)
    layout, weights = Layout.of(Adapted()), torch.full((4,), 0.25, dtype=torch.float64)
    for round in (1, 2, 3):
        kept = read_round(folder, round)
        ((name, updates),) = kept.updates.items()
        assert isinstance(updates.payload, DenseModels)
        views = layout.views(updates.payload.models.double())
        a, b = views["lora_A.default.weight"], views["lora_B.default.weight"]
        assert a[1, 1:].count_nonzero() == b[1, :, 1:].count_nonzero() == 0
        assert a[0].count_nonzero() == 18
        u, values, v = torch.linalg.svd(torch.einsum("c,cor,cri->oi", weights, b, a))
        new = layout.views(kept.models[name].double())
        product = new["lora_B.default.weight"] @ new["lora_A.default.weight"]
        assert torch.allclose(product, u[:, :3] * values[:3] @ v[:3], atol=1e-6)
        assert told[round - 1]["product_error"] == pytest.approx(float(values[3:].norm() / values.norm()), abs=1e-5)
        assert torch.allclose(new["head.bias"], weights @ views["head.bias"], atol=1e-6)
    shown = summarise(folder, described.rounds)["rules"][0]
    assert shown["lost"] == {"product": told[-1]["product_error"], "factors": told[-1]["factor_error"]}
    assert shown["server"] == {}


def test_a_model_without_adapters_is_refused(tmp_path: Path) -> None:
    described = experiment(algorithm={"name": "flexlora"}, model={"name": "logistic"})
    with pytest.raises(UserError, match="got 'flexlora' with a model without low-rank adapters; allowed: one with"):
        run(described, out=tmp_path / "run", dataset=rows())
