"""The loop's view of clients on other machines, over a grid without a network: every fault of the issue, one by one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict
from tests.clients.flower.flower_fakes import (
    FakeGrid,
    evaluate,
    failing,
    honest,
    introduction,
    reasons,
    task,
    train,
    until,
)

from steelyard.clients.flower import grid as flower_grid
from steelyard.clients.flower import polling, questions, tasks, wire
from steelyard.clients.flower.adapter.answers import FoundAnswer
from steelyard.clients.flower.adapter.messages import PartsNotTaken, RunNotRunning
from steelyard.clients.flower.forms import EVALUATE, INTRODUCE, TRAIN, Form
from steelyard.clients.flower.grid import FlowerClients, NoAnswers
from steelyard.clients.flower.payloads import DENSE, Codec
from steelyard.clients.flower.register import REGISTER
from steelyard.clients.flower.requesting import Gone, Request, RequestSender
from steelyard.clients.flower.settings import FederateSettings
from steelyard.clients.flower.superlink import RunStopped, SuperLinkFault
from steelyard.errors import UserError
from steelyard.messages import Question

CRITERIA: dict[str, Any] = {"DS": lambda value: None if 0 <= value <= 1000 else f"criterion DS = {value}"}


def clients(grid: FakeGrid, timeout: float = 20.0, **options: Any) -> FlowerClients:
    made = FlowerClients(grid, CRITERIA, FederateSettings(timeout=timeout, **options), scores=(0.0, 1.0))  # type: ignore[arg-type]
    made.wait()
    return made


def test_cohorts_are_named_by_stable_ids_and_answers_come_in_their_order():
    grid = FakeGrid({900: honest("c3", "c1"), 17: honest("c2")})
    crowd = clients(grid, nodes=2)
    assert crowd.names(0) == ["c1", "c2", "c3"]
    (updates,) = crowd.train([task("c1", "c2", "c3")])
    assert updates.clients == ("c1", "c2", "c3")
    assert updates.samples.tolist() == [10, 20, 30]
    assert updates.payload.combine(torch.zeros(3), np.asarray([1.0, 0.0, 0.0])).tolist() == [1, 2, 3]
    assert updates.payload.combine(torch.zeros(3), np.asarray([0.0, 0.0, 1.0])).tolist() == [3, 4, 5]
    assert updates.failures == ()


def test_only_the_nodes_of_the_cohort_are_asked_to_train():
    grid = FakeGrid({1: honest("c1"), 2: honest("c2")})
    crowd = clients(grid, nodes=2)
    grid.kinds.clear()
    crowd.train([task("c2")])
    assert grid.kinds == [TRAIN]


def test_several_tasks_and_candidates_in_one_call():
    crowd = clients(FakeGrid({1: honest("c1", "c4"), 2: honest("c2")}), nodes=2)
    first, second = crowd.train([task("c1", "c2"), task("c2", "c4", parameters=5)])
    assert (first.clients, second.clients) == (("c1", "c2"), ("c2", "c4"))
    (answer,) = crowd.evaluate([Question("fed", 7, 1, torch.zeros(6, 3), detailed=True)])
    assert answer.clients == ("c1", "c2", "c4")
    assert answer.scores.shape == (6, 3)
    assert answer.scores[5].tolist() == [0.06, 0.07, 0.09]
    assert answer.right is not None
    assert answer.right.tolist() == [True, True, False, True, False, True]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Error(2, "<class 'ZeroDivisionError'>:<'division by zero'>"), "raised an error: ZeroDivisionError: division"),
        (Error(8, "ClientApp stopped responding."), "its ClientApp died"),
        (Error(5, "Node Unavailable"), "its node is gone"),
        (Error(1, "import"), "its ClientApp could not be loaded"),
        (None, "no answer within 4 s"),
        (introduction("c1"), "federation: Field required"),
    ],
)
def test_a_node_that_fails_is_left_out_with_its_reason(answer: Any, reason: str):
    seconds = 4.0 if answer is None else 60.0
    crowd = clients(FakeGrid({1: failing("c1", answer=answer), 2: honest("c2")}), timeout=seconds, nodes=2)
    begun = time.monotonic()
    (updates,) = crowd.train([task("c1", "c2")])
    assert time.monotonic() - begun < 30
    assert updates.clients == ("c2",)
    assert list(reasons(updates.failures)) == ["c1"]
    assert reasons(updates.failures)["c1"].startswith(reason)


def test_an_answer_for_another_round_is_left_out():
    stale = tasks.write_updates(train(task("c1", round=4)))
    crowd = clients(FakeGrid({1: failing("c1", answer=stale), 2: honest("c2")}), nodes=2)
    (updates,) = crowd.train([task("c1", "c2", round=5)])
    assert reasons(updates.failures) == {"c1": "round: got 4; allowed: 5"}


def with_form(records: RecordDict, **changes: Any) -> RecordDict:
    """The same answer with some fields of its form replaced."""
    form = json.loads(records.config_records["form"]["json"]) | changes  # type: ignore[arg-type]
    return RecordDict({"form": ConfigRecord({"json": json.dumps(form)}), "arrays": records.array_records["arrays"]})


@pytest.mark.parametrize("name", ["samples", "losses", "count"])
def test_a_criterion_named_like_a_field_of_the_answer_refuses_that_answer_alone(name: str):
    odd = with_form(tasks.write_updates(train(task("c1"))), criteria={"DS": [10.0], name: [1.0]})
    crowd = clients(FakeGrid({1: failing("c1", answer=odd), 2: honest("c2")}), nodes=2)
    (updates,) = crowd.train([task("c1", "c2")])
    assert updates.clients == ("c2",)
    assert reasons(updates.failures) == {"c1": f"criteria: got DS, {name}; allowed: exactly DS"}


@pytest.mark.parametrize("name", ["samples", "loss", "count"])
def test_a_metric_of_any_name_never_stops_the_run(name: str):
    question = Question("fed", 7, 1, torch.zeros(1, 3))
    odd = with_form(questions.write_evaluations(evaluate(question, ("c1",))), metrics={name: [1.0]})
    crowd = clients(FakeGrid({1: failing("c1", kind=EVALUATE, answer=odd), 2: honest("c2")}), nodes=2)
    (answer,) = crowd.evaluate([question])
    if name == "count":  # No column of the record has this name.
        assert answer.clients == ("c1", "c2")
    else:
        assert answer.clients == ("c2",)
        assert reasons(answer.failures)["c1"].startswith(f"metrics: got {name}, a name of the record's own")


def test_any_error_while_one_answer_is_read_refuses_that_answer_alone():
    def judge(value: float) -> str | None:
        if value == 10.0:
            raise ZeroDivisionError("in the check of\x1b[31m DS")
        return None

    crowd = FlowerClients(FakeGrid({1: honest("c1"), 2: honest("c2")}), {"DS": judge}, FederateSettings(nodes=2))  # type: ignore[arg-type]
    crowd.wait()
    (updates,) = crowd.train([task("c1", "c2")])
    assert updates.clients == ("c2",)
    reason = "its answer could not be read: ZeroDivisionError: in the check of [31m DS"
    assert reasons(updates.failures) == {"c1": reason}


def test_any_error_while_an_evaluation_or_introduction_is_read_concerns_its_node_alone(monkeypatch: pytest.MonkeyPatch):
    question = Question("fed", 7, 1, torch.zeros(1, 3))
    grid = FakeGrid({1: honest("c1"), 2: honest("c2")})
    crowd = clients(grid, nodes=2)
    read, admit = questions.read_evaluations, crowd.roster._admit

    def faulty(records: Any, question: Any, asked: Any, scores: Any) -> Any:
        return read(records, question, asked, scores) if "c1" not in asked else {}["no such field"]

    def choosy(node: int, form: Any) -> Any:
        return admit(node, form) if "c3" not in form.clients else {}["no such field"]

    monkeypatch.setattr(flower_grid, "read_evaluations", faulty)
    monkeypatch.setattr(crowd.roster, "_admit", choosy)
    grid.nodes[3] = honest("c3")
    (answer,) = crowd.evaluate([question])
    assert answer.clients == ("c2",)
    assert reasons(answer.failures) == {"c1": "its answer could not be read: KeyError: 'no such field'"}
    assert crowd.names(0) == ["c1", "c2"]
    assert crowd.roster.notes == ["node 3 was not admitted: its answer could not be read: KeyError: 'no such field'"]


def test_an_envelope_that_cannot_be_read_refuses_that_answer_alone():
    def forge(question: Message, answer: Message) -> list[Message]:
        return [None] if question.metadata.dst_node_id == 1 else [answer]  # type: ignore[list-item]

    grid = FakeGrid({1: honest("c1"), 2: honest("c2")})
    crowd = clients(grid, nodes=2)
    grid.tamper = forge
    (updates,) = crowd.train([task("c1", "c2")])
    assert updates.clients == ("c2",)
    assert reasons(updates.failures)["c1"].startswith("its answer could not be read: AttributeError: ")


def test_a_late_answer_is_left_out_and_the_round_does_not_wait():
    grid = FakeGrid({1: honest("c1"), 2: honest("c2")})
    crowd = clients(grid, timeout=4.0, nodes=2)
    grid.delays[1] = 60.0
    begun = time.monotonic()
    (updates,) = crowd.train([task("c1", "c2")])
    assert time.monotonic() - begun < 20
    assert reasons(updates.failures) == {"c1": "no answer within 4 s"}
    grid.delays.clear()
    (again,) = crowd.train([task("c1", "c2", round=2)])
    assert again.clients == ("c1", "c2")


def test_a_node_that_answers_twice_is_left_out():
    grid = FakeGrid({1: honest("c1"), 2: honest("c2")})
    crowd = clients(grid, nodes=2)
    grid.tamper = lambda question, answer: [answer] * (2 if question.metadata.dst_node_id == 1 else 1)
    (updates,) = crowd.train([task("c1", "c2")])
    assert reasons(updates.failures) == {"c1": "answered 2 times; allowed: once"}


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("_src_node_id", 2, "answered as node 2; asked node 1"),
        ("_reply_to_message_id", "other", "answered another message"),
        ("_message_type", "train.other", "answered with 'train.other'; allowed: 'train.task'"),
    ],
)
def test_an_answer_with_a_false_envelope_is_left_out(field: str, value: Any, reason: str):
    def forge(question: Message, answer: Message) -> list[Message]:
        if question.metadata.dst_node_id == 1:
            answer.metadata.__dict__[field] = value
        return [answer]

    grid = FakeGrid({1: honest("c1"), 2: honest("c2")})
    crowd = clients(grid, nodes=2)
    grid.tamper = forge
    (updates,) = crowd.train([task("c1", "c2")])
    assert reasons(updates.failures) == {"c1": reason}


def test_an_answer_that_cannot_be_read_does_not_stop_the_others():
    class Broken(FakeGrid):
        def pull_messages(self, names: Any) -> list[Message]:
            (name,) = names
            message = self.sent[name][0]
            if message.metadata.dst_node_id == 1 and message.metadata.message_type == TRAIN:
                raise KeyError("missing chunk")
            return super().pull_messages([name])

    crowd = clients(Broken({1: honest("c1"), 2: honest("c2")}), nodes=2)
    (updates,) = crowd.train([task("c1", "c2")])
    assert reasons(updates.failures) == {"c1": "its answer could not be read: KeyError: 'missing chunk'"}


def test_reading_one_answer_that_hangs_does_not_block_the_others():
    class Hanging(FakeGrid):
        def pull_messages(self, names: Any) -> list[Message]:
            (name,) = names
            message = self.sent[name][0]
            if message.metadata.dst_node_id == 1 and message.metadata.message_type == TRAIN:
                time.sleep(30)
            return super().pull_messages([name])

    crowd = clients(Hanging({1: honest("c1"), 2: honest("c2")}), timeout=4.0, nodes=2)
    begun = time.monotonic()
    (updates,) = crowd.train([task("c1", "c2")])
    assert time.monotonic() - begun < 20
    assert (updates.clients, list(reasons(updates.failures))) == (("c2",), ["c1"])


def test_a_run_that_flower_stopped_ends():
    class Stopped(FakeGrid):
        def pull_messages(self, names: Any) -> list[Message]:
            raise RunNotRunning  # Not an Exception: nothing that catches those sees it.

    class StoppedBefore(FakeGrid):
        def push_messages(self, messages: Any) -> list[str]:
            raise RunNotRunning

    begun = time.monotonic()
    for grid in (Stopped({1: honest("c1")}), StoppedBefore({1: honest("c1")})):
        with pytest.raises(RunStopped, match="the SuperLink stopped this run"):
            RequestSender(grid).ask([Request(1, INTRODUCE, wire.content(Form(), {}), 0, 1 << 20)], 20.0)  # type: ignore[arg-type]
    assert time.monotonic() - begun < 10  # At once, not when the time is over.


def _status(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://127.0.0.1/v1/runtime/pull-messages")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(code, request=request))


@pytest.mark.parametrize(
    ("raised", "heard"),
    [
        ([_status(500)] * 3, "none"),  # The database was locked for a moment.
        ([_status(500)] * 100, "HTTPStatusError"),
        ([_status(400)], "HTTPStatusError"),
        ([RunNotRunning()], "RunStopped"),
    ],
)
def test_a_superlink_that_fails_for_a_moment_costs_nobody_the_round(
    raised: list[BaseException], heard: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(polling, "_LONGEST_PAUSE", 0.05)
    looks, arrived, stop = iter(raised), [], threading.Event()

    def look(names: Any) -> list[FoundAnswer]:
        error = next(looks, None)
        if error is not None:
            raise error
        stop.set()
        return []

    requests = {"a": polling.PendingRequest("a", 10), "b": polling.PendingRequest("b", 10)}
    deadline = time.monotonic() + 30
    poller = polling.AnswerPoller(None, requests, deadline, lambda *found: arrived.append(found))  # type: ignore[arg-type]
    poller._look(stop, SimpleNamespace(look=look))  # type: ignore[arg-type]
    kinds = {"none"} if not arrived else {type(answer).__name__ for _, answer in arrived}
    assert kinds == {heard}
    assert sorted(name for name, _ in arrived) == ([] if heard == "none" else ["a", "b"])


def test_a_full_disk_of_the_server_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Full(FakeGrid):
        def push_messages(self, messages: Any) -> list[str]:
            raise PartsNotTaken("part", 1, "session")

    def ask() -> None:
        RequestSender(Full({1: honest("c1")})).ask([Request(1, INTRODUCE, wire.content(Form(), {}), 0, 1 << 20)], 1.0)  # type: ignore[arg-type]

    monkeypatch.setenv(REGISTER, str(tmp_path / "register.json"))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(SuperLinkFault, match=f"any more: {tmp_path}: No space left on device$"):
        ask()
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1 << 30))
    with pytest.raises(SuperLinkFault, match=r"any more: ObjectPushError: Failed to push object") as caught:
        ask()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("free", "fails"), [(1000, True), (1 << 30, False)])
def test_a_full_disk_is_named_where_it_takes_the_answers(
    free: int, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(REGISTER, str(tmp_path / "register.json"))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    grid: Any = FakeGrid({1: lambda message: None})
    words = f"any more: {tmp_path}: No space left on device$"
    with pytest.raises(SuperLinkFault, match=words) if fails else nullcontext():
        found = RequestSender(grid).ask([Request(1, INTRODUCE, wire.content(Form(), {}), 0, 1 << 20)], 0.2)
        assert found == ["no answer within 0.2 s"]


def test_a_server_that_stood_still_while_it_sent_does_not_call_its_nodes_silent():
    class Slow(FakeGrid):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            time.sleep(0.3)  # As a laptop that is closed while a round's messages are sent.
            return super().push_messages(messages)

    (found,) = RequestSender(Slow({1: lambda _: None})).ask(  # type: ignore[arg-type]
        [Request(1, INTRODUCE, wire.content(Form(), {}), 0, 1 << 20)], 0.2
    )
    assert isinstance(found, Gone)
    assert "the server itself stood still" in found


def test_nobody_answers_gives_an_empty_update_for_the_loop_to_judge():
    crowd = clients(FakeGrid({1: failing("c1")}), timeout=0.3)
    (updates,) = crowd.train([task("c1")])
    assert updates.clients == ()
    assert updates.payload.finite().tolist() == []
    assert reasons(updates.failures) == {"c1": "no answer within 0.3 s"}


def test_nobody_tests_the_model_stops_the_run_with_a_line():
    crowd = clients(FakeGrid({1: failing("c1", kind=EVALUATE)}), timeout=0.3)
    with pytest.raises(NoAnswers, match=r"round 3: no client tested the model \(c1: no answer within 0.3 s\)"):
        crowd.evaluate([Question("fed", 7, 3, torch.zeros(1, 3))])


def test_a_node_that_leaves_costs_no_waiting_and_comes_back_under_another_id():
    grid = FakeGrid({1: honest("c1"), 2: honest("c2")})
    crowd = clients(grid, timeout=5.0, nodes=2)
    del grid.nodes[1]
    begun = time.monotonic()
    (updates,) = crowd.train([task("c1", "c2")])
    assert time.monotonic() - begun < 20
    assert crowd.names(0) == ["c1", "c2"]
    assert reasons(updates.failures) == {"c1": "no connected node holds this client"}
    grid.nodes[44] = honest("c1")
    (updates,) = crowd.train([task("c1", "c2", round=2)])
    assert updates.clients == ("c1", "c2")


def test_a_second_claim_does_not_displace_a_client_that_answers():
    grid = FakeGrid({5: honest("c1")})
    crowd = clients(grid)
    grid.nodes[1] = honest("c1", "c2")
    until(lambda: crowd.roster.holder("c2") == 1, crowd)
    assert crowd.roster.holder("c1") == 5
    assert "client c1 is claimed by node 1, but node 5 holds it" in crowd.roster.notes
    (updates,) = crowd.train([task("c1", "c2")])
    assert updates.clients == ("c1", "c2")


def test_a_silent_node_loses_its_client_to_one_that_claims_it():
    grid = FakeGrid({5: failing("c1")})
    crowd = clients(grid, timeout=2.0)
    crowd.train([task("c1")])
    grid.nodes[9] = honest("c1")  # Started again: a new id, while Flower still believes in the old one.
    (updates,) = crowd.train([task("c1", round=2)])
    assert updates.clients == ("c1",)


@pytest.mark.parametrize("names", [[], ["c1", "c1"], ["", "c1"], ["a\nb"], ["x" * 200]])
def test_an_impossible_introduction_is_not_admitted(names: list[str]):
    grid = FakeGrid({1: failing(kind=INTRODUCE, answer=introduction(*names)), 2: honest("c2")})
    crowd = clients(grid)
    until(lambda: bool(crowd.roster.notes), crowd)
    assert crowd.names(0) == ["c2"]
    assert crowd.roster.notes[0].startswith("node 1 was not admitted: clients: ")
    grid.kinds.clear()
    crowd.roster.refresh()
    assert grid.kinds == []  # It is not asked again and again.


def test_a_silent_newcomer_does_not_hold_up_every_round():
    grid = FakeGrid({2: honest("c2")})
    crowd = clients(grid, timeout=2.0)
    grid.nodes[1] = failing("c1", kind=INTRODUCE)
    grid.kinds.clear()
    begun = time.monotonic()
    crowd.train([task("c2")])
    assert time.monotonic() - begun < 2.0  # Less than the node has: it is asked in the background.
    while not crowd.roster.notes:
        assert time.monotonic() - begun < 20
        crowd.train([task("c2", round=2)])
    assert grid.kinds.count(INTRODUCE) == 1
    assert crowd.roster.notes == ["round 2: node 1 was not admitted: no answer within 2 s"]


def test_the_start_waits_for_as_many_nodes_as_asked_and_no_longer():
    grid = FakeGrid({1: failing("c1", kind=INTRODUCE), 2: honest("c2")})
    begun = time.monotonic()
    crowd = clients(grid, timeout=60.0, nodes=1)
    assert time.monotonic() - begun < 20
    assert crowd.names(0) == ["c2"]
    assert crowd.roster.notes == []


def test_a_node_that_raises_at_the_start_is_named_when_too_few_are_left():
    broken = failing("c1", kind=INTRODUCE, answer=Error(2, "<class 'UserError'>:<'data.path: found no x'>"))
    with pytest.raises(UserError, match=r"node 1 was not admitted: raised an error: UserError: data.path: found no x"):
        clients(FakeGrid({1: broken, 2: honest("c2")}), nodes=2, start_timeout=3.0)


def test_too_few_nodes_stop_the_run_before_it_starts():
    with pytest.raises(UserError, match=r"federate.nodes: 3 nodes are to take part, 1 admitted within .* = 1.5 s"):
        clients(FakeGrid({1: honest("c1")}), nodes=3, start_timeout=1.5)


def test_a_resumed_run_knows_who_was_registered():
    first = clients(FakeGrid({1: honest("c1"), 2: honest("c2", "ü4")}), nodes=2)
    second = clients(FakeGrid({7: honest("c1")}))
    assert second.names(0) == ["c1"]
    second.restore(first.snapshot())
    assert second.names(0) == ["c1", "c2", "ü4"]
    assert second.describe()["clients"] == "flower"


def test_updates_travel_in_the_codec_that_was_handed_over():
    other = replace(DENSE, kind="other")

    def sends(codec: Codec) -> Any:
        otherwise = honest("c1")

        def answer(message: Message) -> Any:
            if message.metadata.message_type != TRAIN:
                return otherwise(message)
            return tasks.write_updates(train(tasks.read_task(message.content)[0]), codec)

        return answer

    settings = FederateSettings(nodes=2)
    grid = FakeGrid({1: sends(other), 2: honest("c2")})
    crowd = FlowerClients(grid, CRITERIA, settings, codec=other)  # type: ignore[arg-type]
    crowd.wait()
    (updates,) = crowd.train([task("c1", "c2")])
    assert updates.clients == ("c1",)
    assert reasons(updates.failures) == {"c2": "payload: got 'dense'; allowed: other"}
    with pytest.raises(TypeError, match="the codec 'sparse' does not carry DenseModels"):
        tasks.write_updates(train(task("c1")), replace(DENSE, kind="sparse", payload=int))
