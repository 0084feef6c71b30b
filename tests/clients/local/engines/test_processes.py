"""Processes that train clients: the loop's bits, whoever trains; how they end, and what is said when one dies."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import pytest
import torch
from tests.clients.local import engine_cases as cases
from tests.kit import assert_refused
from torch import nn

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.clients.local.engines import processes, table
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.messages.updates import Task

pytestmark = [
    pytest.mark.skipif(not table.can_fork(), reason="processes are forks"),
    pytest.mark.usefixtures("own_cache"),
]
PEOPLE = cases.population((64,), 10, sizes=(15, 9, 16, 2, 9, 30, 5))
TRAINING = TrainingSettings(learning_rate=0.1, batch_size=7, epochs=2)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


def dropping() -> nn.Module:
    """Draws by name, has running means, and a part that is not trained."""
    module = nn.Sequential(nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.4), nn.Linear(12, 10))
    return cases.frozen(module, "0.bias")


def simulation(engine: str, make: object = dense, threads: int = 2, rounds: int = 0) -> tuple[Simulation, Task]:
    compute = ComputeSettings(engine=engine, device="cpu", threads=threads)
    clients = Simulation({0: PEOPLE}, ModelSettings(name=make), TRAINING, compute, rounds=rounds)  # type: ignore[arg-type]
    return clients, Task("f", 0, 3, tuple(clients.names(0)), SimulationServer(clients).initial(0))


def children() -> set[int]:
    return {child.pid or 0 for child in multiprocessing.active_children()}


def gone(pid: int, seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat") as words:
                if words.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_any_number_of_processes_gives_the_bits_of_the_loop() -> None:
    clients, task = simulation("loop", dropping)
    expected = clients.train([task])[0]
    for threads in (1, 3):
        clients, task = simulation("processes", dropping, threads)
        for _ in range(2):  # shares are single clients at first, then more
            found = clients.train([task])[0]
            assert torch.equal(found.payload.models, expected.payload.models)
            assert found.losses.tolist() == expected.losses.tolist()
        assert clients.describe()["engine_choice"] == "processes"
        clients.close()


def test_a_process_that_is_killed_ends_the_round_in_one_line_and_the_next_begins_anew() -> None:
    others = children()
    clients, task = simulation("processes")
    expected = clients.train([task])[0].payload.models.clone()
    first = children() - others
    os.kill(min(first), signal.SIGKILL)
    assert_refused(lambda: clients.train([task]), "was killed by signal 9")
    assert all(gone(pid) for pid in first)
    assert torch.equal(clients.train([task])[0].payload.models, expected)
    second = children() - others
    assert second
    assert not second & first
    clients.close()


def test_a_process_that_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    others = children()
    clients, task = simulation("processes")
    clients.train([task])
    mine = children() - others
    for pid in mine:
        os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(processes, "SILENCE", 0.2)
    assert_refused(lambda: clients.train([task]), "have computed nothing")
    assert all(gone(pid) for pid in mine)


def test_an_interrupt_does_not_reach_the_processes_and_closing_ends_them() -> None:
    others = children()
    clients, task = simulation("processes")
    clients.train([task])
    mine = children() - others
    for pid in mine:
        os.kill(pid, signal.SIGINT)
    clients.train([task])
    assert children() - others == mine
    clients.close()
    gc.collect()
    assert all(gone(pid) for pid in mine)
    assert not mine & children()


def _killed(line: Connection) -> None:
    others = children()
    clients, task = simulation("processes", threads=1)  # a fork lacks the threads of torch's operators
    clients.train([task])
    line.send(children() - others)
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_end_with_a_killed_parent() -> None:
    context = multiprocessing.get_context("fork")
    line, theirs = context.Pipe()
    parent = context.Process(target=_killed, args=(theirs,))
    parent.start()
    theirs.close()
    mine = line.recv()
    parent.join()
    assert parent.exitcode == -signal.SIGKILL
    assert mine
    assert all(gone(pid) for pid in mine)
