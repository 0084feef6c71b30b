"""What a process of the engine `processes` is sent, and what it does: train, answer, end with the engine's process."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.execution import arithmetic, shortened
from steelyard.clients.local.engines.sequential import channels_last
from steelyard.learning.augmentation import Augmentation
from steelyard.learning.descent import Descent
from steelyard.learning.settings import TrainingSettings
from steelyard.learning.training import chance_of, orders
from steelyard.messages.updates import LossState

HEAP = 256 << 20
"""Bytes of a process's memory that lie on large pages; they are taken when they are first written to."""


@dataclass(frozen=True)
class Share:
    """What is sent of some clients; their starting models, and corrections, lie in shared memory."""

    names: list[tuple[int, int, str]]
    """Seed, round and client: what draws come from."""
    sizes: list[int]
    features: NDArray[Any]
    labels: NDArray[Any]
    """Those of all clients, one after another."""
    losses: list[LossState]
    descent: Descent
    augment: Augmentation | None

    def orders(self, training: TrainingSettings) -> list[NDArray[np.int64]]:
        """Return the order in which each client visits its samples; of clients that are alike all are drawn at once."""
        alike: dict[tuple[int, int, int], list[int]] = {}
        for number, ((seed, round, _), size) in enumerate(zip(self.names, self.sizes, strict=True)):
            alike.setdefault((seed, round, size), []).append(number)
        found: dict[int, NDArray[np.int64]] = {}
        for (seed, round, size), numbers in alike.items():
            drawn = orders(seed, round, [self.names[number][2] for number in numbers], size, training)
            found.update(zip(numbers, drawn, strict=True))
        return [found[number] for number in range(len(self.names))]


def serve(setup: TrainingSetup, models: torch.Tensor, line: Connection) -> NoReturn:
    """Be one of the processes: train what comes in until the engine's process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the engine's process decides.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Locks, sockets and pipes of the engine's process would stay open for as long as we live.
    os.closerange(3, line.fileno())
    os.closerange(line.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    torch.set_num_threads(1)
    _keep_memory()
    gc.freeze()  # no search for garbage goes through, and copies, what was there before
    inbox: SimpleQueue[Share] = SimpleQueue()
    threading.Thread(target=_listen, args=(line, inbox), daemon=True).start()
    loop = channels_last(setup)
    with arithmetic(setup.precision, setup.device), torch.enable_grad():
        while True:
            share = inbox.get()
            begun, losses = time.process_time(), list[float]()
            try:
                features, labels = (
                    torch.from_numpy(each).split(share.sizes) for each in (share.features, share.labels)
                )
                for row, order in enumerate(share.orders(setup.training)):
                    start, correction = models[:, row]
                    samples = (features[row], labels[row], order, setup.training, share.losses[row])
                    how = (share.descent, correction if share.descent.corrected else None, share.augment)
                    with shortened(setup.precision, setup.device):
                        losses.append(loop.train(start, *samples, None, chance_of(*share.names[row]), *how, start)[1])
                answer = time.process_time() - begun, losses
            except Exception as error:  # whatever the user's module does
                answer = _sendable(error)
            line.send_bytes(pickle.dumps(answer))


def _listen(line: Connection, inbox: SimpleQueue[Share]) -> NoReturn:
    """Take in what is sent, and end, also amid a client's training, when there is nobody left to send."""
    while True:
        try:
            inbox.put(pickle.loads(line.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)


def _sendable(error: Exception) -> Exception:
    """The error itself, or its words where it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _keep_memory() -> None:
    """Let malloc keep what is freed, on large pages: a step takes and frees the same blocks over and over.

    By default the larger ones go back to the system, which hands out zeroed pages of 4 KB anew in every step.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    for option, value in ((mmap_threshold, 1 << 30), (trim_threshold, (1 << 31) - 1), (top_pad, 64 << 20)):
        library.mallopt(option, value)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = library.malloc(HEAP)
    if block:
        begin = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        library.madvise(begin, HEAP - mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
        library.free(block)
