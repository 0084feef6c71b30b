"""Reading a run back: data frames with the numbers that were written, per rule, seed, client and round."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runs.records import RAW, evaluations, federation, record, state, updates

from steelyard.errors import UserError
from steelyard.rounds.state import RoundRecord
from steelyard.runs import opening
from steelyard.runs.reader import History, at_once
from steelyard.runs.store import Store
from steelyard.weighing.rule import Rule, WeighingSettings

METRICS = {"recall": np.array([0.5, 0.25])}


def written(folder: Path) -> History:
    """Two rules with two seeds each; of the second rule only DS is a criterion, and only it has metrics."""
    store = Store(folder)
    names = [(rule, seed) for seed in (1, 2) for rule in ("both", "size")]
    store.register(
        [
            federation(f"{rule}#{seed}", seed, rule, criteria=("DS", "LD") if rule == "both" else ("DS",))
            for rule, seed in names
        ]
    )
    alone = Rule(WeighingSettings(criteria=("DS",)))
    for round in (0, 1, 2):
        records: list[RoundRecord] = []
        for rule, seed in names:
            name = f"{rule}#{seed}"
            scores = np.array([[round / 8 + seed / 64, 0.5 if rule == "both" else 0.25]])
            more = {"metrics": METRICS if rule == "size" else {}, "right": np.array([True, rule == "both"])}
            answer = evaluations(name, round, scores=scores, **(more if round == 2 else {}))
            if round == 0:
                records.append(RoundRecord(name, 0, 0.0, evaluations=answer, accuracy=0.5))
            elif rule == "both":
                records.append(record(name, round, evaluations=answer))
            else:
                records.append(
                    record(name, round, evaluations=answer, weighing=alone.weigh(RAW[:, :1]), order=(0,), tried=())
                )
        store.commit(round, records, {one.federation: state(round) for one in records}, dict, last=round == 2)
    store.note(status="finished")
    store.close()
    return History(folder)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return written(tmp_path_factory.mktemp("read"))


def test_rounds_are_listed_by_federation_and_round(history: History) -> None:
    found = history.rounds
    assert list(zip(found["rule"], found["seed"], found["round"], strict=True)) == [
        (rule, seed, round) for seed in (1, 2) for rule in ("both", "size") for round in (0, 1, 2)
    ]
    assert list(found.columns[3:]) == [
        *("accuracy", "priority", "tried", "tests", "cohort", "answered", "kept_old", "zero_criteria", "zero_scores"),
        *("loss", "server_accuracy", "server_macro_f1", "server_metrics", "seconds", "simulated", "epsilon"),
        *("cpu", "gpu", "up", "down"),
    ]
    assert found["priority"].fillna("").tolist()[:6] == ["", "DS>LD", "DS>LD", "", "DS", "DS"]


def test_federations_and_facts(history: History) -> None:
    assert history.federations["federation"].tolist() == ["both#1", "size#1", "both#2", "size#2"]
    assert history.federations["rule"].tolist() == ["both", "size"] * 2
    assert history.federations["seed"].tolist() == [1, 1, 2, 2]
    assert json.loads(history.federations["settings"][1])["criteria"] == ["DS"]
    assert history.info == {"schema": "9", "status": "finished"}


def test_criteria_stand_in_columns_of_their_own(history: History) -> None:
    found = history.clients
    assert list(found.columns) == [
        *("rule", "seed", "round", "client", "samples", "loss", "score", "weight", "bytes", "failure"),
        *("raw_DS", "raw_LD", "normalised_DS", "normalised_LD"),
    ]
    assert found["client"].tolist() == ["a", "b", "c"] * 8
    both = found[(found["rule"] == "both") & (found["seed"] == 2) & (found["round"] == 2)].set_index("client")
    assert both["raw_DS"].tolist()[:2] == [3.0, 1.0]
    assert both["raw_LD"].tolist()[:2] == [4.0, 4.0]
    assert both["normalised_DS"].tolist()[:2] == [0.75, 0.25]
    assert both["normalised_LD"].tolist()[:2] == [0.5, 0.5]
    assert both["weight"].tolist()[:2] == [0.75, 0.25]
    assert math.isnan(both["raw_DS"]["c"])
    assert both["failure"]["c"] == "not registered"
    alone = found[found["rule"] == "size"]
    assert alone["raw_LD"].isna().all()
    assert alone["normalised_DS"].tolist()[:2] == [0.75, 0.25]


def test_further_metrics_stand_in_columns_where_there_are_some(history: History) -> None:
    found = history.evaluations
    columns = ["rule", "seed", "round", "client", "samples", "score", "loss", "recall"]
    assert list(found.columns) == columns
    mine = found[(found["rule"] == "size") & (found["round"] == 2) & (found["seed"] == 1)]
    assert mine[["client", "recall", "score"]].to_numpy().tolist() == [["a", 0.5, 0.265625], ["d", 0.25, 0.25]]
    assert found[found["rule"] == "both"]["recall"].isna().all()
    assert len(found) == 4 * 3 * 2


def test_without_further_metrics_there_is_no_such_column(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.register([federation()])
    store.commit(1, [record()], {"DS>LD": state()}, dict, last=True)
    store.close()
    assert list(History(tmp_path).evaluations.columns) == [
        "rule",
        "seed",
        "round",
        "client",
        "samples",
        "score",
        "loss",
    ]


def test_scores_are_those_of_one_federation_without_round_0(history: History) -> None:
    rounds, scores = history.scores("both", 2)
    assert rounds.tolist() == [1, 2]
    assert scores.tolist() == [[0.15625, 0.5], [0.28125, 0.5]]
    assert history.scores("size", 1)[1].tolist() == [[0.140625, 0.25], [0.265625, 0.25]]


def test_right_or_wrong_is_that_of_the_last_detailed_round(history: History) -> None:
    for seed in (1, 2):
        both, size = history.hits("both", seed), history.hits("size", seed)
        assert both is not None
        assert size is not None
        assert (both.tolist(), size.tolist()) == ([True, True], [True, False])
        assert both.dtype == np.bool_
    with pytest.raises(UserError, match="no rule 'both' with seed 3 in this run"):
        history.hits("both", 3)


@settings(max_examples=25)  # each makes a database
@given(bits=st.lists(st.lists(st.booleans(), max_size=20), min_size=1, max_size=3))
def test_any_number_of_samples_comes_back(tmp_path_factory: pytest.TempPathFactory, bits: list[list[bool]]) -> None:
    folder = tmp_path_factory.mktemp("bits")
    store = Store(folder)
    store.register([federation()])
    for round, right in enumerate(bits, start=1):
        answer = evaluations(round=round, right=np.array(right, dtype=bool))
        store.commit(round, [record(round=round, evaluations=answer)], {"DS>LD": state(round)}, dict, last=False)
    store.close()
    found = History(folder).hits("DS>LD", 0)
    assert found is not None
    assert found.tolist() == bits[-1]


def test_the_last_checkpoint(history: History, tmp_path: Path) -> None:
    states, kept = history.last_checkpoint()
    assert list(states) == ["both#1", "size#1", "both#2", "size#2"]
    assert {one.round for one in states.values()} == {2}
    assert kept == {}
    store = Store(tmp_path)
    assert History(tmp_path).last_checkpoint() == ({}, {})
    store.register([federation()])
    store.commit(0, [], {"DS>LD": state(0)}, lambda: {"own": torch.tensor([1.5])}, last=False)
    # Read while the writer still holds the run.
    assert History(tmp_path).last_checkpoint()[1]["own"].tolist() == [1.5]
    store.close()


def test_a_run_is_read_while_it_is_written_and_a_frame_is_read_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.register([federation()])
    store.commit(1, [record(updates=updates())], {"DS>LD": state()}, dict, last=False)
    early = History(tmp_path)
    assert len(early.rounds) == 1
    store.commit(2, [record(round=2)], {"DS>LD": state(2)}, dict, last=False)
    assert len(early.rounds) == 1
    assert len(History(tmp_path).rounds) == 2
    assert len(early.clients) == 6  # this one was not asked for before
    store.close()


def test_a_function_that_asks_much_opens_the_run_once_and_sees_each_new_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    connect = opening.connect

    def noted(folder: Path, *, write: bool) -> sqlite3.Connection:
        opened.append(folder)
        return connect(folder, write=write)

    store = Store(tmp_path)
    store.register([federation()])
    store.commit(1, [record()], {"DS>LD": state()}, dict, last=False)
    monkeypatch.setattr(opening, "connect", noted)

    @at_once
    def asks(run: History | Path) -> list[int]:
        history = run if isinstance(run, History) else History(run)
        before = history.last_round
        if before == 1:
            store.commit(2, [record(round=2)], {"DS>LD": state(2)}, dict, last=False)
        return [before, history.last_round, len(history.rounds)]

    assert asks(tmp_path) == [1, 2, 2]
    assert len(opened) == 1
    assert asks(History(tmp_path)) == [2, 2, 2]
    assert len(opened) == 3
    assert History(tmp_path).last_round == 2
    assert len(opened) == 5  # what was kept open is closed again
    store.close()


def test_a_reader_never_opens_a_run_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    opened: list[bool] = []
    connect = opening.connect

    def spied(folder: Path, *, write: bool) -> sqlite3.Connection:
        opened.append(write)
        return connect(folder, write=write)

    monkeypatch.setattr(opening, "connect", spied)
    history = History(tmp_path)
    assert history.info
    assert history.hits("both", 1) is not None
    assert history.last_checkpoint()[0]
    assert len(opened) >= 4
    assert not any(opened)


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run here \(no run.sqlite\); allowed: a folder that `steelyard run` made"):
        History(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_broke_is_named(tmp_path: Path) -> None:
    Store(tmp_path).close()
    opened = History(str(tmp_path))
    with sqlite3.connect(tmp_path / "run.sqlite") as connection:
        connection.execute("DROP TABLE rounds")
    connection.close()
    with pytest.raises(UserError, match=r"not a readable run database: the table 'rounds' is missing$"):
        opened.rounds  # noqa: B018


def test_labels_and_flaws_are_those_that_were_noted(tmp_path: Path, history: History) -> None:
    store = Store(tmp_path)
    store.register([federation()])
    store.note(labels={"1": {"a": [3, 4]}}, flaws={"1": {"a": ["few steps", "noise"], "b": []}})
    store.close()
    noted = History(tmp_path)
    assert noted.labels(1) == {"a": [3, 4]}
    assert noted.labels(2) == {}
    assert noted.flaws.to_dict("list") == {"seed": [1, 1], "client": ["a", "a"], "flaw": ["few steps", "noise"]}
    assert history.labels(1) == {}
    assert len(history.flaws) == 0
    assert list(history.flaws.columns) == ["seed", "client", "flaw"]


def test_whoever_was_left_out_is_listed_in_order(tmp_path: Path, history: History) -> None:
    found = history.failures_after()
    assert list(found.columns) == ["rule", "seed", "round", "client", "failure"]
    assert list(found.index) == list(range(len(found)))
    assert found[["rule", "seed", "round"]].values.tolist() == [
        [rule, seed, round] for seed in (1, 2) for rule in ("both", "size") for round in (1, 2)
    ]
    assert set(found["failure"]) == {"not registered"}
    asked = history.clients
    assert list(asked.index) == list(range(len(asked)))
    assert asked["seed"].dtype == np.int64
    assert History(written(tmp_path).folder).untested.empty


def test_an_empty_run_has_frames_with_their_columns(tmp_path: Path) -> None:
    Store(tmp_path).close()
    nothing = History(tmp_path)
    assert nothing.last_round == -1
    for frame in (nothing.clients, nothing.evaluations, nothing.rounds):
        assert len(frame) == 0
        assert (frame["seed"].dtype, frame["round"].dtype) == (np.int64, np.int64)


def test_a_rule_without_rounds_has_empty_arrays_of_their_types(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.register([federation()])
    store.close()
    found = History(tmp_path).cohorts("DS>LD", 0)
    assert (found.round.dtype, found.client.dtype, len(found.weight)) == (np.int64, np.int64, 0)
    assert History(tmp_path).tested("DS>LD", 0).round.dtype == np.int64


def test_rounds_that_come_twice_are_one_line(tmp_path: Path) -> None:
    written(tmp_path)
    history = History(tmp_path)
    columns = history._columns

    def doubled(*given: object) -> list[tuple[object, ...]]:
        return [column * 2 for column in columns(*given)]  # type: ignore[arg-type]

    history._columns = doubled  # type: ignore[assignment, method-assign]
    for read, table in ((history.cohorts, "updates"), (history.tested, "evaluations")):
        with pytest.raises(UserError) as found:
            read("both", 1)
        assert f"{table} of both, seed 1: rounds come twice, or out of order" in str(found.value)


def test_a_rule_that_is_not_there_is_named(history: History) -> None:
    with pytest.raises(UserError) as found:
        history.hits("both", 9)
    assert str(found.value) == f"{history.folder}: no rule 'both' with seed 9 in this run"


@pytest.mark.parametrize(("clients_every", "most", "read"), [(1, 8, [3, 6, 9, 10]), (2, 8, [4, 8, 10]), (1, 22, None)])
def test_of_a_long_run_some_rounds_are_looked_at(
    tmp_path: Path, clients_every: int, most: int, read: list[int] | None
) -> None:
    store = Store(tmp_path, checkpoint_every=5, clients_every=clients_every)
    store.register([federation("both", 1, "both")])
    for round in range(11):
        store.commit(round, [record("both", round)], {"both": state(round)}, dict, last=round == 10)
    store.close()
    history = History(tmp_path)
    spaced = history.spaced(most)
    whole = list(range(0, 11, clients_every))
    assert history.cohorts("both", 1).rounds.tolist() == whole
    assert [round for round in spaced.cohorts("both", 1).rounds.tolist() if round] == (read or whole[1:])
    assert spaced.weights("both", 1)[2].shape == (len(spaced.cohorts("both", 1).rounds), 2)
    assert spaced.scores("both", 1)[0].tolist() == history.scores("both", 1)[0].tolist() == list(range(1, 11))
    assert spaced.spaced(most) is spaced


@pytest.mark.parametrize(("most", "read"), [(20, range(1, 11)), (19, [1, 2, 3, 4, 5, 7, 8, 9, 10]), (6, [1, 5, 10])])
def test_of_many_tests_some_rounds_are_looked_at(tmp_path: Path, most: int, read: Sequence[int]) -> None:
    store = Store(tmp_path, checkpoint_every=5)
    store.register([federation("both", 1, "both")])
    for round in range(11):
        store.commit(round, [record("both", round)], {"both": state(round)}, dict, last=round == 10)
    store.close()
    history = History(tmp_path)
    whole, some = history.tested("both", 1), history.tested_at("both", 1, most)
    assert sorted(set(some.round.tolist())) == list(read)
    kept = np.isin(whole.round, some.round)
    assert some.score.tolist() == whole.score[kept].tolist()
    assert some.clients == whole.clients
