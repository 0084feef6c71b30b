"""Who is asked: each way of choosing against a slow one, the trace of who is there, the same after a stop, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.kit import SMALL, assert_refused, changed, small

from steelyard import Experiment
from steelyard.base import randomness
from steelyard.base.settings import validated
from steelyard.experiment.running import run
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Failure, Updates
from steelyard.rounds.plan import SelectSettings
from steelyard.rounds.state import Plan

NAMES = [f"c{number:02}" for number in range(20)]


def of(by: str, **given: Any) -> SelectSettings:
    return SelectSettings.model_validate({"by": by, **given})


def slow(select: SelectSettings, seed: int, round: int, size: int, known: Any) -> list[str]:
    """The same written out with lists: every client has two numbers by chance in each round, and one for its turn."""
    keys = randomness.stream_keys(seed, round, NAMES, "select")
    one, two = ({name: row[at] for name, row in zip(NAMES, randomness.uniforms(keys, 2), strict=True)} for at in (0, 1))
    keys = randomness.stream_keys(seed, 0, NAMES, "select")
    turn = dict(zip(NAMES, randomness.uniforms(keys, 1)[:, 0], strict=True))
    facts = {name: {"asked": 0, **known.get(name, {})} for name in NAMES}
    if select.by == "round-robin":
        return sorted(sorted(NAMES, key=lambda name: (facts[name]["asked"], turn[name]))[:size])
    if select.by == "power-of-choice":
        sizes = [each["samples"] for each in facts.values() if "samples" in each]
        usual = sum(sizes) / len(sizes) if sizes else 1.0
        drawn = sorted(NAMES, key=lambda name: -math.log(one[name]) / facts[name].get("samples", usual))
        drawn = drawn[: max(size, select.candidates or 2 * size)]
        return sorted(sorted(drawn, key=lambda name: (-facts[name].get("loss", math.inf), two[name]))[:size])
    scored = [name for name in NAMES if "score" in facts[name]]
    best = sorted(scored, key=lambda name: (-facts[name]["score"], one[name]))[
        : size - math.ceil(select.explore * size)
    ]
    rest = sorted(set(NAMES) - set(best), key=lambda name: (facts[name]["asked"] > 0, two[name]))
    return sorted(best + rest[: size - len(best)])


@given(
    st.sampled_from(["power-of-choice", "round-robin", "score"]),
    st.integers(0, 5),
    st.integers(1, 9),
    st.integers(1, 19),
    st.dictionaries(
        st.sampled_from(NAMES),
        st.fixed_dictionaries(
            {"asked": st.integers(1, 9)},
            optional={"loss": st.integers(0, 3), "samples": st.integers(1, 99), "score": st.integers(0, 3)},
        ),
    ),
    st.one_of(st.none(), st.integers(1, 20)),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
@example(
    "score",
    0,
    1,
    5,
    {NAMES[at]: {"asked": 1, "score": at % 3} if at % 2 else {"asked": 1} for at in range(15)},
    None,
    0.1,
)
@example("score", 0, 1, 5, {NAMES[at]: {"asked": 1} for at in range(0, 15, 2)}, None, 0.1)
@example("power-of-choice", 0, 1, 3, {NAMES[at]: {"loss": at % 4, "samples": 9 + at} for at in range(15)}, 12, 0.1)
def test_who_is_chosen_is_the_slow_way_s(
    by: str, seed: int, round: int, size: int, known: Any, candidates: int | None, explore: float
) -> None:
    select = of(by, explore=explore, **({"candidates": candidates} if by == "power-of-choice" else {}))
    assert select.chosen(seed, round, NAMES, size, known) == slow(select, seed, round, size, known)


def test_what_is_known_of_clients_after_a_round() -> None:
    models = DenseModels(torch.zeros(2, 1))
    samples, losses = np.array([7, 9]), np.array([0.5, np.nan])
    updates = Updates(
        "f", 4, ("a", "b"), samples, {}, losses, models, failures=(Failure("c", "late"), Failure("d", "late"))
    )
    known = {"a": {"asked": 1, "loss": 2.0}, "c": {"asked": 2, "loss": 3.0}, "e": {"asked": 3}}
    found = SelectSettings().after(known, 4, updates, np.array([np.inf, 0.25]))
    assert found == {
        "a": {"asked": 4, "samples": 7.0, "loss": 0.5},
        "b": {"asked": 4, "samples": 9.0, "score": 0.25},
        "c": {"asked": 4, "loss": 3.0},
        "d": {"asked": 4},
        "e": {"asked": 3},
    }
    assert known["c"] == {"asked": 2, "loss": 3.0}
    assert SelectSettings().after({}, 4, updates, None)["b"] == {"asked": 4, "samples": 9.0}


def test_when_somebody_comes_next() -> None:
    select = of("uniform", available={"a": [[1, 2], [7, 8]], "b": [[5, 5]], "c": [[3, 4]]})
    assert [select.next_time(["a", "b"], now) for now in (0, 1, 4.5, 5, 7)] == [1, 5, 5, 7, None]
    assert select.next_time(["d"], 0) is None
    assert [select.there(["b", "a"], now) for now in (1, 2, 3, 5, 8)] == [["a"], ["a"], [], ["b"], ["a"]]


def test_only_who_is_there_is_asked(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("client,from,to\nc00,1,2\nc00,5,5\nc01,3,9\n")
    select = validated(SelectSettings, {"path": str(trace)}, "")
    assert select.available == {"c00": ((1.0, 2.0), (5.0, 5.0)), "c01": ((3.0, 9.0),)}
    there = {round: Plan(9, 1.0, select=select).cohort(0, round, ["c00", "c01", "c02"]) for round in range(1, 7)}
    assert there == {
        1: ("c00", "c02"),
        2: ("c00", "c02"),
        3: ("c01", "c02"),
        4: ("c01", "c02"),
        5: ("c00", "c01", "c02"),
        6: ("c01", "c02"),
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", "has the columns none;"),
        ("client;from;to\n", "has the columns client;from;to"),
        ("client,from,to\na,1\n", "line 2: 2 cells"),
        ("client,from,to\n\na,1,x\n", "line 3 is a, 1, x"),
        ("client,from,to\na,3,1\n", "available.a: got 3 to 1"),
        ("client,from,to\na,1,nan\n", "available.a.0.1: got nan"),
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path: Path, text: str, value: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    assert_refused(lambda: validated(SelectSettings, {"path": str(tmp_path / "trace.csv")}, ""), value, "allowed: ")


def test_a_trace_that_cannot_be_read_or_is_given_twice(tmp_path: Path) -> None:
    away, spaced = str(tmp_path / "away.csv"), tmp_path / "spaced.csv"
    assert_refused(lambda: validated(SelectSettings, {"path": away}, ""), f"path: {away} cannot be read")
    spaced.write_text("\ufeffclient , from,to\n , ,\n a, 1 ,2\n", encoding="utf-8")
    given = {"path": str(spaced)}
    assert validated(SelectSettings, given, "").available == {"a": ((1.0, 2.0),)}
    twice = {**given, "available": {"a": [[1, 2]]}}
    assert_refused(lambda: validated(SelectSettings, twice, ""), f"available: given here and in {spaced}")


CENTRAL = {"weighing": {"criteria": ["EQ"], "max_weight": 0.5}, "privacy": {"central": {"clip": 1.0, "noise": 1.0}}}
LOCAL = {"privacy": {"local": {"clip": 1.0, "noise": 1.0}, "criteria": "public"}}


@pytest.mark.parametrize(
    ("field", "value", "rounds", "sections"),
    [
        ("rounds.select", "'score'", {"select": "score"}, CENTRAL),
        ("rounds.select", "come and go with privacy.local", {"select": {"available": {"a": [[1, 2]]}}}, LOCAL),
        ("select.by", "'score' with sampling = 'poisson'", {"select": "score", "sampling": "poisson"}, {}),
        ("candidates", "got 3 with by = 'score'", {"select": {"by": "score", "candidates": 3}}, {}),
    ],
)
def test_what_does_not_go_together_is_refused(
    field: str, value: str, rounds: dict[str, Any], sections: dict[str, Any]
) -> None:
    document = changed(SMALL, rounds=rounds, **sections)
    assert_refused(lambda: validated(Experiment, document, ""), f"{field}: ", value)


def test_a_trace_with_a_client_that_does_not_exist_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    experiment = small(rounds={"select": {"available": {"client-0": [[1, 2]]}}})
    assert_refused(lambda: run(experiment, out=tmp_path / "run"), "rounds.select.available", "'client-0'")
    assert not (tmp_path / "run").exists()
