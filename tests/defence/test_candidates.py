"""What colluders may send, by hand: sums of a few known updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steelyard.defence.candidates import Candidates, Directions, Named, around, candidates

HONEST = torch.tensor([[3.0, 0.0, 4.0], [1.0, 0.0, 0.0], [5.0, 0.0, 12.0]])
OWN = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 6.0]])
MORE = {"climb": torch.tensor([0.0, 2.0, 0.0]), "bias 0": torch.tensor([0.0, 1.0, 0.0])}


def sent(family: str = "all") -> tuple[Directions, list[Named], dict[str, np.ndarray]]:
    """The candidates of a family, and by name what each of the two colluders sends: [colluders, parameters]."""
    directions = Directions(HONEST, OWN, MORE)
    named = candidates(directions, family, np.random.default_rng(0))
    made = Candidates.of(directions, named)
    return directions, named, {name: made.vectors[made.sent[at]].numpy() for at, name in enumerate(made.names)}


def test_each_candidate_is_what_its_name_says() -> None:
    _, _, by_name = sent()
    mean, spread = np.array([3.0, 0.0, 16 / 3]), HONEST.double().numpy().std(axis=0)
    np.testing.assert_allclose(by_name["ipm 2"], np.tile(-2 * mean, (2, 1)), rtol=1e-6)
    np.testing.assert_allclose(by_name["alie 1.5 spread"][0], mean - 1.5 * spread, rtol=1e-5)
    # Nobody's second parameter moves: its mean has no sign.
    np.testing.assert_allclose(by_name["alie 3 signed-spread"][0], mean - 3 * spread * [1, 0, 1], rtol=1e-5)
    np.testing.assert_allclose(by_name["reversed 5"], -5 * OWN.numpy(), rtol=1e-6)
    np.testing.assert_allclose(by_name["half ipm 3"], [-3 * mean, mean], rtol=1e-6)
    np.testing.assert_allclose(by_name["boosted 5"][1], 5 * mean, rtol=1e-6)
    np.testing.assert_allclose(by_name["nothing"], 0.0)
    # Lengths are 5, 1 and 13: the median is 5.
    np.testing.assert_allclose(by_name["climb 3"][0], [0, 15, 0], rtol=1e-6)
    np.testing.assert_allclose(by_name["bias 0"][0], mean + np.array([0, 5, 0]), rtol=1e-6)
    np.testing.assert_allclose(by_name["copy of honest 2"][0], HONEST[2], rtol=1e-6)


def test_drift_stays_inside_the_clip_and_min_max_inside_the_cohort() -> None:
    _, _, by_name = sent()
    drifting = {name: each for name, each in by_name.items() if name.startswith("drift")}
    assert len(drifting) == 12
    for each in drifting.values():
        assert np.linalg.norm(each[0]) <= 5 * (1 + 1e-6)
    np.testing.assert_allclose(drifting["drift 1 climb"][0], [0, 5, 0], atol=1e-5)
    honest = HONEST.numpy()
    widest = max(np.linalg.norm(a - b) for a in honest for b in honest)
    for name in ("min-max spread", "min-max mean", "min-max signs"):
        furthest = max(np.linalg.norm(by_name[name][0] - each) for each in honest)
        assert furthest == pytest.approx(widest, rel=1e-5)


def test_families() -> None:
    assert len(sent()[1]) >= 70
    assert {name.split()[0] for name, _ in sent("ipm")[1]} == {"ipm"}
    assert {name.split()[0] for name, _ in sent("alie")[1]} == {"alie"}
    assert {name.split()[0] for name, _ in sent("drift")[1]} == {"drift"}


def test_the_best_is_tried_longer_and_shorter() -> None:
    directions, named, _ = sent("ipm")
    again = Candidates.of(directions, around(directions, named[5]))
    assert named[5][0] == "ipm 1"
    mean = HONEST.double().mean(dim=0).numpy()
    np.testing.assert_allclose(again.vectors[0], -0.5 * mean, rtol=1e-6)
    np.testing.assert_allclose(again.vectors[6], mean + 0.5 * (-2 * mean), atol=1e-6)
    assert len(again.names) == 12


def test_one_honest_client_and_updates_of_nothing() -> None:
    directions = Directions(torch.zeros(1, 3), torch.zeros(1, 3), {})
    made = Candidates.of(directions, candidates(directions, "all", np.random.default_rng(0)))
    assert torch.isfinite(made.vectors).all()
    assert not made.vectors.any()
