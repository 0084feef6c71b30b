"""What all tests share: the real command line in a subprocess, and where the real data lie."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from tests.kit import inside
from tests.warm import borrow_warmth, command_environment, lend_warmth, warm_command

from steelyard.base.logs import DISPLAYED

# Where no bytecode may be kept (many containers say so), every worker would compile all tests and every command all of
# the package anew: a third of what a cold command costs.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
# Tests run in several workers: operator threads that wait for each other would only slow all of them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test asks for several threads all the same, those that wait let others work: a sixth of the processor's time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A run is written with fsync, for which a disk takes milliseconds each time: tests write to memory if there is room.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4e9:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Where tests run in the background, the shell has them ignore Ctrl-C, and every command they start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Imports and collecting make a million objects that stay: each search among them for garbage is for nothing.
gc.disable()

if os.environ.get("STEELYARD_TEST_MKLDNN") == "off":
    # `.ci/other-processor`: other kernels than oneDNN's, for which torch has no variable of its own.
    import torch

    torch.backends.mkldnn.enabled = False  # type: ignore[attr-defined]

# No test is timed: a busy machine may make any example slow.
hypothesis.settings.register_profile("plain", deadline=None)
hypothesis.settings.load_profile("plain")
# For mutation runs, which repeat the same tests a thousand times.
hypothesis.settings.register_profile("mutation", max_examples=20, database=None, deadline=None)

SLOWEST = "STEELYARD_SLOWEST_FILES"
CommandLine = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def steelyard(tmp_path: Path) -> CommandLine:
    """Run `steelyard ...` in a warm process of its own, in an empty folder; returns the completed process."""

    def call(*arguments: str | Path, timeout: float = 240, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return warm_command(*arguments, folder=cwd or tmp_path, timeout=timeout)

    return call


@pytest.fixture
def cold(tmp_path: Path) -> CommandLine:
    """Run `python -m steelyard ...` from nothing: for what a warm process cannot show, and once for each command."""

    def call(*arguments: str | Path, timeout: float = 240, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "steelyard", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd or tmp_path,
            env=command_environment(),
            check=False,
        )

    return call


@pytest.fixture
def command(tmp_path: Path) -> CommandLine:
    """Run `steelyard ...` in this process, in an empty folder: for whatever needs no process of its own."""

    def call(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return inside(*arguments, folder=cwd or tmp_path)

    return call


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this test keep what it computes in a cache of its own; returns the folder."""
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def refused(command: CommandLine) -> Callable[..., str]:
    """Run a command that must be refused: exit code 2, one line, no traceback; returns the line."""

    def call(*arguments: str | Path) -> str:
        done = command(*arguments)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        # On a slow machine, what takes long is named before the answer.
        lines = done.stderr.strip().splitlines()
        assert [line for line in lines if line.startswith("steelyard: ")] == lines[-1:], done.stderr
        return lines[-1]

    return call


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def messages() -> Generator[list[str]]:
    """What the library says in this process, line by line; progress is in none of them."""
    handler, ours = _Lines(), logging.getLogger("steelyard")
    handler.addFilter(lambda record: record.name != DISPLAYED)
    before = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    yield handler.lines
    ours.removeHandler(handler)
    ours.setLevel(before)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist where the process is from which it forks commands."""
    node.workerinput["warmth"] = lend_warmth()


def pytest_configure(config: pytest.Config) -> None:
    """Let a worker fork commands from the process that all workers share."""
    if warmth := getattr(config, "workerinput", {}).get("warmth"):
        borrow_warmth(warmth)


FIRST = ("test_federations", "test_study", "test_jobs", "test_ranks")
"""Files whose tests wait for processes of their own: begun first, they leave no worker idle at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what waits longest."""
    items.sort(key=lambda item: item.path.stem not in FIRST)


def pytest_collection_finish() -> None:
    """Let no later search for garbage go through everything that was imported and collected."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # a test makes little that only a search would find
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give mutmut 3.8 the name by which it asks for a test's id; pytest 9.2 has only the public one."""
    if not hasattr(item, "_nodeid"):
        item._nodeid = item.nodeid  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    """Debian's Chromium, steered by Playwright; a machine without either skips."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the files whose tests take longest, where STEELYARD_SLOWEST_FILES says how many (`.ci/run` does)."""
    seconds: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                name = report.nodeid.partition("::")[0]
                seconds[name] = seconds.get(name, 0.0) + report.duration
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[: int(os.environ.get(SLOWEST, "0"))]:
        terminalreporter.write_line(f"{seconds[name]:7.1f} s  {name}")
