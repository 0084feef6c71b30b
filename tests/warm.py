"""Processes that need not read the heavy packages again.

Most of what a short command costs is the reading of torch, pandas and scikit-learn. A server process, one for all test
workers, reads them once and forks a fresh process for each command, with arguments, folder, environment, output and
exit code as those of `python -m steelyard`. What a fork cannot show (what a cold start imports, another hash seed) is
shown by the fixture `cold`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest import mock

import typer.main

from steelyard.base.logs import FILE, LEVEL

# What typer finds in a function does not change; reading it from the annotations takes most of a quick command.
typer.main.get_params_from_function = functools.cache(  # pyright: ignore[reportPrivateImportUsage]
    typer.main.get_params_from_function  # pyright: ignore[reportPrivateImportUsage]
)

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = multiprocessing.get_context("forkserver")
SERVER = forkserver._forkserver  # type: ignore[attr-defined]
# Nothing here may start threads when it is imported: a process that has some cannot be forked.
PROCESSES.set_forkserver_preload(
    [
        "tests.warm",
        "tests.built_app",
        "steelyard.api",
        "steelyard.cli.printing",
        "steelyard.experiment.node",
        "steelyard.experiment.node",
        "steelyard.report.html",
        "sklearn.datasets",
        "pandas",
        "pyarrow.pandas_compat",
        "narwhals._pandas_like.namespace",
        "safetensors.torch",
        "scipy.stats",
        "dp_accounting.pld.privacy_loss_distribution",
        "cryptography.x509",
        "torch._dynamo",  # of vmap and of torch's optimisers
        "tests.warmed",
    ]
)


def command_environment(**changes: str) -> dict[str, str]:
    """The environment of a process that runs this checkout's code, with messages shown as nobody has asked for them."""
    # A command that another test ran inside this process leaves its wishes (--quiet) to the processes it starts.
    kept = {name: value for name, value in os.environ.items() if name not in {LEVEL, FILE}}
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(path for path in paths if path)
    return {**kept, "PYTHONPATH": paths, "COLUMNS": "160", **changes}


def warm_command(
    *arguments: str | Path,
    folder: Path,
    timeout: float = 240,
    environment: dict[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `steelyard ...` as `subprocess.run` would; `before` is called in the new process, ahead of the command."""
    words = ["steelyard", *map(str, arguments)]
    return _warm_process(functools.partial(_command, before), words, folder, environment, timeout)


class WarmProcess:
    """`steelyard ...` that goes on beside the test, with what tests ask of a `subprocess.Popen`."""

    def __init__(
        self, *arguments: str | Path, folder: Path, printed: Path, environment: dict[str, str] | None = None
    ) -> None:
        environment = command_environment() if environment is None else environment
        words, outputs = ["steelyard", *map(str, arguments)], [printed, printed]
        started = warm_processes().Process(
            target=_inside, args=(functools.partial(_command, None), words, folder, environment, outputs)
        )
        started.start()
        assert started.pid is not None
        self._started, self.pid, self._asked = started, started.pid, threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code; None while it goes on."""
        with self._asked:  # of two threads that ask, one would read the code and the other wait for it
            return self._started.exitcode

    def wait(self, timeout: float) -> int:
        """Wait for its end and return the exit code."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("steelyard", timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal if it goes on."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def forget_steelyard() -> None:
    """Let a new process read our modules anew: what one of them fails to import is seen, as in a cold start."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "steelyard"]:
        del sys.modules[name]


def warm_script(
    path: Path, folder: Path, timeout: float = 240, environment: dict[str, str] | None = None, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a script as `python PATH` would; a fresh one reads our modules anew, those below `folder` first."""
    return _warm_process(functools.partial(_script, path, fresh), [str(path)], folder, environment, timeout)


def warm_module(
    name: str, *arguments: str, folder: Path, timeout: float = 240, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a module as `python -m NAME` would."""
    module = functools.partial(runpy.run_module, name, run_name="__main__")
    return _warm_process(module, [name, *arguments], folder, environment, timeout)


def warm_processes() -> ForkServerContext:
    """Return the context whose processes are forks of the warm one; what they call should import little more."""
    with mock.patch.dict(os.environ, command_environment()):
        SERVER.ensure_running()  # it reads this checkout's code, not that of an installed package
    return PROCESSES


def lend_warmth() -> dict[str, object]:
    """Start the warm process if there is none; return how the workers of this test run reach it."""
    warm_processes()
    return {
        name: getattr(SERVER, name) for name in ("_forkserver_address", "_forkserver_authkey") if hasattr(SERVER, name)
    }


def borrow_warmth(reached: dict[str, object]) -> None:
    """Fork from the warm process of whoever started this worker, who also ends it; one is enough for all workers."""
    for name, value in reached.items():
        setattr(SERVER, name, value)
    # Processes get this handle in place of that by which the server sees that nobody is left.
    SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)  # type: ignore[attr-defined]
    SERVER.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]


def await_warmth() -> None:
    """Return when processes start at once: the first one otherwise waits until all packages are read."""
    first = warm_processes().Process(target=os.getpid)
    first.start()
    first.join()


def _warm_process(
    target: Callable[[], object], words: list[str], folder: Path, environment: dict[str, str] | None, timeout: float
) -> subprocess.CompletedProcess[str]:
    environment = command_environment() if environment is None else environment
    processes = warm_processes()
    with tempfile.TemporaryDirectory() as written:
        outputs = [Path(written) / "output", Path(written) / "errors"]
        process = processes.Process(target=_inside, args=(target, words, folder, environment, outputs))
        process.start()
        process.join(timeout)
        code = process.exitcode
        if process.pid is not None and _group_is_left(process.pid):
            os.killpg(process.pid, signal.SIGKILL)  # what the command started ends with it
        process.join()
        shown = [path.read_text(encoding="utf-8") if path.exists() else "" for path in outputs]
    if code is None:
        raise subprocess.TimeoutExpired(words, timeout, *shown)
    return subprocess.CompletedProcess(words, code, *shown)


def _group_is_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _inside(
    target: Callable[[], object], words: list[str], folder: Path, environment: dict[str, str], outputs: list[Path]
) -> None:
    os.setsid()
    for number in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        number.atexit = False  # what torch takes apart at its end: the warm process will
    gc.freeze()  # no search for garbage goes through, and copies, what was read before
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _redirect(*outputs)
    sys.argv = words
    sys.path.insert(0, str(folder))  # as `python -m` does
    try:
        target()
    finally:
        atexit._run_exitfuncs()


def _script(path: Path, fresh: bool) -> None:
    if fresh:
        forget_steelyard()
    runpy.run_path(str(path), run_name="__main__")


def _command(before: Callable[[], None] | None) -> None:
    if before is not None:
        before()
    from steelyard.cli.main import main

    main()


def _redirect(output: Path, errors: Path) -> None:
    """Send what this process and its children write to files, and give them nothing to read."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
