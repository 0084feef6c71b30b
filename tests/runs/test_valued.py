"""What a database holds of contributions: the same numbers come back, and a damaged row is named by its round."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.runs.contents import change
from tests.runs.records import values
from tests.runs.signed_runs import signed_run

from steelyard.errors import UserError
from steelyard.rounds.contributions import RoundValues
from steelyard.runs.store import Store
from steelyard.runs.valued import add_values, read_values


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    return signed_run(folder / "run", folder / "keys")


@pytest.fixture
def run(plain: Path, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(plain, tmp_path / "run"))
    change(copy, "DELETE FROM contributions")
    return copy


def test_values_come_back_by_round_with_their_rule_seed_and_source(run: Path):
    assert read_values(run) == []
    one, other = (
        values(1),
        RoundValues(
            *("accuracy", "leave-one-out", ("b",), np.array([[0.5, -0.5]]), np.array([0.25]), np.array([7]), 0.5, 0.75)
        ),
    )
    assert add_values(run, {("DS>LD", 2): [other], ("DS>LD", 1): [one]}, "replay") == ""
    found = read_values(run)
    assert [(each.rule, each.seed, each.round, each.source) for each in found] == [
        ("DS>LD", 0, 1, "replay"),
        ("DS>LD", 0, 2, "replay"),
    ]
    for stored, given in zip(found, (one, other), strict=True):
        back = stored.found
        assert (back.measure, back.method, back.clients) == (given.measure, given.method, given.clients)
        assert (back.before, back.after) == (given.before, given.after)
        for name in ("values", "error", "sizes"):
            np.testing.assert_array_equal(getattr(back, name), getattr(given, name))


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ("UPDATE contributions SET sizes = zeroblob(length(sizes))", "contributions of round 2: no test rows"),
        ("UPDATE contributions SET error = x'00'", "contributions of round 2: "),
        ("UPDATE contributions SET added = x'00'", "contributions of round 2: "),
        ("UPDATE contributions SET clients = x'ff000000fe000000'", "client"),
        ("UPDATE contributions SET federation = 77", "federation"),
    ],
)
def test_a_damaged_row_is_one_line_that_names_it(run: Path, statement: str, line: str):
    add_values(run, {("DS>LD", 2): [values(2)]}, "run")
    change(run, statement)
    with pytest.raises(UserError, match=line) as found:
        read_values(run)
    assert str(run) in str(found.value)
    assert "\n" not in str(found.value)


def test_a_run_that_another_writes_says_why_and_stays_as_it_is(run: Path):
    other = Store(run)
    try:
        why = add_values(run, {("DS>LD", 2): [values(2)]}, "run")
    finally:
        other.close()
    assert why.startswith(f"{run}: ")
    assert "writing this run" in why
    assert read_values(run) == []
