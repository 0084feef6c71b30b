"""What the server measures on updates and on its own rows: AG, GA, MK, RD and TR on views made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import assert_refused
from tests.weighing.policies.cohorts import answering
from torch import nn

from steelyard.learning.parameters import Layout
from steelyard.messages.payloads import DenseModels, Floats, ServerTest
from steelyard.messages.updates import Updates
from steelyard.weighing.builtin import (
    LIMIT,
    MEMORY,
    SLACK,
    after,
    agreement,
    agreement_with_sum,
    cosines_with_others,
    cosines_with_sum,
    gain,
    kernel_divergence,
    model_divergence,
    root_direction,
    track_record,
)
from steelyard.weighing.cohort import CohortView, ServerSide


def seen(updates: Any, **more: Any) -> CohortView:
    """A view of a cohort with these updates."""
    ones = np.ones(len(updates), np.int64)
    parts = {"divergence": np.linalg.norm(updates, axis=1), "gram": updates @ updates.T, **more}
    return answering(parts.pop("samples", ones), parts.pop("clients", ()), **parts)


def test_agreement_is_the_mean_cosine_with_the_others() -> None:
    """Two along x (one three times as long), one along y."""
    updates = np.array([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]])
    np.testing.assert_allclose(agreement(seen(updates)), [0.5, 0.5, 0.0], atol=1e-15)
    # An update of no length agrees with nobody, and one alone counts full.
    assert agreement(seen(np.array([[0.0, 0.0], [1.0, 0.0]]))).tolist() == [0.0, 0.0]
    assert agreement(seen(np.array([[2.0, 0.0]]))).tolist() == [1.0]


def test_agreement_with_the_sum_of_the_others_weighs_long_updates_more() -> None:
    # (3, 0) sees (0, 1) + (0, 0); (0, 1) sees (3, 0); an update of no length agrees with nobody.
    updates = np.array([[3.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    assert agreement_with_sum(seen(updates)) == pytest.approx([0.5**0.5, 0.5**0.5, 0.0])
    assert agreement_with_sum(seen(np.array([[2.0, 0.0]]))).tolist() == [0.0]
    # Weighted: (1, 0) against 2 · (0, 1) + 1 · (1, 0).
    updates = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    found = cosines_with_sum(updates @ updates.T, np.array([5.0, 2.0, 1.0]))
    assert found == pytest.approx([1 / 5**0.5, 0.0, 5 / 29**0.5])


def test_gain_is_what_the_loss_grows_without_the_client() -> None:
    worth = np.array([0.5, -0.2, 0.1])

    def test(weights: Floats) -> ServerTest:
        # The loss of a combination is that of the clients left out of it: which are told by their zero weights.
        found = (np.atleast_2d(weights) == 0) @ worth
        return ServerTest(np.zeros(len(found)), np.zeros((len(found), 0)), losses=found)

    found = gain(seen(np.eye(3), samples=np.array([10, 10, 20]), test=test))
    np.testing.assert_allclose(found, [0.5, 0.0, 0.1], atol=1e-15)


def layered(changes: torch.Tensor, module: nn.Module) -> CohortView:
    layout = Layout.of(module)
    origin = layout.read(module)
    payload = DenseModels(origin + changes)
    return seen(
        changes,
        divergence=payload.divergence(origin),
        kernel_norms=payload.kernel_norms(origin, layout.kernels),
    )


def test_it_is_the_mean_over_kernels_and_leaves_biases_out() -> None:
    # Two layers of weights [2, 2] and [1, 2], each followed by its bias: positions 0-3, 4-5, 6-7, 8.
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    changes = torch.zeros(3, 9)
    changes[0, :4] = 3.0  # a norm of 6 in the first kernel
    changes[1, 0], changes[1, 6] = 4.0, 10.0
    changes[2, [4, 5, 8]] = 7.0  # biases alone
    found = layered(changes, network)
    assert kernel_divergence(found) == pytest.approx([1 / 2, 1 / 8**0.5, 1.0], abs=1e-6)
    # One norm over all is the larger, so MD lies below.
    assert (model_divergence(found) < kernel_divergence(found)).all()


def test_layers_that_are_not_there_are_named() -> None:
    scale = nn.ParameterList([nn.Parameter(torch.ones(2))])
    assert_refused(lambda: kernel_divergence(layered(torch.zeros(1, 2), scale)), "criterion MK", "no kernels")
    assert_refused(
        lambda: kernel_divergence(CohortView.of(sent(DenseModels(torch.ones(1, 1))), torch.zeros(1), ServerSide())),
        "no layers",
    )


class Training(ServerSide):
    """A server that has trained this model."""

    def __init__(self, model: torch.Tensor) -> None:
        self.model = model

    def trained(self) -> torch.Tensor:
        return self.model


def sent(payload: DenseModels) -> Updates:
    count = len(payload.models)
    return Updates("f", 1, tuple(map(str, range(count))), np.ones(count, np.int64), {}, np.zeros(count), payload)


def rooted(root: torch.Tensor | None) -> CohortView:
    origin = torch.tensor([7.0, -2.0])
    payload = DenseModels(origin + torch.tensor([[3.0, 0.0], [0.0, 5.0], [-1.0, 0.0], [4.0, 4.0], [0.0, 0.0]]))
    return CohortView.of(sent(payload), origin, ServerSide() if root is None else Training(origin + root))


def test_the_cosine_with_what_the_server_learned_counts_from_0_on() -> None:
    # Cosines with (2, 0): 1, 0, −1, √½; an update of length 0 has none.
    assert root_direction(rooted(torch.tensor([2.0, 0.0]))) == pytest.approx([1.0, 0.0, 0.0, 0.5**0.5, 0.0], abs=1e-6)
    # Where the server has nothing to learn nobody is trusted.
    assert root_direction(rooted(torch.zeros(2))).tolist() == [0.0] * 5
    assert_refused(lambda: root_direction(rooted(None)), "no rows to train on")


UPDATES = np.array([[1.0, 0.0], [1.0, 0.1], [1.0, -0.1], [1.0, 0.2], [-1.0, 0.0]])


def test_a_round_adds_the_deviations_below_the_middle_less_the_slack() -> None:
    # Middle 0.4; below it by −0.1, 0, −0.2, 0.1, 0.8; the median of their sizes is 0.1, so z = below / 0.14826.
    sums = after(np.array([0.0, 3.0, 0.0, 0.0, 1.0]), np.array([0.5, 0.4, 0.6, 0.3, -0.4]))
    odd = np.array([-0.1, 0.0, -0.2, 0.1, 0.8]) / 0.14826
    expected = np.clip(np.array([0.0, 3.0, 0.0, 0.0, 1.0]) + odd - SLACK, 0.0, 2 * LIMIT)
    assert sums == pytest.approx(expected)
    assert sums[4] == pytest.approx(1.0 + 0.8 / 0.14826 - SLACK)


def test_who_agrees_like_all_others_is_not_odd() -> None:
    found = after(np.array([1.0, 4.0, 0.0]), np.full(3, 0.7))
    assert (found.tolist(), found.dtype) == ([0.0, 4.0 - SLACK, 0.0], np.float64)
    assert after(np.zeros(0), np.zeros(0)).tolist() == []


def test_the_cosine_with_the_others_clips_those_who_shout() -> None:
    updates = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, -1000.0]])
    # Of the first two, each sees the other and a third of length 1; the third sees (1, 1).
    found = cosines_with_others(updates @ updates.T)
    assert found == pytest.approx([0.0, -(0.5**0.5), -(0.5**0.5)])


def test_alarms_come_over_rounds_are_remembered_by_client_and_end() -> None:
    memory: dict[str, Any] = {}

    def flagged(updates: np.ndarray, clients: str) -> list[float]:
        now = seen(updates, clients=tuple(clients), memory=dict(memory))
        found = track_record(now).tolist()
        memory.update(now.remembered)
        return found

    assert [flagged(UPDATES, "abcde") for _ in range(2)][-1] == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert memory[MEMORY]["e"] == 2 * LIMIT
    # Of another cohort, only who is in it changes; e behaves and comes back in the third round.
    honest = np.array([[1.0, 0.0], [1.0, 0.1], [1.0, 0.0]])
    assert [flagged(honest, "abe")[2] for _ in range(3)] == [0.0, 0.0, 1.0]
    assert set(memory[MEMORY]) == set("abcde")
