"""What colluders may send, by hand: sums of a few known updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steelyard.defence.colluding import Candidates, Directions, Named, around, candidates

HONEST = torch.tensor([[3.0, 0.0, 4.0], [1.0, 0.0, 0.0], [5.0, 0.0, 12.0]])
OWN = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 6.0]])
MORE = {"climb": torch.tensor([0.0, 0.5, 0.0]), "lasting": torch.tensor([9.0, 0.0, 16.0]), "bias 0": torch.eye(3)[1]}
MEAN = np.array([3.0, 0.0, 16 / 3])


def sent(family: str = "all") -> tuple[Directions, list[Named], dict[str, np.ndarray]]:
    """The candidates of a family, and by name what each of the two colluders sends: [colluders, parameters]."""
    directions = Directions(HONEST, OWN, MORE)
    named = candidates(directions, family, np.random.default_rng(0))
    made = Candidates.of(directions, named)
    assert made.sent.dtype == np.int64
    return directions, named, {name: made.vectors[made.sent[at]].numpy() for at, name in enumerate(made.names)}


def test_each_candidate_is_what_its_name_says() -> None:
    spread = HONEST.double().numpy().std(axis=0)
    back, drawn = -5 * MEAN / np.linalg.norm(MEAN), np.random.default_rng(0).standard_normal(3) @ HONEST.numpy()
    expected = {
        "ipm 2": -2 * MEAN,
        "alie 1.5 spread": MEAN - 1.5 * spread,
        # Nobody's second parameter moves: its mean has no sign.
        "alie 3 signed-spread": MEAN - 3 * spread * [1, 0, 1],
        "reversed 5": -5 * OWN.numpy(),
        "half ipm 3": [-3 * MEAN, MEAN],
        "boosted 5": 5 * MEAN,
        "nothing": np.zeros(3),
        # Lengths are 5, 1 and 13: the median is 5.
        "climb 3": [0, 15, 0],
        "lasting 3": -3 * back,
        "random 0 3": 15 * drawn / np.linalg.norm(drawn),
        "random 0 1": 5 * drawn / np.linalg.norm(drawn),
        # No longer than 5, and what is shorter stays as short.
        "drift 0.25 -mean": 0.75 * MEAN + 0.25 * back,
        "drift 1 -mean": back,
        "drift 0.5 climb": 0.5 * MEAN + [0, 2.5, 0],
        "drift 0.25 lasting": -back,
        "bias 0": MEAN + np.array([0, 5, 0]),
        # The two farthest from the others: ‖u‖² − 2 ⟨u, μ⟩ is −35.7, −5 and 11.
        "copy of honest 1": HONEST[1].numpy(),
        "copy of honest 2": HONEST[2].numpy(),
    }
    found = sent()[2]
    factors = {
        kind: [float(name.split()[-1]) for name in found if name.startswith(kind)]
        for kind in ("reversed", "boosted", "half", "climb", "lasting", "random 7", "copy")
    }
    assert factors == {
        "reversed": [0.5, 1, 2, 5, 10],
        "boosted": [5, 30],
        "half": [1, 3],
        "random 7": [1, 3],
        "copy": [2, 1],
        "climb": [1, 3, 10],
        "lasting": [1, 3, 10],
    }
    for name, vectors in expected.items():
        # Products of a few float32 of size 60 at most.
        np.testing.assert_allclose(found[name], np.broadcast_to(vectors, (2, 3)), rtol=1e-5, atol=1e-5, err_msg=name)
    # As far against the spread as one honest client is from another.
    honest, widest = HONEST.numpy(), found["min-max spread"][0]
    assert (widest - MEAN) @ spread < 0
    for name in ("min-max spread", "min-max mean", "min-max signs"):
        furthest = max(np.linalg.norm(found[name][0] - each) for each in honest)
        assert furthest == pytest.approx(np.linalg.norm(honest[2] - honest[1]), rel=1e-5)


@pytest.mark.parametrize(("family", "count"), [("ipm", 12), ("alie", 18), ("drift", 16)])
def test_a_family_is_a_part_of_all_candidates(family: str, count: int) -> None:
    found, whole = sent(family)[2], sent()[2]
    assert list(found) == [name for name in whole if name.startswith(family)]
    assert len(found) == count


def test_candidates_with_roles_are_of_four_kinds() -> None:
    baits, *others = [sent(kind)[2] for kind in ("bait", "copies", "hidden")]
    names = [*baits, *(name for found in others for name in found)]
    assert sorted(names) == sorted(sent("roles")[2])
    assert set(names) <= set(sent()[2])
    # No random direction is known here, so that nobody can stand apart in one: what is left is a reversed mean.
    assert list(sent("decoys")[2]) == list(sent("ipm")[2])
    assert list(baits) == [f"bait 1 {times}" for times in ("0", "0.3", "3", "30")]
    back = -5 * MEAN / np.linalg.norm(MEAN)
    np.testing.assert_allclose(baits["bait 1 0.3"], [0.3 * back, back], rtol=1e-5, atol=1e-5)
    along = np.array([0.0, 1.0, 0.0])
    aside = {**MORE, "aside 0": torch.tensor(along, dtype=torch.float32)}
    directions = Directions(HONEST, torch.cat([OWN, OWN]), aside)
    made = Candidates.of(directions, candidates(directions, "decoys", np.random.default_rng(0)))
    vectors = dict(zip(made.names, made.vectors[torch.from_numpy(made.sent)].numpy(), strict=True))
    decoy, *others = vectors["decoy 1 3 -mean"]
    assert decoy.tolist() == [0, 20 * 3 * 5 * 4, 0]
    # The others stand where the mean of all seven stands along the decoy, and push by three times the median.
    assert others[0] @ along == pytest.approx((decoy @ along + sum(each @ along for each in others)) / 7, rel=1e-5)
    np.testing.assert_allclose(others[0] - others[0] @ along * along, 3 * back, rtol=1e-4, atol=1e-4)


def test_the_best_is_tried_longer_and_shorter() -> None:
    directions, named, _ = sent("ipm")
    assert named[5][0] == "ipm 1"
    again = Candidates.of(directions, around(directions, named[5])).vectors
    np.testing.assert_allclose(again[[0, 6]], [-0.5 * MEAN, MEAN + 0.5 * (-2 * MEAN)], rtol=1e-6, atol=1e-6)
    assert len(again) == 12


def test_one_honest_client_and_updates_of_nothing() -> None:
    directions = Directions(torch.zeros(1, 3), torch.zeros(1, 3), {})
    made = Candidates.of(directions, candidates(directions, "all", np.random.default_rng(0)))
    assert not made.vectors.any()  # NaN would be something
