"""What every policy keeps: sums, order of clients, copies, and the same bits after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.stopping import stopped_and_resumed
from tests.weighing.policies import cohorts
from tests.weighing.policies.cohorts import LATER, LOSSES, MODELS, SIZES, SKEWED, cohort, weighed

from steelyard import Experiment
from steelyard.experiment.comparing import with_rules
from steelyard.experiment.running import run
from steelyard.runs.reader import History
from steelyard.weighing import criteria
from steelyard.weighing.policies.catalogue import known
from steelyard.weighing.policies.policy import Policy
from steelyard.weighing.view import Memory

ALL = sorted(known())
EAGER = {"nvflare-adaptive": {"warmup": 0, "patience": 1, "most": 1.0, "delta": 0.4}, "term": {"smooth": 0.5}}
"""Parameters under which a policy does something from the first round on."""


def made(name: str) -> Policy:
    return known()[name](**EAGER.get(name, {}))


def two_rounds(name: str, order: list[int]) -> list[np.ndarray]:
    """The weights of two rounds with the clients in this order, remembered by name in between."""
    policy, memory, found = made(name), dict[str, Memory](), []
    for models in (MODELS, LATER):
        view = cohort(
            models[order],
            names=["abc"[i] for i in order],
            sizes=[SIZES[i] for i in order],
            losses=[LOSSES[i] for i in order],
            after=[cohorts.LATER_LOSSES[i] for i in order],
            counts=[SKEWED[i] for i in order],
            memory=memory,
        )
        found.append(weighed(policy, view))
        scores = {"abc"[i]: (0.3, 0.6, 0.9)[i] for i in order}
        memory = {**view.remembered, **policy.after_tests(view.remembered, scores)}
    return found


@pytest.mark.parametrize("name", ALL)
def test_weights_are_numbers_from_0_on_and_shares_sum_to_1(name: str) -> None:
    for weights in two_rounds(name, [0, 1, 2]):
        assert weights.shape == (3,)
        assert np.isfinite(weights).all()
        assert (weights >= 0).all()
        assert weights.sum() > 0
        if made(name).applies_to == "shares":
            assert weights.sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_other_sums_are_declared(name: str) -> None:
    """Only policies that say so may sum to anything but 1; each that says so does."""
    sums = [abs(weights.sum() - 1) > 1e-6 for weights in two_rounds(name, [0, 1, 2])]
    assert any(sums) == (made(name).applies_to != "shares")


@pytest.mark.parametrize("name", ALL)
def test_a_permutation_of_clients_permutes_the_weights(name: str) -> None:
    order = [2, 0, 1]
    for before, after in zip(two_rounds(name, [0, 1, 2]), two_rounds(name, order), strict=True):
        np.testing.assert_allclose(after, before[order], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_copies_get_alike(name: str) -> None:
    policy, copied, memory = made(name), [0, 1, 2, 1], dict[str, Memory]()
    for models in (MODELS, LATER):
        view = cohort(
            models[copied],
            names="abcd",
            sizes=[SIZES[i] for i in copied],
            losses=[LOSSES[i] for i in copied],
            after=[cohorts.LATER_LOSSES[i] for i in copied],
            counts=[SKEWED[i] for i in copied],
            memory=memory,
        )
        weights = weighed(policy, view)
        assert weights[1] == pytest.approx(weights[3], rel=1e-9)
        scores = {"a": 0.3, "b": 0.6, "c": 0.9, "d": 0.6}
        memory = {**view.remembered, **policy.after_tests(view.remembered, scores)}


@pytest.mark.parametrize("name", ALL)
def test_one_client_alone_and_updates_of_no_length(name: str) -> None:
    alone = cohort(MODELS[:1], names="a", sizes=[5], losses=[0.4], after=[0.2], counts=[[5, 0, 0]])
    assert np.isfinite(weighed(made(name), alone)).all()
    still = cohort(cohorts.START.repeat(3, 1))
    assert np.isfinite(weighed(made(name), still)).all()


@pytest.mark.parametrize("name", ALL)
def test_what_is_remembered_is_plain_json(name: str) -> None:
    view = cohort()
    weighed(made(name), view)
    assert json.loads(json.dumps(view.remembered)) == view.remembered


DOCUMENT = {
    "rounds": {"count": 4, "fraction": 1.0},
    "partition": {"clients": 5, "server": "fraction", "server_fraction": 0.2},
    "model": {"name": "logistic"},
    "training": {"batch_size": 60},
}


def test_a_stopped_comparison_of_all_policies_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Also: every policy runs, with its memory in the checkpoint."""
    rules = ["fedavg", *ALL, "capped(term(t=5);min_weight=0.1;max_weight=0.4)", "median(feddisco)", "SV"]
    experiment = with_rules(Experiment.model_validate(DOCUMENT), rules)
    whole = run(experiment, out=tmp_path / "whole")
    stopped_and_resumed(experiment, tmp_path / "cut", after=2)
    expected, found = (History(tmp_path / name).last_checkpoint()[0] for name in ("whole", "cut"))
    assert set(found) == set(expected)
    for name, state in expected.items():
        assert torch.equal(found[name].parameters, state.parameters), name
        assert found[name].memory == state.memory, name
    remembering = {name for name in ALL if expected[name].memory}
    assert remembering == {"afl", "cgsv", "fedawa", "fedce", "feddg-ga", "fedscs", "nvflare-adaptive", "shapfed"}
    # No two policies came to the same model, nor one to that of FedAvg, but for those that act only now and then.
    models = {
        name: state.parameters for name, state in expected.items() if name not in ("nvflare-adaptive", "trust-mad")
    }
    assert len({tuple(model.tolist()) for model in models.values()}) == len(models)
    assert History(whole).info["status"] == "finished"


@pytest.mark.parametrize("name", ALL)
def test_what_a_policy_needs_one_of_its_criteria_asks_the_clients_for(name):
    # Clients say what criteria of the run need and nothing else: alone in a run, the policy would have no such figures.
    policy = known()[name]
    asked = [criteria.known()[criterion].needs for criterion in policy.criteria]
    assert not policy.needs.label_counts or any(needs.label_counts for needs in asked)
    assert not policy.needs.first_losses or any(needs.first_losses for needs in asked)
