"""Runs of a server, one after another, whatever ends them; who follows one; processes that are started, and ended."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.kit import assert_refused, wait_until

from steelyard.federate import workers
from steelyard.federate.queue import ServerFolder, ServerRun, find_run, new_run, note_outcome, runs_of
from steelyard.federate.server import RunQueue
from steelyard.federate.standing import nodes_of
from steelyard.federate.workers import Process, end_all


class Queue(RunQueue):
    """A queue whose apps are sent nowhere."""

    def __init__(self, server: ServerFolder) -> None:
        self.sent: list[list[str]] = []
        self.stopped: list[int] = []
        self.refused = ""
        self.flower_says: str | None = None
        super().__init__(server, self)  # type: ignore[arg-type]

    def _send(self, command: list[str]) -> tuple[int | None, str]:
        self.sent.append(command)
        return (None, self.refused) if self.refused else (100 + len(self.sent), "")

    def stop(self, run: int) -> None:
        self.stopped.append(run)

    def ended(self, run: int) -> str | None:
        return self.flower_says


@pytest.fixture
def server(tmp_path: Path) -> ServerFolder:
    made = ServerFolder(tmp_path / "server")
    made.make()
    return made


def submitted(server: ServerFolder, name: str = "x") -> ServerRun:
    run = new_run(server)
    run.note_submitted(name, server.folder.parent / f"out-{run.number}", 4)
    return run


def statuses(server: ServerFolder) -> list[str]:
    return [run.status() for run in runs_of(server)]


def test_runs_start_one_after_another(server: ServerFolder):
    one, two = submitted(server), submitted(server)
    queue = Queue(server)
    with server.held():
        queue.look()
        queue.look()
        assert statuses(server) == ["starting", "queued"]
        note_outcome(one.folder, "running", pid=os.getpid())
        assert statuses(server) == ["running", "queued"]
        note_outcome(one.folder, "finished", "there")
        queue.look()
        assert statuses(server) == ["finished", "starting"]
        assert [command[2] for command in queue.sent] == [str(one.app), str(two.app)]
        assert find_run(server, None).number == 2


def test_a_killed_server_app_is_noticed_and_the_next_run_begins(server: ServerFolder):
    one, _ = submitted(server), submitted(server)
    queue = Queue(server)
    queue.look()
    one.out.mkdir()
    note_outcome(one.folder, "running", pid=2**22 + 1)  # No process has this number.
    queue.look()
    assert one.outcome["line"] == (
        f"the ServerApp was killed; 0 rounds are whole, `steelyard federate submit {server.folder} {one.out}` goes on "
        "from there"
    )
    assert queue.stopped == [101]  # Flower itself would take a minute to notice.
    queue.look()
    assert len(queue.sent) == 2


def test_a_server_app_that_ends_before_it_speaks_is_noticed(server: ServerFolder):
    run, queue = submitted(server), Queue(server)
    queue.look()
    queue.look()
    assert run.is_open
    queue.flower_says, queue._asked = "failed: \x1b[91mno module named x\x1b[0m", 0.0
    queue.look()
    assert run.outcome["line"] == "the ServerApp did not start: failed: no module named x"


def test_a_run_that_does_not_start_in_its_time_is_ended_and_the_next_one_begins(
    server: ServerFolder, monkeypatch: pytest.MonkeyPatch
):
    run, queue = submitted(server), Queue(server)
    submitted(server)
    queue.look()
    moved = time.monotonic() + 299
    monkeypatch.setattr(time, "monotonic", lambda: moved)
    queue.look()
    assert run.is_open
    moved += 10
    queue.look()
    assert run.outcome["line"].startswith("the ServerApp did not start within federate.start_timeout = 300 s; see ")
    queue.look()
    assert (queue.stopped, len(queue.sent)) == ([101], 2)


@pytest.mark.parametrize("spoke", [True, False])
def test_a_run_that_was_stopped_says_so_however_its_server_app_ended(server: ServerFolder, *, spoke: bool):
    run, queue = submitted(server), Queue(server)
    queue.look()
    (run.folder / "stop").touch()
    if spoke:
        note_outcome(run.folder, "running", pid=2**22 + 1)  # No process has this number.
    queue.flower_says = "stopped: "
    queue.look()
    assert run.outcome["line"] == "stopped by an operator (`steelyard federate stop`)"


def test_what_was_interrupted_with_its_server_goes_on_with_the_next_one_but_not_for_ever(server: ServerFolder):
    run = submitted(server)
    for number in range(3):
        queue = Queue(server)
        queue.look()
        note_outcome(run.folder, "running", pid=os.getpid())
        assert run.status() == "interrupted"  # Nobody holds the folder.
        assert ("resume=true" in queue.sent[0]) == (number > 0)
    queue = Queue(server)
    queue.look()
    assert queue.sent == []
    assert run.outcome["line"].startswith("its server ended 3 times while it ran; nothing of it was kept, `steelyard")
    assert run.outcome["line"].endswith(f"submit {server.folder} EXPERIMENT --out {run.out}` begins it anew")


def test_a_run_that_waits_is_taken_out_and_one_that_goes_is_stopped_once(server: ServerFolder):
    one, two = submitted(server), submitted(server)
    queue = Queue(server)
    with server.held():
        queue.look()
        one.ask_to_stop()
        two.ask_to_stop()
        queue.look()
        queue.look()
        assert statuses(server) == ["stopping", "stopped"]
        assert (queue.stopped, two.outcome["line"]) == (
            [101],
            "stopped by an operator (`steelyard federate stop`) before it began",
        )
    three = submitted(server)
    three.ask_to_stop()
    assert three.status() == "stopped"  # Nobody serves: there is nobody to ask.


def test_a_run_that_is_not_there_is_named(server: ServerFolder):
    assert_refused(lambda: find_run(server, 7), "none was submitted")


def served(folder: Path) -> ServerFolder:
    """Return the folder of a server with two registered nodes, one of which has called, and a run that has begun."""
    home = ServerFolder(folder)
    home.make()
    entries = [{"name": name, "key": f"k {name}", "clients": [name], "most": 1} for name in ("a.b", "axb")]
    home.register.write_text(json.dumps({"nodes": entries}))
    contact = {"last": datetime.now(UTC).isoformat(), "clock": 6.0, "steelyard": "1", "flower": "2"}
    home.contacts.write_text(json.dumps({"k a.b": contact}))
    run = new_run(home)
    run.note_submitted("x", folder.parent / "out", 4)
    run.note_started("mark", 1, 7)
    return home


def test_a_refusal_is_shown_while_the_run_still_waits(tmp_path: Path):
    home = served(tmp_path / "server")
    (home.runs / "1" / "log.txt").write_text(
        "steelyard: waiting for 2 nodes\n"
        "steelyard: node axb was not admitted: raised an error: NotAllowed: data.labels: got 'y'; allowed: 'z'\n"
        "steelyard: round 2: node axb was not admitted: node a.b was not admitted: a lie\n"
        "node a.b was not admitted: printed by somebody else\n"
    )
    with home.held():
        one, other = nodes_of(home)
    assert (one["name"], one["status"], one["clock"], one["refused"]) == ("a.b", "connected", 6.0, None)
    assert other["refused"] == "round 2: node axb was not admitted: node a.b was not admitted: a lie"


if not Path("/proc/self/environ").exists():
    pytest.skip("this system does not show environments of processes", allow_module_level=True)


DETACHED = """
import pathlib, subprocess, sys, time
waiting = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(float(sys.argv[1]))"
child = subprocess.Popen([sys.executable, "-c", waiting, sys.argv[2]], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""


def detached(tmp_path: Path, seconds: float) -> tuple[Process, int]:
    """Start a process that starts another in a session of its own, as a SuperLink does; returns the other's id."""
    written = tmp_path / "pid"
    command = [sys.executable, "-c", DETACHED, str(written), str(seconds)]
    process = Process("parent", command, dict(os.environ), tmp_path / "log", tmp_path)
    wait_until(lambda: written.exists() and written.read_text())
    return process, int(written.read_text())


def alive(pid: int) -> bool:
    try:
        return b"time.sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_what_a_process_started_in_another_session_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "_ORPHAN_SECONDS", 0.5)
    process, child = detached(tmp_path, 60)
    assert alive(child)
    end_all([process])
    assert not alive(child)
