"""The ledger: on the disk before noise is drawn, never shorter, and the worst-hit client counts."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from steelyard.errors import UserError
from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.ledger import Account, Charge, Ledger

DELTA = 1e-5


def charge(round: int, *clients: str, noise: float = 4.0, what: str = "update", count: int = 1) -> Charge:
    return Charge("f", round, what, Release(noise), clients, count)


def test_charges_are_read_back_as_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    made = [
        charge(1, "a", "b"),
        Charge("g", 1, "update", Release(1.1, "poisson", 0.01)),
        Charge("g", 2, "update", Release(1.5, "fixed", 0.1)),
        charge(2, "b", what="criteria", count=3),
    ]
    ledger.charge(made[:3])
    ledger.charge(made[3:])
    again = Ledger(tmp_path / "ledger.jsonl")
    assert again.charges == made
    assert again.account("f").epsilon(DELTA) == ledger.account("f").epsilon(DELTA)


def test_the_client_that_was_hit_worst_counts() -> None:
    account = Account().plus([charge(1, "a", "b"), charge(2, "b"), charge(3, "b", noise=2.0)])
    # b: two with noise 4 and one with 2, which is four of noise 4.
    assert account.epsilon(DELTA) == pytest.approx(spent({Release(4.0): 6}, DELTA))
    assert Account().epsilon(DELTA) == 0.0


def test_a_round_that_is_charged_twice_counts_twice(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.charge([charge(1, "a")])
    ledger.charge([charge(1, "a")])
    assert ledger.account("f").epsilon(DELTA) == pytest.approx(spent({Release(4.0): 2}, DELTA))


def test_rules_side_by_side_tell_of_the_same_clients() -> None:
    ledger = Ledger()
    ledger.charge([charge(1, "a"), Charge("g", 1, "update", Release(4.0), ("a",))])
    assert ledger.together().epsilon(DELTA) == pytest.approx(spent({Release(4.0): 2}, DELTA))
    assert ledger.account("g").epsilon(DELTA) == pytest.approx(spent({Release(4.0): 1}, DELTA))
    assert ledger.account("unknown").epsilon(DELTA) == 0.0


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
    path.write_text(charge(1, "a").line() + line + "\n")
    with pytest.raises(UserError, match=r"ledger\.jsonl, line 2: is not a charge"):
        Ledger(path)


def test_a_ledger_that_cannot_be_written_stops_the_noise(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "gone" / "ledger.jsonl")
    with pytest.raises(UserError, match="cannot be written"):
        ledger.charge([charge(1, "a")])
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
