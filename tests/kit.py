"""What tests of every room begin with: small experiments, refusals, commands in this process, folders made once."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import io
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from steelyard import Experiment
from steelyard.base import logs
from steelyard.base.errors import UserError

SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 5,
    "data": {"source": "digits"},
    "partition": {"scheme": "dirichlet", "clients": 6, "alpha": 0.5, "minimum": 10},
    "model": {"name": "logistic"},
    "training": {"learning_rate": 0.1, "epochs": 1, "batch_size": 50},
    "rounds": {"count": 2, "fraction": 1.0},
    "weighing": {"criteria": ["DS"]},
    "compute": {"engine": "loop", "device": "cpu"},
}
"""Six clients read digits with a logistic regression: less than a tenth of a second a round."""


def changed(document: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """Return a copy of an experiment's document in which sections have other fields; a section None is left out."""
    new = copy.deepcopy(dict(document))
    for name, value in sections.items():
        if value is None:
            new.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(new.get(name), dict):
            new[name] |= value
        else:
            new[name] = value
    return new


def small(**sections: Any) -> Experiment:
    """Return the small experiment with other fields: `small(rounds={"count": 3})`."""
    return Experiment(**changed(SMALL, **sections))


def of_diff(page: str) -> str:
    """Return what the diff with which a page of the guide begins makes of an app."""
    text = (Path(__file__).parent.parent / "docs" / "guide" / page).read_text(encoding="utf-8")
    kind, diff = text.split("```")[1].split("\n", 1)
    lines = [line for line in diff.splitlines() if line.strip()]
    assert (kind, len(lines) <= 5) == ("diff", True)
    return "\n".join(line[1:] for line in lines if line[0] != "-")


def refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Call what must be refused as a user's mistake; return the one line."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    line = str(caught.value)
    assert line
    assert "\n" not in line
    return line


def assert_refused(call: Callable[[], object], *parts: object) -> None:
    """Hold a refusal to what its line must name: the field or file first, then the value and whatever else matters."""
    line = refusal(call)
    assert [str(part) for part in parts if str(part) not in line] == [], line


def inside(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `steelyard ...` in this process: for what needs no process of its own, ten times as quick."""
    from steelyard.cli.main import main

    ours, before = logging.getLogger("steelyard"), Path.cwd()
    handlers, level, propagate = list(ours.handlers), ours.level, ours.propagate
    shown, code = (io.StringIO(), io.StringIO()), 0
    with contextlib.ExitStack() as changes:
        for change in (
            mock.patch.dict(os.environ, {"COLUMNS": "160"}),
            mock.patch.object(sys, "argv", ["steelyard", *map(str, words)]),
            mock.patch.object(sys, "stdin", io.StringIO()),
            mock.patch.object(sys, "path", [str(folder), *sys.path]),
            mock.patch.object(warnings, "showwarning", warnings.showwarning),
            mock.patch.object(logs, "_shown", None),
            contextlib.redirect_stdout(shown[0]),
            contextlib.redirect_stderr(shown[1]),
        ):
            changes.enter_context(change)
        os.environ.pop(logs.LEVEL, None)
        os.environ.pop(logs.FILE, None)
        os.chdir(folder)
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            os.chdir(before)
            for handler in set(ours.handlers) - set(handlers):
                handler.close()
            ours.handlers[:] = handlers
            ours.setLevel(level)
            ours.propagate = propagate
    return subprocess.CompletedProcess(["steelyard", *map(str, words)], code, shown[0].getvalue(), shown[1].getvalue())


def wait_until(what: Callable[[], object], seconds: float = 30.0, words: str = "it did not happen") -> None:
    """Wait until something is true that another thread or process brings about."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, words
        time.sleep(0.05)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that the first worker makes and all others only read, once in a whole run of the tests."""
    root = factory.getbasetemp()
    shared = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder, done = shared / f"once-{name}", shared / f"once-{name}.made"
    with (shared / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(folder)
            done.touch()
    return folder


def named(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return cases for `parametrize` whose first entry is the name by which pytest shows and picks them."""
    return [pytest.param(*rest, id=str(name)) for name, *rest in cases]
