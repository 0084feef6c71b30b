"""The proxy of a server: the calls that it holds, what it hears and refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from steelyard.base.logs import show
from steelyard.clients.flower.calls import Answer
from steelyard.clients.flower.register import Entry
from steelyard.federate import proxy
from steelyard.federate.proxy import Contacts, HeldPolls, RefusalLog

CALLER = Entry("hospital", "ssh line")


EMPTY, MESSAGE, FAULT = Answer(200, b""), Answer(200, b"message"), Answer(503, b"busy")


class Played:
    """A proxy's held calls, with a SuperLink whose answers and news the test decides."""

    def __init__(self) -> None:
        self.polls, self.asked, self.alive = HeldPolls(), 0, list[list[str]]()
        self.looks = 0
        """How often the SuperLink was asked for news."""
        self.answer, self.hears = EMPTY, True
        self.pushed: list[str] = []
        self.connected = asyncio.Event()

    async def superlink(self, path: str, content: bytes, headers: object) -> Answer:
        self.looks += 1
        if not self.hears:
            return Answer(404, b"")
        self.alive.append(json.loads(content)["alive"])
        await asyncio.sleep(0.001)  # others have their turn
        names, self.pushed = self.pushed, []
        return Answer(200, json.dumps({"serial": 1, "names": names}).encode())

    async def ask(self) -> Answer:
        self.asked += 1
        return self.answer

    async def receive(self) -> dict[str, Any]:
        await self.connected.wait()  # Set: the caller is gone.
        return {"type": "http.disconnect"}

    async def looked(self, times: int = 2) -> None:
        """Wait until news were asked for so often again, by which time those of the last answer have been heard."""
        wanted = self.looks + times
        while self.looks < wanted:
            await asyncio.sleep(0)

    def hold(self, name: str, seconds: float = 20.0) -> Coroutine[Any, Any, Answer]:
        return self.polls.hold(name, CALLER, seconds, self.receive, self.ask)


def play(test: Callable[[Played], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        played = Played()
        listening = asyncio.create_task(played.polls.listen(played.superlink))
        await played.looked()
        await asyncio.wait_for(test(played), 30)
        listening.cancel()

    asyncio.run(run())


def test_a_held_call_is_passed_on_when_its_message_comes_and_not_before():
    async def test(played: Played) -> None:
        held = asyncio.create_task(played.hold("a"))
        await played.looked()
        assert (played.asked, played.polls.held) == (1, {"a": "ssh line"})
        played.pushed = ["b"]
        await played.looked(3)
        assert played.asked == 1
        played.answer, played.pushed = MESSAGE, ["a"]
        assert await held == MESSAGE
        assert (played.asked, played.polls.held) == (2, {})
        # There may be another message behind it: the next call is passed on at once.
        assert await played.hold("a") == MESSAGE
        played.answer = EMPTY
        assert await played.hold("a", 0.0) == EMPTY
        asked = played.asked
        assert await played.hold("a", 0.0) == EMPTY
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


def test_whose_call_is_held_is_said_to_be_alive(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("steelyard.federate.proxy.LOOK_SECONDS", 0.05)

    async def test(played: Played) -> None:
        held = asyncio.create_task(played.hold("a"))
        while ["a"] not in played.alive:
            await played.looked()
        held.cancel()
        assert await held == EMPTY

    play(test)


def test_without_news_every_call_is_passed_on_at_once():
    async def test(played: Played) -> None:
        played.hears = False
        await played.looked(1)
        assert await played.hold("a") == EMPTY
        assert await played.hold("a") == EMPTY
        assert played.asked == 2
        played.answer = FAULT
        assert await played.hold("a") == FAULT

    play(test)


@pytest.fixture
def minute(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test sets."""
    now = [0.0]
    monkeypatch.setattr(proxy.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def shown() -> None:
    show("info")


def printed(capfd: pytest.CaptureFixture[str]) -> list[str]:
    found = capfd.readouterr()
    return (found.out + found.err).splitlines()


@pytest.mark.usefixtures("shown")
def test_a_log_of_refusals_neither_floods_nor_falls_silent(minute: list[float], capfd: pytest.CaptureFixture[str]):
    log = RefusalLog()
    for number in range(5_000):  # Whoever makes up a new path for every call.
        log.note("10.0.0.9", f"GET /{number}")
    assert len(printed(capfd)) == 20
    log.report()
    assert printed(capfd) == []
    minute[0] = 61.0
    log.report()
    lines = printed(capfd)
    assert len(lines) <= 22
    assert any("4800 more times in a minute: calls of further kinds" in line for line in lines)
    log.note("10.0.0.7", "a key that is not registered")  # After thousands of refusals, a new one is seen at once.
    assert printed(capfd) == ["steelyard: refused 10.0.0.7: a key that is not registered"]
    log.note("10.0.0.7", "a key that is not registered")  # Known from before: counted alone.
    assert printed(capfd) == []


@pytest.mark.usefixtures("shown")
def test_a_node_says_its_clock_and_its_versions(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    known = Contacts()
    entry = Entry("hospital-a", "ssh one")
    for _ in range(2):
        known.heard(entry, {"steelyard-clock": "-6", "steelyard-version": "0.9\x1b[2J"})
    assert printed(capfd) == ["steelyard: the clock of hospital-a is 6 s behind ours; it is let in"]
    known.write(tmp_path / "contacts.json")
    found = json.loads((tmp_path / "contacts.json").read_text())
    assert (found["ssh one"]["clock"], found["ssh one"]["steelyard"]) == (-6.0, "0.9\\x1b[2J")
