"""Every way in which a client's update can be wrong is refused with a reason, and the rest is kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from steelyard.algorithms.scaffold import Scaffold
from steelyard.defence.validate import NOT_FINITE, admit
from steelyard.messages import Failure, Task, Updates
from steelyard.update_payloads import DenseModels
from steelyard.weighing import criteria

CRITERIA = [criteria.get(name) for name in ("DS", "CB", "MD")]
TASK = Task("f", 0, 3, ("a", "b", "c"), torch.zeros(4))


def answer() -> Updates:
    measured = {"DS": np.array([10.0, 20.0, 30.0]), "CB": np.array([0.1, 0.5, 1.0])}
    models = DenseModels(torch.arange(12, dtype=torch.float32).reshape(3, 4))
    return Updates("f", 3, ("a", "b", "c"), np.array([10, 20, 30]), measured, np.zeros(3), models)


def test_a_good_answer_passes_untouched() -> None:
    good = answer()
    assert admit(TASK, good, CRITERIA) is good


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite(value: float) -> None:
    bad = answer()
    bad.payload.models[1, 2] = value  # type: ignore[attr-defined]
    left = admit(TASK, bad, CRITERIA)
    assert left.clients == ("a", "c")
    assert [(failure.client, "NaN" in failure.reason) for failure in left.failures] == [("b", True)]
    assert left.payload.models.shape == (2, 4)  # type: ignore[attr-defined]
    assert left.criteria["DS"].tolist() == [10, 30]


@pytest.mark.parametrize(("name", "value"), [("CB", 1.5), ("CB", -0.1), ("DS", float("nan")), ("DS", -3)])
def test_criteria_out_of_range(name: str, value: float) -> None:
    bad = answer()
    bad.criteria[name][0] = value
    left = admit(TASK, bad, CRITERIA)
    assert left.clients == ("b", "c")
    assert f"criterion {name}" in left.failures[0].reason


def test_missing_criteria_strangers_and_other_rounds() -> None:
    missing = admit(TASK, replace(answer(), criteria={"DS": np.array([1.0, 2.0, 3.0])}), CRITERIA)
    assert missing.clients == ()
    assert [failure.reason for failure in missing.failures] == ["criterion CB is missing"] * 3
    stranger = admit(TASK, replace(answer(), clients=("a", "b", "z")), CRITERIA)
    assert stranger.clients == ("a", "b")
    assert stranger.failures == (Failure("z", "was not asked this round"),)
    late = replace(answer(), round=2)
    left = admit(TASK, late, CRITERIA)
    assert left.clients == ()
    assert [failure.client for failure in left.failures] == ["a", "b", "c"]
    assert {failure.reason for failure in left.failures} == {"answer for round 2 of f; asked for round 3"}
    other = admit(TASK, replace(answer(), federation="g"), CRITERIA)
    assert [failure.reason for failure in other.failures] == ["answer for round 3 of g; asked for round 3"] * 3


def test_one_sample_is_enough() -> None:
    one = replace(answer(), samples=np.array([10, 1, 3]))
    assert admit(TASK, one, CRITERIA) is one


@pytest.mark.parametrize("samples", [-1, 0])
def test_who_trained_on_nothing_gets_no_weight(samples: int) -> None:
    found = admit(TASK, replace(answer(), samples=np.array([10, samples, 3])), CRITERIA)
    assert found.clients == ("a", "c")
    assert [failure.client for failure in found.failures] == ["b"]
    assert found.failures[0].reason.startswith(f"samples = {samples}; allowed: 1 or more")


def test_a_model_of_very_large_finite_numbers_is_not_called_nan() -> None:
    large = replace(answer(), payload=DenseModels(torch.full((3, 4), 3e38)))
    assert admit(TASK, large, CRITERIA).clients == ("a", "b", "c")


# ---------------------------------------------------------------- criteria that the server measures, and classes


def test_what_the_server_measures_is_not_asked_of_clients() -> None:
    # MD stands first and is the server's: the clients' criteria behind it are still looked at.
    bad = answer()
    bad.criteria["CB"][2] = 7.0
    left = admit(TASK, bad, [criteria.get("MD"), criteria.get("CB")])
    assert left.clients == ("a", "b")
    assert left.failures[0].reason == "criterion CB = 7.0; allowed: 0 to 1.0"


def test_the_number_of_classes_bounds_a_criterion_that_counts_them() -> None:
    diverse = replace(answer(), criteria={"LD": np.array([2.0, 3.0, 4.0])})
    assert admit(TASK, diverse, [criteria.get("LD")], 3).clients == ("a", "b")
    assert admit(TASK, diverse, [criteria.get("LD")]).clients == ("a", "b", "c")


# ---------------------------------------------------------------- vectors that an algorithm sends beside the model


def test_a_vector_that_the_algorithm_needs() -> None:
    task = replace(TASK, algorithm=Scaffold())
    (name,) = task.algorithm.sends
    whole = replace(answer(), vectors={name: torch.ones(3, 4)})
    assert admit(task, whole, CRITERIA) is whole
    without = admit(task, answer(), CRITERIA)
    assert without.clients == ()
    assert without.failures == tuple(
        Failure(client, f"the vector {name} of scaffold is missing") for client in ("a", "b", "c")
    )
    vectors = torch.ones(3, 4)
    vectors[0, 3] = float("nan")
    broken = admit(task, replace(answer(), vectors={name: vectors}), CRITERIA)
    assert broken.clients == ("b", "c")
    assert broken.failures == (Failure("a", NOT_FINITE),)
    # A broken model is refused whatever its vector holds.
    both = replace(answer(), vectors={name: torch.ones(3, 4)})
    both.payload.models[1, 0] = float("inf")  # type: ignore[attr-defined]
    assert admit(task, both, CRITERIA).clients == ("a", "c")
    large = replace(answer(), vectors={name: torch.full((3, 4), 3e38)})
    assert admit(task, large, CRITERIA).clients == ("a", "b", "c")
