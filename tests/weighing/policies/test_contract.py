"""What every policy keeps: sums, order of clients, copies, bits after a resume; and what it is refused with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import assert_refused
from tests.stopping import stopped_and_resumed
from tests.weighing.policies import cohorts
from tests.weighing.policies.cohorts import LATER, LOSSES, MODELS, SIZES, SKEWED, cohort, weighed

import steelyard
from steelyard import Experiment
from steelyard.base.settings import validated
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.rules import with_rules
from steelyard.experiment.running import run
from steelyard.runs.history import History
from steelyard.weighing import criterion
from steelyard.weighing.cohort import Memory
from steelyard.weighing.policy import Policy, described, known, needs_of
from steelyard.weighing.table import read_words

ALL = sorted(known())


EAGER = {"nvflare-adaptive": {"warmup": 0, "patience": 1, "most": 1.0, "delta": 0.4}, "term": {"smooth": 0.5}}
"""Parameters under which a policy does something from the first round on."""


def made(name: str) -> Policy:
    return known()[name](**EAGER.get(name, {}))


def two_rounds(name: str, clients: str = "abc") -> list[np.ndarray]:
    """The weights of two rounds with the clients in this order, remembered by name in between; d is a copy of b."""
    policy, memory, found = made(name), dict[str, Memory](), []
    order = ["abcb"["abcd".index(client)] for client in clients]
    places = ["abc".index(client) for client in order]
    for models in (MODELS, LATER):
        view = cohort(
            models[places],
            names=clients,
            sizes=[SIZES[i] for i in places],
            losses=[LOSSES[i] for i in places],
            after=[cohorts.LATER_LOSSES[i] for i in places],
            counts=[SKEWED[i] for i in places],
            memory=memory,
        )
        found.append(weighed(policy, view))
        assert json.loads(json.dumps(view.remembered)) == view.remembered
        scores = {client: (0.3, 0.6, 0.9)[i] for client, i in zip(clients, places, strict=True)}
        memory = {**view.remembered, **policy.after_tests(view.remembered, scores)}
    return found


@pytest.mark.parametrize("name", ALL)
def test_what_every_policy_keeps(name: str) -> None:
    """Weights from 0 on, of the sum that is declared; moved clients move their weights, copies get alike."""
    plain = two_rounds(name)
    shares = made(name).applies_to == "shares"
    for weights in plain:
        assert weights.shape == (3,)
        assert np.isfinite(weights).all()
        assert (weights >= 0).all()
        assert weights.sum() > 0
    # Only policies that say so may sum to anything but 1; each that says so does.
    assert any(abs(weights.sum() - 1) > 1e-6 for weights in plain) != shares
    for before, after in zip(plain, two_rounds(name, "cab"), strict=True):
        np.testing.assert_allclose(after, before[[2, 0, 1]], rtol=1e-9, atol=1e-12)
    for weights in two_rounds(name, "abcd"):
        assert weights[1] == pytest.approx(weights[3], rel=1e-9)
    alone = cohort(MODELS[:1], names="a", sizes=[5], losses=[0.4], after=[0.2], counts=[[5, 0, 0]])
    assert np.isfinite(weighed(made(name), alone)).all()
    assert np.isfinite(weighed(made(name), cohort(cohorts.START.repeat(3, 1)))).all()
    # Clients say what criteria of the run need and nothing else: alone, the policy would have no such figures.
    asked = [criterion.known()[each].needs for each in known()[name].criteria]
    assert not known()[name].needs.label_counts or any(needs.label_counts for needs in asked)
    assert not known()[name].needs.first_losses or any(needs.first_losses for needs in asked)


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
    assert remembering == {
        "afl",
        "cgsv",
        "fedawa",
        "fedce",
        "feddg-ga",
        "fedscs",
        "foolsgold",
        "nvflare-adaptive",
        "shapfed",
    }
    assert History(whole).info["status"] == "finished"


ROWS = {"partition": {"clients": 5, "server": "fraction"}}


def experiment(policy: str, **sections: Any) -> LearningDescription:
    weighing = {"policy": {"name": policy}, **sections.pop("weighing", {})}
    return validated(LearningDescription, {**ROWS, "weighing": weighing, **sections}, "experiment")


@pytest.mark.parametrize(
    ("policy", "sections", "parts"),
    [
        ("afl", {"rounds": {"fraction": 0.5}}, ("weighing.policy", "afl", "full participation")),
        ("fedlaw", {"partition": {"clients": 5}}, ("fedlaw", "server's test set")),
        ("shapfed", {"data": {"source": "diabetes"}, "model": {"name": "mlp"}}, ("shapfed", "classes")),
        ("feddisco", {"weighing": {"criteria": ["DS"]}}, ("criteria", "'feddisco'", "DS, KL")),
        ("term", {"weighing": {"normalise": "max"}}, ("normalise", "'term'")),
        ("term", {"weighing": {"trained_by": "server"}}, ("trained_by", "'term'")),
        ("fedlaw", {"weighing": {"defence": {"rule": "median"}}}, ("defence: given", "'fedlaw'")),
        ("fedlaw", {"weighing": {"fit": {}}}, ("fit: given", "'fedlaw'")),
        ("q-fedavg", {"algorithm": {"name": "fedavgm"}}, ("algorithm.name", "'fedavgm'", "'q-fedavg'")),
    ],
)
def test_what_is_missing_is_named(policy: str, sections: dict[str, Any], parts: tuple[str, ...]) -> None:
    assert_refused(lambda: experiment(policy, **sections), *parts)


def test_full_participation_is_asked_for_again_once_clients_are_counted() -> None:
    """Copies of clients are counted with the data; a large federation then asks a tenth of them."""
    copies = [{"kind": "copy", "pick": "biggest", "count": 1}]
    described_only = experiment("afl", flaws=copies)
    described_only.for_clients(6)
    assert_refused(lambda: described_only.for_clients(5000), "afl", "full participation")


NOISE = {"central": {"clip": 1.0, "noise": 1.0, "weights": "cohort", "cohorts": "public"}, "criteria": "public"}


DEVICES = {"local": {"clip": 1.0, "noise": 1.0}, "criteria": "public"}


HIDDEN = {"aggregation": {"kind": "secure"}}


@pytest.mark.parametrize("policy", ALL)
def test_policies_beside_noise_and_hidden_sums(policy: str) -> None:
    """None goes with noise at the server; only shares of measures go with hidden sums."""
    capped = {"max_shares": 2.0}
    assert_refused(lambda: experiment(policy, privacy=NOISE, weighing=capped), f"'{policy}'", "one client moves")
    kind = known()[policy]
    hides = {"single updates", "rows at the server"} & set(needs_of(kind))
    if kind().applies_to == "shares" and not hides:
        experiment(policy, privacy=HIDDEN)
    else:
        assert_refused(lambda: experiment(policy, privacy=HIDDEN), "privacy.aggregation")


def test_devices_with_noise_send_no_losses_and_take_no_other_sums() -> None:
    for policy, why in (("fedlaw", "do not sum to 1"), ("cgsv", "do not sum to 1"), ("afl", "do not send")):
        assert_refused(lambda p=policy: experiment(p, privacy=DEVICES), why)


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("feddisco(a=-1)", ("a", -1)),
        ("feddisco(a)", ("rule: ", "feddisco(parameter=value)")),
        ("feddisco/max", ("normalise", "'feddisco'")),
    ],
)
def test_wrong_words(word: str, parts: tuple[object, ...]) -> None:
    assert_refused(lambda: read_words(word, ["DS", "KL"]), *parts)


def test_a_policy_for_programs() -> None:
    assert described(known()["fedlaw"]) == {
        "name": "fedlaw",
        "description": "Learnable weights that may shrink the model; use it where the server has rows that it trusts",
        "criteria": ["DS"],
        "needs": ["rows at the server", "a server that learns from them", "single updates"],
        "applies_to": "models",
        "parameters": {"steps": 20, "rate": 0.01},
    }


def test_policies_of_measures_weigh_tables_and_others_say_why_not() -> None:
    table = {"ann": {"DS": 60, "UL": 1.0}, "bob": {"DS": 30, "UL": 1.1}, "cid": {"DS": 10, "UL": 90.0}}
    assert steelyard.weigh(table, "trust-mad").weights.tolist() == pytest.approx([2 / 3, 1 / 3, 0.0])
    one = {"ann": {"DS": 1, "AS": 0.1}}
    assert_refused(
        lambda: steelyard.weigh(one, "fedscs"),
        "fedscs",
        "remembers rounds; allowed for a table: rules of measures alone",
    )
