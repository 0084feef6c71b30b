"""Reading a run back: columns, frames, values and states with the numbers that were written, by rule and round."""

from __future__ import annotations

import dataclasses
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit import assert_refused
from tests.runs.records import RAW, add, begun, evaluations, federation, record, state, updates, values

from steelyard.messages.updates import Failure
from steelyard.rounds.plan import RoundValues
from steelyard.rounds.state import RoundRecord
from steelyard.runs.columns import KEYS, WHOLE, as_table, between, pack, unpack
from steelyard.runs.export import listening_frame
from steelyard.runs.facts import RunFacts
from steelyard.runs.history import History, read_values
from steelyard.runs.store import Store, add_values
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
    store.note(RunFacts(status="finished"))
    store.close()
    return History(folder)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return written(tmp_path_factory.mktemp("read"))


def test_further_metrics_stand_in_columns_where_there_are_some(history: History) -> None:
    found = history.evaluations
    mine = found[(found["rule"] == "size") & (found["round"] == 2) & (found["seed"] == 1)]
    assert mine[["client", "recall", "score"]].to_numpy().tolist() == [["a", 0.5, 0.265625], ["d", 0.25, 0.25]]
    assert found[found["rule"] == "both"]["recall"].isna().all()


def test_scores_are_those_of_one_federation_without_round_0(history: History) -> None:
    rounds, scores = history.scores("both", 2)
    assert rounds.tolist() == [1, 2]
    assert scores.tolist() == [[0.15625, 0.5], [0.28125, 0.5]]


def test_right_or_wrong_is_that_of_the_last_detailed_round(history: History) -> None:
    for seed in (1, 2):
        both, size = history.hits("both", seed), history.hits("size", seed)
        assert both is not None
        assert size is not None
        assert (both.tolist(), size.tolist()) == ([True, True], [True, False])
        assert both.dtype == np.bool_
    for read in (history.hits, history.weights):
        assert_refused(partial(read, "both", 3), history.folder, "no rule 'both' with seed 3 in this run")


def test_labels_and_flaws_are_those_that_were_noted(tmp_path: Path, history: History) -> None:
    store = begun(tmp_path)
    store.note(RunFacts(labels={"1": {"a": [3, 4]}}, flaws={"1": {"a": ["few steps", "noise"], "b": []}}))
    store.close()
    noted = History(tmp_path)
    assert noted.labels(1) == {"a": [3, 4]}
    assert noted.labels(2) == {}
    assert noted.flaws.to_dict("list") == {"seed": [1, 1], "client": ["a", "a"], "flaw": ["few steps", "noise"]}
    assert list(history.flaws.columns) == ["seed", "client", "flaw"]


def test_whoever_was_left_out_is_listed_in_order(tmp_path: Path, history: History) -> None:
    found = history.failures_after()
    assert list(found.index) == list(range(len(found)))
    assert found[["rule", "seed", "round"]].values.tolist() == [
        [rule, seed, round] for seed in (1, 2) for rule in ("both", "size") for round in (1, 2)
    ]
    assert set(found["failure"]) == {"not registered"}
    assert History(written(tmp_path).folder).untested.empty


def eleven_rounds(folder: Path, clients_every: int = 1) -> History:
    store = Store(folder, checkpoint_every=5, clients_every=clients_every)
    store.register([federation("both", 1, "both")])
    for round in range(11):
        store.commit(round, [record("both", round)], {"both": state(round)}, dict, last=round == 10)
    store.close()
    return History(folder)


@pytest.mark.parametrize(
    ("clients_every", "most", "read"),
    [(1, 8, [3, 6, 9, 10]), (1, 11, [2, 4, 6, 8, 10]), (2, 8, [4, 8, 10]), (3, 5, [6, 10]), (1, 22, None)],
)
def test_of_a_long_run_some_rounds_are_looked_at(
    tmp_path: Path, clients_every: int, most: int, read: list[int] | None
) -> None:
    history = eleven_rounds(tmp_path, clients_every)
    whole = sorted({*range(0, 11, clients_every), 10})
    assert sorted(set(history.clients["round"])) == whole
    spaced = history.spaced(most)
    answered = spaced.clients[spaced.clients["failure"].isna()]  # of failures none is left away
    assert set(answered["round"]) == set(spaced.cohorts("both", 1).rounds.tolist()), "also after `clients`"
    assert history.cohorts("both", 1).rounds.tolist() == whole
    assert [round for round in spaced.cohorts("both", 1).rounds.tolist() if round] == (read or whole[1:])
    assert spaced.weights("both", 1)[2].shape == (len(spaced.cohorts("both", 1).rounds), 2)
    assert spaced.scores("both", 1)[0].tolist() == history.scores("both", 1)[0].tolist() == list(range(1, 11))
    assert spaced.spaced(most) is spaced


def test_of_many_tests_some_rounds_are_looked_at(tmp_path: Path) -> None:
    history = eleven_rounds(tmp_path)
    whole = history.tested("both", 1)
    for most, read in ((20, list(range(1, 11))), (19, [1, 2, 3, 4, 5, 7, 8, 9, 10]), (6, [1, 5, 10])):
        some = history.tested_at("both", 1, most)
        assert sorted(set(some.round.tolist())) == read
        assert some.score.tolist() == whole.score[np.isin(whole.round, some.round)].tolist()
        assert some.clients == whole.clients


FINITE = st.floats(allow_nan=False, allow_infinity=False)


def test_bytes_are_little_endian_and_what_is_not_finite_is_unknown() -> None:
    assert pack([1.5, -2.0]) == struct.pack("<2d", 1.5, -2.0)
    assert pack([1, 513], KEYS) == b"\x01\x00\x00\x00\x01\x02\x00\x00"
    found = unpack([pack([np.inf, 1.0, -np.inf, np.nan])], [4])
    assert np.isnan(found).tolist() == [True, False, True, True]


@given(st.lists(st.lists(FINITE, max_size=5), max_size=4), st.lists(st.integers(0, 2**63 - 1), max_size=5))
def test_columns_of_many_rounds_come_back_to_the_last_bit(rounds: list[list[float]], whole: list[int]) -> None:
    found = unpack([pack(column) for column in rounds], [len(column) for column in rounds])
    assert found.tobytes() == np.array([value for column in rounds for value in column], "<f8").tobytes()
    assert unpack([pack(whole, WHOLE)], [len(whole)], WHOLE).tolist() == whole


@pytest.mark.parametrize("blob", [b"", b"\0" * 7, b"\0" * 24, "0.5000000000000000"])
def test_a_blob_of_another_length_is_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match="another length than its round has clients"):
        unpack([blob], [2])


def three_rounds(folder: Path) -> Store:
    """Rounds 1 to 3 of clients whose numbers are not in the order of their names; b is absent in round 2."""
    store = begun(folder)
    rule = Rule(WeighingSettings(criteria=("DS", "LD")))
    for round, names in ((1, ("z", "b")), (2, ("a", "z")), (3, ("z", "b"))):
        failures = (Failure("b", "gone"),) if round == 2 else ()
        sent = updates(round=round, clients=names, failures=failures, bytes_sent=np.array([round, 10]))
        store.commit(
            round,
            [record(round=round, updates=sent, weighing=rule.weigh(RAW))],
            {"DS>LD": state(round)},
            dict,
            last=False,
        )
    return store


def test_arrays_are_ordered_by_round_and_client_and_tables_have_holes(tmp_path: Path) -> None:
    three_rounds(tmp_path).close()
    history = History(tmp_path)
    found = history.cohorts("DS>LD", 0)
    assert (found.clients, found.criteria) == (("a", "b", "z"), ("DS", "LD"))
    assert found.round.tolist() == [1, 1, 2, 2, 3, 3]
    assert found.client.tolist() == [1, 2, 0, 2, 1, 2]
    assert found.weight.tolist() == [0.25, 0.75, 0.75, 0.25, 0.25, 0.75]
    assert found.bytes.tolist() == [10, 1, 2, 10, 10, 3]
    assert (between(found, 1).client.tolist(), between(found, 1, 2).clients) == ([0, 2, 1, 2], ("a", "z"))
    clients, rounds, _ = history.weights("DS>LD", 0)
    assert (clients, rounds.tolist()) == (("a", "b", "z"), [1, 2, 3])
    assert found.table(found.normalised).shape == (3, 3, 2)
    assert np.nan_to_num(found.table(found.normalised), nan=-1)[1].tolist() == [[0.75, 0.5], [-1, -1], [0.25, 0.5]]
    # The frame has the client that was left out among the others, in its place by name.
    frame = history.clients
    assert frame["client"].tolist() == ["b", "z", "a", "b", "z", "b", "z"]
    assert frame["failure"].fillna("").tolist() == ["", "", "", "gone", "", "", ""]
    assert frame.loc[0, ["raw_DS", "raw_LD", "normalised_DS", "normalised_LD"]].tolist() == [1.0, 4.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("round", "client", "table"),
    [
        ([1, 1, 2, 2], [0, 1, 0, 1], [[1, 2], [3, 4]]),  # nobody is missing
        ([1, 1, 2, 3], [0, 1, 0, 1], [[1, 2], [3, 0], [0, 4]]),
        ([1, 1, 2, 2], [0, 1, 1, 2], [[1, 2, 0], [0, 3, 4]]),
        ([], [], []),
    ],
)
def test_entries_stand_in_their_round_and_column(round: list[int], client: list[int], table: list[list[int]]) -> None:
    counts = [np.array(column, dtype=np.int64) for column in (round, client)]
    rounds, found = as_table(*counts, max(client, default=-1) + 1, np.arange(1.0, len(round) + 1))
    assert (rounds.tolist(), np.nan_to_num(found).tolist()) == (sorted(set(round)), table)


def test_a_follower_reads_only_what_is_new(tmp_path: Path) -> None:
    store = three_rounds(tmp_path)
    history = History(tmp_path)
    assert history.last_round == 3
    assert history.rounds_after(2)["round"].tolist() == [3]
    assert history.evaluations_after(1)["round"].tolist() == [2, 2, 3, 3]
    assert history.failures_after(2).empty
    assert history.scores("DS>LD", 0, after=2)[0].tolist() == [3]
    assert history.cohorts("DS>LD", 0, after=3).raw.shape == (0, 2)
    add(store, record(round=4, evaluations=evaluations(clients=("d", "e"))))
    rounds, scores = history.scores("DS>LD", 0)
    assert (rounds.tolist(), scores[3, 1:].tolist()) == ([1, 2, 3, 4], [0.5, 1.0])
    assert history.last_round == 4
    assert history.weights("DS>LD", 0, after=3)[1].tolist() == [4]
    store.close()


def test_a_matrix_is_a_row_for_each_pair_of_its_clients() -> None:
    frame = listening_frame([("fedala", 3, 1, ["a", "b"], np.array([[0.75, 0.25], [0.5, 0.5]]))])
    assert list(frame.columns) == list(listening_frame([]).columns)
    assert list(frame.index) == [0, 1, 2, 3]
    assert frame.to_numpy().tolist()[1:3] == [["fedala", 3, 1, "a", "b", 0.25], ["fedala", 3, 1, "b", "a", 0.5]]


def test_values_come_back_by_round_with_their_rule_seed_and_source(tmp_path: Path):
    run = eleven_rounds(tmp_path).folder
    figures = (np.array([[0.5, -0.5]]), np.array([0.25]), np.array([7]), 0.5, 0.75)
    one, other = values(1), RoundValues("accuracy", "leave-one-out", ("b",), *figures)
    writer = Store(run)
    why = add_values(run, {("both", 2): [other]}, "replay")
    writer.close()
    assert "writing this run" in why
    assert read_values(run) == []
    assert add_values(run, {("both", 2): [other], ("both", 1): [one]}, "replay") == ""
    found = read_values(run)
    assert [(each.rule, each.seed, each.round, each.source) for each in found] == [
        ("both", 1, 1, "replay"),
        ("both", 1, 2, "replay"),
    ]
    for stored, sent in zip(found, (one, other), strict=True):
        back = stored.found
        for field in dataclasses.fields(RoundValues):
            np.testing.assert_array_equal(getattr(back, field.name), getattr(sent, field.name))


def test_an_empty_run_and_a_rule_without_rounds_have_columns_of_their_types(tmp_path: Path) -> None:
    store = Store(tmp_path)
    nothing = History(tmp_path)
    assert (nothing.last_round, nothing.last_checkpoint()) == (-1, ({}, {}))
    for frame in (nothing.clients, nothing.evaluations, nothing.rounds):
        assert len(frame) == 0
        assert (frame["seed"].dtype, frame["round"].dtype) == (np.int64, np.int64)
    store.close()
