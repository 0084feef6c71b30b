"""Frozen parameters stay as they are, in every engine and when combined; choices kept for other nets are not taken."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.clients.local import engine_cases as cases
from torch import nn

from steelyard.algorithms.algorithm import Part
from steelyard.clients.local import Simulation, SimulationServer
from steelyard.clients.local.engines import choice_file, engine_trial, fingerprint
from steelyard.errors import UserError
from steelyard.learning.models import ConvNet, DenseNet, ModelSettings
from steelyard.learning.parameters import Layout
from steelyard.learning.parts import check_part
from steelyard.learning.training import TrainingSettings, train_client
from steelyard.messages import LossState, Task, Updates


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(engine_trial, "REPEATS", 1)  # which one wins a trial is nothing to these tests


def dense(frozen: tuple[str, ...] = ("layers.0.weight", "layers.1.bias")) -> nn.Module:
    return _without(DenseNet(64, (12,), 10), frozen)


def convolutional(frozen: tuple[str, ...] = ("conv1.weight", "dense1.bias")) -> nn.Module:
    return _without(ConvNet((1, 8, 8), (4, 6), 3, 8, 10), frozen)


def own(frozen: tuple[str, ...] = ("body.1.weight", "body.2.weight")) -> nn.Module:
    return _without(cases.Own(10), frozen)


def _without(module: nn.Module, frozen: tuple[str, ...]) -> nn.Module:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return module


MODELS = {"dense": dense, "convolutional": convolutional, "own": own}
ENGINES = ("loop", "threads", "vmap:3", "graph", "fused", "winograd", "stacked:3", "auto")


@functools.cache
def by_the_loop(name: str, how: str) -> tuple[list[Updates], torch.Tensor]:
    model = ModelSettings(name=MODELS[name])  # type: ignore[arg-type]
    found, start, _ = cases.trained("loop", cases.population((8, 8), 10), model, cases.TRAINING[how])
    return found, start


@pytest.mark.filterwarnings("ignore:engine .* does not take this model")
@pytest.mark.parametrize(
    ("name", "engine", "how"),
    [
        # Either training with every engine and every network; the other half are slow tests.
        pytest.param(name, engine, how, marks=[pytest.mark.slow] * ((row + column + place) % 2))
        for row, name in enumerate(MODELS)
        for column, engine in enumerate(ENGINES)
        for place, how in enumerate(("mini", "heavy"))
    ],
)
def test_what_is_frozen_is_no_part_of_what_is_trained_and_sent(name: str, engine: str, how: str) -> None:
    people = cases.population((8, 8), 10)
    model = ModelSettings(name=MODELS[name])  # type: ignore[arg-type]
    expected, start = by_the_loop(name, how)
    found, _, clients = cases.trained(engine, people, model, cases.TRAINING[how])
    setup = clients.context.setup
    free = [parameter for parameter in setup.module.parameters() if parameter.requires_grad]
    assert len(start) == setup.layout.size == sum(parameter.numel() for parameter in free)
    assert len(list(setup.module.parameters())) == len(free) + 2
    cases.assert_alike(found, expected, start, 1e-4)


def test_what_is_frozen_is_the_same_for_every_seed() -> None:
    people = cases.population((8, 8), 10)
    clients = Simulation({0: people, 1: people}, ModelSettings(name=own), cases.TRAINING["mini"])  # type: ignore[arg-type]
    server = SimulationServer(clients)
    first, second = server.initial(0), server.initial(1)
    assert not torch.equal(first, second)
    # The same numbers from both seeds give the same loss, though the second seed would draw other frozen parts.
    tests = [server.test(seed, first[None]).losses for seed in (0, 1)]
    assert tests[0] == pytest.approx(tests[1])


def test_a_choice_made_for_the_whole_net_is_not_taken_for_the_frozen_one() -> None:
    """Both nets have one class and one set of shapes; only the plain one may be trained in stacks by hand."""
    people = cases.population((8, 8), 10)
    whole = ModelSettings(name=lambda: dense(()))  # type: ignore[arg-type]
    _, _, first = cases.trained("auto", people, whole, cases.TRAINING["heavy"])
    keys: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice_file, "read", lambda key: keys.append(key))
        cases.trained("auto", people, whole, cases.TRAINING["heavy"])
        cases.trained("auto", people, ModelSettings(name=lambda: dense(("layers.0.weight",))), cases.TRAINING["heavy"])  # type: ignore[arg-type]
    assert len(set(keys)) == 2
    assert "trial" in first.describe()["engine_reason"]


class Plain(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate
        self.dense = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(nn.functional.dropout(x.flatten(1), self.rate, self.training))


def _hooked() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.1)), lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.2))),
        (lambda: nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 2))),
        (lambda: nn.BatchNorm1d(3), lambda: nn.BatchNorm1d(3).eval()),
        (lambda: nn.BatchNorm1d(3, momentum=0.1), lambda: nn.BatchNorm1d(3, momentum=0.2)),
        (lambda: Plain(0.0), lambda: Plain(0.3)),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), _hooked),
        (lambda: dense(()), lambda: dense()),
    ],
)  # fmt: skip
def test_modules_of_the_same_shapes_are_told_apart(one, other) -> None:  # type: ignore[no-untyped-def]
    assert fingerprint.of_module(one()) == fingerprint.of_module(one())
    assert fingerprint.of_module(one()) != fingerprint.of_module(other())


def test_the_source_of_a_users_code_counts(tmp_path: Path) -> None:
    from steelyard.usercode import find_code

    def module(folder: str, body: str) -> list[object]:
        file = tmp_path / folder / "net.py"
        file.parent.mkdir()
        file.write_text(
            "import torch\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        return " + body + "\n"
        )
        return fingerprint.of_module(find_code(f"{file}:Net", "model.name", [])(3, 2))

    plain = module("a", "super().forward(x)")
    assert plain[3] != module("b", "super().forward(torch.relu(x))")[3]


def test_a_module_that_looks_at_its_whole_batch_is_not_stacked_where_batches_are_padded() -> None:
    """All clients fill whole batches but for the last, which padding would change; the trial must see such a batch."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            return self.dense(x - x.mean(dim=0))

    training = TrainingSettings(batch_size=4, epochs=1)
    people = cases.population((8, 8), 10, sizes=(33, 33, 33))
    model = ModelSettings(name=Centred)  # type: ignore[arg-type]
    expected, start, _ = cases.trained("loop", people, model, training)
    with pytest.warns(UserWarning, match="does not take this model"):
        found, _, clients = cases.trained("vmap", people, model, training)
    assert clients.describe()["engine_choice"] == "loop"
    cases.assert_alike(found, expected, start, 1e-6)


class Backbone(nn.Module):
    """A frozen body with batch norm, one head that is trained."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(12, affine=affine)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), norm, nn.ReLU()).requires_grad_(False)
        norm.running_mean.copy_(torch.linspace(-1, 1, 12))  # type: ignore[union-attr]
        self.head = nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("affine", [True, False])
def test_the_batch_norm_of_a_frozen_part_runs_as_in_tests(affine: bool) -> None:
    """Training is that of the head alone on what the body gives in tests."""
    module = Backbone(affine)
    layout = Layout.of(module)
    assert layout.size == layout.trained == 12 * 10 + 10
    features, labels = torch.randn(20, 64), torch.arange(20) % 10
    head, seen = copy.deepcopy(module.head), module.eval().body(features)
    given = labels, np.arange(20)[None], TrainingSettings(batch_size=7, epochs=1), LossState("cross-entropy")
    found, _ = train_client(module, layout, layout.read(module), features, *given)
    alone = Layout.of(head)
    expected, _ = train_client(head, alone, alone.read(head), seen, *given)
    assert torch.equal(found, expected)
    assert torch.equal(module.body(features), seen)


@pytest.mark.parametrize("engine", ["threads", "vmap:3", "auto"])
def test_the_batch_norm_of_a_frozen_part_is_not_sent(engine: str) -> None:
    people, model = cases.population((8, 8), 10), ModelSettings(name=Backbone)  # type: ignore[arg-type]
    expected, start, _ = cases.trained("loop", people, model, cases.TRAINING["heavy"])
    assert len(start) == 12 * 10 + 10
    assert list(expected[0].clients) == [f"c{number}" for number in range(5)]  # one row is enough for such a norm
    found, _, clients = cases.trained(engine, people, model, cases.TRAINING["heavy"])
    assert engine == "auto" or clients.describe()["engine_choice"] == engine
    cases.assert_alike(found, expected, start, 1e-4)


def test_a_network_of_ones_own_is_looked_at_where_no_gradients_are_taken() -> None:
    """A node tests before it trains."""
    people = cases.population((8, 8), 10)
    clients = Simulation({0: people}, ModelSettings(name=Backbone), cases.TRAINING["mini"])  # type: ignore[arg-type]
    with torch.no_grad():
        assert clients.context.loss(LossState()).name == "cross-entropy"


@pytest.mark.parametrize("part", ["head", "norms"])
def test_an_algorithm_finds_no_part_in_what_is_frozen(part: Part) -> None:
    """fedrep would have nothing to average, fedbn nothing to keep."""
    with pytest.raises(UserError, match=r"algorithm\.name: got 'mine'"):
        check_part(Backbone(), part, "mine")


class Warming(nn.Module):
    """Counts its steps in a whole number; a mask of -inf and a table that is no part of its state lie beside."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(64, 10)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.full((10,), -torch.inf).index_fill_(0, torch.arange(10), 0.0))
        self.register_buffer("future", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("table", torch.ones(7), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1  # type: ignore[operator]
            return self.dense(x.flatten(1)) * (1 - 0.5 ** self.steps.float()) + self.mask  # type: ignore[operator]
        return self.dense(x.flatten(1))


def test_buffers_that_are_not_sent_begin_anew_with_every_client() -> None:
    """What one client counted must not reach the next one: then a cohort would depend on its order."""
    people, model = cases.population((8, 8), 10), ModelSettings(name=Warming)  # type: ignore[arg-type]
    expected, start, clients = cases.trained("loop", people, model, cases.TRAINING["mini"])
    assert len(start) == 650 + 10
    last = clients.names(0)[-1]
    alone = clients.train([Task("plain", 0, 3, (last,), start)])[0]
    assert torch.equal(alone.payload.models[0], expected[0].payload.models[-1])
    found, _, threads = cases.trained("threads", people, model, cases.TRAINING["mini"])
    assert threads.describe()["engine_choice"] == "threads"
    cases.assert_alike(found, expected, start, 1e-6)
    with pytest.warns(UserWarning, match="its buffer steps changes while it trains and is not sent"):
        found, _, _ = cases.trained("vmap", people, model, cases.TRAINING["mini"])
    cases.assert_alike(found, expected, start, 1e-6)


class Counted(nn.Module):
    """Two parts share one count of steps, which the first of them raises and the second reads; and one running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.first, self.second = nn.Linear(64, 10), nn.Module(), nn.Module()
        for name, value in (("steps", torch.zeros((), dtype=torch.int64)), ("mean", torch.zeros(10))):
            self.first.register_buffer(name, value)
            self.second.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.dense(x.flatten(1))
        if self.training:
            self.first.steps += 1  # type: ignore[operator, assignment]
            self.second.mean.lerp_(found.detach().mean(0), 0.1)  # type: ignore[operator]
        assert self.first.mean is self.second.mean
        assert self.first.steps is self.second.steps
        return found * (1 - 0.5 ** self.second.steps.float()) + self.first.mean  # type: ignore[operator]


def test_a_buffer_that_two_parts_share_stays_one_and_begins_anew_with_every_client() -> None:
    people, model = cases.population((8, 8), 10), ModelSettings(name=Counted)  # type: ignore[arg-type]
    expected, start, clients = cases.trained("loop", people, model, cases.TRAINING["mini"])
    assert len(start) == 650 + 10
    last = clients.names(0)[-1]
    alone = clients.train([Task("plain", 0, 3, (last,), start)])[0]
    assert torch.equal(alone.payload.models[0], expected[0].payload.models[-1])
    means = clients.context.setup.layout.views(expected[0].payload.models)["first.mean"]
    assert bool(means.any())
    found, _, _ = cases.trained("threads", people, model, cases.TRAINING["mini"])
    cases.assert_alike(found, expected, start, 1e-6)


class Idle(nn.Module):
    """One of its layers has no part in its outputs, and so no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.idle = nn.Linear(64, 10), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x.flatten(1))


@pytest.mark.parametrize("how", ["heavy", "mini"])
def test_a_layer_without_a_gradient_decays_alike_in_loop_and_stack(how: str) -> None:
    people, model = cases.population((8, 8), 10), ModelSettings(name=Idle)  # type: ignore[arg-type]
    expected, start, clients = cases.trained("loop", people, model, cases.TRAINING[how])
    found, _, stack = cases.trained("vmap:3", people, model, cases.TRAINING[how])
    assert stack.describe()["engine_choice"] == "vmap:3"
    cases.assert_alike(found, expected, start, 1e-5)
    idle = clients.context.setup.layout.views(expected[0].payload.models)["idle.weight"]
    begun = clients.context.setup.layout.views(start)["idle.weight"]
    assert torch.equal(idle, begun.expand_as(idle)) == (how == "mini")  # without decay it stays as it is


def test_running_means_of_an_instance_norm_are_not_stacked_where_batches_are_padded() -> None:
    def tracked() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (4, 16)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten())

    people = cases.population((64,), 10)
    model = ModelSettings(name=lambda: nn.Sequential(*tracked(), nn.Linear(64, 10)))  # type: ignore[arg-type]
    expected, start, _ = cases.trained("loop", people, model, cases.TRAINING["mini"])
    with pytest.warns(UserWarning, match="its norm would count the padding of short batches"):
        found, _, _ = cases.trained("vmap", people, model, cases.TRAINING["mini"])
    cases.assert_alike(found, expected, start, 1e-6)
