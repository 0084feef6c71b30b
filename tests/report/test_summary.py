"""The short account of a run, from a store of hand-made records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.runs.records import evaluations, federation, record, state, updates

from steelyard.report.summary import TOP, summarise
from steelyard.rounds.settings import RoundSettings
from steelyard.runs.store import Store
from steelyard.weighing.rule import Rule, WeighingSettings

SETTINGS = RoundSettings(target=0.5, share=0.5, targets=(0.25, 0.5), shares=(0.5, 1.0))
# Samples of the clients that answer in each round; with DS alone a weight is a share of the round's samples.
ROUNDS: list[Mapping[str, int]] = [{"a": 1, "b": 3}, {"a": 2, "c": 6}, {"b": 1, "c": 1}]


def write(folder: Path) -> None:
    store = Store(folder)
    store.register([federation("size", 5, criteria=("DS",)), federation("other", 5, criteria=("DS", "LD"))])
    rule = Rule(WeighingSettings(criteria=("DS",)))
    for round, sizes in enumerate(ROUNDS, start=1):
        samples = np.array(list(sizes.values()))
        sent = updates(
            "size", round, clients=tuple(sizes), samples=samples, criteria={}, losses=np.zeros(2), failures=()
        )
        answer = evaluations("size", round, scores=np.array([[round / 4, 0.25]]))
        told = {"server_metrics": {"f1": [round / 4, 0.25]}, "server_accuracy": round / 8} if round < 3 else {}
        size = record(
            *("size", round),
            updates=sent,
            weighing=rule.weigh(samples[:, None].astype(float)),
            order=(0,),
            **{"tried": (((0,), 0.5),), "evaluations": answer, "accuracy": round / 8, **told},
        )
        order = (1, 0) if round == 2 else (0, 1)
        other = record("other", round, order=order, tried=(((0, 1), 0.5), (order, 0.6)), tests=round)
        states = {"size": state(round), "other": state(round)}
        store.commit(round, [size, other], states, dict, last=round == 3)
    store.note(status="finished", notes="two clients only")
    store.close()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("summary")
    write(folder)
    return summarise(folder, SETTINGS, "accuracy") | {"folder": str(folder)}


def test_the_heaviest_clients_come_first(found: dict) -> None:
    # a: 1/4 + 2/8, b: 3/4 + 1/2, c: 6/8 + 1/2 of three rounds' weight of 1; b and c tie, and the name decides.
    assert found["rules"][0]["heaviest_clients"] == [
        {"client": "b", "share": pytest.approx(1.25 / 3), "rounds": 2, "samples": 3},
        {"client": "c", "share": pytest.approx(1.25 / 3), "rounds": 2, "samples": 6},
        {"client": "a", "share": pytest.approx(0.5 / 3), "rounds": 2, "samples": 2},
    ]
    # Of the other rule a has ¾ in every round; c, which never answered, has no weight at all.
    heaviest = found["rules"][1]["heaviest_clients"]
    assert [(client["client"], client["share"]) for client in heaviest] == [("a", 0.75), ("b", 0.25)]


def test_only_the_heaviest_few_are_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.register([federation("size", 5, criteria=("DS",))])
    names, samples = tuple("abcdefg"), np.array([3, 7, 1, 5, 2, 6, 4])
    sent = updates("size", 1, clients=names, samples=samples, criteria={}, losses=np.zeros(7), failures=())
    weighing = Rule(WeighingSettings(criteria=("DS",))).weigh(samples[:, None].astype(float))
    one = record("size", 1, updates=sent, weighing=weighing, order=(0,), tried=())
    store.commit(1, [one], {"size": state()}, dict, last=True)
    store.close()
    (rule,) = summarise(tmp_path, SETTINGS)["rules"]
    assert [client["client"] for client in rule["heaviest_clients"]] == list("bfdga")
    assert len(rule["heaviest_clients"]) == TOP
    assert rule["heaviest_clients"][0]["share"] == 7 / 28


def test_a_run_that_kept_its_old_model_has_no_heaviest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.register([federation()])
    store.commit(1, [record(kept_old=True)], {"DS>LD": state()}, dict, last=True)
    store.close()
    (rule,) = summarise(tmp_path, SETTINGS)["rules"]
    assert [client["share"] for client in rule["heaviest_clients"]] == [0.0, 0.0]


def test_the_figures_of_the_last_round_and_of_all(found: dict) -> None:
    size, other = found["rules"]
    assert (size["rule"], size["seed"], size["rounds"], size["accuracy"]) == ("size", 5, 3, 0.375)
    assert (size["worst_tenth"], size["p10"], size["p90"]) == (0.25, pytest.approx(0.3), pytest.approx(0.7))
    assert size["worst_tenth_on"]["rows"] > 0
    assert 0 <= size["worst_tenth_on"]["low"] < 0.25 < size["worst_tenth_on"]["high"] <= 1
    assert size["rounds_to_target"] == 2
    assert (size["testing_rounds"], other["testing_rounds"]) == (0, 6)
    assert (size["left_out"], other["left_out"]) == (0, 3)
    assert size["seconds"] == 3 * 0.125
    assert size["criteria"] == [{"name": "DS", "measured_by": "client", "trust": "unknown"}]


def test_orders_are_counted_as_kept_and_as_tried(found: dict) -> None:
    assert found["rules"][1]["orders"] == {
        "last": "DS>LD",
        "kept": {"DS>LD": 2, "LD>DS": 1},
        "tried": {"DS>LD": 5, "LD>DS": 1},
    }


def test_the_servers_figures_are_those_of_its_last_test(found: dict) -> None:
    assert found["rules"][0]["server"] == {"f1": [0.5, 0.25], "accuracy": 0.25, "macro_f1": 0.375}
    assert found["rules"][1]["server"] == {}


def test_targets_and_facts_of_the_run(found: dict) -> None:
    table = [(row["rule"], row["target"], row["share"], row["round"]) for row in found["rounds_to_target"]]
    assert table[:4] == [
        ("size", 0.25, 0.5, 1),
        ("size", 0.25, 1.0, 1),
        ("size", 0.5, 0.5, 2),
        ("size", 0.5, 1.0, None),
    ]
    assert table[4:] == [("other", target, share, 1) for target in (0.25, 0.5) for share in (0.5, 1.0)]
    assert (found["status"], found["notes"], found["measure"]) == ("finished", "two clients only", "accuracy")
    assert (found["run"], found["target"], found["share"]) == (found["folder"], 0.5, 0.5)
