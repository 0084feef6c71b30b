"""What the loop makes of one hidden sum, and [privacy]: what goes together, and what does not in one line."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.kit import assert_refused, refusal

from steelyard.base.settings import validated
from steelyard.messages.payloads import Summed
from steelyard.messages.updates import Failure
from steelyard.privacy import accounting
from steelyard.privacy import hidden as room
from steelyard.privacy.hidden import (
    BeyondBound,
    FixedPoint,
    HiddenUpdates,
    beyond,
    check_cohort,
    check_sum,
    check_weights,
)
from steelyard.privacy.settings import AggregationSettings, PrivacySettings

START = torch.tensor([1.0, -2.0])


DELTAS = {"a": [1.0, 0.0], "b": [0.0, 2.0], "c": [-1.0, 1.0], "d": [8.0, 8.0]}


SETTINGS = AggregationSettings(bound=8.0)


class Summing:
    """Sums updates in the open; `gone` drop out, and `extra` is what somebody adds to the sum."""

    def __init__(self, gone: str = "", extra: float = 0.0) -> None:
        self.gone, self.extra, self.asked = gone, extra, 0

    def sum(self, clients: tuple[str, ...], weights: np.ndarray) -> Summed:
        self.asked += 1
        stayed = {n: w for n, w in zip(clients, weights.tolist(), strict=True) if n not in self.gone}
        total = np.sum([w * np.array(DELTAS[n]) for n, w in stayed.items()], axis=0)
        return Summed(total + self.extra, tuple(stayed), tuple(Failure(n, "gone") for n in self.gone))


def updates(gone: str = "", extra: float = 0.0) -> HiddenUpdates:
    return HiddenUpdates(tuple("abcd"), Summing(gone, extra), SETTINGS)


def test_a_sum_that_honest_clients_cannot_have_is_not_used_and_all_who_may_be_the_cause_are_named():
    hidden, weights = updates(gone="d", extra=200.0), np.array([0.1, 0.2, 0.3, 0.4])
    with pytest.raises(
        BeyondBound, match=r"3 clients moves a parameter by 201, .* at most 4.8 .* a, b, c sent too much"
    ):
        hidden.aggregate(START, weights)
    assert_refused(lambda: hidden.aggregate(START, weights), "second weighted sum")
    names = tuple(f"c{number:03d}" for number in range(100))
    with pytest.raises(BeyondBound, match=r"one or more of c000, .*c019 and 80 more sent too much"):
        check_sum(Summed(np.array([9.0]), names), 1.0, SETTINGS)


def test_the_limit_is_the_bound_times_the_weights_and_half_a_step_for_each_client():
    check_sum(Summed(np.array([8.0 * 0.5 * (1 + 1e-9)]), ("a", "b", "c")), 0.5, SETTINGS)  # to the last bit
    check_sum(Summed(np.array([-4.8, 4.8 + 0.0149]), ("a", "b", "c"), step=0.01), 0.6, SETTINGS)
    for beyond_it in (4.8 + 0.0151, -4.8 - 0.0151, float("nan"), float("inf")):
        with pytest.raises(BeyondBound):
            check_sum(Summed(np.array([0.0, beyond_it]), ("a", "b", "c"), step=0.01), 0.6, SETTINGS)


@given(
    st.lists(st.floats(0, 1, width=32), min_size=3, max_size=9),
    st.sampled_from([16, 32, 64]),
    st.floats(0.01, 4.0),
    st.integers(0, 99),
)
def test_honest_clients_are_never_refused_however_large_their_updates_are(
    weights: list[float], bits: int, bound: float, seed: int
):
    encoding = FixedPoint.of(bits, bound, len(weights))
    steps = np.random.default_rng(seed).choice([-bound, bound, bound / 3], (len(weights), 5))
    words = np.stack([encoding.encode(step * weight) for step, weight in zip(steps, weights, strict=True)])
    names = tuple(str(number) for number in range(len(weights)))
    summed = Summed(encoding.decode(words.sum(axis=0, dtype=encoding.dtype)), names, step=encoding.step)
    check_sum(summed, sum(weights), AggregationSettings(bound=bound))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([], "a weight is missing or is not a number"),
        ([0.5, -0.1, 0.6], "a weight is missing or is not a number"),
        ([0.5, 0.5, 0.0], "2 of 3 clients have a weight"),
        ([0.6, 0.2, 0.2], "largest_weight: a would have 0.6 of the weight"),
        ([0.26, 0.13, 0.12], "a would have 0.51"),
    ],
)
def test_weights_under_which_nobody_could_hide_are_refused(weights: list[float], words: str):
    assert_refused(lambda: check_weights("abc", np.array(weights), AggregationSettings()), words)
    # A cap of exactly the largest weight passes.
    check_weights("abc", np.array([0.45, 0.45, 0.1]), AggregationSettings(largest_weight=0.45))
    check_weights("abc", np.array([0.1, 0.1, 0.1]), AggregationSettings(largest_weight=1 / 3))


def test_a_second_sum_of_the_same_updates_is_refused():
    once = updates()
    once.aggregate(START, np.full(4, 0.25))
    line = (
        "privacy.aggregation: a second weighted sum of the same updates was asked for, and from several such sums "
        "single updates can be solved; allowed: one sum in a round"
    )
    for hidden, weights in ((once, np.full(4, 0.25)), (updates(), np.full((2, 4), 0.25))):
        asked = hidden.summing.asked
        assert refusal(hidden.aggregate, START, weights) == line
        assert hidden.summing.asked == asked
    # What is left of the cohort after the sum is no new cohort.
    assert refusal(once.select([0, 1, 2]).aggregate, START, np.full(3, 1 / 3)) == line


def test_single_updates_are_nobodys_to_see():
    hidden = updates()
    for call in (
        lambda: hidden.combine(START, np.ones(4)),
        lambda: hidden.divergence(START),
        lambda: hidden.gram(START),
    ):
        assert_refused(
            call, "privacy.aggregation", "sees no single updates", "criteria, rules and defences that do not"
        )
    assert hidden.content() is None
    assert hidden.finite().tolist() == [True] * 4
    assert hidden.finite().dtype == np.bool_
    few = hidden.select([1, 3])
    assert (few.clients, few.summing, few.settings) == (("b", "d"), hidden.summing, SETTINGS)


def test_an_update_that_cannot_be_written_down_is_named_with_its_largest_change():
    start = torch.tensor([1.0, 2.0, 3.0])
    changes = [[0.5, 0.0, -8.0], [0.0, 9.5, 1.0], [-123.456, 0.0, 0.0], [0.0, float("nan"), 0.0]]
    models = start + torch.tensor([*changes, [float("-inf"), 0.0, 0.0]])
    large = "its update changes a parameter by {}; allowed: at most 8 (privacy.aggregation.bound)"
    broken = "model holds NaN or infinity"
    assert beyond(models, start, 8.0) == [None, large.format("9.5"), large.format("123"), broken, broken]
    # Long models are looked at piece by piece.
    long = torch.zeros(2, (1 << 18) + 2)
    long[0, -1] = 9.0
    assert beyond(long, torch.zeros(long.shape[1]), 8.0) == [large.format("9"), None]


def test_a_cohort_must_be_large_enough_to_hide_in_and_small_enough_to_be_summed():
    for kind in ("secure", "ckks"):
        found = AggregationSettings(kind=kind)
        check_cohort(found, 3)
        assert_refused(
            lambda found=found: check_cohort(found, 2),
            "privacy.aggregation: a cohort has 2 clients",
            "allowed: at least 3 (set rounds.fraction or rounds.min_clients)",
        )
    # Sixteen bits do not hold a sum of thousands; the grid of ckks has no such words.
    assert_refused(lambda: check_cohort(AggregationSettings(bits=16, bound=1e6), 60_000), "bits")
    assert_refused(lambda: check_cohort(AggregationSettings(kind="ckks", bound=1e6), 10**9), "bound")


CENTRAL = {"clip": 1.0, "noise": 1.0}


COHORT = {**CENTRAL, "weights": "cohort", "cohorts": "public"}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {},
            "central: missing, and so are local and aggregation; allowed: one of the three, or local with aggregation",
        ),
        ({"central": CENTRAL, "local": CENTRAL}, "local: given together with central"),
        ({"central": CENTRAL, "aggregation": {}}, "central: given together with aggregation"),
        ({"central": {"clip": 1.0}}, "set privacy.central.noise or privacy.budget.epsilon"),
        ({"local": {"clip": 1.0}}, "set privacy.local.noise or privacy.budget.epsilon"),
        ({"local": CENTRAL, "criteria_noise": 1.0}, "criteria_noise: given, but criteria are not charged"),
        (
            {"local": CENTRAL, "criteria": "public", "criteria_bounds": {"DS": 1.0}},
            "criteria_bounds: given, but criteria are not charged",
        ),
        (
            {"local": CENTRAL, "criteria": "charged", "criteria_mechanism": "exponential"},
            "criteria_levels: missing, and 'exponential'",
        ),
        (
            {"local": CENTRAL, "criteria": "charged", "criteria_mechanism": "laplace", "criteria_levels": 3},
            "criteria_levels: given with criteria_mechanism = 'laplace'",
        ),
        (
            {"central": {**CENTRAL, "weights": "cohort"}},
            "central.cohorts: got 'secret' with weights = 'cohort'",
        ),
        ({"central": {**COHORT, "references": {"DS": 5.0}}}, "central.references: given with weights = 'cohort'"),
        ({"central": CENTRAL, "criteria": "charged"}, "criteria: got 'charged' with central.weights = 'own'"),
    ],
)
def test_what_does_not_go_together_is_one_line(given: dict[str, Any], line: str) -> None:
    assert refusal(lambda: validated(PrivacySettings, given, "")).startswith(line)


def test_a_package_that_is_missing_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    accounting.check_accounting()
    missing = ("tenseal", "dp_accounting")
    for module in (accounting, room):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name in missing else name)
    assert_refused(accounting.check_accounting, "privacy", "dp-accounting", "pip install 'steelyard[privacy]'")
    room.check_installed(AggregationSettings())
    call = partial(room.check_installed, AggregationSettings(kind="ckks"))
    assert_refused(call, "privacy.aggregation.kind: 'ckks'", "tenseal", "pip install 'steelyard[encryption]'")


def test_the_model_is_the_weighted_mean_of_those_who_stayed():
    weights = np.array([0.1, 0.2, 0.3, 0.4])
    # Θ + .1·(1, 0) + .2·(0, 2) + .3·(-1, 1) + .4·(8, 8), whatever the weights sum to.
    for scale in (0.5, 1.0, 2.0):
        model = updates().aggregate(START, scale * weights)
        torch.testing.assert_close(model, START + torch.tensor([3.0, 3.9]))
    # .6 of the weight is in the sum: without the division the step would be too short.
    model = updates(gone="d").aggregate(START, weights)
    torch.testing.assert_close(model, START + torch.tensor([-0.2, 0.7]) / 0.6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "ckks", "threshold": 0.9}, "threshold: given with kind = 'ckks'; allowed only with secure"),
        ({"kind": "ckks", "bits": 32}, "bits: given with kind = 'ckks'; allowed only with secure"),
        ({"threshold": 0.5}, "threshold"),
    ],
)
def test_aggregation_that_promises_nothing_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        AggregationSettings.model_validate(fields)


def test_how_many_must_stay() -> None:
    plain = AggregationSettings()
    assert plain.word_bits == 32
    # Two thirds, rounded up; more than half; at least two.
    assert [plain.least(count) for count in (1, 2, 3, 4, 9, 10, 100)] == [2, 2, 2, 3, 6, 7, 67]
    # 0.7 · 10 is 7.000000000000001 at worst, and 7 are enough.
    for threshold, least in ((0.51, 6), (0.5000000000001, 6), (1.0, 10), (0.7, 7)):
        assert AggregationSettings(threshold=threshold).least(10) == least
