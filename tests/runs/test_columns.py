"""Columns of numbers in the database: packed and unpacked to the last bit, and damage that is noticed."""

from __future__ import annotations

import sqlite3
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runs.records import RAW, federation, record, state, updates

from steelyard.errors import UserError
from steelyard.messages import Failure
from steelyard.runs.columns import KEYS, WHOLE, Cohorts, pack, ranked, unpack
from steelyard.runs.reader import History
from steelyard.runs.store import Store
from steelyard.weighing.rule import Rule, WeighingSettings

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def test_bytes_are_little_endian_and_what_is_not_finite_is_unknown() -> None:
    assert pack([1.5, -2.0]) == struct.pack("<2d", 1.5, -2.0)
    assert pack([1, 513], KEYS) == b"\x01\x00\x00\x00\x01\x02\x00\x00"
    found = unpack([pack([np.inf, 1.0, -np.inf, np.nan])], [4])
    assert np.isnan(found).tolist() == [True, False, True, True]


@given(st.lists(st.lists(FINITE, max_size=5), max_size=4))
def test_columns_of_many_rounds_come_back_to_the_last_bit(rounds: list[list[float]]) -> None:
    found = unpack([pack(column) for column in rounds], [len(column) for column in rounds])
    assert found.tobytes() == np.array([value for column in rounds for value in column], "<f8").tobytes()


@given(st.lists(st.integers(0, 2**63 - 1), max_size=5))
def test_whole_numbers_come_back(values: list[int]) -> None:
    assert unpack([pack(values, WHOLE)], [len(values)], WHOLE).tolist() == values


def test_tables_keep_their_width_and_a_missing_column_is_unknown() -> None:
    found = unpack([pack(RAW), None], [2, 1], width=2)
    assert found[:2].tolist() == RAW.tolist()
    assert np.isnan(found[2]).all()
    assert unpack([], [], width=3).shape == (0, 3)


@pytest.mark.parametrize("blob", [b"", b"\0" * 7, b"\0" * 24, "0.5000000000000000"])
def test_a_blob_of_another_length_is_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match="another length than its round has clients"):
        unpack([blob], [2])


def test_clients_are_counted_in_ascending_order_of_their_names() -> None:
    names, index = ranked(np.array([7, 2, 7, 9]), {2: "b", 7: "c", 9: "a", 11: "never"})
    assert names == ("a", "b", "c")
    assert index.tolist() == [2, 1, 2, 0]
    with pytest.raises(ValueError, match="client number 8 has no name"):
        ranked(np.array([8]), {2: "b"})


def three_rounds(folder: Path) -> Store:
    """Rounds 1 to 3 of clients whose numbers are not in the order of their names; b is absent in round 2."""
    store = Store(folder)
    store.register([federation()])
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
    assert found.raw.tolist() == [[1, 4], [3, 4], [3, 4], [1, 4], [1, 4], [3, 4]]
    clients, rounds, weights = history.weights("DS>LD", 0)
    assert (clients, rounds.tolist()) == (("a", "b", "z"), [1, 2, 3])
    assert np.nan_to_num(weights, nan=-1).tolist() == [[-1, 0.25, 0.75], [0.75, -1, 0.25], [-1, 0.25, 0.75]]
    assert found.table(found.normalised).shape == (3, 3, 2)
    assert np.nan_to_num(found.table(found.normalised), nan=-1)[1].tolist() == [[0.75, 0.5], [-1, -1], [0.25, 0.5]]
    # The frame has the client that was left out among the others, in its place by name.
    frame = history.clients
    assert frame["client"].tolist() == ["b", "z", "a", "b", "z", "b", "z"]
    assert frame["failure"].fillna("").tolist() == ["", "", "", "gone", "", "", ""]


def test_a_follower_reads_only_what_is_new(tmp_path: Path) -> None:
    store = three_rounds(tmp_path)
    history = History(tmp_path)
    assert history.last_round == 3
    assert history.rounds_after(2)["round"].tolist() == [3]
    assert history.clients_after(2)["client"].tolist() == ["b", "z"]
    assert history.evaluations_after(1)["round"].tolist() == [2, 2, 3, 3]
    assert history.failures_after(2).empty
    assert history.scores("DS>LD", 0, after=2)[0].tolist() == [3]
    new: Cohorts = history.cohorts("DS>LD", 0, after=3)
    assert (new.clients, len(new.round), new.raw.shape) == ((), 0, (0, 2))
    store.commit(4, [record(round=4)], {"DS>LD": state(4)}, dict, last=False)
    assert history.last_round == 4
    assert history.weights("DS>LD", 0, after=3)[1].tolist() == [4]
    store.close()


def test_a_run_without_rounds_has_empty_tables(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.register([federation()])
    history = History(tmp_path)
    assert (history.last_round, len(history.clients), len(history.evaluations)) == (-1, 0, 0)
    assert list(history.clients.columns)[:4] == ["rule", "seed", "round", "client"]
    with pytest.raises(UserError, match="no rule 'LD' with seed 0 in this run"):
        history.weights("LD", 0)
    store.close()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE updates SET weight = x'00'", "updates of DS>LD, seed 0: a stored column has another length"),
        ("UPDATE updates SET clients = x'63000000'", "another length|client number 99 has no name"),
        ("UPDATE updates SET samples = 'abc'", "updates, samples: 'abc' is no column of numbers"),
        ("UPDATE updates SET samples = x'00000000000000ff00000000000000ff'", "a number below zero"),
        ("UPDATE updates SET weight = x'000000000000f07f000000000000f07f'", "one that is not finite"),
        ("UPDATE federations SET settings = '{'", "federations, settings holds no JSON"),
        ("UPDATE info SET value = 'x' WHERE key = 'flaws'", "info, flaws holds no JSON"),
    ],
)
def test_garbage_in_the_database_is_named(tmp_path: Path, statement: str, said: str) -> None:
    store = three_rounds(tmp_path)
    store.note(flaws={})
    store.close()
    with sqlite3.connect(tmp_path / "run.sqlite") as writer:
        writer.execute(statement)
    writer.close()
    history = History(tmp_path)
    with pytest.raises(UserError, match=f"the run's database cannot be read: .*({said})"):
        history.clients, history.flaws  # noqa: B018
