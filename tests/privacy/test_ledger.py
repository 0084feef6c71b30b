"""The ledger: on the disk before noise is drawn, never shorter, and the worst-hit client counts."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest
from tests.kit import assert_refused

from steelyard.base.errors import UserError
from steelyard.base.journal import Journal
from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.ledger import Account, Charge, Ledger

DELTA = 1e-5


def charge(round: int, *clients: str, noise: float = 4.0, what: str = "update", count: int = 1) -> Charge:
    return Charge("f", round, what, Release(noise), clients, count)


def test_the_client_that_was_hit_worst_counts() -> None:
    account = Account().plus(
        [charge(1, "a", "b"), charge(2, "b"), charge(3, "b", noise=2.0)]
        + [charge(1, str(noise), noise=noise) for noise in (1.8, *range(3, 13))]
    )
    # b: two with noise 4 and one with 2, which is four of noise 4.
    assert account.epsilon(DELTA) == pytest.approx(spent({Release(4.0): 6}, DELTA))
    assert Account().epsilon(DELTA) == 0.0


def test_rules_side_by_side_tell_of_the_same_clients() -> None:
    ledger = Ledger()
    ledger.charge([charge(1, "a"), Charge("g", 1, "update", Release(4.0), ("a",))])
    assert ledger.together().epsilon(DELTA) == pytest.approx(spent({Release(4.0): 2}, DELTA))
    assert ledger.account("g").epsilon(DELTA) == pytest.approx(spent({Release(4.0): 1}, DELTA))


def test_a_line_that_was_cut_is_taken_away_and_the_next_one_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path).charge([charge(1, "a")])
    with path.open("a") as file:
        file.write('{"federation": "f", "rou')
    ledger = Ledger(path)
    assert ledger.charges == [charge(1, "a")]
    ledger.charge([charge(2, "a")])
    assert Ledger(path).charges == [charge(1, "a"), charge(2, "a")]


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "nonsense",
        '{"federation": "f"}',
        '{"federation": "f", "round": 1, "what": "u", "noise": -1, "sampling": "poisson", "rate": 1, "count": 1}',
        '{"federation": "f", "round": 1, "what": "u", "noise": 1, "sampling": "all", "rate": 1, "count": 1}',
        '{"federation": "f", "round": 1, "what": "u", "noise": 1, "sampling": "some", "rate": 1, "count": 1}',
        '{"federation": "f", "round": 1, "what": "u", "noise": 1, "sampling": "poisson", "rate": 0.1, "count": -5}',
        # A sum with one of these has no ε, or one of 0: a line put behind the last round would lift the budget.
        '{"federation": "f", "round": 1, "what": "u", "noise": NaN, "sampling": "fixed", "rate": 1, "count": 1}',
        '{"federation": "f", "round": 1, "what": "u", "noise": 1e-300, "sampling": "fixed", "rate": 1, "count": 1}',
        '{"federation": "f", "round": 1, "what": "u", "noise": 1, "sampling": "fixed", "rate": 1, "count": Infinity}',
        '{"federation": ["f"], "round": 1, "what": "u", "noise": 1, "sampling": "fixed", "rate": 1, "count": 1}',
        '{"federation": "f", "round": 1, "what": "u", "noise": 1, "sampling": "all", "rate": 1, "count": 1, '
        '"clients": "abc"}',
        "[" * 100_000,
    ],
)
def test_a_line_that_was_changed_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(f"{charge(1, 'a').line()}\n{line}\n")
    with pytest.raises(UserError, match=r"ledger\.jsonl, line 2: "):
        Ledger(path)


def test_a_ledger_that_cannot_be_written_stops_the_noise(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "gone" / "ledger.jsonl")
    words = (f"{ledger.path}: the ledger cannot be written", "No such file", "no noise is drawn", "a disk with room")
    assert_refused(lambda: ledger.charge([charge(1, "a")]), *words)
    assert ledger.charges == []


def test_a_charge_is_on_the_disk_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushed with all of its bytes there, and the folder too once its name is new; a power failure may follow."""
    path, flushed = tmp_path / "ledger.jsonl", list[tuple[str, int]]()
    honest = os.fsync

    def noted(handle: int) -> None:
        found = os.fstat(handle)
        kind = "folder" if stat.S_ISDIR(found.st_mode) else "file"
        flushed.append((kind, 0 if kind == "folder" else found.st_size))
        honest(handle)

    monkeypatch.setattr(os, "fsync", noted)
    ledger = Ledger(path)
    ledger.charge([charge(1, "a")])
    first = path.stat().st_size
    assert ("file", first) in flushed
    assert any(kind == "folder" for kind, _ in flushed)
    flushed.clear()
    ledger.charge([charge(2, "a")])
    assert ("file", path.stat().st_size) in flushed


def test_a_ledger_has_one_name(tmp_path: Path) -> None:
    """What is written to it would be written to somebody else's file."""
    path = tmp_path / "ledger.jsonl"
    Ledger(path).charge([charge(1, "a")])
    (tmp_path / "second").hardlink_to(path)
    with pytest.raises(UserError, match="has 2 names"):
        Ledger(path)


def test_an_account_is_counted_as_it_is_asked_to_be() -> None:
    drawn = Charge("f", 1, "update", Release(1.0, "poisson", 0.1), count=20)
    account = Account().plus([drawn, drawn])
    for options in ({}, {"coarse": True}):
        assert account.epsilon(DELTA, **options) == spent({drawn.release: 40}, DELTA, **options)


def test_a_mark_says_how_far_a_ledger_has_come_and_what_it_held(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    marks = [ledger.mark()]
    for round in (1, 2):
        ledger.charge([charge(round, "a")])
        marks.append(ledger.mark())
    content = path.read_bytes()
    assert [mark.bytes for mark in marks] == [0, len(charge(1, "a").line()) + 1, len(content)]
    assert marks[2].sha256 == hashlib.sha256(content).hexdigest()
    assert Ledger(path).mark() == marks[2]
    assert Journal(path).first_difference(marks) is None
    # What follows the last mark is not looked at.
    assert Journal(path).first_difference(marks[:2]) is None
    for changed, difference in (
        (content[:-1], (2, f"has {len(content) - 1:,} bytes, and had {len(content):,}")),
        (content.replace(b'"round": 1', b'"round": 3'), (1, "no longer holds the lines that it held")),
        (content.replace(b'"round": 2', b'"round": 3'), (2, "no longer holds the lines that it held")),
        (b"", (1, f"has 0 bytes, and had {marks[1].bytes:,}")),
    ):
        path.write_bytes(changed)
        assert Journal(path).first_difference(marks) == difference
    path.unlink()
    assert Journal(path).first_difference(marks) == (1, "is gone, and was there")
    assert Journal(path).first_difference(marks[:1]) is None


def test_charges_are_read_back_as_written_and_each_counts(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    made = [
        charge(1, "a", "b"),
        charge(1, "a"),
        Charge("g", 2, "update", Release(1.5, "fixed", 0.1)),
        Charge("f", 3, "criteria", Release(4.0, mechanism="laplace"), ("a",), 3),
    ]
    ledger.charge(made[:3])
    ledger.charge(made[3:])
    again = Ledger(tmp_path / "ledger.jsonl")
    assert again.charges == made
    assert again.account("f").single["a"][Release(4.0)] == 2
