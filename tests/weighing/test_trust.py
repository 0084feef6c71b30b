"""Who vouches for a criterion, and what bounds do to a client that claims too much."""

from __future__ import annotations

import numpy as np
import pytest

from steelyard.weighing import criteria
from steelyard.weighing.rule import Rule, WeighingSettings, label
from steelyard.weighing.trust import bounded_samples, limit_of, trust_of, trusted, warnings


def rule(**given: object) -> WeighingSettings:
    return WeighingSettings.model_validate(given)


@pytest.mark.parametrize(
    ("name", "given", "kind"),
    [
        ("DS", {}, "self-reported"),
        ("DS", {"bound": 3.0}, "bounded"),
        ("DS", {"attested": ["DS"]}, "attested"),
        ("LD", {"criteria": ["LD"]}, "bounded"),
        ("LE", {"criteria": ["LE"]}, "bounded"),
        ("MD", {"criteria": ["MD"]}, "measured"),
        ("VP", {"criteria": ["VP"]}, "measured"),
        ("AG", {"criteria": ["AG"]}, "measured"),
        ("VS", {"criteria": ["VS"]}, "self-reported"),
        ("VS", {"criteria": ["VS"], "bound": 3.0}, "bounded"),
    ],
)
def test_the_kinds(name: str, given: dict[str, object], kind: str) -> None:
    assert trust_of(criteria.get(name), rule(**given)) == kind


def test_a_claim_counts_at_most_a_multiple_of_the_median() -> None:
    raw = np.array([[10.0], [20.0], [30.0], [1e9]])
    weights = Rule(rule(bound=2.0)).weigh(raw).weights
    np.testing.assert_allclose(weights, np.array([10, 20, 30, 50]) / 110)
    assert Rule(rule(bound=2.0, attested=["DS"])).weigh(raw).weights[3] > 0.99
    assert Rule(rule()).weigh(raw).weights[3] > 0.99


def test_measures_of_the_server_are_not_cut() -> None:
    raw = np.array([[0.1], [0.1], [0.9]])
    np.testing.assert_allclose(Rule(rule(criteria=["MD"], bound=1.0)).weigh(raw).weights, [1 / 11, 1 / 11, 9 / 11])


def test_where_most_have_nothing_the_others_are_the_measure() -> None:
    assert limit_of(np.array([0.0, 0.0, 0.0, 2.0, 4.0]), 1.5) == 4.5
    assert limit_of(np.zeros(3), 1.5) == 0.0


def test_claimed_samples_are_cut_for_measures_that_use_them() -> None:
    assert bounded_samples(np.array([10, 10, 10_000]), rule(bound=3.0)).tolist() == [10, 10, 30]
    assert bounded_samples(np.array([10, 10, 10_000]), rule()).tolist() == [10, 10, 10_000]
    believed = rule(bound=3.0, attested=["DS"])
    assert bounded_samples(np.array([10, 10, 10_000]), believed).tolist() == [10, 10, 10_000]
    assert bounded_samples(np.zeros(0, dtype=np.int64), rule(bound=3.0)).tolist() == []
    # Nobody is cut below one sample, since who trained on nothing gets no weight.
    assert bounded_samples(np.array([0, 0, 0]), rule(bound=3.0)).tolist() == [0, 0, 0]
    assert bounded_samples(np.array([1, 1, 9]), rule(bound=1.0)).tolist() == [1, 1, 1]


def test_one_that_claims_everything_gets_the_cap_and_no_more() -> None:
    # Prioritized over three criteria: a client that claims 1 on all of them had three quarters of all weight.
    raw = np.vstack([np.full((20, 3), 1.0), [[1e9, 1e9, 1e9]]])
    names = ["DS", "LD", "MD"]
    assert Rule(rule(criteria=names)).weigh(raw).weights[-1] > 0.7
    limited = Rule(rule(criteria=names, max_weight=0.1))
    assert limited.weigh(raw).weights[-1] == pytest.approx(0.1)
    normalised = limited.weigh(raw).normalised
    assert limited.candidates(normalised, [(0, 1, 2), (2, 1, 0)]).max() == pytest.approx(0.1)
    assert Rule(rule(criteria=names, max_shares=2.0)).weigh(raw).weights[-1] == pytest.approx(2 / 21)


def test_the_line_that_warns() -> None:
    def told(settings: WeighingSettings) -> list[str]:
        return warnings([Rule(settings)])

    assert told(rule())[0].startswith("DS: self-reported without a bound")
    assert told(rule(criteria=["DS", "LD", "VS"]))[0].startswith("DS, VS: ")
    for quiet in ({"bound": 3.0}, {"max_weight": 0.2}, {"attested": ["DS"]}, {"criteria": ["LD", "MD"]}):
        assert told(rule(**quiet)) == []


def test_labels() -> None:
    assert label(rule(bound=3.0, max_shares=2.0)) == "capped(DS;bound=3;max_shares=2)"
    assert label(rule(defence={"rule": "median", "mix": True})) == "median(DS;mix)"
    assert label(rule(defence={"rule": "clip", "quantile": 0.25})) == "clip(DS;quantile=0.25)"


@pytest.mark.parametrize(
    "given",
    [
        {"attested": ["LD"]},
        {"bound": 0.5},
        {"max_weight": 0.0},
        {"max_weight": 1.5},
        {"max_shares": 0.9},
        {"trained_by": "server", "defence": {}},
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"attested|bound|max_weight|max_shares|trained_by"):
        rule(**given)


def test_losses_that_clients_claim_are_cut_at_the_bound_as_sizes_are() -> None:
    """A policy that lifts clients with high losses must not be led by one that claims a huge one."""
    rule = Rule(WeighingSettings(policy={"name": "term", "t": 1.0}, bound=2.0))  # type: ignore[arg-type]
    raw = np.array([[0.5], [0.5], [0.5], [50.0]])
    expected = np.exp([0.5, 0.5, 0.5, 1.0])
    assert rule.weigh(raw, clients="abcd").weights == pytest.approx(expected / expected.sum())
    assert trusted(rule) == {"LB": "bounded"}
    free = Rule(WeighingSettings(policy={"name": "term", "t": 1.0}))  # type: ignore[arg-type]
    assert free.weigh(raw, clients="abcd").weights[3] == pytest.approx(1.0)
    assert trusted(free) == {"LB": "self-reported"}
