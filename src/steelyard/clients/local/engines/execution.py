"""How torch runs the work of an engine: in which arithmetic, and on which threads.

Worker threads have one operator thread each: small operators gain more from many clients than from many cores.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from steelyard.clients.local.settings import Precision

Item = TypeVar("Item")


@contextmanager
def arithmetic(precision: Precision, device: torch.device, autocast: bool = False) -> Generator[None]:
    """Use float32, TF32 or bfloat16 products inside the block, with algorithms that repeat bit for bit.

    `autocast` lets torch choose which operations of an ordinary module run in bfloat16. The rest are settings of the
    whole process: enter the block around threads, never inside one.
    """
    short = precision != "float32"
    cuda = device.type == "cuda"
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    kept = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    with ExitStack() as stack:
        if cuda:
            torch.backends.cuda.matmul.allow_tf32 = short
            torch.backends.cudnn.allow_tf32 = short
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        elif precision == "bfloat16":
            stack.enter_context(_without_failed_products())
        if autocast:
            stack.enter_context(shortened(precision, device))
        try:
            yield
        finally:
            if cuda:
                torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
                torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = kept


def shortened(precision: Precision, device: torch.device) -> torch.autocast:
    """Return the block in which this thread computes an ordinary module in the precision that was asked for."""
    # Without its cache: it would keep the shortened weights of the first step for the whole block.
    return torch.autocast(device.type, torch.bfloat16, precision == "bfloat16", cache_enabled=False)


@contextmanager
def _without_failed_products() -> Generator[None]:
    """Keep oneDNN out where the processor has no bfloat16.

    Torch would call it, see it fail, and switch it off for the rest of the process: every later run, in whichever
    precision, would end with other bits than the same run in a process of its own.
    """
    library: Any = torch.backends.mkldnn
    if not library.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        yield
        return
    before, library.enabled = library.enabled, False
    try:
        yield
    finally:
        library.enabled = before


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
