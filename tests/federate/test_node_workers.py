"""The processes of a node: one that speaks to the server, one that works; each as small as it can be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("flwr")

from steelyard.federate.node_workers import WorkerDied, Workers, WorkersSpec
from steelyard.federate.processes import is_running


def test_what_speaks_to_the_server_never_loads_torch():
    code = "import steelyard.federate.node, sys; print([name for name in ('torch', 'pandas') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_worker_of_a_single_node_is_no_copy_and_one_that_died_is_replaced(nodes: int):
    workers = Workers(WorkersSpec([{"client": "a"}] * nodes))
    try:
        first = workers.worker(0)
        assert (first.pid == workers.pid) == (nodes == 1)
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            first.ask(b"work", 60)
        assert first.gone
        second = workers.worker(0)
        assert second.pid != first.pid
        assert not second.gone
        second.end()  # As where it hangs.
        third = workers.worker(0)
        assert third.pid not in (first.pid, second.pid)
    finally:
        workers.close()
    assert not is_running(workers.pid)
