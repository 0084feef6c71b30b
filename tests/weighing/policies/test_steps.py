"""Policies step by step, by hand: what they remember, where they begin, and where they leave the ordinary case."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import assert_refused
from tests.weighing.policies.cohorts import MODELS, SKEWED, START, cohort, weighed

from steelyard.weighing.policies.afl import Afl
from steelyard.weighing.policies.cgsv import Cgsv
from steelyard.weighing.policies.fedce import FedCe
from steelyard.weighing.policies.feddg_ga import FedDgGa, adjusted
from steelyard.weighing.policies.feddisco import FedDisco
from steelyard.weighing.policies.fedscs import FedScs
from steelyard.weighing.policies.nvflare_adaptive import NvflareAdaptive
from steelyard.weighing.policies.q_fedavg import QFedAvg
from steelyard.weighing.policies.term import Term
from steelyard.weighing.policies.trust_mad import TrustMad
from steelyard.weighing.policy import (
    Policy,
    by_client,
    nearest_shares,
    needs_of,
    policy,
    policy_class,
    policy_criteria,
    remember,
    softmax,
)

CHANGES = (MODELS - START).double().numpy()


def test_what_is_remembered_of_clients() -> None:
    view = cohort(memory={"m": {"b": 5.0, "z": 9.0}})
    assert by_client(view.memory, "m", view, 2.0).tolist() == [2.0, 5.0, 2.0]
    assert by_client(view.memory, "m", view, np.array([1.0, 2.0, 3.0])).tolist() == [1.0, 5.0, 3.0]
    remember(view, "m", np.array([1.0, 2.0, 3.0]))
    assert view.remembered["m"] == {"a": 1.0, "b": 2.0, "c": 3.0, "z": 9.0}


def test_names_of_policies() -> None:
    for name in ("Mine", "1st", "a" * 41):
        assert_refused(lambda n=name: policy(n), "@policy", repr(name))
    assert callable(policy("a" * 40))
    assert needs_of(FedDisco)[-1] == "a task with classes"
    assert policy_criteria({"name": "feddisco"}) == ["DS", "KL"] == policy_criteria(SimpleNamespace(name="feddisco"))
    assert [policy_criteria(given) for given in ({"name": "nobody"}, None)] == [None] * 2
    assert_refused(lambda: policy_class("fedawb"), "name", "'fedawb'", "weighing.plugins")
    assert_refused(lambda: policy_class(3), "name: got 3;")
    assert Policy.model_json_schema()["additionalProperties"] is True
    assert softmax(np.array([1000.0, 1000.0 + np.log(3)])) == pytest.approx([0.25, 0.75])


def test_weights_stay_numbers_where_all_labels_are_even_and_where_an_update_is_nothing() -> None:
    even = weighed(FedDisco(), cohort(counts=[[20, 20, 20]] * 3))
    assert even == pytest.approx(np.array([0.7, 0.4, 0.2]) / 1.3)
    still = weighed(Cgsv(), cohort(models=torch.stack([START, *MODELS[1:]])))
    assert np.isfinite(still).all()
    assert still.min() >= 0
    assert still[0] > 1e5, "a share of 0.6, half of it over 1e-7"


def test_nvflare_adaptive_waits_for_rounds_in_a_row_by_the_same_clients() -> None:
    asked = list(zip([0.5, 0.5, 0.5, 0.0, 0.5, 0.5, 0.5, 0.5], ["abc"] * 6 + ["abd"] * 2, strict=True))
    for same, granted in ((True, [0, 0, 0.5, 0, 0, 0.5, 0, 0.5]), (False, [0, 0, 0.5, 0, 0, 0.5, 0.5, 0.5])):
        made, memory, found = NvflareAdaptive(warmup=2, patience=2, same_cohort=same), dict[str, Any](), []
        for blend, names in asked:
            view = cohort(names=names, memory=memory)
            found.append(made._granted(blend, view))
            memory = view.remembered
        assert found == granted


def test_nvflare_adaptive_keeps_its_bounds() -> None:
    open_gates = {"spread": -100.0, "gap": -100.0, "spread_least": 0.0, "gap_least": 0.0, "warmup": 0, "patience": 1}
    free = weighed(NvflareAdaptive(**open_gates, most=1.0), cohort(counts=SKEWED))
    bounds = {"least_weight": 0.2, "most_weight": 0.42}
    inside = nearest_shares(free, 0.2, 0.42)
    assert not np.allclose(inside, free)
    found = weighed(NvflareAdaptive(**open_gates, most=1.0, **bounds), cohort(counts=SKEWED))
    assert found == pytest.approx(inside, abs=1e-12)
    # Sizes of 0.6, 0.3 and 0.1, half corrected, are beyond them too.
    half = weighed(NvflareAdaptive(**open_gates, most=0.5, **bounds), cohort(counts=SKEWED))
    assert (half.min(), half.max()) == pytest.approx((0.2, 0.42), abs=1e-12)


def test_fedce_takes_a_new_client_for_one_more_of_equal_weight() -> None:
    view = cohort(memory={"fedce/weights": {"a": 0.75, "b": 0.25}})
    weighed(FedCe(), view)
    weights = np.array([0.75, 0.25])
    others = weights[:2] @ CHANGES[:2]
    cosine = CHANGES[2] @ others / np.linalg.norm(CHANGES[2]) / np.linalg.norm(others)
    assert view.remembered["fedce/cosines"]["c"] == pytest.approx(cosine, abs=1e-6)
    # a sees b and the new client, which counts a third.
    others = CHANGES[1] / 4 + CHANGES[2] / 3
    cosine = CHANGES[0] @ others / np.linalg.norm(CHANGES[0]) / np.linalg.norm(others)
    assert view.remembered["fedce/cosines"]["a"] == pytest.approx(cosine, abs=1e-6)
    kept = {"fedce/scores": {"a": [0.4, 2.0], "b": [0.5, 2.0]}}
    assert FedCe().after_tests(kept, {"a": 1.0}) == {"fedce/scores": {"a": [pytest.approx(0.6), 3.0], "b": [0.5, 2.0]}}


def test_feddg_ga_over_three_rounds_and_at_its_ends() -> None:
    view = cohort(after=[0.2, 0.5, 0.1])
    weighed(FedDgGa(), view)
    view = cohort(losses=[0.9, 0.4, 0.3], after=[0.3, 0.3, 0.3], memory=view.remembered, round=2)
    once = adjusted(np.full(3, 1 / 3), np.array([0.7, -0.1, 0.2]), 0.2)
    assert weighed(FedDgGa(), view) == pytest.approx(once)
    last = cohort(losses=[0.2, 0.9, 0.4], memory=view.remembered, round=8, rounds=10)
    assert weighed(FedDgGa(), last) == pytest.approx(adjusted(once, np.array([-0.1, 0.6, 0.1]), 0.1))
    # No weight passes 1 before the division, none falls below 0, and equal losses change nothing.
    assert adjusted(np.array([1.0, 0.0]), np.array([1.0, 0.5]), 0.2) == pytest.approx([1 / 1.05, 0.05 / 1.05])
    assert adjusted(np.array([0.9, 0.1]), np.array([0.0, -1.0]), 0.8) == pytest.approx([1.0, 0.0])


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
