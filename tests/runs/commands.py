"""The real command line in processes of its own that can be killed by the clock of the run itself.

A server process imports the libraries once and forks a fresh process for each command: what a command does is what
`python -m steelyard` does, without the seconds that the imports take.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from pathlib import Path

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    [
        "steelyard.cli.main",
        "steelyard.api",
        "steelyard.cli.tables",
        "steelyard.clients.local.clients",
        "steelyard.experiment.learning_node",
        "steelyard.experiment.recommend_node",
        "sklearn.datasets",
        "pandas",
        "safetensors.torch",
        "scipy.stats",
    ]
)


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
    # The server of the processes was started some time ago: the environment of now is handed over.
    handed = {**os.environ, **(environment or {})}
    texts = [str(argument) for argument in arguments]
    process = _PROCESSES.Process(target=_command, args=(texts, folder, killed_after, during, handed))
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the command hangs"
    return process.exitcode


def _command(
    arguments: list[str], folder: Path, killed_after: int | None, during: str, environment: dict[str, str]
) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    if killed_after is not None:
        _kill_after(killed_after, during)
    from steelyard.cli.main import main

    sys.argv = ["steelyard", *arguments]
    with Path("output").open("w") as output, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        main()


def _kill_after(last: int, during: str) -> None:
    """Make the store of this process the last thing that it uses."""
    from steelyard.runs import checkpoint
    from steelyard.runs.store import Store

    commit, write_tensors = Store.commit, checkpoint.write_tensors

    def commit_and_die(self: Store, round: int, *rest: object, **options: object) -> None:
        commit(self, round, *rest, **options)  # type: ignore[arg-type]
        if round == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def write_and_die(path: Path, tensors: object) -> bytes:
        content = write_tensors(path, tensors)  # type: ignore[arg-type]
        if path.name == f"round-{last:06d}.safetensors":
            os.kill(os.getpid(), signal.SIGKILL)
        return content

    if during == "commit":
        Store.commit = commit_and_die  # type: ignore[method-assign]
    else:
        checkpoint.write_tensors = write_and_die
