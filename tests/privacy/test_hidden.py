"""What the loop makes of one hidden sum: divided by the weights in it, and refused where honest clients have none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import UserError
from steelyard.messages import Failure
from steelyard.privacy import hidden as module
from steelyard.privacy.fixed_point import FixedPoint
from steelyard.privacy.hidden import (
    BeyondBound,
    HiddenUpdates,
    Summed,
    beyond,
    check_cohort,
    check_sum,
    check_weights,
)
from steelyard.privacy.settings import AggregationSettings

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


def test_the_model_is_the_weighted_mean():
    model = updates().aggregate(START, np.array([0.1, 0.2, 0.3, 0.4]))
    # Θ + .1·(1, 0) + .2·(0, 2) + .3·(-1, 1) + .4·(8, 8)
    torch.testing.assert_close(model, START + torch.tensor([3.0, 3.9]))


def test_what_is_left_after_a_dropout_is_divided_by_the_weights_that_are_left():
    """.6 of the weight is in the sum: without the division the step would be too short."""
    model = updates(gone="d").aggregate(START, np.array([0.1, 0.2, 0.3, 0.4]))
    torch.testing.assert_close(model, START + torch.tensor([-0.2, 0.7]) / 0.6)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_weights_that_do_not_sum_to_one_give_the_same_model(scale: float):
    model = updates().aggregate(START, scale * np.array([0.1, 0.2, 0.3, 0.4]))
    torch.testing.assert_close(model, START + torch.tensor([3.0, 3.9]))


def test_a_sum_that_honest_clients_cannot_have_is_not_used_and_all_who_may_be_the_cause_are_named():
    hidden = updates(gone="d", extra=200.0)
    with pytest.raises(
        BeyondBound,
        match=r"sum of 3 clients moves a parameter by 201, .* by at most 4.8 \(privacy.aggregation.bound times the "
        r"sum of their weights\); one or more of a, b, c sent too much",
    ):
        hidden.aggregate(START, np.array([0.1, 0.2, 0.3, 0.4]))
    with pytest.raises(UserError, match="second weighted sum"):
        hidden.aggregate(START, np.array([0.1, 0.2, 0.3, 0.4]))


@pytest.mark.parametrize(
    ("total", "refused"),
    [(4.8, False), (-4.8, False), (4.8 + 0.0149, False), (4.8 + 0.0151, True), (-4.8 - 0.0151, True),
     (float("nan"), True), (float("inf"), True)],
)  # fmt: skip
def test_the_limit_is_the_bound_times_the_weights_and_half_a_step_for_each_client(total: float, refused: bool):
    check_sum(Summed(np.array([8.0 * 0.5 * (1 + 1e-9)]), ("a", "b", "c")), 0.5, SETTINGS)  # to the last bit
    summed = Summed(np.array([0.0, total]), ("a", "b", "c"), step=0.01)
    if refused:
        with pytest.raises(BeyondBound):
            check_sum(summed, 0.6, SETTINGS)
    else:
        check_sum(summed, 0.6, SETTINGS)


def test_in_a_large_cohort_the_first_twenty_are_named_and_the_others_counted():
    names = tuple(f"c{number:03d}" for number in range(100))
    with pytest.raises(BeyondBound, match=r"one or more of c000, .*c019 and 80 more sent too much"):
        check_sum(Summed(np.array([9.0]), names), 1.0, SETTINGS)


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
    ("weights", "why"),
    [
        ([], "a weight is missing or is not a number"),
        ([0.5, np.nan, 0.5], "a weight is missing or is not a number"),
        ([0.5, -0.1, 0.6], "a weight is missing or is not a number"),
        ([0.5, 0.5, 0.0], "2 of 3 clients have a weight"),
        ([0.6, 0.2, 0.2], "largest_weight: a would have 0.6 of the weight"),
        ([0.26, 0.13, 0.12], "a would have 0.51"),
    ],
)
def test_weights_under_which_nobody_could_hide_are_refused(weights: list[float], why: str):
    with pytest.raises(UserError, match=why):
        check_weights("abc", np.array(weights), AggregationSettings())


def test_a_cap_of_exactly_the_largest_weight_passes():
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
        with pytest.raises(UserError) as found:
            hidden.aggregate(START, weights)
        assert str(found.value) == line
        assert hidden.summing.asked == asked
    # What is left of the cohort after the sum is no new cohort.
    with pytest.raises(UserError, match="a second weighted sum"):
        once.select([0, 1, 2]).aggregate(START, np.full(3, 1 / 3))


def test_single_updates_are_nobodys_to_see():
    hidden = updates()
    line = (
        "privacy.aggregation: the server sees no single updates in this run, but something needs them; allowed: "
        "criteria, rules and defences that do not"
    )
    for asked in (
        lambda: hidden.combine(START, np.ones(4)),
        lambda: hidden.divergence(START),
        lambda: hidden.gram(START),
    ):
        with pytest.raises(UserError) as found:
            asked()
        assert str(found.value) == line
    assert hidden.content() is None
    assert hidden.finite().tolist() == [True] * 4
    assert hidden.finite().dtype == np.bool_
    few = hidden.select([1, 3])
    assert (few.clients, few.summing, few.settings) == (("b", "d"), hidden.summing, SETTINGS)


@pytest.mark.parametrize("block", [1, 2, 1 << 18])
def test_an_update_that_cannot_be_written_down_is_named_with_its_largest_change(
    monkeypatch: pytest.MonkeyPatch, block: int
):
    monkeypatch.setattr(module, "_BLOCK", block)
    start = torch.tensor([1.0, 2.0, 3.0])
    changes = [[0.5, 0.0, -8.0], [0.0, 9.5, 1.0], [-123.456, 0.0, 0.0], [0.0, float("nan"), 0.0]]
    models = start + torch.tensor([*changes, [float("-inf"), 0.0, 0.0]])
    large = "its update changes a parameter by {}; allowed: at most 8 (privacy.aggregation.bound)"
    assert beyond(models, start, 8.0) == [
        None,
        large.format("9.5"),
        large.format("123"),
        "model holds NaN or infinity",
        "model holds NaN or infinity",
    ]


def test_a_cohort_must_be_large_enough_to_hide_in_and_small_enough_to_be_summed():
    for kind in ("secure", "paillier", "ckks"):
        settings = AggregationSettings(kind=kind)
        check_cohort(settings, 3)
        with pytest.raises(UserError) as found:
            check_cohort(settings, 2)
        assert str(found.value) == (
            "privacy.aggregation: a cohort has 2 clients, and in a sum of two each could compute the other's update; "
            "allowed: at least 3 (set rounds.fraction or rounds.min_clients)"
        )
    # Sixteen bits do not hold a sum of thousands; the grid of ckks has no such words.
    with pytest.raises(UserError, match="bits"):
        check_cohort(AggregationSettings(bits=16, bound=1e6), 60_000)
    with pytest.raises(UserError):
        check_cohort(AggregationSettings(kind="ckks", bound=1e6), 10**9)
