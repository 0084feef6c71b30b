"""What the program says while it works, apart from its answers: the standard library's loggers, one for each module.

A program that uses the library decides by `logging` what it shows, and where; until it does, Python itself writes our
warnings on standard error. Processes of our own (commands, nodes, servers) call `show`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Generator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from steelyard.base.errors import UserError, brief, listed, one_line

LEVEL, FILE = "STEELYARD_LOG_LEVEL", "STEELYARD_LOG_FILE"
"""Environment variables: how much is said, and a file that gets every line."""
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
DISPLAYED = "steelyard.rounds.progress"
"""The logger of what the progress display shows already."""

_ours = logging.getLogger("steelyard")
_shown: tuple[str, str | None] | None = None


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose messages are one line of printable characters each, whatever names they hold."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Make the message one line."""
        return one_line(str(msg)), kwargs


def logger(module: str) -> Logger:
    """Return the logger of a module: call it once, with `__name__`."""
    # A module that is run with `python -m` has another name, and is ours all the same.
    return Logger(logging.getLogger(module if module.startswith("steelyard.") else f"steelyard.{module}"), {})


def show(level: str | None = None, file: Path | None = None) -> None:
    """Write messages on standard error, and all of them, with their times, at the end of a file where one is named.

    What is not given is as the environment says: the processes that a command starts so do as it does.
    """
    global _shown
    level = level or os.environ.get(LEVEL) or "info"
    path = os.environ.get(FILE) if file is None else str(file.absolute())
    if (level, path) == _shown:
        return
    for old in [handler for handler in _ours.handlers if isinstance(handler, _OnStandardError | _InFile)]:
        _ours.removeHandler(old)
        old.close()
    # First of all, so that what is wrong with the rest can be said.
    known = LEVELS.get(level, logging.INFO)
    _ours.addHandler(_OnStandardError(known))
    _ours.setLevel(known)
    _ours.propagate = False
    warnings.showwarning = _as_message
    if level not in LEVELS:
        raise UserError(f"{LEVEL}: got {brief(level)}; allowed: {listed(LEVELS)}")
    os.environ[LEVEL] = level
    if path:
        _ours.addHandler(_in_file(path))
        _ours.setLevel(logging.DEBUG)
        os.environ[FILE] = path
    _shown = (level, path)


def quiet() -> bool:
    """Whether only warnings and errors are asked for, and so no progress either."""
    return os.environ.get(LEVEL) == "warning"


class _OnStandardError(logging.Handler):
    """Writes lines on what is standard error at that moment; the same warning comes once."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.setFormatter(logging.Formatter("steelyard: %(message)s"))
        self._warned: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if record.name == DISPLAYED or (record.levelno == logging.WARNING and line in self._warned):
            return
        if record.levelno == logging.WARNING:
            self._warned.add(line)
        # Where standard error has been closed nobody reads any more, and the work goes on.
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


class _InFile(logging.FileHandler):
    """Writes lines into a file; one that can no longer be written is left, in one line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        _ours.removeHandler(self)
        # What could not be written is let go now: at its end Python would say so once more.
        with suppress(OSError):
            self.close()
        _log.warning(f"--log-file: {self.baseFilename} cannot be written ({error}); going on without it")


def _in_file(path: str) -> logging.Handler:
    try:
        handler = _InFile(path, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--log-file: {brief(path)} cannot be written ({reason}); allowed: a file") from None
    lines = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    lines.converter = time.gmtime
    handler.setFormatter(lines)
    return handler


def _as_message(message: Warning | str, *where: object, **more: object) -> None:
    _log.warning(f"warning: {message}")


_log = logger(__name__)


# What the program is doing just now, in words: work says it, and whoever shows progress asks for it.


_now_doing: list[tuple[str, float]] = []


@contextmanager
def doing(what: str) -> Generator[None]:
    """Say what the work inside is; use it around anything that may take more than a few seconds."""
    _log.debug(what)
    entry = (what, time.monotonic())
    _now_doing.append(entry)
    try:
        yield
    finally:
        # Work in several threads may end in any order: each takes back its own word.
        _now_doing.remove(entry)


def current() -> tuple[str, float] | None:
    """Return what is being done, the widest word first, and since when (`time.monotonic`) its innermost part."""
    entries = list(_now_doing)
    return (": ".join(what for what, _ in entries), entries[-1][1]) if entries else None
