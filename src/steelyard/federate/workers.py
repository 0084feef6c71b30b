"""Starting processes on this machine and ending every one of them; the workers of nodes, asked and replaced."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from steelyard.base.errors import UserError

_LIBC = ctypes.CDLL(None)
_PDEATHSIG = 1
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b.?")
_FRAME = re.compile(r"[\u2500-\u259f]")
"""Lines and blocks with which programs draw boxes and bars."""
_MARK = "STEELYARD_PROCESS"
"""The variable by which processes are known that were started by one of ours, in whatever session."""
LAUNCHER = "STEELYARD_LAUNCHER"
"""Environment variable with the process id of whoever started the federation; the ServerApp does not outlive it."""
_ORPHAN_SECONDS = 10.0
"""How long processes that outlive the one which started them are left to end by themselves."""


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a Flower process: no telemetry, no update check, nothing installed, its own home."""
    # Flower starts its helpers by name, so the folder of this Python's commands comes first.
    commands = str(Path(sys.executable).parent)
    source = str(Path(__file__).parents[2])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PATH": os.pathsep.join([commands, os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "PYTHONUNBUFFERED": "1",
        # Models that were let go of go back to the system at once, not into the allocator's own store.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        **more,
    }


def reserved_port() -> socket.socket:
    """Return a socket with a free port of the loopback interface; nobody else can take the port while it is open."""
    # No address is reused here: two that reuse one may both have it, until one of them listens.
    reserved = socket.socket()
    reserved.bind(("127.0.0.1", 0))
    return reserved


class Process:
    """One process that we started, with its output in a file; it is ended with us, whatever happens."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        cwd: Path,
        handles: Sequence[int] = (),
    ) -> None:
        self.name, self.log = name, log
        self._mark = uuid.uuid4().hex
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                env={**env, _MARK: self._mark},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=handles,
                preexec_fn=end_with_parent,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._popen.poll()

    def tail(self, lines: int = 3) -> str:
        """Return the last lines that it wrote, for an error line."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return last_words(text, lines)

    def wait_for_port(self, port: int, seconds: float) -> None:
        """Wait until it listens on a port of this machine."""
        deadline = time.monotonic() + seconds
        while self.code is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            time.sleep(0.1)
        why = f"ended with code {self.code}" if self.code is not None else f"does not listen after {seconds:g} s"
        raise UserError(f"{self.name}: {why}; its last words, from {self.log}: {self.tail() or 'none'}")

    def terminate(self) -> None:
        """Ask it and what it started to end."""
        _signal(self._popen, signal.SIGTERM)

    def end(self, seconds: float = 8.0) -> None:
        """Wait for it to end, and kill it and what it started if it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(seconds)
        _signal(self._popen, signal.SIGKILL)
        self._popen.wait()
        self._end_descendants()

    def _end_descendants(self) -> None:
        # A SuperLink starts its SuperExec, and that a server app, in sessions of their own: they end by themselves
        # when the SuperLink is gone, which can take seconds.
        begun = time.monotonic()
        while (left := _processes_with(self._mark)) and time.monotonic() - begun < 2 * _ORPHAN_SECONDS:
            if time.monotonic() - begun > _ORPHAN_SECONDS:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def end_with_parent() -> None:
    """End this process when its parent ends, whatever happens to that one."""
    # Linux only: a child gets SIGTERM when we die, even by SIGKILL. Elsewhere `end` has to do.
    with contextlib.suppress(OSError, AttributeError):
        _LIBC.prctl(_PDEATHSIG, signal.SIGTERM)


def is_running(pid: int) -> bool:
    """Whether a process of this id runs; one that has ended does not, also where nobody has waited for it yet."""
    try:
        os.kill(pid, 0)
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except ProcessLookupError:
        return False
    except OSError:  # It is another account's, or the system has no such table.
        return True
    return line.rpartition(")")[2].split()[0] != "Z"


def last_words(printed: str, lines: int = 3) -> str:
    """Return the last lines of what a process printed, for an error line: no colours, no frames, no empty lines."""
    plain = _FRAME.sub(" ", _ESCAPE.sub("", printed))
    found = [" ".join(line.split()) for line in plain.splitlines()]
    return " | ".join([line for line in found if any(map(str.isalnum, line))][-lines:])


def _processes_with(mark: str) -> list[int]:
    """Processes that inherited an environment with this mark; none where the system does not show environments."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def _signal(popen: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # The session that we started it in has its process id as group id, also after it has ended itself.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, number)


def end_all(processes: Sequence[Process]) -> None:
    """End processes in the order given; none is left, and none is waited for longer than need be."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.end()


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
