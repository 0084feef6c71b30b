"""A node's calls: signed by the server's clock, and repeated where the server is busy."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec

from steelyard.clients.flower.adapter import signed_calls
from steelyard.clients.flower.adapter.signed_calls import SignedCalls


def called(
    path: str, answer: Callable[[httpx.Request], httpx.Response], stop: Any = None
) -> tuple[SignedCalls, httpx.Response]:
    """Make one call of a node and return what came back."""
    calls = SignedCalls(ec.generate_private_key(ec.SECP384R1()), stop or threading.Event())
    context: Any = SimpleNamespace(request=httpx.Request("POST", f"https://x/v1/fleet/{path}", content=b"1"))
    return calls, calls.intercept(context, lambda found: answer(found.request))


@pytest.mark.parametrize("path", ["pull-object", "push-object", "confirm-message-received"])
@pytest.mark.parametrize("fault", [503, httpx.ConnectError("no route")])
def test_a_call_in_the_middle_of_a_task_is_repeated(path: str, fault: Any):
    faults, stamps = [fault, fault], list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        stamps.append(request.headers["flwr-signature"])
        if not faults:
            return httpx.Response(200)
        found = faults.pop()
        if isinstance(found, Exception):
            raise found
        return httpx.Response(found)

    unhurried = SimpleNamespace(is_set=lambda: False, wait=lambda seconds: None)
    _, response = called(path, answer, unhurried)
    assert response.status_code == 200
    assert len(set(stamps)) == 3  # Each try is signed anew.


def test_other_calls_and_a_server_that_stays_busy_are_left_to_the_caller(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(signed_calls.time, "monotonic", lambda: now[0])
    stop = SimpleNamespace(is_set=lambda: False, wait=lambda seconds: now.__setitem__(0, now[0] + seconds))
    assert called("pull-messages", lambda _: httpx.Response(503), stop)[1].status_code == 503
    assert now == [0.0]
    assert called("push-object", lambda _: httpx.Response(503), stop)[1].status_code == 503
    assert 30 < now[0] < 40


@pytest.mark.parametrize("path", ["pull-object", "push-object", "confirm-message-received"])
def test_a_node_that_is_to_stop_waits_for_no_server(path: str):
    """Both may be told to end at once: half a minute for each call that nobody takes any more is too long to leave."""
    stop, tries = threading.Event(), [0]

    def answer(_: httpx.Request) -> httpx.Response:
        tries[0] += 1
        if tries[0] == 2:
            stop.set()
        raise httpx.ConnectError("refused")

    with pytest.raises(httpx.ConnectError):
        called(path, answer, stop)
    assert tries[0] == 3  # The one that was under way, and one more.


@pytest.mark.parametrize("ahead", [-6, 6, 900])
def test_a_clock_that_is_wrong_is_noticed_and_the_servers_is_used(ahead: int, monkeypatch: pytest.MonkeyPatch):
    true = datetime(2026, 1, 2, 3, 4, 5, 500_000, tzinfo=UTC)
    monkeypatch.setattr(signed_calls, "local_time", lambda: true + timedelta(seconds=ahead))

    def answer(request: httpx.Request) -> httpx.Response:
        age = (true - datetime.fromisoformat(request.headers["flwr-timestamp"])).total_seconds()
        return httpx.Response(200 if -5 < age < 5 else 401, headers={"date": format_datetime(true, usegmt=True)})

    calls, response = called("activate-node", answer)
    assert response.status_code == 200
    assert abs(calls.ahead - ahead) <= 1


def test_a_clock_that_is_nearly_right_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    true = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    # It is asked for the stamp, before the call and after it, which took eight seconds on a busy machine.
    times = itertools.cycle([1.4, 1.4, 9.4])
    monkeypatch.setattr(signed_calls, "local_time", lambda: true + timedelta(seconds=next(times)))
    dates = iter([format_datetime(true, usegmt=True), "no date", ""])
    for date in dates:
        calls, _ = called("activate-node", lambda _, date=date: httpx.Response(200, headers={"date": date}))
        assert calls.ahead == 0
        times = itertools.cycle([1.4, 1.4, 9.4])
