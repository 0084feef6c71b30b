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

from steelyard.clients.local.convolution.first import FirstConvolution
from steelyard.clients.local.convolution.pooled import LibraryConvolution, PooledConvolution
from steelyard.clients.local.convolution.stacked import ConvOrder
from steelyard.clients.local.convolution.winograd import WinogradConvolution
from steelyard.clients.local.device_data.cohort import Cohort, Workshop
from steelyard.clients.local.device_data.memory import on_large_pages
from steelyard.clients.local.engines.precision import arithmetic
from steelyard.clients.local.engines.stacked import by_work
from steelyard.clients.local.engines.worker_threads import Team
from steelyard.clients.local.steps.gradients import OutputGradient, Sgd, output_gradient
from steelyard.learning.models import ConvNet
from steelyard.learning.training import batch_limit

aten = torch.ops.aten


class FusedEngine:
    """Trains clients of a ConvNet one at a time on each thread; use it on the CPU.

    With `winograd` the second convolution, most of the work, takes fewer multiplications; it pays at small batches.
    """

    def __init__(self, shop: Workshop, module: ConvNet, *, winograd: bool = False) -> None:
        self.shop = shop
        self.name = "winograd" if winograd else "fused"
        self.order = ConvOrder(module, shop.layout)
        self.team = Team(shop.threads)
        self._desks = threading.local()

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        lost = torch.zeros(len(cohort), dtype=torch.float64, device=self.shop.device)
        starts = {int(place): self.order.native(cohort.starts[place].to(out.device)[None])[0]
                  for place in np.unique(cohort.origin)}  # fmt: skip

        def work(job: np.int64) -> None:
            client = self._desk().seat(starts[int(cohort.origin[job])])
            lost[job] = self._one(cohort, int(job), client)
            out[job].copy_(self.order.restore(client.model[None])[0])

        with arithmetic(self.shop.precision, self.shop.device), torch.no_grad():
            # Longest first, so that no thread is left with a long client at the end.
            self.team.run(work, list(by_work(cohort, self.shop.training)))
        return lost.cpu().numpy()

    def _desk(self) -> FusedClient:
        """What this thread works with, the same for every client it trains."""
        if not hasattr(self._desks, "client"):
            half = torch.bfloat16 if self.shop.precision == "bfloat16" else torch.float32
            kernel = self.order.kernel
            second = WinogradConvolution(kernel) if self.name == "winograd" else LibraryConvolution(kernel, half)
            self._desks.client = FusedClient(self.order, second, Sgd.of(self.shop.training))
        return self._desks.client

    def _one(self, cohort: Cohort, job: int, client: FusedClient) -> torch.Tensor:
        training = self.shop.training
        features, labels = cohort.samples(job)
        images = client.first.split(features.reshape(-1, *self.order.image))
        gradient = output_gradient(cohort.loss)
        order = torch.from_numpy(np.array(cohort.order(job, training))).to(labels.device)
        kappa = _sample_weights(cohort, job, labels)
        batch, size = batch_limit(training, len(labels)), len(labels)
        total = torch.zeros((), dtype=torch.float64, device=labels.device)
        for epoch in range(training.epochs):
            seen, said, weigh = images, labels, kappa
            if batch < size:
                seen, said, weigh = images[order[epoch]], labels[order[epoch]], kappa[order[epoch]]
            last = epoch == training.epochs - 1
            for begin in range(0, size, batch):
                part = slice(begin, begin + batch)
                weights = weigh[part] / (min(begin + batch, size) - begin)
                each = client.step(seen[part], said[part], weights, gradient)
                if last:
                    total += (each * weigh[part]).sum()
        return total / size


def _sample_weights(cohort: Cohort, job: int, labels: torch.Tensor) -> torch.Tensor:
    """κ of every sample's class."""
    given = cohort.loss_of(job).class_weights
    if given is None:
        return torch.ones(len(labels), device=labels.device)
    return torch.tensor(given, dtype=torch.float32, device=labels.device)[labels.long()]


class FusedClient:
    """One client's model in native order and its training step; one after another takes the same seat."""

    def __init__(self, order: ConvOrder, second: PooledConvolution, sgd: Sgd) -> None:
        self.first = FirstConvolution(order.image, order.kernel, order.channels[0])
        self.second, self.sgd = second, sgd
        self.model = on_large_pages(order.layout.size)
        self.named = order.views(self.model)
        self.gradients = None if sgd.plain else torch.zeros_like(self.model)
        self.slopes = {} if self.gradients is None else order.views(self.gradients)
        self.velocity = torch.zeros_like(self.model) if sgd.momentum else None
        self.start = torch.empty_like(self.model) if sgd.proximal else None

    def seat(self, start: torch.Tensor) -> FusedClient:
        """Take the model that the next client starts from."""
        self.model.copy_(start)
        if self.start is not None:
            self.start.copy_(start)
        if self.velocity is not None:
            self.velocity.zero_()
        return self

    def step(
        self, images: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, gradient: OutputGradient
    ) -> torch.Tensor:
        """Do one step of SGD in place on images that are split already; return each sample's loss."""
        named, samples = self.named, len(labels)
        rows = self.first.forward(images, named["conv1.weight"], named["conv1.bias"])
        below1 = rows.view(samples, *self.first.pooled, -1)
        below2 = (self.second.forward(below1, named["conv2.weight"]) + named["conv2.bias"]).relu_()
        flat = below2.view(samples, -1)
        # Weights @ columns beats rows @ weights at small batches, so activations of dense layers stand on end.
        hidden = torch.addmm(named["dense1.bias"][:, None], named["dense1.weight"], flat.t()).relu_()
        outputs = torch.addmm(named["dense2.bias"][:, None], named["dense2.weight"], hidden)
        slope, each = gradient(outputs.t(), labels, weights)
        slope = slope.t().contiguous()

        below = aten.threshold_backward(named["dense2.weight"].t() @ slope, hidden, 0)
        self._product("dense2.weight", slope, hidden.t())
        self._add("dense2.bias", slope.sum(1))
        slope = below
        flat_slope = slope.t().contiguous() @ named["dense1.weight"]
        self._product("dense1.weight", slope, flat)
        self._add("dense1.bias", slope.sum(1))
        flat_slope = aten.threshold_backward(flat_slope, flat, 0)
        slope = flat_slope.view(below2.shape)
        self._add("conv2.bias", slope.sum((0, 1, 2)))
        below, kernels = self.second.backward(slope)
        self._add("conv2.weight", kernels)
        slope = aten.threshold_backward(below.reshape(rows.shape), rows, 0)
        self._add("conv1.bias", slope.sum(0))
        self._add("conv1.weight", self.first.backward(slope))
        if self.gradients is not None:
            self.sgd.apply(self.model, self.gradients, self.velocity, self.start)
        return each

    def _product(self, name: str, slope: torch.Tensor, inputs: torch.Tensor) -> None:
        if self.gradients is None:
            self.named[name].addmm_(slope, inputs, alpha=-self.sgd.rate)
        else:
            torch.mm(slope, inputs, out=self.slopes[name])

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        if self.gradients is None:
            self.named[name].sub_(gradient, alpha=self.sgd.rate)
        else:
            self.slopes[name].copy_(gradient)
