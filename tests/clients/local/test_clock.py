"""Simulated time: seconds by hand, deadlines, late updates that join the next round, traces in seconds, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.clients.contract import Make
from tests.clients.local.test_contract import SimulationContract, simulation
from tests.kit import assert_refused
from tests.populations import regression_population
from tests.stopping import stopped_and_resumed

from steelyard import Experiment
from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.base.settings import validated
from steelyard.clients.local import Clock, ClockSettings, ComputeSettings, Simulation
from steelyard.clients.protocol import SendingClients
from steelyard.experiment.running import run
from steelyard.learning.settings import ModelSettings, TrainingSettings
from steelyard.messages.updates import Floats, Task, Updates
from steelyard.runs.history import History

SIZES = {"a": 4, "b": 6, "c": 10}
FACTS = {
    "b": {"device": {"sample_seconds": 2.0}, "user": {}},
    "c": {"device": {"upload": 4.0, "download": 6.0}, "user": {}},
}


def clocked(settings: dict[str, Any], **training: Any) -> SendingClients:
    population = regression_population(2, SIZES, facts=FACTS)
    given = TrainingSettings(**{"epochs": 2, "batch_size": 3, **training})
    inner = Simulation({3: population}, ModelSettings(name="linear"), given, ComputeSettings(engine="loop"))
    usual = {"sample_seconds": 0.5, "download": 12.0, "upload": 3.0}
    return SendingClients(inner, [Clock(inner.context, validated(ClockSettings, {**usual, **settings}, ""))])


def seconds_of(clients: SendingClients, task: Task, updates: Updates) -> Floats:
    (clock,) = clients.steps
    assert isinstance(clock, Clock)
    return clock.seconds(task, updates)


class TestClock(SimulationContract):
    """A clock with nobody late changes nothing of what clients do."""

    @pytest.fixture
    def make(self) -> Make:
        def fresh() -> SendingClients:
            inner = simulation("loop", self.model)
            return SendingClients(inner, [Clock(inner.context, ClockSettings(late="next", deadline=1e9))])

        return fresh


def task(clients: SendingClients, round: int = 1, algorithm: str = "fedavg", **given: Any) -> Task:
    start = torch.tensor([0.5, -0.25, 0.125]) * round
    made = AlgorithmSettings(name=algorithm, **given).made()
    vectors = {name: torch.zeros(3) for name in made.receives}
    return Task("f", 3, round, tuple(SIZES), start, algorithm=made, vectors=vectors, registered=3)


@pytest.mark.parametrize(
    ("algorithm", "training", "seconds"),
    [
        # Three numbers are 12 bytes: down, 2 epochs of each sample, up.
        ("fedavg", {}, [1 + 4 + 4, 1 + 24 + 4, 2 + 10 + 3]),
        ("fedavg", {"updates": 5, "epochs": 1}, [1 + 7.5 + 4, 1 + 30 + 4, 2 + 7.5 + 3]),
        ("scaffold", {}, [2 + 4 + 8, 2 + 24 + 8, 4 + 10 + 6]),  # a second vector both ways
        ("ditto", {}, [1 + 8 + 4, 1 + 48 + 4, 2 + 20 + 3]),  # two trainings
        ("local-only", {}, [4, 24, 10]),  # nothing is sent
    ],
)
def test_seconds_by_hand(algorithm: str, training: dict[str, Any], seconds: list[float]) -> None:
    clients = clocked({}, **training)
    asked = task(clients, algorithm=algorithm)
    (updates,) = clients.train([asked])
    assert seconds_of(clients, asked, updates).tolist() == pytest.approx(seconds)
    assert updates.simulated == pytest.approx(max(seconds))


def test_stragglers_take_longer_and_are_drawn_anew_in_each_round() -> None:
    clients = clocked({"stragglers": 0.5, "slowdown": 10})
    found = set()
    for round in range(1, 13):
        asked = task(clients, round)
        (updates,) = clients.train([asked])
        took = seconds_of(clients, asked, updates)
        for seconds, fast, slow in zip(took, [9, 29, 15], [81, 281, 132], strict=True):
            assert seconds == pytest.approx(fast) or seconds == pytest.approx(slow)
        found.add(tuple(took > 80))
    assert len(found) > 3


def test_who_is_late_is_left_out_with_the_reason() -> None:
    clients = clocked({"deadline": 20.0})
    (updates,) = clients.train([task(clients)])
    assert updates.clients == ("a", "c")
    assert [(failure.client, failure.reason) for failure in updates.failures] == [
        ("b", "late: 29 s, and clock.deadline = 20")
    ]
    assert updates.simulated == 20
    assert updates.late == {}
    assert clients.snapshot() == {}


def test_a_late_update_joins_the_next_round_as_a_step() -> None:
    late = {"deadline": 20.0, "late": "next", "discount": 0.25}
    clients, again, alone = clocked(late), clocked(late), clocked({})
    first, second = task(clients, 1), task(clients, 2)
    clients.train([first])
    again.restore(dict(clients.snapshot()))
    (joined,), (repeated,) = clients.train([second]), again.train([second])
    (old,), (new,) = alone.train([first]), alone.train([second])
    assert (joined.clients, joined.late, joined.failures) == (("a", "b", "c"), {"b": 0.25}, ())
    models, before, after = (found.payload.models for found in (joined, old, new))  # type: ignore[attr-defined]
    assert torch.allclose(models[1], second.parameters + (before[1] - first.parameters))
    assert torch.equal(models[[0, 2]], after[[0, 2]])
    assert joined.losses.tolist() == [new.losses[0], old.losses[1], new.losses[2]]
    assert joined.samples.tolist() == [4, 6, 10]
    # After a restore the second round is the same again, and what was late in it waits for the third.
    assert torch.equal(repeated.payload.models, models)  # type: ignore[attr-defined]
    assert set(again.snapshot()) == set(clients.snapshot())


BASE: dict[str, Any] = {
    "partition": {"clients": 6},
    "model": {"name": "logistic"},
    "rounds": {"count": 4},
    "facts": {"device": {"sample_seconds": "uniform(0.001, 0.02)"}},
}


def test_a_run_keeps_its_time_weighs_late_updates_less_and_resumes(tmp_path: Path) -> None:
    clock = {"deadline": 3.0, "late": "next", "discount": 0.5}
    document = {**BASE, "clock": clock, "weighing": {"criteria": ["EQ"]}, "store": {"checkpoint_every": 1}}
    experiment = validated(Experiment, document, "")
    whole = run(experiment, out=tmp_path / "whole")
    stopped_and_resumed(experiment, tmp_path / "cut", after=2)
    ours, theirs = History(tmp_path / "cut"), History(whole)
    for name in ("accuracy", "simulated", "cohort"):
        assert ours.rounds[name].tolist()[1:] == theirs.rounds[name].tolist()[1:]
    assert ours.clients["weight"].fillna(-1).tolist() == theirs.clients["weight"].fillna(-1).tolist()
    # In the first round some are late. From the second on they come in with half the weight of the others.
    first = theirs.clients[theirs.clients["round"] == 1]
    late = set(first[first["failure"].notna()]["client"])
    assert 0 < len(late) < 6
    second = theirs.clients[theirs.clients["round"] == 2].set_index("client")["weight"]
    assert len(second) == 6
    assert [second[name] / second.max() for name in sorted(late)] == pytest.approx([0.5] * len(late))
    assert theirs.rounds["simulated"].tolist()[1:] == [3.0] * 4  # Each round lasts until the deadline.


def test_a_trace_counts_in_seconds_and_an_empty_time_is_waited_for(tmp_path: Path) -> None:
    names = [f"client-{number:03}" for number in range(6)]
    trace = tmp_path / "trace.csv"
    stretches = [f"{name},{'0,5' if name in names[:3] else '9,99'}" for name in names]
    trace.write_text("\n".join(["client,from,to", *stretches]))
    document = {
        **BASE,
        "facts": {},
        "clock": {"sample_seconds": 1e-9, "download": 1e9, "upload": 2600 / 4},  # four seconds to send 650 numbers
        "rounds": {"count": 3, "select": {"path": str(trace)}},
    }
    history = History(run(validated(Experiment, document, ""), out=tmp_path / "run"))
    asked = history.clients.groupby("round")["client"].apply(list).to_dict()
    assert asked == {1: names[:3], 2: names[:3], 3: names[3:]}
    # 4, then 8 seconds have passed, and nobody is there until the ninth: one of waiting and four of work.
    assert history.rounds["simulated"].tolist()[1:] == pytest.approx([4, 4, 5], rel=1e-3)


NEXT = {"late": "next", "deadline": 9.0}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"clock": {"deadline": -1}}, ("clock.deadline", -1)),
        ({"clock": NEXT, "algorithm": {"name": "scaffold"}}, ("clock.late", "next", "scaffold")),
        ({"clock": NEXT, "privacy": {"aggregation": {"kind": "secure"}}}, ("clock.late", "[privacy]")),
    ],
)
def test_what_does_not_go_together_is_refused(sections: dict[str, Any], said: tuple[object, ...]) -> None:
    assert_refused(lambda: validated(Experiment, {**BASE, **sections}, ""), *said)
    assert_refused(validated(Experiment, {**BASE, "clock": {}}, "").check_federated, "clock", "across machines")
