"""Checking an archive that another kind of processor made: what is allowed, and what nobody gains by claiming one."""

from __future__ import annotations

import pytest
from tests.studies.made import SUITE, trusting

from steelyard.base.processor import KERNELS, MACHINE, THREADS, TORCH
from steelyard.studies.archive import Replayed, SceneFigures
from steelyard.studies.arena import judge, plan
from steelyard.studies.candidate import read_candidates
from steelyard.studies.checking import APART, ArenaArchive, Checked, replay_answer, shifted

HERE = {MACHINE: "aarch64", KERNELS: "DEFAULT 0a", THREADS: "2", TORCH: "2.13.0"}
THERE = {**HERE, MACHINE: "x86_64", KERNELS: "AVX2 1b"}
ROWS = 400
WAS = Replayed(scene="clean", seed=101, model="a" * 64, value=0.9, samples=ROWS)


def archive(gain: float = 0.05, spread: float = 0.002, figure: float = 0.9, **fields: object) -> ArenaArchive:
    """An archive of one scene and three seeds whose candidate is so far ahead; `figure` is the baseline's first."""
    (candidate,) = read_candidates("LD", None, SUITE, trusting)
    arena = plan(SUITE, candidate, scenes=["clean"], seeds=3)
    baseline = (figure, 0.88, 0.92)
    ahead = tuple(value + gain + spread * number for value, number in zip(baseline, (-1, 0, 1), strict=True))
    figures = {"clean": SceneFigures(values={"fedavg": baseline, arena.candidate: ahead})}
    verdict = judge(arena, figures).verdict
    made = ArenaArchive(verdict=verdict, versions=THERE, plan=arena, figures=figures, replayed=WAS)
    return made.model_copy(update=fields)


def came(samples: float, model: str = "b") -> Replayed:
    """The part as it came out here: another model, so many samples better."""
    return WAS.model_copy(update={"model": model * 64, "value": WAS.value + samples / ROWS})


def test_the_same_bits_are_the_same_on_any_processor() -> None:
    for versions in (THERE, HERE, {}):
        answer = replay_answer(archive(versions=versions), WAS, WAS, HERE)
        assert answer.endswith("the same model, bit for bit")


def test_on_the_same_kind_of_processor_nothing_but_the_same_bits_will_do() -> None:
    same = archive(versions=HERE)
    assert replay_answer(same, WAS, came(0), HERE).startswith("DIFFERS")
    assert replay_answer(same, WAS, came(0, "a").model_copy(update={"value": 0.8}), HERE).startswith("DIFFERS")


@pytest.mark.parametrize("samples", [0, 1, -APART, APART])
def test_another_processor_may_be_a_few_samples_off_and_that_is_said(samples: int) -> None:
    answer = replay_answer(archive(), WAS, came(samples), HERE)
    assert f"agrees within {abs(samples)} of {ROWS} samples; made on x86_64 (AVX2 1b)" in answer


def test_more_samples_off_than_another_processor_makes_differ() -> None:
    for samples in (APART + 0.25, -APART - 1):
        answer = replay_answer(archive(), WAS, came(samples), HERE)
        assert answer.startswith("DIFFERS")
        assert f"3 of {ROWS} samples apart" in answer


def test_a_claim_of_another_processor_excuses_no_figure_of_the_scene() -> None:
    """Whoever forges the scene's figure may be 1 point off what comes out here, as without the claim."""
    margin = SUITE.margin
    beyond = archive(figure=WAS.value + margin + 1 / ROWS)
    assert replay_answer(beyond, WAS, came(0), HERE).startswith("UNDECIDED")
    assert replay_answer(beyond, WAS, WAS, HERE).startswith("DIFFERS")
    assert replay_answer(archive(figure=WAS.value + margin + (APART + 1) / ROWS), WAS, came(0), HERE).startswith(
        "DIFFERS"
    )
    assert "agrees" in replay_answer(archive(figure=WAS.value + margin - 0.001), WAS, came(0), HERE)


def test_a_verdict_that_a_few_samples_would_turn_is_undecided() -> None:
    sure, close = archive(), archive(gain=0.03, spread=0.0095)
    assert not replay_answer(sure, WAS, came(1), HERE).startswith("UNDECIDED")
    answer = replay_answer(close, WAS, came(1), HERE)
    assert answer.startswith("UNDECIDED")
    assert "would turn the verdict" in answer


def test_figures_are_shifted_for_the_part_alone() -> None:
    one = archive()
    moved = shifted(one.plan, one.figures, came(0), 2)
    assert moved["clean"].values["fedavg"] == pytest.approx((0.9 + 2 / ROWS, 0.88, 0.92), abs=1e-12)
    assert moved["clean"].values[one.plan.candidate] == one.figures["clean"].values[one.plan.candidate]


@pytest.mark.parametrize(
    ("differs", "undecided", "code"), [(False, False, 0), (True, False, 1), (True, True, 1), (False, True, 2)]
)
def test_the_exit_code(differs: bool, undecided: bool, code: int) -> None:
    assert Checked((), differs, undecided).code == code
