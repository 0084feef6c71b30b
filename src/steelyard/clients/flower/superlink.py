"""What the SuperLink itself does to a run: it may stop it, fail, or have no room left; each becomes one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx

from steelyard.base.errors import UserError
from steelyard.clients.flower.adapter.messages import PartsNotTaken, RunNotRunning
from steelyard.clients.flower.register import REGISTER

_LEAST_FREE = 1 << 20
"""Bytes; with less, the SuperLink cannot take a message."""
_FAULT = 500


class RunStopped(UserError):
    """The SuperLink no longer runs this run; nothing more can be asked."""

    def __init__(self) -> None:
        super().__init__("the SuperLink stopped this run (`flwr stop`?)")


class SuperLinkFault(UserError):
    """The SuperLink does not do what it is asked; the run stops and can be resumed."""


@contextmanager
def reaching_superlink() -> Generator[None]:
    """Turn what the SuperLink does wrong into one line; use it around every call that a run cannot do without."""
    try:
        yield
    except RunNotRunning:
        raise RunStopped from None
    except (httpx.HTTPError, PartsNotTaken) as error:
        check_disk(error)
        words = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise SuperLinkFault(f"the SuperLink does not take messages any more: {words}") from error


def is_passing(error: BaseException) -> bool:
    """Whether an error of the SuperLink may be gone at the next try; Flower tries all others again by itself."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code == _FAULT


def check_disk(cause: BaseException | None = None) -> None:
    """Raise where the disk of the server's folder is full, in which the SuperLink keeps parts of messages.

    Use it where something failed that a full disk would explain: a message was not taken, or nobody has answered.
    """
    register = os.environ.get(REGISTER)
    folder = Path(register or "").parent
    try:
        full = bool(register) and shutil.disk_usage(folder).free < _LEAST_FREE
    except OSError:
        return
    if full:
        words = f"{folder}: No space left on device"
        raise SuperLinkFault(f"the SuperLink does not take messages any more: {words}") from cause
