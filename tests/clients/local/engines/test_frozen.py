"""Frozen parameters stay as they are, in every engine and when combined; choices kept for other nets are not taken."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from tests.clients.local import engine_cases as cases
from torch import nn

from steelyard.clients.local import Simulation, SimulationServer
from steelyard.clients.local.engines import choice_file, engine_trial, fingerprint
from steelyard.learning.models import ConvNet, DenseNet, ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.messages import Updates


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
