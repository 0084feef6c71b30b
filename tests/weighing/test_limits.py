"""What limits a client's say: caps and floors that keep sum and order, bounds on what it claims, who vouches for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.kit import assert_refused, small

import steelyard
from steelyard.weighing import criterion
from steelyard.weighing.rule import Rule, WeighingSettings, bounded_samples, limit_of, trust_of, trust_warnings
from steelyard.weighing.weights import LimitSettings, cap_of, floor_of, limited


@pytest.mark.parametrize(
    ("weights", "low", "high", "expected"),
    [
        ([0.7, 0.2, 0.1], 0.0, 0.4, [0.4, 0.4, 0.2]),
        # A floor is paid for in proportion, and reaches clients without weight.
        ([0.6, 0.3, 0.1], 0.19, 1.0, [0.54, 0.27, 0.19]),
        # Clients without weight share what nobody else may have.
        ([1.0, 0.0, 0.0, 0.0], [0.0, 0.2, 0.0, 0.0], [0.5, 1.0, 1.0, 1.0], [0.5, 0.2, 0.15, 0.15]),
        # Two floors bind, no cap does: the others share what is left as 7 to 8.
        ([7 / 21, 4 / 21, 2 / 21, 8 / 21], [0.0, 0.2, 0.2, 0.25], [0.3, 1.0, 0.5, 0.4], [0.28, 0.2, 0.2, 0.32]),
        # Their floors leave less than the cap to the one that has weight.
        ([1.0, 0.0], [0.0, 0.6], [0.5, 1.0], [0.4, 0.6]),
        # Limits that cannot hold all weight make them equal.
        ([0.9, 0.1], 0.0, 0.3, [0.5, 0.5]),
        ([0.9, 0.1], [0.3, 0.9], 1.0, [0.25, 0.75]),
    ],
)
def test_weights_within_limits_by_hand(
    weights: list[float], low: float | list[float], high: float | list[float], expected: list[float]
) -> None:
    np.testing.assert_allclose(limited(np.array(weights), np.array(low), np.array(high)), expected)


def test_weights_within_the_limits_stay_to_the_bit() -> None:
    weights = np.array([0.3, 0.3, 0.4])
    assert limited(weights, low=0.3, high=0.4).tolist() == weights.tolist()
    weights = np.array([0.1, 0.2, 0.4])
    assert LimitSettings().limited(weights, "abc") is weights
    assert LimitSettings(max_weight=0.5).limited(np.zeros(0)).tolist() == []


def test_the_cap_and_the_floor_of_a_cohort() -> None:
    caps = [(10,), (10, None, 2.0), (10, 0.15, 2.0), (1, None, 2.0), (0, None, 1.0)]
    assert [cap_of(*given) for given in caps] == [1.0, 0.2, 0.15, 1.0, 1.0]
    floors = [(10,), (10, 0.02, 0.5), (0, None, 0.5)]
    assert [floor_of(*given) for given in floors] == [0, 0.05, 0.5]


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
        ({"max_shares": 2.0}, [0.75, 0.125, 0.125, 0.0], [0.5, 0.25, 0.25, 0.0]),
        ({"min_shares": 0.5}, [0.75, 0.25, 0.0, 0.0], [0.5625, 0.1875, 0.125, 0.125]),
        ({"floors": {"c": 0.25}}, [0.5, 0.5, 0.0, 0.0], [0.375, 0.375, 0.25, 0.0]),
        # Of another sum, shares of which are limited: of 2 half is 1.
        ({"max_weight": 0.5, "min_weight": 0.125}, [1.5, 0.25, 0.25, 0.0], [1.0, 0.375, 0.375, 0.25]),
    ],
)
def test_limits_of_a_rule_by_hand(fields: dict[str, object], weights: list[float], expected: list[float]) -> None:
    settings = LimitSettings(**fields)  # type: ignore[arg-type]
    assert settings.limited(np.array(weights), "abcd").tolist() == pytest.approx(expected, abs=1e-15)


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


def test_a_floor_for_nobody_and_one_that_is_too_much(tmp_path: Path) -> None:
    assert_refused(
        lambda: small(partition={"clients": 4}, weighing={"min_weight": 0.3}), "min_weight", 0.3, "4 clients"
    )
    unknown = small(weighing={"floors": {"nobody": 0.3}})
    assert_refused(lambda: unknown.run(tmp_path / "run"), "weighing.floors", "'nobody'")
    assert not (tmp_path / "run").exists()


def rule(**given: object) -> WeighingSettings:
    return WeighingSettings.model_validate(given)


@pytest.mark.parametrize(
    ("name", "given", "kind"),
    [
        ("DS", {}, "self-reported"),
        ("DS", {"bound": 3.0}, "bounded"),
        ("DS", {"attested": ["DS"]}, "attested"),
        ("CB", {"criteria": ["CB"]}, "bounded"),
        ("MD", {"criteria": ["MD"]}, "measured"),
        ("VS", {"criteria": ["VS"]}, "self-reported"),
        ("VS", {"criteria": ["VS"], "bound": 3.0}, "bounded"),
    ],
)
def test_the_kinds(name: str, given: dict[str, object], kind: str) -> None:
    assert trust_of(criterion.get(name), rule(**given)) == kind


def test_a_claim_counts_at_most_a_multiple_of_the_median() -> None:
    raw = np.array([[10.0], [20.0], [30.0], [1e9]])
    weights = Rule(rule(bound=2.0)).weigh(raw).weights
    np.testing.assert_allclose(weights, np.array([10, 20, 30, 50]) / 110)
    assert Rule(rule(bound=2.0, attested=["DS"])).weigh(raw).weights[3] > 0.99
    # Measures of the server are not cut.
    raw = np.array([[0.1], [0.1], [0.9]])
    np.testing.assert_allclose(Rule(rule(criteria=["MD"], bound=1.0)).weigh(raw).weights, [1 / 11, 1 / 11, 9 / 11])
    # Where most have nothing the others are the measure.
    assert limit_of(np.array([0.0, 0.0, 0.0, 2.0, 4.0]), 1.5) == 4.5
    assert limit_of(np.zeros(3), 1.5) == 0.0


def test_claimed_samples_are_cut_for_measures_that_use_them() -> None:
    assert bounded_samples(np.array([10, 10, 10_000]), rule(bound=3.0)).tolist() == [10, 10, 30]
    believed = rule(bound=3.0, attested=["DS"])
    assert bounded_samples(np.array([10, 10, 10_000]), believed).tolist() == [10, 10, 10_000]
    assert bounded_samples(np.zeros(0, dtype=np.int64), rule(bound=3.0)).tolist() == []
    assert bounded_samples(np.array([1, 1, 9]), rule(bound=1.0)).tolist() == [1, 1, 1]


def test_the_line_that_warns() -> None:
    def told(settings: WeighingSettings) -> list[str]:
        return trust_warnings([Rule(settings)])

    assert told(rule())[0].startswith("DS: self-reported without a bound")
    for quiet in ({"bound": 3.0}, {"max_weight": 0.2}, {"attested": ["DS"]}):
        assert told(rule(**quiet)) == []
