"""The loop shared out to processes of our own: no client waits for another one's turn in the interpreter.

The processes are forks, so that code and model are there at once, and live as long as the engine. Each is sent the
samples of its next clients through a pipe; models go to and fro in memory that all share. Who trains a client changes
nothing about its model: draws are by name, and every process has one operator thread.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.clients.local.cohort import Cohort, longest_first
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.loop import LoopEngine, channels_last
from steelyard.clients.local.hardware import arithmetic, shortened, single_threaded
from steelyard.learning.augmentation import Augmentation
from steelyard.learning.descent import Descent
from steelyard.learning.settings import TrainingSettings
from steelyard.learning.training import chance_of, orders
from steelyard.messages.algorithm import Part
from steelyard.messages.updates import Floats, LossState

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
    training: TrainingSettings
    descent: Descent
    augment: Augmentation | None
    part: Part
    before: int

    def orders(self) -> list[NDArray[np.int64]]:
        """Return the order in which each client visits its samples; of clients that are alike all are drawn at once."""
        alike: dict[tuple[int, int, int], list[int]] = {}
        for number, ((seed, round, _), size) in enumerate(zip(self.names, self.sizes, strict=True)):
            alike.setdefault((seed, round, size), []).append(number)
        found: dict[int, NDArray[np.int64]] = {}
        for (seed, round, size), numbers in alike.items():
            drawn = orders(seed, round, [self.names[number][2] for number in numbers], size, self.training)
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
                for row, order in enumerate(share.orders()):
                    start, correction = models[:, row]
                    samples = (features[row], labels[row], order, share.training, share.losses[row])
                    key, how = (
                        chance_of(*share.names[row], share.before),
                        (share.descent, correction if share.descent.corrected else None),
                    )
                    with shortened(setup.precision, setup.device):
                        found = loop.train(start, *samples, None, key, *how, share.augment, start, share.part)
                    losses.append(found[1])
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


# What the engine does: it hands out jobs, and takes in models.


SHARE = 8
"""Clients of a share at most; memory for their models is taken when it is first written to."""
SHARE_SECONDS = 0.1
"""Processor time that a share of small clients takes: to hand one over costs up to a millisecond."""
SILENCE = 30.0
"""Seconds after which we look whether processes that do not answer compute at all."""
Job = tuple[int, int]
"""A job of a cohort and its steps."""


def can_fork() -> bool:
    """Whether this process can be forked once torch has computed: not beside a GPU, whose threads a fork would lack."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon and not torch.cuda.is_available()


class ProcessesEngine(LoopEngine):
    """Trains clients in processes with one operator thread each; use it for long runs of networks of your own.

    Its models are those of `threads` bit for bit; an algorithm that takes the steps itself takes them in threads.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        super().__init__(setup, setup.threads)
        self.name = "processes"
        self._workers: list[_Worker] = []
        weakref.finalize(self, _end, self._workers)

    def train(self, cohort: Cohort, out: torch.Tensor) -> Floats:
        if cohort.algorithm.by_hand:
            return super().train(cohort, out)
        losses, steps = np.zeros(len(cohort)), cohort.counts.tolist()
        waiting = deque((job, steps[job]) for job in longest_first(cohort).tolist())
        workers, left = self._started(), sum(steps)
        # With more threads a copy would leave one of them spinning on a core that a process needs.
        with single_threaded(), self._ended_on_errors():
            for worker in workers:
                worker.send(cohort, _taken(waiting, min(left / len(workers), worker.pace)))
            left = sum(steps for _, steps in waiting)
            while any(worker.share for worker in workers):
                for worker in _answered(workers):
                    for job, losses[job], model in worker.receive():
                        out[job].copy_(model)
                    worker.send(cohort, _taken(waiting, min(left / len(workers), worker.pace)))
                    left -= sum(steps for _, steps in worker.share)
        return losses

    @contextmanager
    def _ended_on_errors(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            self.close()  # nobody waits for what they still work on
            raise

    def close(self) -> None:
        """End the processes; the next training starts them anew."""
        _end(self._workers)

    def _started(self) -> list[_Worker]:
        if not self._workers:
            shape = (self.setup.threads, 2, SHARE, self.setup.layout.size)
            numbers = int(np.prod(shape))
            models = torch.frombuffer(mmap.mmap(-1, 4 * numbers), dtype=torch.float32, count=numbers)
            try:
                for mine in models.view(shape):
                    self._workers.append(_Worker(self.setup, mine))
            except OSError as error:
                self.close()
                raise UserError(f"compute.engine: processes cannot be started ({error}); allowed: threads") from error
        return self._workers


class _Worker:
    """One process as the engine sees it: the line to it, and what it has been sent and not answered."""

    def __init__(self, setup: TrainingSetup, models: torch.Tensor) -> None:
        self.models = models
        """[2, clients, parameters], shared: the models that clients start from and then have; their corrections."""
        self.share: list[Job] = []
        """What it works on."""
        self.pace = 1.0
        """Steps that make a share worth while."""
        self._parent = os.getpid()
        processes = multiprocessing.get_context("fork")
        self.line, theirs = processes.Pipe()
        self.process = processes.Process(target=serve, args=(setup, models, theirs), daemon=True)
        with warnings.catch_warnings():
            # Newer Pythons warn of forks beside threads. Ours wait for work, and a fork uses nothing of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()

    def send(self, cohort: Cohort, share: list[Job]) -> None:
        """Give it the samples and the starting models of some jobs."""
        self.share = share
        if not share:
            return
        starts, corrections = self.models
        jobs = [job for job, _ in share]
        tasks = [cohort.tasks[number] for number in cohort.task[jobs]]
        for row, job in enumerate(jobs):
            starts[row].copy_(cohort.starts[cohort.origin[job]])
            if cohort.corrections is not None:
                corrections[row].copy_(cohort.corrections[job])
        features, labels = zip(*map(cohort.samples, jobs), strict=True)
        sent = Share(
            [(task.seed, task.round, cohort.name(job)) for task, job in zip(tasks, jobs, strict=True)],
            cohort.sizes[jobs].tolist(),
            torch.cat(features).numpy(),
            torch.cat(labels).numpy(),
            [cohort.loss_of(job) for job in jobs],
            cohort.training,
            cohort.descent,
            cohort.dataset.augment,
            cohort.part,
            cohort.before,
        )
        try:
            self.line.send_bytes(pickle.dumps(sent, pickle.HIGHEST_PROTOCOL))
        except OSError:
            self._died()

    def receive(self) -> list[tuple[int, float, torch.Tensor]]:
        """Return the jobs of its share with losses and models, or raise what stopped it."""
        try:
            answer: tuple[float, list[float]] | Exception = pickle.loads(self.line.recv_bytes())
        except (EOFError, OSError):
            self._died()
        if isinstance(answer, Exception):
            raise answer
        seconds, losses = answer
        self.pace = SHARE_SECONDS * sum(steps for _, steps in self.share) / max(seconds, 1e-6)
        return [
            (job, loss, self.models[0, row])
            for row, ((job, _), loss) in enumerate(zip(self.share, losses, strict=True))
        ]

    def _died(self) -> NoReturn:
        self.process.join(5)
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        raise UserError(
            f"compute.engine: a process that trains clients {how}, for want of memory perhaps; "
            "allowed: fewer compute.threads, or engine threads; a run can be resumed"
        )

    @property
    def processor_time(self) -> list[str]:
        """What the system says about the time that it has computed."""
        with open(f"/proc/{self.process.pid}/stat") as words:
            return words.read().rpartition(")")[2].split()[11:13]

    def end(self) -> None:
        """Kill the process and wait until it is gone."""
        if os.getpid() == self._parent:  # and not a fork that has inherited this
            self.process.kill()
            self.process.join()
            self.line.close()


def _taken(waiting: deque[Job], most: float) -> list[Job]:
    """Take the first jobs that wait: as many as have so many steps together, or one."""
    share = [waiting.popleft()] if waiting else []
    while waiting and len(share) < SHARE and sum(steps for _, steps in share) + waiting[0][1] <= most:
        share.append(waiting.popleft())
    return share


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.end()
    workers.clear()


def _answered(workers: list[_Worker]) -> list[_Worker]:
    """Wait until some have answered; a fork may have inherited a lock that nobody opens, and then it never would."""
    lines = {worker.line: worker for worker in workers if worker.share}
    seen: list[str] = []
    while not (ready := wait(list(lines), SILENCE)):
        now = [worker.processor_time for worker in lines.values()]
        if seen.count(str(now)) > 1:
            raise UserError(
                f"compute.engine: processes that train clients have computed nothing for {2 * SILENCE:.0f} seconds; "
                "allowed: engine threads, with which a run can be resumed"
            )
        seen.append(str(now))
    return [lines[line] for line in ready if isinstance(line, Connection)]
