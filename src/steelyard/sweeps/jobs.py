"""Several runs at a time, each in a process of its own, so that one that is killed takes nothing with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from steelyard.base.errors import UserError
from steelyard.base.logs import show
from steelyard.clients.ranks.group import current
from steelyard.rounds.progress import show_duration

Work = Callable[[Path, int], None]
"""What a process does: a folder, and the number of the run in it."""


MOST_JOBS = 256


def check_jobs(jobs: int) -> None:
    """Refuse a number of processes that cannot be, or more than one where ranks share out each run."""
    if not 1 <= jobs <= MOST_JOBS:
        raise UserError(f"--jobs: got {jobs}; allowed: a whole number from 1 to {MOST_JOBS}")
    if jobs > 1 and current() is not None:
        raise UserError(f"--jobs: got {jobs} on several ranks, which share out each run; allowed: 1")


def in_processes(work: Work, folder: Path, numbers: Sequence[int], jobs: int, announce: Callable[[int], None]) -> None:
    """Do each of the numbered runs, `jobs` at a time; the first that fails stops the others, which can go on later.

    Each process gets the same number of the processor's cores, however few runs are left: with another number of
    threads clients are stacked otherwise, and a call that goes on must give the same bits. Runs are safe against being
    killed, so that is what a stop does to them.
    """
    processes = multiprocessing.get_context("spawn")
    waiting, free = list(numbers), list(range(jobs))
    running: dict[Connection, tuple[BaseProcess, int]] = {}
    try:
        while waiting or running:
            while waiting and free:
                number, core = waiting.pop(0), free.pop(0)
                announce(number)
                answer, question = processes.Pipe(duplex=False)
                process = processes.Process(target=_process, args=(work, folder, number, core, jobs, question))
                process.start()
                question.close()
                running[answer] = (process, core)
            for answer in wait(list(running)):
                assert isinstance(answer, Connection)
                process, core = running.pop(answer)
                free.append(core)
                _check(answer, process)
    finally:
        for process, _ in running.values():
            process.kill()
        for process, _ in running.values():
            process.join()


def time_left(begun: float, position: int, of: int, jobs: int) -> str:
    """Return the end of the line before a run: the time that those before it took, for what is left; empty at first."""
    ended = max(0, position - jobs + 1)
    if not ended:
        return ""
    return f"; about {show_duration((time.monotonic() - begun) / ended * (of - ended))} left"


def _check(answer: Connection, process: BaseProcess) -> None:
    try:
        problem: str | None = answer.recv()
    except EOFError:
        process.join()
        raise UserError(
            f"--jobs: a run's process ended with code {process.exitcode}, as when memory is short; allowed: fewer jobs"
        ) from None
    finally:
        answer.close()
    process.join()
    if problem is not None:
        raise UserError(problem)


def _process(work: Work, folder: Path, number: int, core: int, jobs: int, answer: Connection) -> None:
    show()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ctrl-C reaches every process of the terminal: the first one stops the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // jobs)
        first = core * share % len(cores)
        os.sched_setaffinity(0, cores[first : first + share])
    try:
        work(folder, number)
    except UserError as error:
        answer.send(str(error))
    else:
        answer.send(None)
    answer.close()


def _end_with_parent() -> None:
    """End this process once the one that began it is gone: killed, it can stop nobody, and a second call goes on."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "work is done in a process that was begun for it"
    parent.join()
    os._exit(1)
