"""The loop shared out to processes of our own: no client waits for another one's turn in the interpreter.

The processes are forks, so that code and model are there at once, and live as long as the engine. Each is sent the
samples of its next clients through a pipe; models go to and fro in memory that all share. Who trains a client changes
nothing about its model: draws are by name, and every process has one operator thread.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.clients.local.device_data.cohort import Cohort
from steelyard.clients.local.device_data.schedule import longest_first, step_counts
from steelyard.clients.local.engines.engine import TrainingSetup, Unstacked
from steelyard.clients.local.engines.execution import single_threaded
from steelyard.clients.local.engines.process_worker import Share, serve

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


class ProcessesEngine(Unstacked):
    """Trains clients in processes with one operator thread each; use it for long runs of networks of your own.

    Its models are those of `threads` bit for bit.
    """

    name = "processes"

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup
        self._workers: list[_Worker] = []
        weakref.finalize(self, _end, self._workers)

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        losses = np.zeros(len(cohort))
        steps = step_counts(cohort.sizes, self.setup.training).tolist()
        waiting = deque((job, steps[job]) for job in longest_first(cohort, self.setup.training).tolist())
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
            cohort.descent,
            cohort.dataset.augment,
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
