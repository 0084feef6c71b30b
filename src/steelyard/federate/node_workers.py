"""Starting the workers of nodes, handing them messages, and replacing those that hang or die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from steelyard.base.errors import UserError
from steelyard.federate.processes import end_with_parent

_START_SECONDS = 300.0


@dataclass(frozen=True)
class WorkersSpec:
    """The nodes that one process serves, and what it may load before the first message."""

    configs: list[dict[str, Any]]
    experiment: str = ""
    """An experiment whose data are loaded before workers are forked, so that they share it; only for one's own."""
    threads: int = 0
    """Threads that torch uses in a worker; 0: as many as it likes."""

    @property
    def is_single(self) -> bool:
        """Whether there is one node; the process that loads the libraries is then its worker."""
        return len(self.configs) == 1


class WorkerDied(Exception):
    """The process that did a node's work ended without an answer."""


class Workers:
    """The process that loads the libraries and forks workers; use `worker` for each node, `close` at the end.

    Where it was killed (out of memory, say), another is started for the next worker.
    """

    def __init__(self, spec: WorkersSpec) -> None:
        self._spec, self._lock = spec, threading.Lock()
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "steelyard.federate.node_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                preexec_fn=end_with_parent,
            )
        self._control.settimeout(_START_SECONDS)
        self._control.sendall(json.dumps(asdict(self._spec)).encode() + b"\n")
        self._ready = False

    @property
    def pid(self) -> int:
        """The process id of what forks the workers."""
        return self._popen.pid

    def worker(self, number: int) -> Worker:
        """Return a fresh worker for a node."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            try:
                if self._popen.poll() is not None or (self._ready and self._spec.is_single):
                    self.close()  # The worker of a single node is this process: another worker is another process.
                    self._start()
                if not self._ready:
                    self._read()
                    self._ready = True
                socket.send_fds(self._control, [str(number).encode()], [theirs.fileno()])
                pid = int(self._read())
            except (OSError, ValueError) as error:
                ours.close()
                raise UserError(f"node: its worker cannot be started ({error or type(error).__name__})") from error
        return Worker(Connection(ours.detach()), pid)

    def _read(self) -> str:
        text = b""
        while not text.endswith(b"\n"):
            part = self._control.recv(64)
            if not part:
                raise OSError("the process that loads the libraries ended")
            text += part
        return text.decode().strip()

    def close(self) -> None:
        """End it, and with it every worker."""
        self._control.close()
        self._popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(2)
        self._popen.kill()
        self._popen.wait()


class Worker:
    """One warm process that does one node's work, one message at a time."""

    def __init__(self, link: Connection, pid: int) -> None:
        self._link, self.pid = link, pid

    @property
    def gone(self) -> bool:
        """Whether it has ended; between messages it says nothing, so anything to read is its end."""
        try:
            return self._link.poll(0)
        except OSError:
            return True

    def ask(self, frame: bytes, seconds: float) -> bytes:
        """Return its answer; raises `WorkerDied` where it ends without one, `TimeoutError` where it takes too long."""
        try:
            self._link.send_bytes(frame)
            if not self._link.poll(seconds):
                raise TimeoutError(f"took longer than the {seconds:g} s that the server waits")
            return self._link.recv_bytes()
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise WorkerDied from error

    def end(self) -> None:
        """Kill it."""
        self._link.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def write_frame(head: Mapping[str, Any], pieces: Mapping[str, bytes]) -> bytes:
    """Return a head and pieces as one run of bytes; `read_frame` is the inverse."""
    sizes = {name: len(piece) for name, piece in pieces.items()}
    text = json.dumps({"head": dict(head), "sizes": sizes}).encode()
    return b"".join([len(text).to_bytes(8, "big"), text, *pieces.values()])


def read_frame(frame: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the head and the pieces of a frame."""
    start = 8 + int.from_bytes(frame[:8], "big")
    document = json.loads(frame[8:start])
    pieces: dict[str, bytes] = {}
    for name, size in document["sizes"].items():
        pieces[name] = frame[start : start + size]
        start += size
    return document["head"], pieces
