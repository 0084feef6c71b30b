"""Networks of a user's own: what is frozen stays and is not sent, and two that look alike are told apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.clients.local import engine_cases as cases
from tests.clients.local.engine_cases import Case
from tests.kit import assert_refused
from torch import nn

from steelyard.base.usercode import find_code
from steelyard.clients.local import SimulationServer
from steelyard.clients.local.engines import choice
from steelyard.learning.parameters import Layout, check_part
from steelyard.learning.training import TrainingSettings, train_client
from steelyard.messages.updates import LossState


def test_what_is_frozen_is_the_same_for_every_seed() -> None:
    server = SimulationServer(cases.simulated(cases.case("frozen own, mini")))
    first, second = server.initial(0), server.initial(1)
    assert not torch.equal(first, second)
    # The same numbers from both seeds give the same loss, though the second seed would draw other frozen parts.
    tests = [server.test(seed, first[None]).losses for seed in (0, 1)]
    assert tests[0] == pytest.approx(tests[1])


@pytest.mark.parametrize("affine", [True, False])
def test_the_batch_norm_of_a_frozen_part_runs_as_in_tests(affine: bool) -> None:
    """Training is that of the head alone on what the body gives in tests."""
    torch.manual_seed(1)
    module = cases.Backbone(affine)
    layout = Layout.of(module)
    assert layout.size == layout.trained == 12 * 10 + 10
    features, labels = torch.randn(20, 64), torch.arange(20) % 10
    head, seen = copy.deepcopy(module.head), module.eval().body(features)
    given = labels, np.arange(20)[None], TrainingSettings(batch_size=7, epochs=1), LossState("cross-entropy")
    found, _ = train_client(module, layout, layout.read(module), features, *given)
    alone = Layout.of(head)
    expected, _ = train_client(head, alone, alone.read(head), seen, *given)
    # Twenty rows at once and batches of seven may be summed in another order: 64 float32 products of at most 4 in the
    # body are off by 64 · 4 · 1.2e-7 = 3e-5, and three steps of 0.01 at a slope of about 1 carry less than all of it.
    # Running means of the batch in place of those of tests move numbers by 1e-3 and more.
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5)
    # Nothing in the body has moved: the same rows in the same process.
    assert torch.equal(module.body(features), seen)


def hooked() -> nn.Module:
    module = nn.Linear(4, 2)
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 2))),
        (lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.2)),
        (lambda: nn.Linear(4, 2), hooked),
        (lambda: nn.Linear(4, 2), lambda: cases.frozen(nn.Linear(4, 2), "weight")),
    ],
)
def test_modules_of_the_same_shapes_are_told_apart(
    one: Callable[[], nn.Module], other: Callable[[], nn.Module]
) -> None:
    assert choice.of_module(one()) == choice.of_module(one())
    assert choice.of_module(one()) != choice.of_module(other())


def test_the_source_of_a_users_code_counts(tmp_path: Path) -> None:
    sources = []
    for part in ("bias", "weight"):
        file = tmp_path / part / "net.py"
        file.parent.mkdir()
        file.write_text(
            f"import torch\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        return self.{part}"
        )
        sources.append(choice.of_module(find_code(f"{file}:Net", "model.name", [])(3, 2))[3])
    assert sources[0] != sources[1]


def test_a_network_of_ones_own_is_looked_at_where_no_gradients_are_taken() -> None:
    """A node tests before it trains."""
    with torch.no_grad():
        assert cases.simulated(cases.case("backbone, mini")).context.loss(LossState()).name == "cross-entropy"


@pytest.mark.parametrize("part", ["head", "norms"])
def test_an_algorithm_finds_no_part_in_what_is_frozen(part: str) -> None:
    """fedrep would have nothing to average, fedbn nothing to keep."""
    assert_refused(lambda: check_part(cases.Backbone(), part, "mine"), "algorithm.name", "mine")  # type: ignore[arg-type]


class Pictures(nn.Module):
    """Batch norm over the pixels of an image too: one image is enough for it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dense = nn.BatchNorm2d(1), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.norm(x.reshape(-1, 1, 8, 8)).flatten(1))


def test_a_client_with_too_few_rows_for_a_norm_is_left_out_with_its_reason() -> None:
    def updates(module: type[nn.Module], batch_size: int) -> tuple[tuple[str, ...], list[str]]:
        people = cases.population((8, 8), 10, sizes=(5, 1, 8))
        clients = cases.simulated(Case(cases.of(module), people, TrainingSettings(batch_size=batch_size)))
        (found,) = clients.train([cases.task_of(clients)])
        return found.clients, [f"{failure.client}: {failure.reason}" for failure in found.failures]

    reason = "c1: 1 training sample, and batch norm needs 2 in a batch"
    assert updates(cases.Normed, 4) == (("c0", "c2"), [reason])
    assert updates(Pictures, 1) == updates(cases.Backbone, 1) == (("c0", "c1", "c2"), [])
    assert_refused(lambda: updates(cases.Normed, 1), "training.batch_size", "got 1")
