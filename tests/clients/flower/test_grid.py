"""The loop's view of clients on other machines, over a grid without a network: the contract, and every fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from flwr.app import Error, Message
from tests.clients.contract import ClientsContract, Make
from tests.clients.flower.flower_fakes import (
    FakeGrid,
    crowd,
    failing,
    honest,
    introduction,
    reasons,
    task,
    train,
    until,
)
from tests.kit import named

from steelyard.clients.flower import mailbox, tasks, wire
from steelyard.clients.flower.grid import FlowerClients, NoAnswers
from steelyard.clients.flower.internals import RunNotRunning
from steelyard.clients.flower.mailbox import Gone, Request, RequestSender, SuperLinkFault
from steelyard.clients.flower.parts import PartsNotTaken
from steelyard.clients.flower.register import REGISTER
from steelyard.clients.flower.wire import EVALUATE, INTRODUCE, TRAIN, Form
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Evaluations, Question, Task, Updates

QUESTION = Question("fed", 7, 3, torch.zeros(1, 3))


class TestContract(ClientsContract):
    """Each client moves every parameter a tenth of the way to its number; the nearer a model, the better."""

    @staticmethod
    def numbers(clients: tuple[str, ...]) -> torch.Tensor:
        return torch.tensor([[float(client.removeprefix("c"))] for client in clients])

    def training(self, task: Task) -> Updates:
        goals = self.numbers(task.clients)
        models = task.parameters + 0.1 * (goals - task.parameters)
        sizes = (10 * goals[:, 0]).long().numpy()
        losses = (models - goals).square().mean(1).double().numpy()
        return replace(
            train(task), samples=sizes, criteria={"DS": sizes * 1.0}, losses=losses, payload=DenseModels(models)
        )

    def judging(self, question: Question, clients: tuple[str, ...]) -> Evaluations:
        errors = (question.models[:, None] - self.numbers(clients)).square().mean(2).double().numpy()
        return Evaluations(
            federation=question.federation,
            round=question.round,
            clients=clients,
            samples=np.full(len(clients), 2, dtype=np.int64),
            scores=1 / (1 + errors),
            losses=errors,
            right=np.tile([True, False], len(clients)) if question.detailed else None,
        )

    @pytest.fixture
    def make(self) -> Make:
        def build() -> FlowerClients:
            hosted = {30: ("c4", "c1"), 20: ("c3",), 10: ("c2",)}
            return crowd(
                {i: honest(*names, train=self.training, evaluate=self.judging) for i, names in hosted.items()}, 60
            )

        return build

    @pytest.fixture
    def start(self) -> torch.Tensor:
        return torch.tensor([0.5, -1.0, 2.0])


def two(**options: Any) -> tuple[FlowerClients, FakeGrid]:
    """Two nodes with a client each."""
    grid = FakeGrid({1: honest("c1"), 2: honest("c2")})
    return crowd(grid, **options), grid


def test_cohorts_are_named_by_stable_ids_and_only_their_nodes_are_asked() -> None:
    grid = FakeGrid({900: honest("c3", "c1"), 17: honest("c2")})
    clients = crowd(grid)
    assert clients.names(0) == ["c1", "c2", "c3"]
    grid.kinds.clear()
    clients.train([task("c2")])
    assert grid.kinds == [TRAIN]
    first, second = clients.train([task("c1", "c2", "c3"), task("c2", "c3", parameters=5)])
    assert (first.clients, second.clients) == (("c1", "c2", "c3"), ("c2", "c3"))
    assert (first.samples.tolist(), first.failures) == ([10, 20, 30], ())
    (answer,) = clients.evaluate([Question("fed", 7, 1, torch.zeros(6, 3), detailed=True)])
    assert answer.scores[5].tolist() == [0.06, 0.07, 0.08]


Fault = Callable[[FakeGrid], None]


def answering(answer: Any) -> Fault:
    return lambda grid: grid.nodes.update({1: failing("c1", answer=answer)})


def enveloped(change: Callable[[Message], list[Any]]) -> Fault:
    """The answer comes in another envelope."""

    def spoil(grid: FakeGrid) -> None:
        grid.tamper = lambda asked, answer: change(answer) if asked.metadata.dst_node_id == 1 else [answer]

    return spoil


def forged(field: str, value: Any) -> Fault:
    def change(answer: Message) -> list[Message]:
        answer.metadata.__dict__[field] = value
        return [answer]

    return enveloped(change)


def pulled(work: Callable[[], object]) -> Fault:
    """Looking for the answer does something else first."""

    def spoil(grid: FakeGrid) -> None:
        grid.pulled = lambda asked: work() if asked.metadata.dst_node_id == 1 else None

    return spoil


def missing() -> None:
    raise KeyError("missing chunk")


@pytest.mark.parametrize(
    ("fault", "reason"),
    named(
        [
            ("raised", answering(Error(2, "<class 'KeyError'>:<'x'>")), "raised an error: KeyError: x"),
            ("died", answering(Error(8, "ClientApp stopped responding.")), "its ClientApp died"),
            ("silent", answering(None), "no answer within 2 s"),
            ("another form", answering(introduction("c1")), "federation: "),
            ("another round", answering(tasks.write_updates(train(task("c1", round=4)))), "round: got 4; allowed: 1"),
            ("twice", enveloped(lambda answer: [answer] * 2), "answered 2 times; allowed: once"),
            ("no envelope", enveloped(lambda answer: [None]), "its answer could not be read: AttributeError: "),
            ("as another", forged("_src_node_id", 2), "answered as node 2; asked node 1"),
            ("to another", forged("_reply_to_message_id", "other"), "answered another message"),
            ("of a kind", forged("_message_type", "train.other"), "answered with 'train.other'; allowed: 'train.task'"),
            ("unreadable", pulled(missing), "its answer could not be read: KeyError: 'missing chunk'"),
            ("hangs", pulled(lambda: time.sleep(10)), "no answer within 2 s"),
            ("late", lambda grid: grid.delays.update({1: 60.0}), "no answer within 2 s"),
            ("left", lambda grid: grid.nodes.pop(1), "no connected node holds this client"),
        ]
    ),
)  # fmt: skip
def test_a_node_that_fails_is_left_out_alone_with_its_reason(fault: Fault, reason: str) -> None:
    clients, grid = two(timeout=2.0 if "2 s" in reason else 60.0)
    fault(grid)
    begun = time.monotonic()
    (updates,) = clients.train([task("c1", "c2")])
    assert time.monotonic() - begun < 30
    assert updates.clients == ("c2",)
    assert list(reasons(updates.failures)) == ["c1"]
    assert reasons(updates.failures)["c1"].startswith(reason)


def test_any_error_while_an_answer_is_read_concerns_its_node_alone() -> None:
    def judge(value: float) -> str | None:
        return None if value != 10.0 else {}["in the check of\x1b[31m DS"]

    clients, _ = two(judges={"DS": judge})
    (updates,) = clients.train([task("c1", "c2")])
    assert updates.clients == ("c2",)
    assert reasons(updates.failures)["c1"].startswith("its answer could not be read: KeyError: ")
    assert reasons(updates.failures)["c1"].isprintable()


def introduce(grid: Any, seconds: float) -> list[Any]:
    return RequestSender(grid).ask([Request(1, INTRODUCE, wire.content(Form(), {}), 0, 1 << 20)], seconds)


class Sending(FakeGrid):
    """A grid of one silent node whose sending does something else first."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__({1: lambda message: None})
        self.work = work

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self.work()
        return super().push_messages(messages)


class TestSuperLink:
    """What the SuperLink itself does to a round."""

    @pytest.mark.parametrize(
        ("codes", "heard"),
        [([500] * 3, None), ([500] * 100, "HTTPStatusError"), ([400], "HTTPStatusError"), ([0], "RunStopped")],
    )
    def test_one_that_fails_for_a_moment_costs_nobody_the_round(
        self, codes: list[int], heard: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """500: the database was locked for a moment."""
        request = httpx.Request("POST", "https://127.0.0.1/v1/runtime/pull-messages")
        looks, arrived, done = iter(codes), list[tuple[str, object]](), threading.Event()

        def look(names: Any) -> list[Any]:
            code = next(looks, None)
            if code is None:
                done.set()
                return []
            if code == 0:
                raise RunNotRunning
            raise httpx.HTTPStatusError("no", request=request, response=httpx.Response(code, request=request))

        def take(name: str, answer: object) -> None:
            arrived.append((name, answer))
            if len(arrived) == 2:
                done.set()

        source = SimpleNamespace(of=lambda grid: SimpleNamespace(look=look))
        monkeypatch.setattr(mailbox, "AnswerSource", source)
        asked = {name: mailbox.PendingRequest(name, 10) for name in "ab"}
        unhurried: Any = SimpleNamespace(wait=lambda seconds: done.is_set(), is_set=done.is_set)
        mailbox.AnswerPoller(None, asked, time.monotonic() + 30, take).start(unhurried)  # type: ignore[arg-type]
        assert done.wait(30)
        assert sorted((name, type(answer).__name__) for name, answer in arrived) == [(n, heard) for n in "ab" if heard]

    def test_a_full_disk_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def not_taken() -> None:
            raise PartsNotTaken("part 1")

        monkeypatch.setenv(REGISTER, str(tmp_path / "register.json"))
        with pytest.raises(SuperLinkFault, match="any more: PartsNotTaken: part 1"):
            introduce(Sending(not_taken), 1.0)
        silent = Sending(lambda: None)
        assert introduce(silent, 0.2) == ["no answer within 0.2 s"]
        monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
        for sending in (Sending(not_taken), silent):  # It takes no answers either.
            with pytest.raises(SuperLinkFault, match=f"any more: {tmp_path}: No space left on device$"):
                introduce(sending, 0.2)

    def test_a_server_that_stood_still_while_it_sent_does_not_call_its_nodes_silent(self) -> None:
        (found,) = introduce(Sending(lambda: time.sleep(0.3)), 0.2)  # As a laptop that is closed meanwhile.
        assert isinstance(found, Gone)
        assert "the server itself stood still" in found


def test_where_nobody_answers_training_is_empty_and_a_test_stops_the_run() -> None:
    clients = crowd({1: failing("c1")}, 0.3)
    (updates,) = clients.train([task("c1")])
    assert (updates.clients, updates.payload.finite().tolist()) == ((), [])
    assert reasons(updates.failures) == {"c1": "no answer within 0.3 s"}
    with pytest.raises(NoAnswers, match=r"round 3: no client tested the model \(c1: no answer within 0.3 s\)"):
        crowd({1: failing("c1", kind=EVALUATE)}, 0.3).evaluate([QUESTION])


class TestStart:
    """Whom the start waits for, and what it says of the others."""

    @pytest.mark.parametrize("names", [[], ["c1", "c1"], ["a\nb"], ["x" * 200]])
    def test_an_impossible_introduction_is_not_admitted(self, names: list[str]) -> None:
        grid = FakeGrid({1: failing(kind=INTRODUCE, answer=introduction(*names)), 2: honest("c2")})
        clients = crowd(grid, nodes=1)
        until(lambda: bool(clients.roster.notes), clients)
        assert clients.names(0) == ["c2"]
        assert clients.roster.notes[0].startswith("node 1 was not admitted: clients: ")
        grid.kinds.clear()
        clients.roster.refresh()
        assert grid.kinds == []  # It is not asked again and again.

    def test_a_silent_newcomer_does_not_hold_up_every_round(self) -> None:
        grid = FakeGrid({2: honest("c2")})
        clients = crowd(grid, 2.0)
        grid.nodes[1] = failing("c1", kind=INTRODUCE)
        grid.kinds.clear()
        begun = time.monotonic()
        clients.train([task("c2")])
        assert time.monotonic() - begun < 2.0  # Less than the node has: it is asked in the background.
        until(lambda: bool(clients.roster.notes), clients)
        assert grid.kinds.count(INTRODUCE) == 1
        assert clients.roster.notes == ["round 1: node 1 was not admitted: no answer within 2 s"]
