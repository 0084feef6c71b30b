"""Testing models: what small operators must not do on a busy machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.clients.local.evaluator import MANY
from steelyard.data import PartitionSettings, in_memory, share_out
from steelyard.learning import losses
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.messages import Question


def test_losses_of_small_models_are_taken_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that wait for each other at every small operator made a loaded machine many times slower."""
    chance = torch.Generator().manual_seed(0)
    data = in_memory(torch.randn(60, 4, generator=chance), torch.arange(60) % 3, classes=3)
    population = share_out(data, PartitionSettings(scheme="iid", clients=3, server="fraction"), 0)
    simulation = Simulation(
        {0: population},
        ModelSettings(name="logistic"),
        TrainingSettings(),
        ComputeSettings(engine="loop", device="cpu"),
    )
    model = SimulationServer(simulation).initial(0)
    plain, threads = losses.per_sample, []

    def watched(state):  # type: ignore[no-untyped-def]
        each = plain(state)

        def counted(outputs, labels):  # type: ignore[no-untyped-def]
            threads.append(torch.get_num_threads())
            return each(outputs, labels)

        return counted

    monkeypatch.setattr(losses, "per_sample", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        simulation.evaluate([Question("a", 0, 0, model[None])])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads
    assert set(threads) == {1}


class Shifted(nn.Module):
    """Adds one to its input: in place, or to a copy."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.dense = in_place, nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x.add_(1) if self.in_place else x + 1)


def test_a_module_that_writes_into_its_input_does_not_change_what_the_next_model_sees() -> None:
    chance = torch.Generator().manual_seed(0)
    data = in_memory(torch.randn(60, 4, generator=chance), torch.arange(60) % 3, classes=3)
    population = share_out(data, PartitionSettings(scheme="iid", clients=3, server="fraction"), 0)
    found: list[np.ndarray] = []
    for in_place in (True, False):
        settings = ModelSettings(name=lambda: Shifted(in_place))  # noqa: B023  # type: ignore[arg-type]
        simulation = Simulation(
            {0: population}, settings, TrainingSettings(), ComputeSettings(engine="loop", device="cpu")
        )
        server = SimulationServer(simulation)
        found.append(server.test(0, server.initial(0).repeat(3, 1)).losses)
    assert found[0].tolist() == found[1].tolist()
    assert len(set(found[0].tolist())) == 1


@pytest.mark.parametrize("hidden", [(), (7,), (5, 3)])
def test_many_models_in_one_stack_give_what_each_gives_alone(hidden: tuple[int, ...]) -> None:
    """Coalitions of clients are tested together; the stack is cut by models and by rows."""
    chance = torch.Generator().manual_seed(0)
    data = in_memory(torch.randn(90, 4, generator=chance), torch.arange(90) % 3, classes=3)
    population = share_out(data, PartitionSettings(scheme="iid", clients=3, server="fraction"), 0)
    model = ModelSettings(name="mlp", hidden=hidden) if hidden else ModelSettings(name="logistic")
    # So little memory that no two models fit at once.
    compute = ComputeSettings(engine="loop", device="cpu", memory_gb=0.00002)
    simulation = Simulation({0: population}, model, TrainingSettings(), compute)
    server = SimulationServer(simulation)
    models = server.initial(0) + 0.3 * torch.randn(MANY + 6, len(server.initial(0)), generator=chance)
    together = server.test(0, models)
    alone = [server.test(0, one[None]) for one in models]
    assert together.losses == pytest.approx(np.concatenate([test.losses for test in alone]), abs=1e-6)
    assert np.array_equal(together.f1, np.concatenate([test.f1 for test in alone]))
    assert len(np.unique(together.losses)) == len(models)
