"""Curious servers and canaries: what is read of a lone sample, what noise hides, and which faults are found out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.privacy.seeded_source import SeededSource

from steelyard.experiment.digit_audits import (
    Attack,
    Protection,
    attack_many,
    audit_extraction,
    audit_inversion,
    audit_membership,
    guess,
    victims,
)
from steelyard.experiment.run_audits import audit_runs
from steelyard.privacy import clipping
from steelyard.privacy.accounting import Release, spent
from steelyard.rounds import private
from steelyard.rounds.private import PrivateRounds
from steelyard.weighing import rule


def test_a_lone_sample_is_read_and_noise_hides_it() -> None:
    found = audit_inversion(batches=(1,), tries=4, steps=0, source=SeededSource(1))
    by = {(entry.model, entry.protection): entry for entry in found}
    for model in ("linear", "MLP"):
        assert by[model, "none"].read == 1.0
        assert by[model, "local noise, ε = 1"].read == 0.0
        assert by[model, "local noise, ε = 1"].likeness < by[model, "nothing is sent"].likeness
        assert by[model, "sum of 10 clients"].likeness < 0.99


def test_a_sample_is_known_to_be_among_the_clients_and_noise_hides_it() -> None:
    found = audit_membership(batches=(4,), tries=6, source=SeededSource(1))
    by = {(entry.model, entry.protection): entry for entry in found}
    for model in ("linear", "MLP"):
        assert by[model, "none"].ranked > 0.85
        assert by[model, "none"].found > 0.15
        assert by[model, "sum of 100 clients"].ranked < 0.75
        assert abs(by[model, "local noise, ε = 1"].ranked - 0.5) < 0.25
        assert by[model, "local noise, ε = 1"].found < 0.15


@pytest.mark.slow
def test_a_linear_model_is_solved_for_and_a_class_alone_hides_it() -> None:
    found = {(row.model, row.questions, row.answer): (row.agrees, row.apart) for row in audit_extraction(100)}
    # 64 pixels and a bias: 100 questions are more than the 65 equations that each class needs.
    same, apart = found["linear", "random pixels", "probabilities"]
    assert same == 1.0
    assert apart < 1e-5
    assert found["linear", "random pixels", "class alone"][0] < 0.9
    assert 0.6 < found["MLP", "digits of others", "probabilities"][0] < 1.0


@pytest.mark.parametrize(
    ("option", "value", "more"),
    [
        ("--delta", "0.01", ("--canaries", "200")),
    ],
)
def test_what_cannot_be_audited_is_refused_before_the_audit(
    option: str, value: str, more: tuple[str, ...], tmp_path: Path, refused: Callable[..., str]
) -> None:
    (tmp_path / "file").write_text("")
    line = refused("privacy", "audit", option, value, *more)
    assert line.startswith(f"steelyard: {option}: ")
    assert value in line


@pytest.mark.parametrize("network", ["linear", "MLP"])
def test_more_noise_and_larger_sums_hide_more(network: str) -> None:
    held, source = victims(), SeededSource(3)

    def alike(**protection: Any) -> float:
        return attack_many(held, Attack(network, 1, "analytic"), Protection("", **protection), 6, 0, source).mean()

    control = guess(held, 1, 50).mean()
    assert 0.75 < control < 0.9
    assert alike(clients=1) == pytest.approx(1.0, abs=1e-4)
    assert alike(clients=100) < control
    assert alike(epsilon=1e6) > 0.9
    assert abs(alike(epsilon=1.0)) < 0.3


@pytest.mark.parametrize("sampled", ["poisson", pytest.param("fixed", marks=pytest.mark.slow)])
def test_an_honest_run_is_not_refuted_and_the_round_that_was_run_twice_is_counted(sampled: Any) -> None:
    found = audit_runs(0.5, 0.5, 2, sampled=sampled, seed=1)
    assert found.accounted == pytest.approx(spent({Release(0.5, sampled, 0.5): 3}, 1e-5), abs=1e-6)
    assert 0.5 < found.lower < found.accounted
    assert found.canaries == 300


LARGEST, CAP = PrivateRounds.largest_weight, rule.own_cap


@pytest.mark.parametrize(
    ("place", "name", "faulty", "noise", "rate"),
    [
        (PrivateRounds, "largest_weight", lambda self, of, answered: LARGEST(self, of, answered) / 10, 3.0, 0.5),
        (rule, "own_cap", lambda rule, expected: 10 * CAP(rule, expected), 3.0, 0.5),
        (clipping, "clip_factors", lambda lengths, clip: np.ones_like(lengths), 3.0, 0.5),
        (private, "each_with", lambda source, names, rate: list(names), 1.0, 0.02),
        (PrivateRounds, "_release", lambda self, of, noise: Release(noise, "poisson", 0.001), 1.0, 0.5),
    ],
    ids=["smaller largest weight", "weights beyond the cap", "no clipping", "cohorts of everybody", "another rate"],
)
def test_a_fault_anywhere_on_the_way_is_found_out(
    place: Any, name: str, faulty: Any, noise: float, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, faulty)
    found = audit_runs(noise, rate, 2, seed=2)
    assert found.lower > found.accounted
