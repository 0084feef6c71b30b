"""What a curious server reads from updates."""

import numpy as np
import pytest

from steelyard.experiment.loading import build
from steelyard.experiment.run_audits import audit
from steelyard.recommend.audit import CuriousServer, Guess, judge
from steelyard.recommend.histories import Histories
from steelyard.recommend.interactions import build as table
from steelyard.recommend.sparse import SparseRows


def test_guesses_by_hand():
    histories = Histories.of(table(["a", "a", "b"], ["0", "1", "2"], all_items=["3"]))
    curious = CuriousServer(2, 4)
    rows = np.array([0, 3, 2, 1], dtype=np.int32)
    changes = np.array([[0.2, 0.5], [0.1, -0.5], [0.3, 0.1], [0.0, -0.1]], dtype=np.float32)
    # Owner 0 is user b, owner 1 is user a: b pushes 0 up (a decoy) and 3 down, a pushes 2 up (a decoy) and 1 down.
    curious.see(np.array([1, 0]), SparseRows(2, np.array([0, 0, 1, 1], dtype=np.int32), rows, changes, 0.1))
    sign = judge(curious.by_sign(), histories)
    assert (sign.claims, sign.precision, sign.recall) == (2, 0.0, 0.0)
    absence = judge(curious.by_absence(), histories)
    # a: all but 1, of which 0 is hers; b: all but 3, of which 2 is hers.
    assert (absence.claims, absence.precision, absence.recall) == (6, 2 / 6, 2 / 3)


def test_protections_over_rounds(description):
    found = audit(build(description), [1, 40], share=0.5, decoys=1.0)
    by_name = {entry.protection: [row.sign for row in entry.rounds] for entry in found}
    everything, drawn, persistent, decoyed, nothing = by_name.values()
    assert everything[1] == Guess(24 * 8, 1.0, 1.0)
    assert drawn[0].recall < 0.6
    assert drawn[1].recall > 0.99  # fresh draws only delay the leak
    # 192 interactions, each kept or not by one coin: three standard errors of 0.036.
    assert persistent[1].recall == pytest.approx(0.5, abs=0.11)
    assert persistent[1].precision == 1.0
    # As many decoys as interactions, so at most 384 claims: three standard errors of 0.026.
    assert decoyed[1].precision == pytest.approx(0.5, abs=0.08)
    assert nothing[1].claims == 0
    absence = {entry.protection: entry.rounds[1].absence.precision for entry in found}
    assert absence["π = 0"] > 0.9  # what she never pushes down is hers, whatever π
    assert absence["π = 0.5 persistent, 1 decoy per item"] < 0.6


def test_sums_by_hand():
    curious = CuriousServer(1, 4)
    rows, owners = np.array([0, 1, 2, 0], dtype=np.int32), np.zeros(4, dtype=np.int32)
    changes = np.array([[0.0, 0.5], [0.0, -0.4], [0.0, 0.3], [0.0, -0.3]], dtype=np.float32)
    curious.see(np.array([0]), SparseRows(1, owners, rows, changes, 0.1))
    # Sums 0.2, −0.4, 0.3 and nothing: of one item, 2 is claimed; of three, never the one that was not named.
    assert curious.by_sum(np.array([1])).tolist() == [[False, False, True, False]]
    assert curious.by_sum(np.array([3])).tolist() == [[True, False, True, False]]
