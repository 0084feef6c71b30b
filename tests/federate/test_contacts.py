"""What the proxy hears and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from steelyard.clients.flower.register import Entry
from steelyard.federate import contacts
from steelyard.federate.contacts import Contacts, RefusalLog
from steelyard.logs import show


@pytest.fixture
def minute(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test sets."""
    now = [0.0]
    monkeypatch.setattr(contacts.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def shown() -> None:
    show("info")


def printed(capfd: pytest.CaptureFixture[str]) -> list[str]:
    found = capfd.readouterr()
    return (found.out + found.err).splitlines()


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
    for _ in range(30):
        log.note("10.0.0.7", "a key that is not registered")
    minute[0] = 122.0
    log.report()
    assert printed(capfd) == ["steelyard: refused 10.0.0.7 30 more times in a minute: a key that is not registered"]
    log.note("10.0.0.7", "a key that is not registered")  # Known from the minute before: counted alone.
    assert printed(capfd) == []


def test_a_node_says_its_clock_and_its_versions(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    known = Contacts()
    entry = Entry("hospital-a", "ssh one")
    for _ in range(2):
        known.heard(entry, {"steelyard-clock": "-6", "steelyard-version": "0.9\x1b[2J", "flwr-package-version": "1.41"})
    known.heard(Entry("hospital-b", "ssh two"), {"steelyard-clock": "nan"})
    assert printed(capfd) == ["steelyard: the clock of hospital-a is 6 s behind ours; it is let in"]
    known.write(tmp_path / "contacts.json")
    found = json.loads((tmp_path / "contacts.json").read_text())
    assert (found["ssh one"]["clock"], found["ssh one"]["steelyard"]) == (-6.0, "0.9\\x1b[2J")
    assert found["ssh two"]["clock"] == 0.0
