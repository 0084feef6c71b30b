"""The real command line in processes of its own that can be killed by the clock of the run itself."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

from tests.warm import command_environment, warm_command


def steelyard(
    *arguments: str | Path,
    folder: Path,
    killed_after: int | None = None,
    during: str = "commit",
    environment: dict[str, str] | None = None,
) -> int:
    """Run `steelyard ...` in `folder` in a new process and return its exit code; its output goes to folder/output.

    With `killed_after`, the process gets a SIGKILL of its own making right after that round was committed, or, with
    during = "checkpoint", after the round's checkpoint file was written and before its rows were.
    """
    handed = command_environment(**(environment or {}))
    before = None if killed_after is None else functools.partial(_kill_after, killed_after, during)
    done = warm_command(*arguments, folder=folder, timeout=120, environment=handed, before=before)
    (folder / "output").write_text(done.stdout + done.stderr, encoding="utf-8")
    return done.returncode


def _kill_after(last: int, during: str) -> None:
    """Make the store of this process the last thing that it uses."""
    from steelyard.runs import checkpoint
    from steelyard.runs.store import Store

    commit, write_tensors = Store.commit, checkpoint.write_tensors

    def commit_and_die(self: Store, round: int, *rest: object, **options: object) -> None:
        commit(self, round, *rest, **options)  # type: ignore[arg-type]
        if round == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def write_and_die(path: Path, *rest: object) -> bytes:
        content = write_tensors(path, *rest)  # type: ignore[arg-type]
        if path.name == f"round-{last:06d}.safetensors":
            os.kill(os.getpid(), signal.SIGKILL)
        return content

    if during == "commit":
        Store.commit = commit_and_die  # type: ignore[method-assign]
    else:
        checkpoint.write_tensors = write_and_die
