"""The short account of a run, documents between rooms, and weighing recorded updates again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python
from tests.report.made_run import described, shared_run
from tests.runs.records import evaluations, federation, record, state, updates

from steelyard.report import contents
from steelyard.report import result as documents
from steelyard.report.summary import summarise
from steelyard.report.view import RunView, cohorts, reweigh
from steelyard.result import Result
from steelyard.rounds.plan import RoundSettings
from steelyard.runs.facts import RunFacts
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
    store.note(RunFacts(status="finished", notes="two clients only"))
    store.close()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("summary")
    write(folder)
    experiment = described(("fedavg",), 3).model_copy(update={"rounds": SETTINGS})
    return summarise(folder, experiment) | {"folder": str(folder)}


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


def check(document: object, declared: object) -> None:
    """Hold a document against its type, values too; a key that the type does not declare is dropped, and so noticed."""
    kept = TypeAdapter(declared).validate_python(document)
    shown = [json.dumps(to_jsonable_python(each), sort_keys=True) for each in (kept, document)]
    assert shown[0] == shown[1]


def test_documents_have_the_keys_of_their_types(tmp_path_factory: pytest.TempPathFactory) -> None:
    result = Result(shared_run(tmp_path_factory))
    view = RunView([result.history])
    check(result.summary, documents.Summary)
    check(result.table, documents.Comparison)
    check(contents.contents(view), contents.ReportData)
    check(reweigh(view, view.federation("VP>DS"), WeighingSettings(criteria=("DS",))), documents.Reweighed)
    with pytest.raises((AssertionError, ValidationError)):
        check(result.summary | {"more": 1}, documents.Summary)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return RunView([shared_run(tmp_path_factory)])


def test_the_rule_that_was_used_gives_the_weights_that_were_recorded(view: RunView) -> None:
    found = reweigh(view, view.federation("VP>DS", 1), WeighingSettings(criteria=("VP", "DS")))
    assert found["rounds"] == 6
    for row in found["clients"]:
        assert row["weight"] == pytest.approx(row["recorded"], abs=1e-12)
    assert sum(row["weight"] for row in found["clients"]) == pytest.approx(1)


def test_another_rule_by_hand(view: RunView) -> None:
    part = view.federation("VP>DS", 1)
    found = reweigh(view, part, WeighingSettings(criteria=("DS",)))
    totals: Counter[str] = Counter()
    for _, clients, raw, _ in cohorts(view.clients(part), ["DS"]):
        totals.update(dict(zip(clients, (raw[:, 0] / raw[:, 0].sum() / 6).tolist(), strict=True)))
    assert {row["client"]: row["weight"] for row in found["clients"]} == pytest.approx(totals)
    flawed = sum(row["weight"] for row in found["clients"] if row["flaws"])
    assert found["flawed"]["weight"] == pytest.approx(flawed)
