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

from steelyard.report import html, result, statistics, tables
from steelyard.report.rendering import filled, render
from steelyard.report.result import Comparison, computed
from steelyard.report.view import RunView, cohorts, reweigh
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
def found(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("summary")
    write(folder)
    experiment = described(("fedavg",), 3).model_copy(update={"rounds": SETTINGS})
    return computed(folder, experiment)


def test_the_heaviest_clients_come_first(found: Comparison) -> None:
    # a: 1/4 + 2/8, b: 3/4 + 1/2, c: 6/8 + 1/2 of three rounds' weight of 1; b and c tie, and the name decides.
    heaviest = [tuple(dict(each).values()) for each in found.rules[0].seeds[0].heaviest_clients]
    assert heaviest == [
        ("b", pytest.approx(1.25 / 3), 2, 3),
        ("c", pytest.approx(1.25 / 3), 2, 6),
        ("a", pytest.approx(0.5 / 3), 2, 2),
    ]
    # Of the other rule a has ¾ in every round; c, which never answered, has no weight at all.
    heaviest = found.rules[1].seeds[0].heaviest_clients
    assert [(client.client, client.share) for client in heaviest] == [("a", 0.75), ("b", 0.25)]


def test_the_figures_of_the_last_round_and_of_all(found: Comparison) -> None:
    size, other = found.rules
    figures = {name: value.mean for name, value in size.figures.items()}
    assert (size.rule, found.seeds, size.rounds, figures["final"]) == ("size", (5,), 3, 0.375)
    assert (figures["worst_tenth"], figures["p10"], figures["p90"]) == (0.25, pytest.approx(0.3), pytest.approx(0.7))
    assert size.worst_tenth_on.rows > 0
    assert 0 <= size.worst_tenth_on.low < 0.25 < size.worst_tenth_on.high <= 1
    assert figures["rounds_to_target"] == 2
    assert [rule.figures["testing_rounds"].mean for rule in found.rules] == [0, 6]
    assert [rule.figures["left_out"].mean for rule in found.rules] == [0, 3]
    assert figures["seconds"] == 3 * 0.125
    assert [tuple(dict(each).values()) for each in size.criteria] == [("DS", "client", "unknown")]
    # Accuracy on the server's rows is that of its last test, in round 2; nothing is known of all three rounds.
    assert (figures["server_accuracy"], "server_accuracy_late" in figures) == (0.25, False)
    assert not [name for name in other.figures if name.startswith("server_")]


def test_orders_are_counted_as_kept_and_as_tried(found: Comparison) -> None:
    assert dict(found.rules[1].seeds[0].orders) == {
        "last": "DS>LD",
        "kept": {"DS>LD": 2, "LD>DS": 1},
        "tried": {"DS>LD": 5, "LD>DS": 1},
    }


def test_one_entry_is_a_column_of_every_table_and_file(found: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new figure of merit: the terminal, LaTeX, CSV, JSON and the report's HTML have it, and nothing else changed."""
    figure = statistics.FigureOfMerit("median", "median client", lambda curve, _: 0.625, None, ("main", "clients"))
    for module in (statistics, result, tables):
        monkeypatch.setattr(module, "FIGURES", (*statistics.FIGURES, figure))
    document = computed(Path(found.run), described(("fedavg",), 3).model_copy(update={"rounds": SETTINGS}))
    assert document.rules[0].figures["median"].values == (0.625,)
    for style in ("text", "markdown", "latex"):
        shown = render(tables.comparison_parts(document), style).replace("\\%", "%")
        assert shown.count("median client (%)") == 2
    assert "size,median,0.625," in tables.comparison_csv(document.model_copy(update={"rounds_to_target": ()}))
    assert "median client (%)" in filled(
        "notebook.html.j2", headline=[], tables=[tables.main_table(document)], chart=""
    )


def check(document: object, declared: object) -> None:
    """Hold a document against its type, values too; a key that the type does not declare is dropped, and so noticed."""
    kept = TypeAdapter(declared).validate_python(document)
    shown = [json.dumps(to_jsonable_python(each), sort_keys=True) for each in (kept, document)]
    assert shown[0] == shown[1]


def test_documents_have_the_keys_of_their_types(view: RunView) -> None:
    check(html.contents(view), html.ReportData)
    with pytest.raises((AssertionError, ValidationError)):
        check(html.contents(view) | {"more": 1}, html.ReportData)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return RunView([shared_run(tmp_path_factory)])


def test_the_rule_that_was_used_gives_the_weights_that_were_recorded(view: RunView) -> None:
    found = reweigh(view, view.federation("VP>DS", 1), WeighingSettings(criteria=("VP", "DS")))
    assert found.rounds == 6
    for row in found.clients:
        assert row.weight == pytest.approx(row.recorded, abs=1e-12)
    assert sum(row.weight for row in found.clients) == pytest.approx(1)


def test_another_rule_by_hand(view: RunView) -> None:
    part = view.federation("VP>DS", 1)
    found = reweigh(view, part, WeighingSettings(criteria=("DS",)))
    totals: Counter[str] = Counter()
    for _, clients, raw, _ in cohorts(view.clients(part), ["DS"]):
        totals.update(dict(zip(clients, (raw[:, 0] / raw[:, 0].sum() / 6).tolist(), strict=True)))
    assert {row.client: row.weight for row in found.clients} == pytest.approx(totals)
    assert found.flawed.weight == pytest.approx(sum(row.weight for row in found.clients if row.flaws))
