"""Real processes that are stopped, killed, run out of room or speak twice: one of them never costs the others a run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from tests.federate.small_experiment import weights
from tests.federate.test_federate_processes import experiment, left_running, steelyard, written
from tests.federate.test_node_process import hospitals

from steelyard.federate.local import rounds_of
from steelyard.federate.local_federation import started
from steelyard.federate.local_launch import Launch
from steelyard.runs.reader import History

TIMEOUT = 8.0


def wait_until(what: Callable[[], bool], seconds: float, words: str) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, words
        time.sleep(0.05)


def last_round(folder: Path) -> int:
    return rounds_of(folder)[0]


def failures(folder: Path, client: str) -> dict[int, str | None]:
    """Return why a client was left out, by round; None where it took part."""
    rows = History(folder).clients
    mine = rows[rows["client"] == client]
    found = zip(mine["round"].tolist(), mine["failure"].tolist(), strict=True)
    return {round: why if isinstance(why, str) else None for round, why in found}


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.slow
def test_a_stopped_node_costs_one_timeout_and_takes_part_again(tmp_path: Path):
    """SIGSTOP: the node is connected and silent, as a laptop that was closed."""
    described = experiment(
        3, timeout=TIMEOUT, partition={"clients": 3}, rounds={"count": 2000, "fraction": 1.0, "evaluate_every": 2000}
    )
    folder = tmp_path / "run"
    with started(folder, described, Launch(3), apart=True) as federation:
        federation.submit()
        wait_until(lambda: last_round(folder) >= 2, 120, "no round")
        victim = federation.nodes[1].pid
        os.killpg(victim, signal.SIGSTOP)
        stopped_at = last_round(folder)
        try:
            # Long enough for the others to work, and for the node to be asked again several times.
            wait_until(lambda: last_round(folder) >= stopped_at + 12, 12 + 6 * TIMEOUT, "the others starve")
        finally:
            os.killpg(victim, signal.SIGCONT)
        awake_at = last_round(folder)
        wait_until(
            lambda: any(why is None for round, why in failures(folder, "client-001").items() if round > awake_at),
            60,
            f"it never came back: {failures(folder, 'client-001')}",
        )
        assert federation.nodes[1].code is None
    for other in ("client-000", "client-002"):
        assert set(failures(folder, other).values()) == {None}
    missed = {round: why for round, why in failures(folder, "client-001").items() if why is not None}
    silent = [round for round, why in missed.items() if why == f"no answer within {TIMEOUT:g} s"]
    assert len(silent) == 1, missed
    assert set(missed.values()) <= {
        f"no answer within {TIMEOUT:g} s",
        "its node was silent and has not answered since",
        "no connected node holds this client",
    }
    assert left_running(folder) == []


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_its_message_alone(tmp_path: Path):
    """What does a node's work, and what starts it, are killed from outside, as by a machine that is out of memory."""
    described = experiment(
        2, timeout=60.0, partition={"clients": 2}, rounds={"count": 2000, "fraction": 1.0, "evaluate_every": 2000}
    )
    folder = tmp_path / "run"

    def came_back(after: int) -> bool:
        return any(why is None for round, why in failures(folder, "client-001").items() if round > after)

    with started(folder, described, Launch(2), apart=True) as federation:
        federation.submit()
        for whole in (False, True, False, True):
            at = last_round(folder) + 2
            wait_until(lambda at=at: last_round(folder) >= at, 120, "no round")
            (starter,) = children(federation.nodes[1].pid)
            for victim in [starter] if whole else children(starter):
                os.kill(victim, signal.SIGKILL)
            at = last_round(folder) + 1
            wait_until(lambda at=at: came_back(at), 120, "it never came back")
    assert set(failures(folder, "client-000").values()) == {None}
    missed = [why for why in failures(folder, "client-001").values() if why is not None]
    assert len(missed) <= 4  # One message each, or none where it was killed between two.
    assert set(missed) <= {"its ClientApp died"}
    assert left_running(folder) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    """A disk of 24 MB of its own; needs the right to mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    handle = os.open(filler, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(handle, bytes(4096))
    except OSError:
        os.close(handle)
    return filler


@pytest.mark.slow
def test_a_full_disk_is_named_and_the_run_goes_on_to_the_same_bits(tmp_path: Path, small_disk: Path):
    file = written(tmp_path, rounds={"count": 12, "fraction": 1.0})
    whole = steelyard("federate", "local", file, "--nodes", "2", "--out", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    folder = small_disk / "run"
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2] / 'src'}"}
    command = [sys.executable, "-m", "steelyard", "federate", "local", file, "--nodes", "2", "--out", str(folder)]
    begun = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: last_round(folder) >= 3, 240, "no round")
        filler = fill(small_disk)
        _, errors = begun.communicate(timeout=120)
    finally:
        begun.terminate()  # on a machine too slow for the limits, nothing is left running
    line = errors.strip().splitlines()[-1]
    assert begun.returncode == 2, errors
    assert f"steelyard: {folder}: round" in line
    assert "No space left on device" in line
    assert line.count(f"`steelyard resume {folder}`") == 1
    assert "Traceback" not in errors
    assert left_running(folder) == []
    assert 3 <= last_round(folder) < 12
    filler.unlink()
    resumed = steelyard("resume", str(folder))
    assert resumed.returncode == 0, resumed.stderr
    one, other = weights(tmp_path / "whole"), weights(folder)
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_full_disk_under_the_servers_own_folder_is_named(tmp_path: Path, small_disk: Path):
    with hospitals(tmp_path, server=str(small_disk / "server")) as federation:
        folder = tmp_path / "run"
        words = ["submit", federation.server, "hospitals.toml", "--set", "rounds.count=40", "--out", str(folder)]
        begun = federation.start_and_listen(*words)
        wait_until(lambda: last_round(folder) >= 2, 120, "no round")
        filler = fill(small_disk)
        _, errors = begun.communicate(timeout=200)
        line = errors.strip().splitlines()[-1]
        assert begun.returncode == 2, errors
        assert "No space left on device" in line
        assert f"`steelyard federate submit {federation.server} {folder}` goes on" in line
        assert "No space left on device" in History(folder).info["stopped"]
        filler.unlink()
        again = federation.steelyard("submit", federation.server, str(folder))
        assert again.returncode == 0, again.stdout + again.stderr
        assert last_round(folder) == 40


@pytest.mark.slow
def test_ports_that_are_taken_and_two_answers_to_one_message(tmp_path: Path):
    with hospitals(tmp_path) as federation:
        taken = federation.steelyard("serve", "other", "--tls", "tls", "--listen", f"127.0.0.1:{federation.port}")
        assert taken.returncode == 2
        assert taken.stderr.strip().splitlines() == [
            f"steelyard: --listen: 127.0.0.1:{federation.port} cannot be used: Address already in use; allowed: an "
            "address of this machine and a free port"
        ]
        assert federation.server_process.code is None
        # A node has no port of its own: two on one machine never get in each other's way. Where something else listens
        # at the server's address, the node says so.
        with socket.create_server(("127.0.0.1", 0)) as plain:
            thread = threading.Thread(target=_greet, args=(plain,), daemon=True)
            thread.start()
            text = (tmp_path / "hospital-a.toml").read_text()
            other = text.replace(str(federation.port), str(plain.getsockname()[1]))
            (tmp_path / "elsewhere.toml").write_text(other)
            wrong = federation.steelyard("node", "elsewhere.toml")
            assert wrong.returncode == 2
            assert "ca: the server is not the one that it should be" in wrong.stderr
        federation.stop("hospital-b")
        (tmp_path / "twice.py").write_text(TWICE)
        federation.run_script("twice", "twice.py", "hospital-b.toml")
        done = federation.steelyard("submit", "server", "hospitals.toml", "--out", "runs/twice")
        assert done.returncode == 0, done.stdout + done.stderr
        folder = tmp_path / "runs" / "twice"
        assert set(failures(folder, "hospital-a").values()) == {None}
        # The SuperLink keeps the first answer alone, be the second in the same request or in one of its own.
        assert set(failures(folder, "hospital-b").values()) == {None}
        assert History(folder).untested.empty
        assert (tmp_path / "twice.log").read_text().count("sent a second answer") >= 8


def _greet(listening: socket.socket) -> None:
    while True:
        try:
            link, _ = listening.accept()
        except OSError:
            return
        with link:
            link.sendall(b"220 mail.example ready\r\n")


TWICE = """
import sys
from pathlib import Path
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, ObjectTree
from steelyard.clients.flower.adapter import fleet
from steelyard.clients.flower.adapter.messages import RAISED, MessageParts, error_parts
from steelyard.federate import node, node_link

second = {}

class Twice(node_link.NodeLink):
    def _worked(self, frame, message):
        first = super()._worked(frame, message)
        if message.metadata.message_type == "query.introduce":
            second.clear()
            return first
        other = error_parts(message, RAISED, "once more")
        second.update(messages=[Message.FromString(other.head)], trees=[ObjectTree.FromString(other.tree)])
        return MessageParts(first.head, first.tree, {**first.parts, **other.parts})

def doubled(messages_list, message_object_trees, **more):
    return PushMessagesRequest(
        messages_list=[*messages_list, *second.get("messages", [])],
        message_object_trees=[*message_object_trees, *second.get("trees", [])],
        **{**more, "clientapp_runtime_list": [1.0] * (1 + len(second.get("messages", [])))},
    )

class Again(fleet.FleetHttpClient):
    def PushMessages(self, request):
        pushed = super().PushMessages(request)
        if second:
            alone = PushMessagesRequest(
                node=request.node,
                messages_list=second["messages"],
                message_object_trees=second["trees"],
                clientapp_runtime_list=[1.0],
            )
            try:
                print("sent a second answer", super().PushMessages(alone), flush=True)
            except Exception as error:
                print("sent a second answer", repr(error), flush=True)
        return pushed

fleet.FleetHttpClient = Again
fleet.PushMessagesRequest = doubled
node.NodeLink = Twice
node.run_node(Path(sys.argv[1]))
"""
