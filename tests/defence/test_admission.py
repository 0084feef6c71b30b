"""Every way in which a client's update can be wrong is refused with a reason, and the rest is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import named

from steelyard.algorithms.scaffold import Scaffold
from steelyard.defence.admission import NOT_FINITE, admit
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Task, Updates
from steelyard.weighing import criterion

DS, CB, MD, LD = (criterion.get(name) for name in ("DS", "CB", "MD", "LD"))
TASK = Task("f", 0, 3, ("a", "b", "c"), torch.zeros(4))
(CONTROL,) = Scaffold.sends
WITH_VECTORS = replace(TASK, algorithm=Scaffold())


def answer(**changed: Any) -> Updates:
    good = {"DS": np.array([10.0, 20.0, 30.0]), "CB": np.array([0.1, 0.5, 1.0])}
    samples = np.array([10, 20, 30])
    return replace(Updates("f", 3, ("a", "b", "c"), samples, good, np.zeros(3), models()), **changed)


def vectors(at: tuple[int, int] = (0, 0), value: float = 1.0) -> torch.Tensor:
    found = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    found[at] = value
    return found


def models(at: tuple[int, int] = (0, 0), value: float = 1.0) -> DenseModels:
    return DenseModels(vectors(at, value))


def claims(name: str, at: int, value: float) -> dict[str, np.ndarray]:
    given = answer().criteria
    given[name][at] = value
    return given


NAN, INFINITY = float("nan"), float("inf")
LARGE = torch.full((3, 4), 3e38)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"payload": DenseModels(LARGE)},  # finite, though its sum is not
        {"vectors": {CONTROL: LARGE}},
    ],
)
def test_a_good_answer_passes_untouched(changes: dict[str, Any]) -> None:
    good = answer(**changes)
    assert admit(WITH_VECTORS if "vectors" in changes else TASK, good, [DS, CB, MD]) is good


@pytest.mark.parametrize(
    ("changes", "kept", "reason"),
    named(
        [
            ("NaN", {"payload": models((1, 2), NAN)}, "ac", NOT_FINITE),
            ("above", {"criteria": claims("CB", 0, 1.5)}, "bc", "criterion CB = 1.5"),
            ("NaN claimed", {"criteria": claims("DS", 0, NAN)}, "bc", "criterion DS = nan"),
            ("missing", {"criteria": {"DS": np.ones(3)}}, "", "criterion CB is missing"),
            ("a stranger", {"clients": ("a", "b", "z")}, "ab", "was not asked this round"),
            ("late", {"round": 2}, "", "answer for round 2 of f; asked for round 3"),
            ("of others", {"federation": "g"}, "", "answer for round 3 of g; asked for round 3"),
            ("no samples", {"samples": np.array([10, 0, 3])}, "ac", "samples = 0; allowed: 1 or more"),
        ]
    ),
)
def test_what_is_wrong_is_left_out_with_its_reason(changes: dict[str, Any], kept: str, reason: str) -> None:
    bad = answer(**changes)
    left = admit(TASK, bad, [DS, CB, MD])
    assert left.clients == tuple(kept)
    assert [failure.client for failure in left.failures] == sorted(set(bad.clients) - set(kept))
    assert all(reason in failure.reason for failure in left.failures)
    places = [bad.clients.index(client) for client in kept]
    assert left.payload.models.tolist() == bad.payload.models[places].tolist()  # type: ignore[attr-defined]
    assert left.criteria["DS"].tolist() == bad.criteria["DS"][places].tolist()


def test_what_is_wrong_is_left_out_also_where_nobody_claims_anything() -> None:
    assert admit(TASK, answer(samples=np.array([10, 0, 3])), []).clients == ("a", "c")
    assert admit(TASK, answer(payload=models((1, 2), -INFINITY)), []).clients == ("a", "c")


def test_a_criterion_is_held_to_who_measures_it_and_to_the_number_of_classes() -> None:
    # MD stands first and is the server's: the clients' criteria behind it are still looked at.
    left = admit(TASK, answer(criteria=claims("CB", 2, 7.0)), [MD, CB])
    assert (left.clients, left.failures[0].reason) == (("a", "b"), "criterion CB = 7.0; allowed: 0 to 1.0")
    diverse = answer(criteria={"LD": np.array([2.0, 3.0, 4.0])})
    assert admit(TASK, diverse, [LD], 3).clients == ("a", "b")
    assert admit(TASK, diverse, [LD]) is diverse


@pytest.mark.parametrize(
    ("changes", "kept", "reason"),
    named(
        [
            ("missing", {}, "", f"the vector {CONTROL} of scaffold is missing"),
            ("broken", {"vectors": {CONTROL: vectors((0, 3), NAN)}}, "bc", NOT_FINITE),
        ]
    ),
)
def test_a_vector_that_the_algorithm_needs(changes: dict[str, Any], kept: str, reason: str) -> None:
    left = admit(WITH_VECTORS, answer(**changes), [DS, CB])
    assert left.clients == tuple(kept)
    assert [failure.client for failure in left.failures] == sorted({*"abc"} - {*kept})
    assert {failure.reason for failure in left.failures} == {reason}
