"""The queue of a server: runs one after another, whatever ends them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from steelyard.errors import UserError
from steelyard.federate.outcomes import note_outcome
from steelyard.federate.run_queue import RunQueue
from steelyard.federate.server_folder import ServerFolder
from steelyard.federate.server_runs import ServerRun, find_run, new_run, runs_of


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
        assert (queue.stopped, two.outcome["line"]) == ([101], "stopped before it began")
    three = submitted(server)
    three.ask_to_stop()
    assert three.status() == "stopped"  # Nobody serves: there is nobody to ask.


def test_a_run_that_cannot_begin_says_why(server: ServerFolder):
    run, queue = submitted(server), Queue(server)
    queue.refused = "no such app"
    queue.look()
    assert run.outcome["line"] == "the run did not begin: no such app"


def test_a_server_that_ends_takes_no_run_for_ended(server: ServerFolder):
    run, queue = submitted(server), Queue(server)
    queue.refused = "connection refused"
    queue.close()
    queue.look()
    assert run.is_open


def test_one_process_holds_a_folder(server: ServerFolder):
    assert not server.is_served()
    with pytest.raises(UserError, match="nobody serves this folder"):
        server.require_served()
    with server.held():
        assert server.is_served()
        with pytest.raises(UserError, match="another process serves this folder"), server.held():
            pass
    assert not server.is_served()


@pytest.mark.parametrize("number", [None, 7])
def test_a_run_that_is_not_there_is_named(server: ServerFolder, number: Any):
    with pytest.raises(UserError, match="none was submitted"):
        find_run(server, number)
