"""From hidden sums to models and records: who dropped out is left out of both, and a sum that cannot be ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.rounds.scripted import NAMES, Clients, Kept, Server, federation, state

from steelyard.messages import DenseModels, Failure, Task, Updates
from steelyard.privacy.aggregation_settings import AggregationSettings
from steelyard.privacy.hidden import HiddenUpdates, Summed
from steelyard.rounds.combining import as_summed
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.soundness import Exploded
from steelyard.rounds.state import Plan
from steelyard.weighing.weights import Weighing

PLAN = Plan(rounds=3, fraction=1.0)


class Hiding(Clients):
    """The scripted clients with their updates hidden; `gone` drop out of every sum, `excess` is added by federation."""

    def __init__(self, gone: str = "", excess: dict[str, float] | None = None) -> None:
        super().__init__()
        self.gone, self.excess = gone, excess or {}

    def _trained(self, task: Task) -> Updates:
        updates = super()._trained(task)
        assert isinstance(updates.payload, DenseModels)
        steps = updates.payload.models.double().numpy() - task.parameters.double().numpy()
        payload = HiddenUpdates(updates.clients, Open(self, task, steps), AggregationSettings(bound=2.0))
        return replace(updates, payload=payload)


class Open:
    """A sum that is taken in the open."""

    def __init__(self, clients: Hiding, task: Task, steps: np.ndarray) -> None:
        self.clients, self.task, self.steps = clients, task, steps

    def sum(self, clients: Sequence[str], weights: np.ndarray) -> Summed:
        stayed = [row for row, name in enumerate(clients) if name not in self.clients.gone]
        total = weights[stayed] @ self.steps[stayed] + self.clients.excess.get(self.task.federation, 0.0)
        names = tuple(clients[row] for row in stayed)
        dropped = tuple(Failure(name, "its node is gone") for name in clients if name in self.clients.gone)
        return Summed(total, names, dropped, {name: 10 * NAMES.index(name) for name in names})


def test_the_model_is_the_weighted_mean_of_those_who_stayed_and_the_record_says_so() -> None:
    kept = Kept()
    states = run_rounds([federation()], {"f": state(0)}, Hiding(gone="bj"), Server(), Plan(1, 1.0), kept)
    sizes = np.array([1, 0, 3, 4, 5, 6, 7, 8, 9, 0])  # of b and j nothing is left
    expected = torch.tensor(sizes / sizes.sum(), dtype=torch.float32)
    torch.testing.assert_close(states["f"].parameters, expected)
    (record,) = kept.records
    assert record.updates is not None
    assert record.weighing is not None
    assert record.updates.clients == tuple("acdefghi")
    assert record.weighing.weights.tolist() == pytest.approx((sizes[sizes > 0] / sizes.sum()).tolist())
    assert record.weighing.raw[:, 0].tolist() == sizes[sizes > 0].tolist()
    assert [(failure.client, failure.reason) for failure in record.updates.failures] == [
        ("b", "its node is gone"),
        ("j", "its node is gone"),
    ]
    assert record.updates.bytes_sent is not None
    assert record.updates.bytes_sent.tolist() == [10 * NAMES.index(name) for name in "acdefghi"]


def test_a_federation_whose_sum_cannot_be_ends_alone_with_its_last_good_model() -> None:
    kept = Kept()
    made = [federation("spoiled"), federation("f")]
    clients = Hiding()
    done = run_rounds(
        made, {"spoiled": state(0), "f": state(0)}, clients, Server(), PLAN, kept,
        progress=lambda round, _: clients.excess.update(spoiled=40.0),
    )  # fmt: skip
    assert (done["spoiled"].round, done["spoiled"].finished, done["f"].round) == (1, True, 3)
    assert done["spoiled"].parameters.tolist() == pytest.approx((np.arange(1, 11) / 55).tolist())
    reason = str(done["spoiled"].ended)
    assert reason.startswith("the hidden sum of 10 clients moves a parameter by 40")
    assert "one or more of a, b, c, d, e, f, g, h, i, j sent too much" in reason
    assert [record.federation for record in kept.records] == ["spoiled", "f", "f", "f"]


def test_without_another_federation_the_run_stops_with_that_line() -> None:
    with pytest.raises(
        Exploded, match=r"^round 1 of f: the hidden sum of 10 .*from another seed, without clients that"
    ):
        run_rounds([federation()], {"f": state(0)}, Hiding(excess={"f": 3.0}), Server(), PLAN, Kept())


def test_updates_in_the_open_are_there_before_they_are_weighed() -> None:
    updates = Clients()._trained(Task("f", 0, 1, tuple("ab"), torch.zeros(10)))
    two = np.array([0.25, 0.75])
    weighing = Weighing(("DS",), two[:, None], two[:, None], two, two, (), uniform=False)
    assert as_summed(updates, weighing) == (updates, weighing)
