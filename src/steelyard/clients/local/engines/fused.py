"""One client of the convolutional network after another, with the step derived by hand on the library's convolutions.

On the CPU, clients are shared out to threads with one operator thread each. What is saved over autograd: no gradient
buffers (products go straight into the weights), pooling before ReLU, channels last throughout, the first convolution
and its pooling as four products, the second one by the library or with fewer multiplications.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.local.convolution.fused_client import FusedClient
from steelyard.clients.local.convolution.order import ConvOrder
from steelyard.clients.local.convolution.pooled import LibraryConvolution
from steelyard.clients.local.convolution.winograd import WinogradConvolution
from steelyard.clients.local.device_data.cohort import Cohort
from steelyard.clients.local.device_data.schedule import longest_first
from steelyard.clients.local.engines.engine import TrainingSetup, Unstacked
from steelyard.clients.local.engines.execution import WorkerThreads, arithmetic
from steelyard.clients.local.steps.gradients import output_gradient
from steelyard.learning.descent import Descent
from steelyard.learning.models import ConvNet
from steelyard.learning.training import batch_limit


class FusedEngine(Unstacked):
    """Trains clients of a ConvNet one at a time on each thread; use it on the CPU.

    With `winograd` the second convolution, most of the work, takes fewer multiplications; it pays at small batches.
    """

    def __init__(self, setup: TrainingSetup, module: ConvNet, *, winograd: bool = False) -> None:
        self.setup = setup
        self.name = "winograd" if winograd else "fused"
        self.order = ConvOrder(module, setup.layout)
        self.workers = WorkerThreads(setup.threads)
        self._of_thread = threading.local()

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        losses = torch.zeros(len(cohort), dtype=torch.float64, device=self.setup.device)
        starts = {
            int(origin): self.order.native(cohort.starts[origin].to(out.device)[None])[0]
            for origin in np.unique(cohort.origin)
        }

        def corrected(job: np.int64) -> torch.Tensor | None:
            found = cohort.corrections
            return None if found is None else self.order.native(found[int(job)].to(out.device)[None])[0]

        def work(job: np.int64) -> None:
            client = self._client(cohort.descent).begin(starts[int(cohort.origin[job])], cohort.descent, corrected(job))
            losses[job] = self._one(cohort, int(job), client)
            out[job].copy_(self.order.restore(client.model[None])[0])

        with arithmetic(self.setup.precision, self.setup.device), torch.no_grad():
            # Longest first, so that no thread is left with a long client at the end.
            self.workers.run(work, list(longest_first(cohort, self.setup.training)))
        return losses.cpu().numpy()

    def _client(self, descent: Descent) -> FusedClient:
        """The model and memory of this thread, the same for every client that it trains with such a descent."""
        if getattr(self._of_thread, "form", None) != descent.form:
            half = torch.bfloat16 if self.setup.precision == "bfloat16" else torch.float32
            kernel = self.order.kernel
            second = WinogradConvolution(kernel) if self.name == "winograd" else LibraryConvolution(kernel, half)
            self._of_thread.client = FusedClient(self.order, second, descent)
            self._of_thread.form = descent.form
        return self._of_thread.client

    def _one(self, cohort: Cohort, job: int, client: FusedClient) -> torch.Tensor:
        training = self.setup.training
        features, labels = cohort.samples(job)
        images = features.reshape(-1, *self.order.image)
        augment, keys = cohort.dataset.augment, cohort.take([job]).keys(labels.device)
        if augment is None:
            images = client.first.split(images)
        gradient = output_gradient(cohort.loss)
        order = torch.from_numpy(np.array(cohort.order(job, training))).to(labels.device)
        kappa = _sample_weights(cohort, job, labels)
        batch, size = batch_limit(training, len(labels)), len(labels)
        steps = [(rows, begin) for rows in order for begin in range(0, size, batch)][: training.updates]
        last = max(len(steps) - -(-size // batch), 0)
        total = torch.zeros((), dtype=torch.float64, device=labels.device)
        samples = 0
        seen, true, weigh = images, labels, kappa
        for number, (rows, begin) in enumerate(steps):
            if batch < size and begin == 0:
                seen, true, weigh = images[rows], labels[rows], kappa[rows]
            part = slice(begin, begin + batch)
            count = min(begin + batch, size) - begin
            shown = seen[part]
            if augment is not None:
                shown = client.first.split(augment(shown, torch.stack([keys[0], torch.tensor(number)])))
            each = client.step(shown, true[part], weigh[part] / count, gradient)
            if number >= last:
                total += (each * weigh[part]).sum()
                samples += count
        return total / samples


def _sample_weights(cohort: Cohort, job: int, labels: torch.Tensor) -> torch.Tensor:
    """κ of every sample's class."""
    given = cohort.loss_of(job).class_weights
    if given is None:
        return torch.ones(len(labels), device=labels.device)
    return torch.tensor(given, dtype=torch.float32, device=labels.device)[labels.long()]
