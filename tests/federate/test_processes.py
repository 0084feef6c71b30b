"""Processes that we start, and what those start: none is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")
if not Path("/proc/self/environ").exists():
    pytest.skip("this system does not show environments of processes", allow_module_level=True)

from steelyard.federate import processes
from steelyard.federate.processes import Process, end_all, is_running

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
    deadline = time.monotonic() + 30
    while not (written.exists() and written.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return process, int(written.read_text())


def alive(pid: int) -> bool:
    try:
        return b"time.sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_what_a_process_started_in_another_session_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "_ORPHAN_SECONDS", 0.5)
    process, child = detached(tmp_path, 60)
    assert alive(child)
    end_all([process])
    assert not alive(child)


def test_it_is_left_to_end_by_itself_for_a_while(tmp_path: Path):
    process, child = detached(tmp_path, 1.0)
    begun = time.monotonic()
    end_all([process])
    assert not alive(child)
    assert time.monotonic() - begun < processes._ORPHAN_SECONDS


def test_the_last_words_of_a_process_are_plain_text(tmp_path: Path):
    printed = (
        "\x1b[92mINFO \x1b[0m:      Starting\n\x1b[91mERROR \x1b[0m:     no such app\n"
        "╭─ Error ──────╮\n│ No such file │\n╰──────────────╯\n\n"
    )
    log = tmp_path / "log"
    log.write_text(printed)
    process = Process("quiet", [sys.executable, "-c", ""], dict(os.environ), log, tmp_path)
    end_all([process])
    assert process.tail() == "ERROR : no such app | Error | No such file"
    assert processes.last_words(printed, lines=1) == "No such file"
    assert processes.last_words("╰──╯\n") == ""


def test_a_process_that_has_ended_does_not_run_even_if_nobody_has_waited_for_it():
    """As where a container's first process waits for nobody."""
    ended = subprocess.Popen(["true"])
    deadline = time.monotonic() + 60
    while is_running(ended.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(ended.pid, 0)  # The system still knows its id.
    assert not is_running(ended.pid)
    ended.wait()
    assert not is_running(ended.pid)
    assert is_running(os.getpid())
