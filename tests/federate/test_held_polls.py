"""Calls for messages are held at the proxy: the SuperLink is asked once for all of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

pytest.importorskip("flwr")

from steelyard.clients.flower.register import Entry
from steelyard.federate.proxy import Answer, HeldPolls

CALLER = Entry("hospital", "ssh line")
EMPTY, MESSAGE, FAULT = Answer(200, b""), Answer(200, b"message"), Answer(503, b"busy")


class Played:
    """A proxy's held calls, with a SuperLink whose answers and news the test decides."""

    def __init__(self) -> None:
        self.polls, self.asked, self.alive = HeldPolls(), 0, list[list[str]]()
        self.answer, self.hears = EMPTY, True
        self.pushed: list[str] = []
        self.connected = asyncio.Event()

    async def superlink(self, path: str, content: bytes, headers: object) -> Answer:
        if not self.hears:
            return Answer(404, b"")
        self.alive.append(json.loads(content)["alive"])
        await asyncio.sleep(0.02)
        names, self.pushed = self.pushed, []
        return Answer(200, json.dumps({"serial": 1, "names": names}).encode())

    async def ask(self) -> Answer:
        self.asked += 1
        return self.answer

    async def receive(self) -> dict[str, Any]:
        await self.connected.wait()  # Set: the caller is gone.
        return {"type": "http.disconnect"}

    def hold(self, name: str, seconds: float = 20.0) -> Coroutine[Any, Any, Answer]:
        return self.polls.hold(name, CALLER, seconds, self.receive, self.ask)


def play(test: Callable[[Played], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        played = Played()
        listening = asyncio.create_task(played.polls.listen(played.superlink))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(test(played), 30)
        listening.cancel()

    asyncio.run(run())


def test_a_held_call_is_passed_on_when_its_message_comes_and_not_before():
    async def test(played: Played) -> None:
        held = asyncio.create_task(played.hold("a"))
        await asyncio.sleep(0.2)
        assert (played.asked, played.polls.held) == (1, {"a": "ssh line"})
        played.pushed = ["b"]
        await asyncio.sleep(0.1)
        assert played.asked == 1
        played.answer, played.pushed = MESSAGE, ["a"]
        assert await held == MESSAGE
        assert (played.asked, played.polls.held) == (2, {})
        # There may be another message behind it: the next call is passed on at once.
        assert await played.hold("a") == MESSAGE
        played.answer = EMPTY
        assert await played.hold("a", 0.1) == EMPTY
        asked = played.asked
        assert await played.hold("a", 0.1) == EMPTY
        assert played.asked == asked  # Nothing has come: the SuperLink is not asked again.

    play(test)


def test_a_message_that_comes_while_the_superlink_is_asked_is_not_missed():
    async def test(played: Played) -> None:
        async def ask() -> Answer:
            found = await played.ask()
            played.polls._news.note(["a"])
            played.answer = MESSAGE
            return found

        assert await played.polls.hold("a", CALLER, 20, played.receive, ask) == MESSAGE
        assert played.asked == 2

    play(test)


def test_whose_call_is_held_is_said_to_be_alive_until_it_is_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("steelyard.federate.proxy.LOOK_SECONDS", 0.05)

    async def test(played: Played) -> None:
        held = asyncio.create_task(played.hold("a"))
        await asyncio.sleep(0.3)
        assert ["a"] in played.alive
        played.connected.set()
        assert await held == EMPTY
        played.alive.clear()
        await asyncio.sleep(0.2)
        assert {tuple(names) for names in played.alive} == {()}

    play(test)


def test_without_news_every_call_is_passed_on_at_once():
    async def test(played: Played) -> None:
        played.hears = False
        await asyncio.sleep(0.2)
        assert await played.hold("a") == EMPTY
        assert await played.hold("a") == EMPTY
        assert played.asked == 2
        played.answer = FAULT
        assert await played.hold("a") == FAULT

    play(test)


def test_a_server_that_ends_answers_the_calls_that_it_holds():
    async def test(played: Played) -> None:
        held = asyncio.create_task(played.hold("a"))
        await asyncio.sleep(0.2)
        held.cancel()
        assert await held == EMPTY
        assert played.polls.held == {}

    play(test)
