"""Layers written for stacks give what torch's give, in every engine that stacks clients."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from tests.clients.local import engine_cases as cases
from torch import nn
from torch.nn import functional

from steelyard.clients.local import Simulation
from steelyard.clients.local.engines.compiled import CompiledStep
from steelyard.clients.local.engines.graph import GraphEngine
from steelyard.clients.local.engines.graph_steps import MappedStep
from steelyard.clients.local.layers.convolution import StackedConvolution, StackedLinear, banded, beside, convolve
from steelyard.clients.local.layers.recurrent import StackedRecurrent
from steelyard.clients.local.layers.replacing import stackable, unmasked_norms
from steelyard.learning.augmentation import Augmentation, Padding
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.messages import Updates


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 5, 3, padding=1),
        nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(0, 2), bias=False),
        nn.Conv2d(3, 4, 3, dilation=2, padding="same"),
        nn.Conv2d(3, 4, 4, padding="same"),
        nn.Conv2d(3, 4, 5, padding="valid", stride=2),
        nn.Conv2d(3, 6, 1, stride=2),
        nn.Linear(7, 4),
        nn.Linear(7, 4, bias=False),
    ],
    ids=str,
)
# What torch says of even kernels concerns its own copy of the rows, not what it computes.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_products_are_what_torch_computes(layer: nn.Module) -> None:
    stacked = StackedConvolution(layer) if isinstance(layer, nn.Conv2d) else StackedLinear(layer)  # type: ignore[arg-type]
    torch.manual_seed(1)
    x = torch.randn((2, 3, 9, 8) if isinstance(layer, nn.Conv2d) else (2, 5, 7), requires_grad=True)
    expected = layer(x)
    slope = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x, *layer.parameters()], slope)
    found = stacked(x)
    assert torch.allclose(found, expected, atol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(found, [x, *stacked.parameters()], slope), wanted, strict=True):
        if theirs.shape == getattr(layer, "weight").shape and theirs.dim() == 4:  # noqa: B009
            theirs = theirs.permute(StackedConvolution.AXES)
        assert torch.allclose(mine, theirs, atol=1e-4)


@pytest.mark.parametrize("kernel", [(5, 5), (3, 2), (1, 1), (2, 7)])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_neighbours_in_one_product_are_what_torch_computes(kernel: tuple[int, int], count: int) -> None:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn((2, 9, 12, 3), generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn((6, *kernel, 3), generator=draw, dtype=torch.float64, requires_grad=True)
    expected = functional.conv2d(images.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    found = convolve(images, weight, (1, 1), (1, 1), count)
    slope = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    assert torch.allclose(found, expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, [images, weight], slope),
        torch.autograd.grad(expected, [images, weight], slope),
        strict=True,
    ):
        assert torch.allclose(mine, theirs)


def test_kernels_of_neighbours_by_hand() -> None:
    weight = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1)
    assert banded(weight, 3).tolist() == [[1, 2, 0, 0], [0, 1, 2, 0], [0, 0, 1, 2]]


def test_as_many_neighbours_as_fill_a_product() -> None:
    assert beside(6, 28) == 10  # three times ten for 28 columns
    assert beside(16, 32) == 4
    assert beside(16, 3) == 3  # no more than there are
    assert beside(64, 8) == beside(500, 8) == 1


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_cells_are_what_torch_computes(kind: type[nn.Module], depth: int, both: bool, first: bool, bias: bool) -> None:
    torch.manual_seed(1)
    layer = kind(3, 4, depth, batch_first=first, bidirectional=both, bias=bias)
    stacked = StackedRecurrent(layer)  # type: ignore[arg-type]
    x = torch.randn(2, 5, 3)
    samples = 2 if first else 5
    state = torch.randn(depth * (1 + both), samples, 4)
    for begin in (None, (state, -state) if kind is nn.LSTM else state):
        (expected, ends), (found, mine) = layer(x, hx=begin), stacked(x, hx=begin)
        assert torch.allclose(found, expected, atol=1e-6)
        mine, ends = (mine, ends) if kind is nn.LSTM else ((mine,), (ends,))
        assert all(torch.allclose(own, end, atol=1e-6) for own, end in zip(mine, ends, strict=True))


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Dropout2d(0.3), nn.Flatten(), nn.Dropout(0.4), nn.Linear(256, 12), nn.BatchNorm1d(12, momentum=0.3),
        nn.ReLU(), nn.Linear(12, 10),
    )  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.gru = nn.GRU(6, 5, batch_first=True)
        self.dense = nn.Linear(5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.gru(self.lstm(x)[0])[0][:, -1])


class Tied(nn.Module):
    """One layer in two places, frozen parts, attention and embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(8, 8)
        self.places.requires_grad_(False)
        self.one = nn.Linear(8, 8)
        self.two = self.one
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.tokens = nn.Embedding(4, 8)
        self.dense = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.places(torch.arange(8, device=x.device)) + self.tokens((x.abs() * 2).long().clamp(max=3)[..., 0])
        x = self.norm(self.two(torch.relu(self.one(x))))
        return self.dense((x + self.attention(x, x, x, need_weights=False)[0]).mean(dim=1))


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))


NETWORKS = {"plain": plain, "normed": normed, "recurrent": Recurrent, "tied": Tied, "encoded": cases.Encoded}
TRAINING = {
    # 11 and 6 rows leave one over (8 do of batches of 7), which batch norm joins to the batch before.
    "mini": TrainingSettings(learning_rate=0.1, batch_size=5, epochs=1),
    "heavy": TrainingSettings(learning_rate=0.05, batch_size=7, epochs=2, momentum=0.5, weight_decay=0.1),
    "adam": TrainingSettings(learning_rate=0.01, batch_size=5, epochs=1, optimiser="adam"),
    "updates": TrainingSettings(learning_rate=0.1, batch_size=5, updates=5),
}


PAIRS = [(name, engine) for name in ("normed", "recurrent", "tied") for engine in ("vmap", "graph")]
ALL = [(row + column, (*pair, how)) for row, pair in enumerate(PAIRS) for column, how in enumerate(TRAINING)]
# Every network meets every engine, and every training some of each; the other half are slow tests.
CASES, SLOW = ([case for place, case in ALL if place % 2 == half] for half in (0, 1))
# Tracing takes seconds, so each network is traced once, and all but the smallest in the slow tests.
CASES += [("plain", "compiled", "heavy"), ("encoded", "graph", "mini")]
SLOW += [
    ("encoded", "compiled", "mini"),
    ("normed", "compiled", "mini"),
    ("recurrent", "compiled", "adam"),
    ("tied", "compiled", "heavy"),
]
PEOPLE = cases.population((8, 8), 10, sizes=(11, 6, 4, 8))


@functools.cache
def by_the_loop(name: str, how: str) -> tuple[list[Updates], torch.Tensor, Simulation]:
    return cases.trained("loop", PEOPLE, ModelSettings(name=NETWORKS[name]), TRAINING[how])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "engine", "how"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_stacks_of_any_network_give_what_the_loop_gives(
    name: str, engine: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompiledStep, "backend", "aot_eager")
    model, training = ModelSettings(name=NETWORKS[name]), TRAINING[how]  # type: ignore[arg-type]
    expected, start, clients = by_the_loop(name, how)
    if engine == "vmap":
        found, _, others = cases.trained("vmap:3", PEOPLE, model, training)
        assert others.describe()["engine_choice"] == "vmap:3"
        models, losses = found[0].payload.models, found[0].losses
    else:
        setup = clients.context.setup
        kind = MappedStep if engine == "graph" else CompiledStep
        made = GraphEngine(setup, lambda descent: kind(setup, descent), engine, 3)
        cohort, _ = clients.cohort_builder.gather(cases.tasks_of(clients.names(0), start, 10, training)[:1])
        models = torch.zeros_like(expected[0].payload.models)
        losses = made.train(cohort, models)
    # Adam divides by the size of the gradients, and rounding near 0 with it.
    assert torch.allclose(models, expected[0].payload.models, atol=2e-3 if how == "adam" else 5e-5)
    assert losses == pytest.approx(expected[0].losses, rel=1e-3)
    assert not torch.equal(models, start.expand_as(models))


@pytest.mark.parametrize("padding", ["zero", "reflect"])
def test_a_compiled_step_changes_images_as_the_loop_does(padding: Padding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledStep, "backend", "aot_eager")
    changes = Augmentation(2, padding, flip=True, black=(-0.5, 0.25))
    people = cases.population((2, 8, 8), 3, sizes=(15, 9, 16), bytes_=True, augment=changes)
    # What changes images does not ask what looks at them: the network that is traced soonest.
    model, training = ModelSettings(name="logistic"), cases.TRAINING["mini"]
    expected, start, clients = cases.trained("loop", people, model, training)
    setup = clients.context.setup
    made = GraphEngine(setup, lambda descent: CompiledStep(setup, descent), "compiled", 3)
    cohort, _ = clients.cohort_builder.gather(cases.tasks_of(clients.names(0), start, 3, training)[:1])
    models = torch.zeros_like(expected[0].payload.models)
    made.train(cohort, models)
    assert torch.allclose(models, expected[0].payload.models, atol=1e-5)
    plain, _, _ = cases.trained("loop", cases.population((2, 8, 8), 3, sizes=(15, 9, 16), bytes_=True), model, training)
    assert not torch.allclose(plain[0].payload.models, models, atol=1e-3)


def test_layers_of_a_users_own_stay_as_they_are() -> None:
    class Own(nn.Linear):
        pass

    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    unusual = nn.BatchNorm1d(2, momentum=None)
    module = nn.Sequential(Own(2, 2), hooked, unusual, nn.Linear(2, 2), nn.Conv2d(2, 2, 1, groups=2))
    kinds = [type(layer) for layer in stackable(module, products=True)]
    assert kinds == [Own, nn.Linear, nn.BatchNorm1d, StackedLinear, nn.Conv2d]
    assert [type(layer) for layer in module][3] is nn.Linear
    assert unmasked_norms(module)
    assert not unmasked_norms(normed())
    assert type(stackable(nn.Linear(2, 2), products=True)) is StackedLinear
    assert type(stackable(nn.Linear(2, 2), products=False)) is nn.Linear
