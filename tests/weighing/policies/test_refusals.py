"""A policy is refused with one line that names what is missing, before any data is read."""

from __future__ import annotations

from typing import Any

import pytest

import steelyard
from steelyard.adapters.rounds import WeighedRounds
from steelyard.errors import UserError
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import build
from steelyard.settings import validated
from steelyard.weighing.policies.catalogue import known
from steelyard.weighing.policies.describing import described, needs_of
from steelyard.weighing.table import read_words

ROWS = {"partition": {"clients": 5, "server": "fraction"}}


def experiment(policy: str, **sections: Any) -> LearningDescription:
    weighing = {"policy": {"name": policy}, **sections.pop("weighing", {})}
    return validated(LearningDescription, {**ROWS, "weighing": weighing, **sections}, "experiment")


@pytest.mark.parametrize(
    ("policy", "sections", "line"),
    [
        ("afl", {"rounds": {"fraction": 0.5}}, "weighing.policy: afl needs full participation"),
        ("feddg-ga", {"rounds": {"fraction": 0.5}}, "feddg-ga needs full participation"),
        ("afl", {"rounds": {"fraction": 1, "select": {"available": {"client-0": [[1, 2]]}}}}, "full participation"),
        ("afl", {"clock": {"deadline": 5.0}}, "full participation"),
        ("cgsv", {"rounds": {"fraction": 0.5}}, "cgsv needs full participation"),
        ("fedlaw", {"partition": {"clients": 5}}, "fedlaw is measured on the server's test set"),
        ("fedce", {"rounds": {"evaluate_every": 2}}, "fedce has clients test models in every round"),
        ("fedce", {"partition": {"clients": 5, "test": "none"}}, "fedce has clients test models in every round"),
        ("shapfed", {"data": {"source": "diabetes"}, "model": {"name": "mlp"}}, "shapfed measures classes"),
        ("feddisco", {"data": {"source": "diabetes"}, "model": {"name": "mlp"}}, "KL measures classes"),
        ("feddisco", {"weighing": {"criteria": ["DS"]}}, "criteria: got DS with policy 'feddisco'"),
        ("term", {"weighing": {"normalise": "max"}}, "normalise: given with policy 'term'"),
        ("term", {"weighing": {"score": "mean"}}, "score: given with policy 'term'"),
        ("term", {"weighing": {"trained_by": "server"}}, "trained_by: given with policy 'term'"),
        ("q-fedavg", {"weighing": {"fit": {}}}, "fit: given with policy 'q-fedavg', whose weights do not sum to 1"),
        ("fedlaw", {"weighing": {"defence": {"rule": "median"}}}, "defence: given with policy 'fedlaw'"),
        ("q-fedavg", {"algorithm": {"name": "fedavgm"}}, "algorithm.name: got 'fedavgm' with policy 'q-fedavg'"),
        ("nobody", {}, "allowed: "),
    ],
)
def test_what_is_missing_is_named(policy: str, sections: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        experiment(policy, **sections)
    assert line in str(caught.value)
    assert "allowed:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_full_participation_is_asked_for_again_once_clients_are_counted() -> None:
    """Copies of clients are counted with the data; a large federation then asks a tenth of them."""
    copies = [{"kind": "copy", "pick": "biggest", "count": 1}]
    described_only = experiment("afl", flaws=copies)
    described_only.for_clients(6)
    with pytest.raises(UserError, match="afl needs full participation"):
        described_only.for_clients(5000)


NOISE = {"central": {"clip": 1.0, "noise": 1.0, "weights": "cohort", "cohorts": "public"}, "criteria": "public"}
DEVICES = {"local": {"clip": 1.0, "noise": 1.0}, "criteria": "public"}
HIDDEN = {"aggregation": {"kind": "secure"}}


@pytest.mark.parametrize("policy", sorted(known()))
def test_no_policy_goes_with_noise_at_the_server(policy: str) -> None:
    with pytest.raises(UserError, match=f"weighs by '{policy}', under which one client moves the weights of all"):
        experiment(policy, privacy=NOISE, weighing={"max_shares": 2.0})


@pytest.mark.parametrize("policy", sorted(known()))
def test_only_shares_of_measures_go_with_hidden_sums(policy: str) -> None:
    made = known()[policy]()
    hides = {"single updates", "rows at the server"} & set(needs_of(type(made)))
    if made.applies_to == "shares" and not hides:
        experiment(policy, privacy=HIDDEN)
        return
    with pytest.raises(UserError, match=r"privacy\.aggregation"):
        experiment(policy, privacy=HIDDEN)


@pytest.mark.parametrize("policy", ["q-fedavg", "fedlaw", "cgsv", "term", "afl"])
def test_devices_with_noise_send_no_losses_and_take_no_other_sums(policy: str) -> None:
    with pytest.raises(UserError, match=r"devices with noise do not send|do not sum to 1"):
        experiment(policy, privacy=DEVICES)


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("feddisco(c=1)", "c"),
        ("feddisco(a=-1)", "a: got -1"),
        ("feddisco(a)", "allowed: feddisco(parameter=value)"),
        ("fedce(mode=minus)", "mode: got 'minus'"),
        ("feddisco/max", "normalise: given with policy 'feddisco'"),
    ],
)
def test_wrong_words(word: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        read_words(word, ["DS", "KL"])
    assert line in str(caught.value)


def test_policies_of_measures_weigh_tables_and_others_say_why_not() -> None:
    table = {"ann": {"DS": 60, "UL": 1.0}, "bob": {"DS": 30, "UL": 1.1}, "cid": {"DS": 10, "UL": 90.0}}
    assert steelyard.weigh(table, "trust-mad").weights.tolist() == pytest.approx([2 / 3, 1 / 3, 0.0])
    floor = steelyard.weigh(table, "capped(trust-mad;min_weight=0.1)")
    assert floor.weights.tolist() == pytest.approx([0.6, 0.3, 0.1])
    for word in ("fedscs", "cgsv", "afl"):
        with pytest.raises(UserError, match="looks at updates or remembers rounds"):
            steelyard.weigh({"ann": {"DS": 1, "LB": 1.0, "AS": 0.1}}, word)


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("fedlaw", "fedlaw is measured on the server's test set, and no rows were given"),
        ("feddisco", "looks at label counts"),
        ("afl", "looks at losses before training"),
        ("shapfed", "shapfed looks at single layers"),
        ("fedce", "fedce has clients test models"),
    ],
)
def test_inside_other_frameworks_what_they_cannot_give_is_named(word: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        WeighedRounds(word)
    assert line in str(caught.value)


@pytest.mark.parametrize("word", ["trust-mad", "fedscs", "fedawa", "cgsv"])
def test_inside_other_frameworks_the_rest_is_taken(word: str) -> None:
    assert WeighedRounds(word).name == word


def test_recommenders_take_policies_of_measures_alone() -> None:
    document = {"kind": "recommend", "interactions": {"path": "x.tsv"}, "weighing": {"policy": {"name": "trust-mad"}}}
    assert "trust-mad" in build(document).rules()
    with pytest.raises(UserError, match="LB has no meaning for users of a recommender"):
        build({**document, "weighing": {"policy": {"name": "q-fedavg"}}})
    with pytest.raises(UserError, match="cgsv changes the length of the step"):
        build({**document, "weighing": {"policy": {"name": "cgsv"}}})


def test_a_policy_in_words() -> None:
    found = described(known()["fedlaw"])
    assert found["needs"] == ["rows at the server", "a server that learns from them", "single updates"]
    assert found["parameters"] == {"steps": 20, "rate": 0.01}
    assert found["applies_to"] == "models"
    assert needs_of(known()["nvflare-adaptive"]) == ["label counts", "losses before training", "a task with classes"]
