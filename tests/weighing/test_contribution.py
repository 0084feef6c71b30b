"""Agreement and gain on views made by hand."""

from __future__ import annotations

import numpy as np

from steelyard.update_payloads import Floats, ServerTest
from steelyard.weighing import criteria as registry
from steelyard.weighing.contribution import agreement, gain
from steelyard.weighing.view import CohortView


def view(updates: np.ndarray, samples: list[int], losses: dict[int, float] | None = None) -> CohortView:
    def test(weights: Floats) -> ServerTest:
        # The loss of a combination is that of the clients left out of it: which are told by their zero weights.
        found = [sum((losses or {}).get(i, 0.0) for i in np.flatnonzero(row == 0)) for row in np.atleast_2d(weights)]
        empty = np.zeros((len(found), 0))
        return ServerTest(np.zeros(len(found)), empty, losses=np.array(found))

    return CohortView(
        samples=np.array(samples),
        divergence_of=lambda: np.linalg.norm(updates, axis=1),
        validation_of=lambda: ServerTest(np.zeros(0), np.zeros((0, 0))),
        gram_of=lambda: updates @ updates.T,
        test_of=test,
    )


def test_agreement_is_the_mean_cosine_with_the_others() -> None:
    """Two along x (one three times as long), one along y, one against x."""
    updates = np.array([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])
    np.testing.assert_allclose(agreement(view(updates, [1] * 4)), [0.0, 0.0, 0.0, 0.0], atol=1e-15)
    np.testing.assert_allclose(agreement(view(updates[:3], [1] * 3)), [0.5, 0.5, 0.0], atol=1e-15)


def test_an_update_of_no_length_agrees_with_nobody_and_one_alone_counts_full() -> None:
    np.testing.assert_array_equal(agreement(view(np.array([[0.0, 0.0], [1.0, 0.0]]), [1, 1])), [0.0, 0.0])
    np.testing.assert_array_equal(agreement(view(np.array([[2.0, 0.0]]), [5])), [1.0])


def test_gain_is_what_the_loss_grows_without_the_client() -> None:
    found = gain(view(np.eye(3), [10, 10, 20], {0: 0.5, 1: -0.2, 2: 0.1}))
    np.testing.assert_allclose(found, [0.5, 0.0, 0.1], atol=1e-15)


def test_both_are_measured_by_the_server_and_say_what_they_need() -> None:
    table = registry.known()
    assert table["AG"].measured_by == table["GA"].measured_by == "server"
    assert table["AG"].needs.models
    assert not table["AG"].needs.test_set
    assert table["GA"].needs.test_set
