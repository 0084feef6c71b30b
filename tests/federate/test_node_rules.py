"""What a node tells by its own rules: few rows, no tests, and a ledger of all that it told."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Error, Message, RecordDict
from tests.clients.flower.flower_fakes import FakeGrid
from tests.conftest import CommandLine
from tests.federate.small_experiment import described, node
from tests.kit import assert_refused
from tests.runs.contents import models

from steelyard.base.errors import UserError
from steelyard.base.usercode import NotAllowed
from steelyard.clients.flower import tasks, wire
from steelyard.clients.flower.wire import EVALUATE, TRAIN
from steelyard.clients.node import NodeConfig
from steelyard.experiment.loading import build
from steelyard.federate import book
from steelyard.federate.app_folder import experiment_text
from steelyard.federate.book import ASKED, LEDGER, MARK, Disclosure, NodeLedger
from steelyard.federate.node_worker import answer
from steelyard.federate.server_app import federate
from steelyard.messages.updates import LossState, Question, Task
from steelyard.runs.history import History


def disclosure(round: int = 1, noise: float = 2.0, run: str = "run", **more: Any) -> Disclosure:
    return Disclosure(
        **{"run": run, "federation": "fed", "round": round, "clients": 1, "clip": 0.5, "noise": noise, **more}
    )


ONE = 4.37718


"""ε at δ = 1e-5 of one Gaussian release with noise 1: Σ 1/z² = 1 of several together."""


def filled(folder: Path, answers: int) -> NodeLedger:
    ledger = NodeLedger(folder, 8.0)
    for round in range(1, answers + 1):
        ledger.charge(disclosure(round))
    return ledger


def test_answers_add_up_as_by_hand_whoever_asked(tmp_path: Path):
    """Noise 2 is 1/4, four criteria with noise 4 are 1/4 together: 1/4 + 1/4 + (1/4 + 1/4) = 1."""
    ledger = NodeLedger(tmp_path / "state", 4.38)
    ledger.charge(disclosure(1, run="a"))
    ledger.charge(disclosure(1, run="b", federation="other"))
    last = ledger.charge(disclosure(2, run="a", criteria=4, criteria_noise=4.0))
    assert last.epsilon == pytest.approx(ONE, abs=1e-5)
    assert (last.number, last.delta, last.run, last.round, last.clip, last.noise) == (3, 1e-5, "a", 2, 0.5, 2.0)
    again = NodeLedger(tmp_path / "state", 4.38)  # A node that was started anew.
    assert again.entries() == ledger.entries()
    assert again.entries()[-1] == last
    assert again.open() == "epsilon 4.377 of 4.38 in 3 answers so far (delta 1e-05)"
    assert (tmp_path / "state" / LEDGER).stat().st_mode & 0o777 == 0o600


def test_what_would_pass_the_owners_epsilon_is_refused_and_costs_nothing(tmp_path: Path):
    ledger = NodeLedger(tmp_path, 4.38)
    for round in (1, 2, 3):
        ledger.charge(disclosure(round))
    ledger.check(disclosure(4))
    ledger.charge(disclosure(3))  # The same round once more is one more.
    before = (tmp_path / LEDGER).read_bytes()
    for refused in (disclosure(4), disclosure(1), disclosure(1, run="other"), disclosure(5, noise=10.0)):
        for ask_to_train in (ledger.check, ledger.charge):
            with pytest.raises(NotAllowed, match=r"^privacy\.local: round \d would .* over its epsilon 4\.38; allowed"):
                ask_to_train(refused)
    assert (tmp_path / LEDGER).read_bytes() == before
    assert NodeLedger(tmp_path, 4.5).charge(disclosure(5, noise=10.0)).number == 5


def _replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(old, new, 1)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: b"", "it is empty"),
        (lambda content: content.split(b"\n", 1)[1], "line 1 is number 2"),
        (lambda content: content + content, "line 4 is number 1"),
        (_replaced(b'"noise":2.0', b'"noise":9.0'), "it says epsilon 3.70863"),
        # Each of these is a sound ledger by itself: its lines add up to what it says.
        (lambda content: b"".join(content.splitlines(keepends=True)[:2]), "it has "),
        (_replaced(b'"run":"run"', b'"run":"elsewhere"'), "it no longer holds the lines that it held"),
        (None, "it is gone, and was there"),
    ],
)
def test_a_damaged_or_older_ledger_is_refused_and_never_taken_for_an_empty_one(
    tmp_path: Path, damage: Callable[[bytes], bytes] | None, words: str
) -> None:
    ledger, file = filled(tmp_path, 3), tmp_path / LEDGER
    whole = file.read_bytes()
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(whole))
    for ask in (ledger.open, lambda: ledger.check(disclosure()), lambda: ledger.charge(disclosure())):
        assert_refused(ask, "node config state", f"{LEDGER} is damaged ({words}")
    assert damage is None or file.read_bytes() == damage(whole)
    file.write_bytes(whole)
    assert ledger.charge(disclosure(4)).number == 4


def test_a_mark_that_is_gone_or_changed_is_named_and_one_behind_is_an_honest_kill(tmp_path: Path) -> None:
    ledger = filled(tmp_path, 1)
    (tmp_path / MARK).unlink()  # Killed between the first line and its mark.
    assert ledger.charge(disclosure(2)).number == 2
    behind = (tmp_path / MARK).read_bytes()
    ledger.charge(disclosure(3))
    (tmp_path / MARK).write_bytes(behind)  # Killed between a later line and its mark.
    assert ledger.charge(disclosure(4)).number == 4
    for content in (b"", b"[]", b'{"bytes": "x", "sha256": 3}'):
        (tmp_path / MARK).write_bytes(content)
        assert_refused(ledger.open, "damaged (its mark, ledger.mark, cannot be read)")
    (tmp_path / MARK).unlink()
    assert_refused(ledger.open, "damaged (its mark, ledger.mark, is gone)")


def test_a_ledger_that_cannot_be_kept_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    blocked = NodeLedger(tmp_path / "file" / "state", 8.0)
    for ask in (blocked.open, lambda: blocked.charge(disclosure())):
        assert_refused(ask, "node config state")
    ledger = filled(tmp_path / "full", 1)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert_refused(lambda: ledger.charge(disclosure(2)), "No space left on device", "nothing is answered")
    monkeypatch.undo()
    assert [entry.round for entry in ledger.entries()] == [1]


@pytest.mark.parametrize(("config", "keeps"), [({"require": "local", "epsilon": 8}, True), ({}, False)])
def test_a_ledger_is_kept_where_every_answer_carries_noise(tmp_path: Path, config: dict[str, Any], keeps: bool):
    read = NodeConfig.read({"client": "a", "state": str(tmp_path), **config})
    assert (NodeLedger.of(read) is not None) == keeps


def test_the_owner_sees_what_was_told(tmp_path: Path, command: CommandLine):
    (tmp_path / "node.toml").write_text(
        'server = "h:1"\ninsecure = true\nclient = "a"\nrequire = "local"\nepsilon = 8\nstate = "state"\n'
    )
    ledger = filled(tmp_path / "state", 3)
    ledger.charge(disclosure(1, run="oth\x1ber", noise=4.0))
    done = command("federate", "ledger", "node.toml", cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "epsilon 3.709 in 3 answers to fed of run run",
        "epsilon 0.9263 in 1 answer to fed of run oth\\x1ber",
        "epsilon 3.883 of 8 in 4 answers in all (delta 1e-05)",
    ]


def private(rounds: int = 4, noise: float = 2.0, **more: Any) -> dict[str, Any]:
    local = {"criteria": "public", "local": {"clip": 1.0, "noise": noise}}
    return described(
        rounds={"count": rounds, "fraction": 1.0},
        weighing={"criteria": ["DS"], "score": "prioritized", "priority": "DS"},
        privacy=local,
        federate={"nodes": 2, "timeout": 60.0},
        **more,
    )


def private_node(number: int, state: Path, **own: Any) -> Callable[[Message], RecordDict | Error]:
    """A node that runs the real ClientApp, as `steelyard federate node` does, by rules of its own."""
    config = {"partition-id": number, "num-partitions": 2, "require": "local", "epsilon": 8, "state": str(state), **own}
    context = Context(1, 1, config, RecordDict(), {})

    def answered(message: Message) -> RecordDict | Error:
        reply = answer(message, context)
        return reply.error if reply.has_error() else reply.content

    return answered


def ask_to_train(
    asked: Callable[[Message], RecordDict | Error], document: dict[str, Any], round: int, **changes: Any
) -> RecordDict | Error:
    """Ask a node for a round of its own accord, as a server can that keeps to no plan."""
    described = {"federation": "DS", "clients": ("client-000",), "run": "run", **changes}
    task = Task(described["federation"], 5, round, described["clients"], torch.zeros(650), LossState("cross-entropy"))
    experiment = experiment_text(build(document))
    content = tasks.write_task(
        task, task.clients, 60.0, tasks.pack_parameters(task), described["run"], experiment=experiment
    )
    message = Message(content, 40, TRAIN, ttl=60.0, group_id=str(round))
    message.metadata.__dict__["_message_id"] = "asked"
    return asked(message)


def reason(found: RecordDict | Error) -> str:
    assert isinstance(found, Error)
    return str(found.reason)


def test_a_server_that_asks_again_beyond_or_under_another_name_is_refused_at_the_limit(
    tmp_path: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch
):
    asked, document = private_node(0, tmp_path, epsilon=4.38), private(rounds=1)
    assert isinstance(ask_to_train(asked, document, 1), RecordDict)
    assert isinstance(ask_to_train(asked, document, 1), RecordDict)  # Noised anew, and counted again.
    assert reason(ask_to_train(asked, document, 99)) == "NotAllowed: round: got 99; allowed: 1 to 1"
    assert isinstance(ask_to_train(asked, document, 1, federation="other"), RecordDict)  # Never named.
    assert isinstance(ask_to_train(asked, private(rounds=2), 1, run="other", clients=("client-002",)), RecordDict)
    monkeypatch.setattr("steelyard.clients.protocol.SendingClients.train", no_work)
    restarted = private_node(0, tmp_path, epsilon=4.38)
    line = "privacy.local: round 1 would take the total of this node's answers over its epsilon 4.38; allowed: no"
    for changes in ({}, {"run": "third"}, {"federation": "fourth"}, {"clients": ("client-004",)}):
        assert reason(ask_to_train(restarted, document, 1, **changes)).startswith(f"NotAllowed: {line}")
    assert messages[-1].startswith(f"not answered: {line}")
    assert len(NodeLedger(tmp_path, 8.0).entries()) == 4


def test_a_node_trains_and_tests_no_more_in_a_day_than_its_owner_allows(
    tmp_path: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch
):
    own = {"rounds-per-day": 2, "questions-per-day": 3}
    asked, document = private_node(0, tmp_path, epsilon=100, **own), private(rounds=4)
    for run in ("one", "two"):  # Whoever asks.
        assert isinstance(ask_to_train(asked, document, 1, run=run), RecordDict)
    ask_to_test(asked, Question("DS", 5, 1, torch.zeros(2, 650)))
    assert "takes part: question 1 of DS, run run, 2 models" in messages
    monkeypatch.setattr("steelyard.clients.protocol.SendingClients.train", no_work)
    monkeypatch.setattr("steelyard.clients.protocol.SendingClients.evaluate", no_work)
    again = private_node(0, tmp_path, epsilon=100, **own)
    line = "rounds-per-day: 2 in the last 24 hours and 1 more; allowed: 2"
    assert reason(ask_to_train(again, document, 2, run="three")) == f"NotAllowed: {line}"
    assert f"not answered: {line}" in messages
    with pytest.raises(AssertionError, match="questions-per-day: 2 in the last 24 hours and 2 more; allowed: 3"):
        ask_to_test(again, Question("DS", 5, 1, torch.zeros(2, 650)))
    lines = (tmp_path / ASKED).read_text().splitlines()
    assert [(one["what"], one["run"], one["count"]) for one in map(json.loads, lines)] == [
        *[("round", run, 1) for run in ("one", "two")],
        ("question", "run", 2),
    ]
    yesterday = (datetime.now(UTC) - timedelta(days=1, minutes=1)).isoformat(timespec="seconds")
    aged = [json.dumps({**json.loads(line), "time": yesterday}) + "\n" for line in lines]
    (tmp_path / ASKED).write_text("".join(aged))
    monkeypatch.undo()
    assert isinstance(ask_to_train(private_node(0, tmp_path, epsilon=100, **own), document, 2), RecordDict)


def test_one_answer_tells_of_a_client_once_and_failed_work_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked, document = private_node(0, tmp_path, epsilon=4.38), private(rounds=1)
    twice = ("client-000", "client-000")
    assert (
        reason(ask_to_train(asked, document, 1, clients=twice))
        == "refused: clients: one is named twice; allowed: each once"
    )
    assert isinstance(ask_to_train(asked, document, 1, clients=("client-001",)), RecordDict)  # It lives elsewhere.
    with monkeypatch.context() as patched:
        patched.setattr("steelyard.clients.protocol.SendingClients.train", no_work)
        assert reason(ask_to_train(asked, document, 1)) == "AssertionError"
    assert NodeLedger(tmp_path, 8.0).entries() == []
    assert isinstance(ask_to_train(asked, document, 1, clients=("client-000", "client-002")), RecordDict)
    assert [entry.clients for entry in NodeLedger(tmp_path, 8.0).entries()] == [2]


def test_charged_criteria_are_counted_as_they_are_noised(tmp_path: Path):
    document = private(rounds=1)
    document["privacy"] |= {"criteria": "charged", "criteria_noise": 4.0, "criteria_bounds": {"DS": 100.0}}
    assert isinstance(ask_to_train(private_node(0, tmp_path, epsilon=8.0), document, 1), RecordDict)
    (entry,) = NodeLedger(tmp_path, 8.0).entries()
    assert (entry.noise, entry.criteria, entry.criteria_noise, entry.clip) == (2.0, 1, 4.0, 1.0)
    assert entry.epsilon == pytest.approx(book.epsilon_of([disclosure(noise=(1 / 4 + 1 / 16) ** -0.5)]))


REFUSED = "tests: this node's clients are never tested; allowed: training"


HERE = ("client-000", "client-002", "client-004")


def ask_to_test(asked: Callable[[Message], RecordDict | Error], asking: Question) -> RecordDict:
    """Ask a node how good models are, as a server can whenever it likes."""
    content = tasks.write_question(asking, 60.0, "run", experiment=experiment_text(build(private(rounds=1))))
    message = Message(content, 40, EVALUATE, ttl=60.0, group_id="1")
    message.metadata.__dict__["_message_id"] = "asked"
    found = asked(message)
    assert isinstance(found, RecordDict), found.reason
    return found


def run_with_tests(tmp_path: Path, tests: tuple[bool, bool], **sections: Any) -> Path:
    """Run with two nodes, of which each is tested or not; returns the run's folder."""
    nodes = {40 + i: private_node(i, tmp_path / f"state-{i}", tests=tested) for i, tested in enumerate(tests)}
    document = private(rounds=2)
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    config = {"experiment": experiment_text(build(document)), "set": "", "out": str(tmp_path / "run")}
    return federate(FakeGrid(dict(nodes)), config, "1")  # type: ignore[arg-type, dict-item]


def test_a_question_is_answered_with_names_and_the_reason_alone(
    tmp_path: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("steelyard.clients.protocol.SendingClients.evaluate", no_work)
    asking = Question("DS", 5, 1, torch.zeros(2, 650), detailed=True)
    content = ask_to_test(private_node(0, tmp_path, tests=False), asking)
    form = json.loads(str(wire.split(content)[0]))
    assert form.pop("failures") == [{"client": name, "reason": f"NotAllowed: {REFUSED}"} for name in HERE]
    assert [form[name] for name in ("clients", "samples", "metrics", "scores")] == [[], [], {}, [[], []]]
    read = tasks.read_evaluations(content, asking, HERE, (0.0, 1.0))  # A server can use it as it is.
    assert read.right is not None
    assert (read.clients, read.scores.shape, read.right.size) == ((), (2, 0), 0)
    assert messages == [f"not answered: {REFUSED}"]


def test_a_run_goes_on_where_nobody_is_tested(tmp_path: Path):
    history = History(run_with_tests(tmp_path, (False, False), rounds={"samples": True}))
    assert history.info["status"] == "finished"
    assert history.rounds["accuracy"].isna().all()
    assert history.evaluations.empty
    assert history.untested["round"].tolist() == [0] * 6 + [1] * 6 + [2] * 6
    assert [entry.round for entry in NodeLedger(tmp_path / "state-0", 8.0).entries()] == [1, 2]


def test_what_needs_tests_is_refused_in_one_line_before_anybody_trains(tmp_path: Path):
    rounds = {"stop_at_target": True}
    assert_refused(
        lambda: run_with_tests(tmp_path, (False, False), rounds=rounds),
        "rounds.stop_at_target",
        f"NotAllowed: {REFUSED}",
    )
    assert NodeLedger(tmp_path / "state-0", 8.0).entries() == []
    assert not (tmp_path / "run").exists()


ROWS = {"north": 60, "south": 40}


"""A fifth of them are for tests: 12 and 8."""


def two_hospitals(**sections: Any) -> dict[str, Any]:
    return {
        "name": "two-hospitals",
        "seed": 3,
        "data": {"source": "npz", "path": "nowhere.npz", "classes": 2},
        "partition": {"scheme": "iid", "clients": 2},
        "model": {"name": "logistic"},
        "rounds": {"count": 2, "fraction": 1.0},
        "compute": {"engine": "loop", "device": "cpu"},
        "federate": {"nodes": 2, "start_timeout": 2.0},
        **sections,
    }


def federated(folder: Path, out: str, document: dict[str, Any], **own: Any) -> History:
    rng = np.random.default_rng(0)
    config = {"experiment": experiment_text(build(document)), "out": str(folder / out)}
    nodes: dict[int, Any] = {}
    for number, (name, rows) in enumerate(ROWS.items()):
        x = rng.normal(size=(rows, 5)).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
        nodes[number + 2] = node({"allow": "", "client": name, "data": str(folder / f"{name}.npz"), **own}, config)
    federate(FakeGrid(nodes), config, "1")  # type: ignore[arg-type]
    return History(folder / out)


def test_a_small_test_set_stays_untold_and_the_run_goes_on(tmp_path: Path):
    history = federated(tmp_path, "first", two_hospitals())
    assert history.clients["samples"].tolist() == [48, 32, 48, 32]
    assert history.clients["failure"].isna().all()
    assert set(history.evaluations["client"]) == {"north"}
    assert set(history.untested["client"]) == {"south"}
    (reason,) = set(history.untested["failure"])
    assert reason == "tests: the test set has fewer, and this node answers with 10 rows or more"
    assert set(federated(tmp_path, "told", two_hospitals(), **{"min-rows": 8}).evaluations["client"]) == set(ROWS)


def test_what_a_server_asks_of_the_split_changes_nothing(tmp_path: Path):
    federated(tmp_path, "first", two_hospitals())
    other = {"scheme": "dirichlet", "clients": 7, "test_fraction": 0.9, "seed": 5, "minimum": 2}
    federated(tmp_path, "other", two_hospitals(partition=other))
    first, other_weights = models(tmp_path / "first"), models(tmp_path / "other")
    assert all(torch.equal(first[name], other_weights[name]) for name in first)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"training": {"batch_size": 1, "learning_rate": 0.1, "weight_decay": 10.0}}, "training.batch_size: with this"),
        ({"beside": {"f": {"algorithm": {"name": "feddyn"}}}, "training": {"batch_size": 5}}, "training.batch_size: w"),
    ],
)
def test_an_experiment_that_wants_few_rows_does_not_begin(tmp_path: Path, section: dict[str, Any], field: str):
    with pytest.raises(UserError, match=f"NotAllowed: {field}"):
        federated(tmp_path, "run", two_hospitals(**section))
    assert not (tmp_path / "run").exists()


def no_work(*_: object) -> Any:
    raise AssertionError("worked before it was refused")


def test_two_processes_of_a_node_lose_no_entry(tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork")
    gate = forked.Barrier(2)

    def charge_twenty(run: str) -> None:
        gate.wait(60)
        for round in range(20):
            NodeLedger(tmp_path, 99.0).charge(disclosure(round, run=run))

    both = [forked.Process(target=charge_twenty, args=(run,)) for run in ("a", "b")]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
        assert process.exitcode == 0
    found = [(entry.run, entry.round) for entry in NodeLedger(tmp_path, 8.0).entries()]
    assert sorted(found) == [(run, round) for run in ("a", "b") for round in range(20)]
