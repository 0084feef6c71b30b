"""Policies step by step, by hand: what they remember, where they begin, and where they leave the ordinary case."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kit import assert_refused
from tests.weighing.policies.cohorts import MODELS, SKEWED, START, cohort, weighed

from steelyard.registry import Registry
from steelyard.usercode import POLICIES, load_entry_points
from steelyard.weighing.policies import policy as policies
from steelyard.weighing.policies.afl import Afl
from steelyard.weighing.policies.cgsv import Cgsv
from steelyard.weighing.policies.fedce import FedCe
from steelyard.weighing.policies.feddg_ga import FedDgGa, adjusted
from steelyard.weighing.policies.feddisco import FedDisco
from steelyard.weighing.policies.fedscs import FedScs
from steelyard.weighing.policies.nvflare_adaptive import NvflareAdaptive
from steelyard.weighing.policies.optimising import Adam, nearest_shares, softmax
from steelyard.weighing.policies.policy import Policy, by_client, cosines, policy, remember
from steelyard.weighing.policies.q_fedavg import QFedAvg
from steelyard.weighing.policies.settings import policy_class, policy_criteria
from steelyard.weighing.policies.shapfed import ShapFed
from steelyard.weighing.policies.term import Term
from steelyard.weighing.policies.trust_mad import TrustMad
from steelyard.weighing.rule import Rule, WeighingSettings

CHANGES = (MODELS - START).double().numpy()
NUMBERS = st.lists(st.floats(-5, 5), min_size=1, max_size=12)


def test_adam_steps_as_torch_does() -> None:
    values = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    theirs = torch.optim.Adam([values], lr=0.05, betas=(0.5, 0.999))
    ours, found = Adam(3, (0.5, 0.999)), values.detach().numpy().copy()
    for slopes in ([1.0, -2.0, 0.0], [0.5, 0.1, 3.0], [-1.0, 0.0, 0.2]):
        values.grad = torch.tensor(slopes, dtype=torch.float64)
        theirs.step()
        found = ours.step(found, np.array(slopes), 0.05)
        assert found == pytest.approx(values.detach().numpy(), abs=1e-12)


@given(NUMBERS, st.floats(0, 0.3), st.floats(0.2, 1))
def test_nearest_shares_are_the_nearest(values: list[float], low: float, high: float) -> None:
    """The difference to the nearest point makes no acute angle with the way to any other allowed point."""
    given_values, count = np.array(values), len(values)
    found = nearest_shares(given_values, low, high)
    assert found.sum() == pytest.approx(1.0, abs=1e-9)
    if low * count >= 1 or high * count <= 1:
        assert found == pytest.approx(np.full(count, 1 / count))
        return
    assert (found >= low - 1e-12).all()
    assert (found <= high + 1e-12).all()
    others = [np.full(count, 1 / count)]
    for corner in range(count):
        # A corner of the allowed set: as much as may be to one client after another, beginning with this one.
        other, left = np.full(count, low), 1.0 - low * count
        for place in np.roll(np.arange(count), -corner):
            more = min(left, high - low)
            other[place] += more
            left -= more
        others.append(other)
    for other in others:
        assert (given_values - found) @ (other - found) <= 1e-7


@given(NUMBERS)
def test_softmax_sums_to_1_and_keeps_the_order(values: list[float]) -> None:
    found = softmax(np.array(values) * 300)
    assert found.sum() == pytest.approx(1.0)
    assert found[int(np.argmax(values))] == found.max()


def test_what_is_remembered_of_clients() -> None:
    view = cohort(memory={"m": {"b": 5.0, "z": 9.0}})
    assert by_client(view.memory, "m", view, 2.0).tolist() == [2.0, 5.0, 2.0]
    assert by_client(view.memory, "m", view, np.array([1.0, 2.0, 3.0])).tolist() == [1.0, 5.0, 3.0]
    assert by_client(view.memory, "other", view, 0.5).tolist() == [0.5, 0.5, 0.5]
    remember(view, "m", np.array([1.0, 2.0, 3.0]))
    assert view.remembered["m"] == {"a": 1.0, "b": 2.0, "c": 3.0, "z": 9.0}


def test_cosines_by_hand() -> None:
    updates = np.array([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]])
    # Σ w Δ = (3, 4) + 2·(0, 2) = (3, 8).
    length = np.hypot(3, 8)
    found = cosines(updates @ updates.T, np.array([1.0, 2.0, 5.0]))
    assert found == pytest.approx([(9 + 32) / 5 / length, 8 / length, 0.0])
    assert cosines(updates @ updates.T, np.zeros(3)).tolist() == [0.0, 0.0, 0.0]


def test_names_of_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", "Mine", "1st", "a" * 41, "a_b"):
        assert_refused(lambda n=name: policy(n), "@policy", repr(name))
    assert callable(policy("a" * 40))
    with pytest.raises(NotImplementedError, match=r"^Policy\.weigh$"):
        Policy().weigh({}, cohort())
    assert Policy().after_tests({}, {"a": 1.0}) == {}
    assert policy_criteria({"name": "feddisco"}) == ["DS", "KL"] == policy_criteria(SimpleNamespace(name="feddisco"))
    assert [policy_criteria(given) for given in ({}, {"name": "nobody"}, {"name": 3}, None)] == [None] * 4
    assert_refused(lambda: policy_class("fedawb"), "name", "'fedawb'", "weighing.plugins")
    assert_refused(lambda: policy_class(3), "name", 3)
    monkeypatch.setattr(policies, "_registry", Registry("policy", "none", lambda made: made.__qualname__))

    @policy("mine-2")
    class Mine(Policy):
        pass

    assert (dict(policies.known()), Mine.name) == ({"mine-2": Mine}, "mine-2")


def test_a_package_declares_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_registry", Registry("policy", POLICIES, lambda made: made.__qualname__))
    (tmp_path / "declared_policy.py").write_text(
        "from steelyard.weighing.policies.policy import Policy, policy\n"
        "@policy('declared')\n"
        "class Declared(Policy):\n"
        "    def weigh(self, measures, view): return 2 * measures['DS']\n"
    )
    info = tmp_path / "declared-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{POLICIES}]\nmine = declared_policy\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    load_entry_points.cache_clear()
    settings = WeighingSettings(policy={"name": "declared"})  # type: ignore[arg-type]
    assert (settings.criteria, Rule(settings).weigh(np.array([[3.0], [1.0]])).weights.tolist()) == (
        ("DS",),
        [0.75, 0.25],
    )


def test_nvflare_adaptive_waits_for_rounds_in_a_row_by_the_same_clients() -> None:
    asked = [
        (0.5, "abc"),
        (0.5, "abc"),
        (0.5, "abc"),
        (0.0, "abc"),
        (0.5, "abc"),
        (0.5, "abc"),
        (0.5, "abd"),
        (0.5, "abd"),
    ]
    for same, granted in ((True, [0, 0, 0.5, 0, 0, 0.5, 0, 0.5]), (False, [0, 0, 0.5, 0, 0, 0.5, 0.5, 0.5])):
        made, memory, found = NvflareAdaptive(warmup=2, patience=2, same_cohort=same), dict[str, Any](), []
        for blend, names in asked:
            view = cohort(names=names, memory=memory)
            found.append(made._granted(blend, view))
            memory = view.remembered
        assert found == granted
        assert memory == {
            "nvflare-adaptive/rounds": 8,
            "nvflare-adaptive/streak": 2 if same else 4,
            "nvflare-adaptive/cohort": ["a", "b", "d"],
        }


def test_nvflare_adaptive_keeps_its_bounds_twice() -> None:
    open_gates = {"spread": -100.0, "gap": -100.0, "spread_least": 0.0, "gap_least": 0.0, "warmup": 0, "patience": 1}
    free = weighed(NvflareAdaptive(**open_gates, most=1.0), cohort(counts=SKEWED))
    bounds = {"least_weight": 0.2, "most_weight": 0.42}
    inside = nearest_shares(free, 0.2, 0.42)
    assert not np.allclose(inside, free)
    found = weighed(NvflareAdaptive(**open_gates, most=1.0, **bounds), cohort(counts=SKEWED))
    assert found == pytest.approx(inside, abs=1e-12)
    half = weighed(NvflareAdaptive(**open_gates, most=0.5, **bounds), cohort(counts=SKEWED))
    blended = 0.5 * np.array([0.6, 0.3, 0.1]) + 0.5 * inside
    assert half == pytest.approx(nearest_shares(blended, 0.2, 0.42), abs=1e-12)


def test_fedce_takes_a_new_client_for_one_more_of_equal_weight() -> None:
    view = cohort(memory={"fedce/weights": {"a": 0.75, "b": 0.25}})
    weighed(FedCe(), view)
    weights = np.array([0.75, 0.25, 1 / 3])
    for row, name in enumerate("abc"):
        others = (np.delete(weights, row)[:, None] * np.delete(CHANGES, row, axis=0)).sum(axis=0)
        cosine = CHANGES[row] @ others / np.linalg.norm(CHANGES[row]) / np.linalg.norm(others)
        assert view.remembered["fedce/cosines"][name] == pytest.approx(cosine, abs=1e-6)
    assert view.remembered["fedce/counts"] == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert FedCe().after_tests({}, {"a": 0.8}) == {"fedce/scores": {"a": [0.4, 2.0]}}
    kept = {"fedce/scores": {"a": [0.4, 2.0], "b": [0.5, 2.0]}}
    assert FedCe().after_tests(kept, {"a": 1.0}) == {"fedce/scores": {"a": [pytest.approx(0.6), 3.0], "b": [0.5, 2.0]}}


def test_feddg_ga_over_three_rounds_and_at_its_ends() -> None:
    view = cohort(after=[0.2, 0.5, 0.1])
    weighed(FedDgGa(), view)
    view = cohort(losses=[0.9, 0.4, 0.3], after=[0.3, 0.3, 0.3], memory=view.remembered, round=2)
    once = adjusted(np.full(3, 1 / 3), np.array([0.7, -0.1, 0.2]), 0.2)
    assert weighed(FedDgGa(), view) == pytest.approx(once)
    last = cohort(losses=[0.2, 0.9, 0.4], memory=view.remembered, round=3, rounds=10)
    assert weighed(FedDgGa(), last) == pytest.approx(adjusted(once, np.array([-0.1, 0.6, 0.1]), 0.2))
    last = cohort(losses=[0.2, 0.9, 0.4], memory=view.remembered, round=8, rounds=10)
    assert weighed(FedDgGa(), last) == pytest.approx(adjusted(once, np.array([-0.1, 0.6, 0.1]), 0.1))
    # No weight passes 1 before the division, none falls below 0, and equal losses change nothing.
    assert adjusted(np.array([1.0, 0.0]), np.array([1.0, 0.5]), 0.2) == pytest.approx([1 / 1.05, 0.05 / 1.05])
    assert adjusted(np.array([0.9, 0.1]), np.array([0.0, -1.0]), 0.8) == pytest.approx([1.0, 0.0])
    assert adjusted(np.array([0.9, 0.1]), np.zeros(2), 0.8).tolist() == [0.9, 0.1]
    assert adjusted(np.array([0.5, 0.5]), np.array([-1.0, -1.0]), 1.35).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("skew", "expected"), [([0.2, 0.2], [0.6, 0.1]), ([0.0, 0.0], [0.85, 0.35]), ([0.0, 0.9], [0.85, 0.0])]
)
def test_feddisco_by_hand(skew: list[float], expected: list[float]) -> None:
    measures = {"DS": np.array([30.0, 10.0]), "KL": np.array(skew)}
    assert FedDisco().weigh(measures, cohort()).tolist() == pytest.approx(expected)


def test_afl_keeps_the_share_of_who_is_away() -> None:
    view = cohort(names="abd", losses=[1.0, 0.0, 0.0], memory={"afl/mixture": {"a": 0.25, "b": 0.25, "c": 0.5}})
    found = Afl(rate=0.5).weigh({"LB": np.array([1.0, 0.0, 0.0])}, view)
    assert found.tolist() == [0.25, 0.25, 0.25]
    # (0.75, 0.25, 0.5, 0.25) is 0.75 too much.
    expected = {"a": 0.5625, "b": 0.0625, "c": 0.3125, "d": 0.0625}
    assert view.remembered == {"afl/mixture": pytest.approx(expected)}


def test_fedscs_begins_anew_with_who_was_away() -> None:
    view = cohort(memory={"fedscs/rounds": 3, "fedscs/scores": {"a": 0.5, "z": 0.1}})
    found = FedScs().weigh({"AS": np.array([0.7, 0.2, 1.0])}, view)
    scores = np.array([0.75 * 0.5 + 0.7 / 4, 0.75 + 0.2 / 4, 1.0])
    assert found == pytest.approx(scores / (1 + np.array([0.1, 0.2, 0.0])))
    kept = {"a": scores[0], "b": scores[1], "c": scores[2]}
    assert view.remembered == {"fedscs/rounds": 4, "fedscs/scores": pytest.approx(kept)}


def test_term_counts_from_the_smallest_loss_where_the_tilt_is_negative() -> None:
    losses = {"LB": np.array([800.0, 801.0])}
    assert Term(t=-1.0).weigh(losses, cohort()) == pytest.approx([1.0, np.exp(-1)])
    assert Term(t=2.0).weigh(losses, cohort()) == pytest.approx([np.exp(-2), 1.0])
    assert (Term().applies_to, Term(smooth=0.5).applies_to) == ("shares", "updates")


def test_q_fedavg_takes_its_own_rate_before_the_clients() -> None:
    measures = {"LB": np.array([1.0, 3.0]), "UL": np.array([2.0, 1.0])}
    # L = 2: h = (2·2)²·1 + 2·F, weights L·F/Σh.
    assert QFedAvg(rate=0.5).weigh(measures, cohort()) == pytest.approx(np.array([2.0, 6.0]) / (16 + 2 + 4 + 6))
    view: Any = SimpleNamespace(rate=0.0)
    assert_refused(lambda: QFedAvg().weigh(measures, view), "weighing.policy", "q-fedavg", "rate = 0.1")


def test_trust_mad_trusts_all_where_half_are_alike() -> None:
    sizes = np.array([1.0, 2.0, 3.0])
    assert TrustMad().weigh({"DS": sizes, "UL": np.array([1.0, 1.0, 9.0])}, cohort()).tolist() == [1.0, 2.0, 3.0]


def test_cgsv_and_shapfed_where_updates_have_no_length_or_disagree() -> None:
    still = cohort(START.repeat(3, 1))
    assert np.isfinite(weighed(Cgsv(), still)).all()
    assert still.remembered["cgsv/reputation"] == pytest.approx(dict.fromkeys("abc", 1 / 3))
    weighed(ShapFed(), still)
    assert still.remembered["shapfed/weights"] == pytest.approx(dict.fromkeys("abc", 1 / 3))
    assert still.remembered["shapfed/values"] == {"a": 0.0, "b": 0.0, "c": 0.0}
