"""Who is asked: each way of choosing by hand, the trace of who is there, the same again after a stop, refusals."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.stopping import stopped_and_resumed

from steelyard import Experiment, UserError, randomness
from steelyard.experiment.running import run
from steelyard.messages import Failure, Updates
from steelyard.rounds.selecting import SelectSettings
from steelyard.rounds.state import Plan
from steelyard.runs.reader import History
from steelyard.settings import validated
from steelyard.update_payloads import DenseModels

NAMES = [f"c{number:02}" for number in range(20)]


def of(by: str, **given: Any) -> SelectSettings:
    return SelectSettings.model_validate({"by": by, **given})


@given(
    st.sampled_from(["uniform", "power-of-choice", "round-robin", "score"]),
    st.integers(0, 5),
    st.integers(1, 30),
    st.dictionaries(
        st.sampled_from(NAMES),
        st.fixed_dictionaries(
            {"asked": st.integers(1, 9)},
            optional={"loss": st.floats(0, 9), "samples": st.floats(1, 99), "score": st.floats(0, 1)},
        ),
    ),
)
def test_a_cohort_has_its_size_and_names_each_once(by: str, seed: int, size: int, known: Any) -> None:
    found = of(by).chosen(seed, 3, NAMES, size, known)
    assert found == sorted(set(found))
    assert set(found) <= set(NAMES)
    assert len(found) == min(size, len(NAMES))
    assert found == of(by).chosen(seed, 3, list(reversed(NAMES)), size, known)  # the order of names is nothing


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
    assert (SelectSettings().plain, of("score").plain, select.plain) == (True, False, False)


def test_uniform_is_what_a_plan_drew_before() -> None:
    assert Plan(5, 0.25).cohort(7, 2, NAMES) == tuple(SelectSettings().chosen(7, 2, NAMES, 5, {}))


def test_round_robin_asks_everybody_before_anybody_again() -> None:
    select, known, asked = of("round-robin"), {}, Counter()
    for round in range(1, 9):
        cohort = select.chosen(3, round, NAMES, 5, known)
        asked.update(cohort)
        known |= {name: {"asked": round} for name in cohort}
        assert max(asked.values()) - min(asked[name] for name in NAMES) <= 1
    assert set(asked.values()) == {2}
    assert select.chosen(3, 1, NAMES, 5, {}) != select.chosen(4, 1, NAMES, 5, {})


def test_power_of_choice_takes_the_highest_losses_of_its_candidates() -> None:
    known = {name: {"asked": 1, "samples": 10.0, "loss": float(number)} for number, name in enumerate(NAMES)}
    assert of("power-of-choice", candidates=20).chosen(1, 2, NAMES, 3, known) == ["c17", "c18", "c19"]
    del known["c04"]["loss"]  # never answered: counts as highest
    assert of("power-of-choice", candidates=20).chosen(1, 2, NAMES, 3, known) == ["c04", "c18", "c19"]
    # As many candidates as are asked: the losses have no effect, the sizes have.
    heavy = {**known, "c00": {"asked": 1, "samples": 1e9, "loss": 0.0}}
    drawn = [of("power-of-choice", candidates=3).chosen(1, round, NAMES, 3, heavy) for round in range(40)]
    assert all("c00" in cohort for cohort in drawn)
    assert len({tuple(cohort) for cohort in drawn}) > 20


def test_scores_decide_but_for_the_share_that_explores() -> None:
    known = {name: {"asked": 1, "score": float(number)} for number, name in enumerate(NAMES[:16])}
    every = [of("score", explore=0.25).chosen(1, round, NAMES, 8, known) for round in range(60)]
    assert all(set(cohort) >= {f"c{number}" for number in range(10, 16)} for cohort in every)
    # Two of eight explore: clients that were never asked, all of them in time.
    assert {name for cohort in every for name in cohort} - {f"c{n}" for n in range(10, 16)} == set(NAMES[16:])
    assert of("score", explore=0).chosen(1, 5, NAMES, 2, known) == ["c14", "c15"]


def test_of_equal_scores_the_first_number_by_chance_decides_and_the_second_who_explores() -> None:
    names = NAMES[:6]
    known = {name: {"asked": 1, "score": 1.0} for name in names}
    one, two = randomness.uniforms(randomness.stream_keys(3, 4, names, "select"), 2).T
    best = [names[int(row)] for row in np.argsort(one)[:2]]
    rest = [name for name in sorted(names, key=lambda name: two[names.index(name)]) if name not in best]
    assert of("score", explore=0.5).chosen(3, 4, names, 4, known) == sorted(best + rest[:2])


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
    ("text", "line"),
    [
        ("client;from;to\n", "path: TRACE has the columns client;from;to; allowed: client, from, to"),
        ("client,to,from\n", "path: TRACE has the columns client, to, from; allowed: client, from, to"),
        ("", "path: TRACE has the columns none; allowed: client, from, to"),
        ("client,from,to\na,1\n", "path: TRACE, row 2 is a, 1; allowed: a client and two numbers"),
        ("client,from,to\na,1,soon\n", "path: TRACE, row 2 is a, 1, soon; allowed: a client and two numbers"),
        ("client,from,to\na,3,1\n", "available.a: got 3 to 1; allowed: the end not before the begin"),
        ("client,from,to\na,1,nan\n", "available.a.0.1: got nan; allowed: a finite number"),
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path: Path, text: str, line: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    with pytest.raises(UserError) as refused:
        validated(SelectSettings, {"path": str(trace)}, "")
    assert str(refused.value).removeprefix("SelectSettings: ") == line.replace("TRACE", str(trace))


def test_a_trace_that_cannot_be_read_or_is_given_twice(tmp_path: Path) -> None:
    away, spaced = tmp_path / "away.csv", tmp_path / "spaced.csv"
    reason = f"[Errno 2] No such file or directory: '{away}'"
    with pytest.raises(UserError) as refused:
        validated(SelectSettings, {"path": str(away)}, "")
    assert str(refused.value) == f"path: {away} cannot be read: {reason}; allowed: a CSV file"
    spaced.write_text("\ufeffclient , from,to\n , ,\n a, 1 ,2\n", encoding="utf-8")
    assert validated(SelectSettings, {"path": str(spaced)}, "").available == {"a": ((1.0, 2.0),)}
    with pytest.raises(UserError) as refused:
        validated(SelectSettings, {"path": str(spaced), "available": {"a": [[1, 2]]}}, "")
    assert str(refused.value) == f"available: given here and in {spaced}; allowed: one of the two"


BASE: dict[str, Any] = {"partition": {"clients": 8}, "model": {"name": "logistic"}}


@pytest.mark.parametrize("by", ["power-of-choice", "round-robin", "score"])
def test_a_stopped_run_asks_the_same_clients_again(tmp_path: Path, by: str) -> None:
    rounds = {"count": 5, "fraction": 0.4, "select": by}
    experiment = Experiment.model_validate({**BASE, "rounds": rounds, "store": {"checkpoint_every": 2}})
    whole = run(experiment, out=tmp_path / "whole")
    stopped_and_resumed(experiment, tmp_path / "cut", after=3)
    ours, theirs = (History(folder).clients[["round", "client", "weight"]] for folder in (tmp_path / "cut", whole))
    assert ours.to_numpy().tolist() == theirs.to_numpy().tolist()
    cohorts = theirs.groupby("round")["client"].apply(tuple)
    assert cohorts.nunique() > 1
    uniform = run(experiment.changed({"rounds.select": {"by": "uniform"}}), out=tmp_path / "uniform")
    drawn = History(uniform).clients.groupby("round")["client"].apply(tuple)
    assert not np.array_equal(cohorts.to_numpy(), drawn.to_numpy())


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {
                "rounds": {"select": "score"},
                "weighing": {"criteria": ["EQ"], "max_weight": 0.5},
                "privacy": {"central": {"clip": 1.0, "noise": 1.0}},
            },
            "rounds.select: got by = 'score' with privacy.central, whose guarantee holds for cohorts that are drawn",
        ),
        (
            {
                "rounds": {"select": {"available": {"a": [[1, 2]]}}},
                "privacy": {"local": {"clip": 1.0, "noise": 1.0}, "criteria": "public"},
            },
            "rounds.select: got clients that come and go with privacy.local",
        ),
        (
            {"rounds": {"select": "score", "sampling": "poisson"}},
            "rounds: select.by: got 'score' with sampling = 'poisson'",
        ),
        (
            {"rounds": {"select": {"by": "score", "candidates": 3}}},
            "rounds.select: candidates: got 3 with by = 'score'; allowed with: power-of-choice",
        ),
        ({"rounds": {"select": "luck"}}, "rounds.select.by: got 'luck'; allowed: "),
    ],
)
def test_what_does_not_go_together_is_refused(sections: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as refused:
        validated(Experiment, {**BASE, **sections}, "")
    assert line.split(": ", 1)[-1] in str(refused.value)


def test_a_trace_with_a_client_that_does_not_exist_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    rounds = {"count": 2, "select": {"available": {"client-0": [[1, 2]]}}}
    with pytest.raises(
        UserError, match=r"rounds\.select\.available: got 'client-0' .* which is no client; allowed: cl"
    ):
        run(Experiment.model_validate({**BASE, "rounds": rounds}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
