"""Users whose devices add noise: every row carries it, and nobody's change is longer than allowed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.privacy.seeded_source import SeededSource

from steelyard.errors import UserError
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.privacy.accounting import Release, spent
from steelyard.recommend.sparse import SparseRows
from steelyard.runs.reader import History

NOISY = {"local": {"clip": 1.0, "noise": 20.0}}


def rows_of() -> SparseRows:
    owners, rows = np.array([0, 0, 1], dtype=np.int32), np.array([1, 3, 0], dtype=np.int32)
    return SparseRows(2, owners, rows, np.array([[3.0, 0.0], [0.0, 4.0], [0.3, 0.4]], dtype=np.float32), 0.1)


def test_a_users_change_is_clipped_and_lies_under_noise_on_every_row() -> None:
    told = rows_of().noised(5, 1.0, 1e-6, SeededSource(1))
    # User 0: (3, 4) over two rows, length 5, clipped to 1; user 1: length 0.5, as it is.
    table = told.values.reshape(2, 5, 2)
    expected = np.zeros((2, 5, 2))
    expected[0, 1, 0], expected[0, 3, 1], expected[1, 0] = 0.6, 0.8, (0.3, 0.4)
    assert table == pytest.approx(expected, abs=1e-5)
    assert told.rows.tolist() == [0, 1, 2, 3, 4] * 2
    wide = rows_of().noised(5000, 1.0, 0.5, SeededSource(2))
    assert wide.values.std() == pytest.approx(0.5, rel=0.02)
    assert (wide.values != 0).all()
    broken = rows_of()
    broken.values[0, 1] = np.nan  # Then nothing clips the rest of user 0's change: it is not told.
    assert np.abs(broken.noised(5, 1.0, 1e-6, SeededSource(1)).values.reshape(2, 5, 2)[0]).max() < 1e-4


def test_a_run_with_noise_shows_what_it_spends(description: dict, tmp_path: Path) -> None:
    described = build({**description, "rounds": {"count": 3}, "fpl": {"factors": 4, "mode": "pFPL"}, "privacy": NOISY})
    folder = run(described, out=tmp_path / "run")
    assert History(folder).rounds["epsilon"].iloc[-1] == pytest.approx(spent({Release(20.0): 3}, 1e-5))


@pytest.mark.parametrize(
    ("fpl", "privacy", "line"),
    [
        ({"mode": "sFPL"}, NOISY, r"privacy\.local: given with one user in each round"),
        (
            {"mode": "pFPL"},
            {"central": {"clip": 1.0, "noise": 1.0}},
            r"privacy\.central: given, but the server sees",
        ),
    ],
)
def test_what_is_not_built_is_refused(description: dict, fpl: dict, privacy: dict, line: str) -> None:
    document = {**description, "fpl": fpl, "privacy": privacy, "weighing": {"criteria": ["EQ"], "max_shares": 1.0}}
    with pytest.raises(UserError, match=line):
        build({**document, "weighing": {"criteria": ["EQ"]}} if "local" in privacy else document)
