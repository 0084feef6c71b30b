"""What the compute settings mean on this machine: the device, its memory, arithmetic and threads."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import torch

from steelyard.base.errors import UserError
from steelyard.clients.local.settings import ComputeSettings, Precision


def device_of(settings: ComputeSettings) -> torch.device:
    """Return the device that the settings name, or say that it is not there."""
    name = settings.device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"compute.device: got '{name}'; allowed: auto, cpu, cuda, cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise UserError(f"compute.device: got '{name}', but this machine has {count} CUDA devices; allowed: cpu")
        return torch.device("cuda", device.index or 0)
    return device


def threads_of(settings: ComputeSettings) -> int:
    """Return how many CPU threads to use."""
    if settings.threads is not None:
        return settings.threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def memory_of(settings: ComputeSettings, device: torch.device) -> int:
    """Return the bytes that the simulation may plan for on the device."""
    if settings.memory_gb is not None:
        return int(settings.memory_gb * 1e9)
    if device.type == "cuda":
        return int(0.7 * torch.cuda.mem_get_info(device)[0])
    return int(0.7 * _free_memory())


def _free_memory() -> float:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return float(line.split()[1]) * 1024
    except OSError:
        pass
    return 4e9


def peak_memory(device: torch.device) -> int:
    """Return the most bytes taken so far: of the GPU by torch, or of main memory by this process; 0 where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/status") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
    except OSError:
        return 0


_triton: Any = None
with suppress(ImportError):
    _triton = import_module("triton")
AMPERE = (8, 0)
"""The first generation whose matrix units take TF32 and bfloat16."""


def ready(device: torch.device) -> bool:
    """Whether Triton is there and can work on this device (its interpreter takes CPU tensors; the tests use it)."""
    if _triton is None:
        return False
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= AMPERE
    return os.environ.get("TRITON_INTERPRET") == "1"


# How torch runs the work of an engine: in which arithmetic, and on which threads. Worker threads have one operator
# thread each: small operators gain more from many clients than from many cores.


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


class MatrixPool:
    """Gives out matrices in main memory; fresh pages cost more than the numbers written to them, so they are kept.

    Each block is given out as a view that the matrix and all tensors made from it keep alive: the block is free again
    when the view is gone.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._blocks: list[tuple[mmap.mmap, weakref.ref[memoryview]]] = []

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        """Return an uninitialised float32 matrix; beyond the limit it lies in a file that is read as it is used."""
        needed = 4 * rows * columns
        if not needed:
            return torch.empty((rows, columns))
        if needed > self.limit:
            return _in_file(rows, columns)
        block = self._free(needed)
        view = memoryview(block)
        self._blocks.append((block, weakref.ref(view)))
        return torch.frombuffer(view, dtype=torch.float32, count=rows * columns).view(rows, columns)

    def _free(self, needed: int) -> mmap.mmap:
        """Return a block that fits and that nobody uses, or a fresh one; other unused blocks are let go for it."""
        for place, (block, view) in enumerate(self._blocks):
            if view() is None and needed <= len(block) <= 2 * needed:
                del self._blocks[place]
                return block
        self._blocks = [each for each in self._blocks if each[1]() is not None]
        return _fresh(needed)

    def held(self) -> int:
        """Return the bytes of all blocks."""
        return sum(len(block) for block, _ in self._blocks)


def on_large_pages(numbers: int) -> torch.Tensor:
    """Return an uninitialised float32 vector for what is read over and over; it is gone with its last tensor."""
    return torch.frombuffer(_fresh(4 * numbers), dtype=torch.float32, count=numbers)


def _fresh(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    # Large pages: a cohort of models touches tens of thousands of small ones. They are given to private memory only.
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _in_file(rows: int, columns: int) -> torch.Tensor:
    size = 4 * rows * columns
    try:
        with tempfile.TemporaryFile(prefix="steelyard-updates-") as file:
            os.posix_fallocate(
                file.fileno(), 0, size
            )  # Where a disk filled up later, the system would end the process.
            return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=(rows, columns)).view(np.ndarray))
    except OSError as error:
        raise UserError(
            f"compute.memory_gb: {size / 1e9:.3g} GB of updates do not fit into memory, nor into "
            f"{tempfile.gettempdir()} ({error.strerror}); allowed: TMPDIR on a disk with room, or fewer clients a round"
        ) from error
