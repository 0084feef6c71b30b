"""Caps and floors hold, keep the sum and the order, and share out in proportion; a floor needs a client to stand on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import steelyard
from steelyard import Experiment
from steelyard.errors import UserError
from steelyard.experiment.running import run
from steelyard.settings import validated
from steelyard.weighing.limits import LimitSettings
from steelyard.weighing.rule import Rule, WeighingSettings, label
from steelyard.weighing.table import read_words
from steelyard.weighing.weights import cap_of, floor_of, limited


def test_the_surplus_goes_to_the_others_in_proportion() -> None:
    np.testing.assert_allclose(limited(np.array([0.7, 0.2, 0.1]), high=0.4), [0.4, 0.4, 0.2])
    np.testing.assert_allclose(limited(np.array([0.8, 0.1, 0.05, 0.05]), high=0.4), [0.4, 0.3, 0.15, 0.15])
    # The first surplus lifts the second above the cap too.
    np.testing.assert_allclose(limited(np.array([0.7, 0.25, 0.05, 0.0]), high=0.4), [0.4, 0.4, 0.2, 0.0])


def test_a_floor_is_paid_for_in_proportion_and_reaches_clients_without_weight() -> None:
    np.testing.assert_allclose(limited(np.array([0.6, 0.3, 0.1]), low=0.19), [0.54, 0.27, 0.19])
    np.testing.assert_allclose(limited(np.array([0.8, 0.2, 0.0]), low=0.1), [0.72, 0.18, 0.1])
    np.testing.assert_allclose(limited(np.array([0.9, 0.06, 0.04]), low=0.1, high=0.6), [0.6, 0.24, 0.16])


def test_clients_without_weight_share_what_nobody_else_may_have() -> None:
    np.testing.assert_allclose(limited(np.array([1.0, 0.0, 0.0]), high=0.5), [0.5, 0.25, 0.25])
    alone = np.array([1.0, 0.0, 0.0, 0.0])
    low, high = np.array([0.0, 0.2, 0.0, 0.0]), np.array([0.5, 1.0, 1.0, 1.0])
    np.testing.assert_allclose(limited(alone, low, high), [0.5, 0.2, 0.15, 0.15])
    low, high = np.array([0.0, 0.1, 0.0, 0.0]), np.array([0.5, 0.15, 1.0, 1.0])
    np.testing.assert_allclose(limited(alone, low, high), [0.5, 0.15, 0.175, 0.175])
    # Their floors leave less than the cap to the one that has weight.
    low, high = np.array([0.0, 0.6]), np.array([0.5, 1.0])
    np.testing.assert_allclose(limited(np.array([1.0, 0.0]), low, high), [0.4, 0.6])


def test_limits_that_cannot_hold_all_weight_make_them_equal() -> None:
    np.testing.assert_allclose(limited(np.array([0.9, 0.1]), high=0.3), [0.5, 0.5])
    np.testing.assert_allclose(limited(np.array([0.9, 0.1]), low=0.7), [0.5, 0.5])
    np.testing.assert_allclose(limited(np.array([0.9, 0.1]), low=np.array([0.3, 0.9])), [0.25, 0.75])


def test_weights_within_the_limits_stay_to_the_bit() -> None:
    weights = np.array([0.3, 0.3, 0.4])
    assert limited(weights, low=0.3, high=0.4).tolist() == weights.tolist()


@pytest.mark.parametrize(
    ("clients", "share", "shares", "cap"),
    [
        *((10, None, None, 1.0), (10, 0.3, None, 0.3), (10, None, 2.0, 0.2), (10, 0.15, 2.0, 0.15)),
        *((1, None, 1.0, 1.0), (1, None, 2.0, 1.0), (0, None, 1.0, 1.0)),
    ],
)
def test_the_cap_of_a_cohort(clients: int, share: float | None, shares: float | None, cap: float) -> None:
    assert cap_of(clients, share, shares) == cap


def test_the_floor_of_a_cohort() -> None:
    assert floor_of(10) == 0
    assert floor_of(10, 0.02) == 0.02
    assert floor_of(10, 0.02, 0.5) == 0.05
    assert (floor_of(1, None, 0.5), floor_of(0, None, 0.5)) == (0.5, 0.5)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 1), st.floats(1e-3, 1))
@example([1.0, 2.225073858507e-311], 0.0, 0.75)
@example([1.0, 0.0, 0.0, 1e-9], 0.2, 0.26)
def test_no_weight_beyond_its_limits_and_the_order_stays(raw: list[float], low: float, high: float) -> None:
    count = len(raw)
    weights = np.array(raw) / sum(raw) if sum(raw) > 0 else np.full(count, 1 / count)
    low = min(low, high)
    found = limited(weights, low, high)
    assert found.sum() == pytest.approx(1.0)
    assert found.max() <= max(high, 1 / count) + 1e-12
    assert found.min() >= min(low, 1 / count) - 1e-12
    assert (np.diff(found[np.argsort(weights, kind="stable")]) >= -1e-9).all()


def test_a_floor_for_one_client_by_name() -> None:
    rule = Rule(WeighingSettings(floors={"b": 0.4}, min_weight=0.05))
    raw = np.array([[80.0], [10.0], [9.0], [1.0]])
    found = rule.weigh(raw, clients=["a", "b", "c", "d"]).weights
    assert found == pytest.approx([0.55 * 80 / 89, 0.4, 0.55 * 9 / 89, 0.05], abs=1e-12)
    # In a cohort without it, nobody has its floor.
    assert rule.weigh(raw[:2], clients=["a", "c"]).weights.tolist() == pytest.approx([8 / 9, 1 / 9])


@pytest.mark.parametrize(
    ("fields", "weights", "expected"),
    [
        ({"max_weight": 0.5}, [0.6, 0.3, 0.1, 0.0], [0.5, 0.375, 0.125, 0.0]),
        ({"max_shares": 2.0}, [0.75, 0.125, 0.125, 0.0], [0.5, 0.25, 0.25, 0.0]),
        ({"max_weight": 0.25, "max_shares": 2.0}, [0.75, 0.125, 0.125, 0.0], [0.25, 0.25, 0.25, 0.25]),
        ({"min_weight": 0.1}, [0.9, 0.1, 0.0, 0.0], [0.7, 0.1, 0.1, 0.1]),
        ({"min_shares": 0.5}, [0.75, 0.25, 0.0, 0.0], [0.5625, 0.1875, 0.125, 0.125]),
        ({"floors": {"c": 0.25}}, [0.5, 0.5, 0.0, 0.0], [0.375, 0.375, 0.25, 0.0]),
        # Of another sum, shares of which are limited: of 2 half is 1.
        ({"max_weight": 0.5, "min_weight": 0.125}, [1.5, 0.25, 0.25, 0.0], [1.0, 0.375, 0.375, 0.25]),
        ({"max_weight": 0.5}, [0.375, 0.0625, 0.0625, 0.0], [0.25, 0.125, 0.125, 0.0]),
        ({"max_weight": 0.5}, [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_limits_of_a_rule_by_hand(fields: dict[str, object], weights: list[float], expected: list[float]) -> None:
    settings = LimitSettings(**fields)  # type: ignore[arg-type]
    assert settings.limited(np.array(weights), "abcd").tolist() == pytest.approx(expected, abs=1e-15)
    if "floors" not in fields:
        assert settings.limited(np.array(weights)).tolist() == pytest.approx(expected, abs=1e-15)


def test_weights_of_any_sum_stay_to_the_bit_where_nothing_limits_them() -> None:
    weights = np.array([0.1, 0.2, 0.4])
    assert LimitSettings().limited(weights, "abc") is weights
    assert LimitSettings(max_weight=0.5).limited(np.zeros(0)).tolist() == []
    # A sum of 1 up to rounding is not divided.
    near = np.array([0.1, 0.2, 0.7 + 1e-12])
    assert LimitSettings(max_weight=0.8).limited(near).tolist() == near.tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {"min_weight": 0.3, "max_weight": 0.3},
        {"min_shares": 1.0, "max_shares": 1.0},
        {"floors": {"a": 0.3, "b": 0.7}},
        {"floors": {"a": 0.3}, "max_weight": 0.3},
    ],
)
def test_limits_may_touch(fields: dict[str, object]) -> None:
    LimitSettings(**fields).check_limits()  # type: ignore[arg-type]


def test_floors_in_words_in_a_table_and_in_the_name() -> None:
    table = {"ann": {"DS": 900}, "bob": {"DS": 80}, "cid": {"DS": 20}}
    found = steelyard.weigh(table, "capped(DS;min_weight=0.1;floors.cid=0.2)")
    assert found.weights.tolist() == pytest.approx([0.7, 0.1, 0.2])
    assert found.reasons == ("lowered for the floors of others", "raised by the limits", "raised by the limits")
    settings = read_words("capped(DS;min_shares=0.5;floors.cid=0.2)", ["DS"]).model_copy(update={"name": None})
    assert label(settings) == "capped(DS;min_shares=0.5;floors.cid=0.2)"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"min_weight": 0.5, "max_weight": 0.3}, "min_weight: got 0.5 with max_weight = 0.3; allowed: at most 0.3"),
        ({"floors": {"a": 0.6, "b": 0.6}}, "floors: sum to 1.2; allowed: at most 1 in all"),
        (
            {"floors": {"a": 0.6}, "max_weight": 0.3},
            "floors.a: got 0.6 with max_weight = 0.3; allowed: at most 0.3",
        ),
    ],
)
def test_limits_that_cannot_be(given: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        WeighingSettings(**given)  # type: ignore[arg-type]
    assert str(caught.value) == f"WeighingSettings: {expected}"
    with pytest.raises(UserError, match="min_shares"):
        WeighingSettings(min_shares=2)


def test_a_floor_for_nobody_and_one_that_is_too_much(tmp_path: Path) -> None:
    document = {"rounds": {"count": 1}, "partition": {"clients": 4}, "model": {"name": "logistic"}}
    with pytest.raises(UserError, match=r"min_weight: got 0.3 in rule .* 4 clients; allowed: at most 0.25"):
        validated(Experiment, {**document, "weighing": {"min_weight": 0.3}}, "")
    unknown = Experiment.model_validate({**document, "weighing": {"floors": {"nobody": 0.3}}})
    with pytest.raises(UserError, match=r"weighing\.floors: got 'nobody', which is no client; allowed: "):
        run(unknown, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
