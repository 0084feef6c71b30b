"""Every way in which a client's update can be wrong is refused with a reason, and the rest is kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from steelyard.defence.validate import admit
from steelyard.messages import DenseModels, Task, Updates
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
    missing = replace(answer(), criteria={"DS": np.array([1.0, 2.0, 3.0])})
    assert admit(TASK, missing, CRITERIA).clients == ()
    stranger = replace(answer(), clients=("a", "b", "z"))
    assert admit(TASK, stranger, CRITERIA).clients == ("a", "b")
    late = replace(answer(), round=2)
    assert admit(TASK, late, CRITERIA).clients == ()
    assert "round 2" in admit(TASK, late, CRITERIA).failures[0].reason


@pytest.mark.parametrize("samples", [-1, 0])
def test_who_trained_on_nothing_gets_no_weight(samples: int) -> None:
    found = admit(TASK, replace(answer(), samples=np.array([10, samples, 3])), CRITERIA)
    assert found.clients == ("a", "c")
    assert [failure.client for failure in found.failures] == ["b"]
    assert found.failures[0].reason.startswith(f"samples = {samples}; allowed: 1 or more")


def test_a_model_of_very_large_finite_numbers_is_not_called_nan() -> None:
    large = replace(answer(), payload=DenseModels(torch.full((3, 4), 3e38)))
    assert admit(TASK, large, CRITERIA).clients == ("a", "b", "c")
