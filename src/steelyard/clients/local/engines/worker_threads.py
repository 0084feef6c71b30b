"""Worker threads with one operator thread each: small operators gain more from many clients than from many cores."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch

Item = TypeVar("Item")


@contextmanager
def single_threaded() -> Generator[None]:
    """Let every operator inside the block run on the thread that calls it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SMALL = 200_000
"""Parameters below which a model's operators are too small to share: threads would wait for each other."""


def threads_for(device: torch.device, parameters: int) -> AbstractContextManager[None]:
    """Return the block in which a model of this size runs fastest; use it around loops over small models."""
    return single_threaded() if device.type == "cpu" and parameters < SMALL else nullcontext()


class WorkerThreads:
    """A few threads that share out a list of jobs; torch lets go of the interpreter inside its operators."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="steelyard") if threads > 1 else None

    def run(self, work: Callable[[Item], None], items: Sequence[Item]) -> None:
        """Do the work on every item; the first error is raised once all have ended."""
        with single_threaded():
            if self._pool is None or len(items) < 2:
                for item in items:
                    work(item)
                return
            waiting = [self._pool.submit(_quietly, work, item) for item in items]
            errors = [future.exception() for future in waiting]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _quietly(work: Callable[[Item], None], item: Item) -> None:
    # Gradient mode is a setting of the thread, not of the process.
    with torch.no_grad():
        work(item)
