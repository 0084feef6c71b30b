"""One client of the convolutional network after another on the CPU, with the step derived by hand.

Clients are shared out to threads with one operator thread each. What is saved over autograd: no gradient buffers
(products go straight into the weights), pooling before ReLU, channels last throughout, the first convolution and its
pooling as four products, the second one by the library or with fewer multiplications (`pooled`).

The first convolution gathers no window. A pooled number looks at a patch of (k+1)×(k+1) pixels. Plane (u, v) holds
pixel (u, v) of every patch, so the number at corner (a, b) of a 2×2 pool needs planes a … a+k−1 × b … b+k−1. Give the
kernel one more column of zeros, and those planes stand in memory as one slab without a gap: planes are laid out once a
batch, and each of the four corners is a product of its slab with the kernels. Pooling then is the maximum over four
matrices.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from steelyard.clients.local.cnn.pooled import (
    Corners,
    LibraryConvolution,
    PooledConvolution,
    Scratch,
    WinogradConvolution,
    largest,
    send_back,
)
from steelyard.clients.local.cnn.steps import ConvOrder
from steelyard.clients.local.cohort import Cohort
from steelyard.clients.local.engines.engine import Jobs, TrainingSetup
from steelyard.clients.local.engines.loop import LoopEngine
from steelyard.clients.local.hardware import on_large_pages
from steelyard.clients.local.steps import OutputGradient, output_gradient
from steelyard.learning.descent import Descent, StackDescent
from steelyard.learning.models import ConvNet
from steelyard.learning.parameters import names_of
from steelyard.learning.training import batch_limit
from steelyard.messages.algorithm import Part


@dataclass(frozen=True, eq=False)
class _Table:
    """Memory and views for batches of one size; made once, since threads wait for each other over every call."""

    patches: torch.Tensor
    slabs: Corners
    turned: Corners
    """The slabs, transposed."""
    whole: torch.Tensor
    """[4, n · pools, channels]: the corners."""
    corners: Corners
    top: torch.Tensor


class FirstConvolution:
    """relu(max-pool(convolution) + bias) of images, and the gradient at its kernels; one for every thread.

    Without `rectified` the ReLU is left out.
    """

    def __init__(self, image: tuple[int, int, int], kernel: int, channels: int, *, rectified: bool = True) -> None:
        self.depth, height, width = image
        self.kernel, self.channels, self.rectified = kernel, channels, rectified
        self.pooled = (height // 2, width // 2)
        self.starts = tuple(((a * (kernel + 1)) + b) * self.depth for a in (0, 1) for b in (0, 1))
        self.taps = kernel * (kernel + 1) * self.depth
        # Half the padded image, counted in pools: the patch of the last one ends (k−1)/2 pools beyond it.
        self.halves = (self.pooled[0] + kernel // 2, self.pooled[1] + kernel // 2)
        wide = torch.zeros((channels, kernel, kernel + 1, self.depth))
        self._kernels, self._wide = wide[:, :, :kernel], wide.view(channels, -1).t()
        self._total = torch.empty((self.taps, channels))
        kept = self._total.view(kernel, kernel + 1, self.depth, channels)[:, :kernel]
        self._kept = kept.permute(3, 0, 1, 2)
        self._scratch = Scratch()
        self._tables: dict[int, _Table] = {}

    def split(self, images: torch.Tensor) -> torch.Tensor:
        """Return images [n, depth, height, width] padded and split by odd and even rows and columns; once a client."""
        edge, (rows, columns) = self.kernel // 2, self.halves
        height, width = images.shape[2:]
        padding = (edge, 2 * columns - width - edge, edge, 2 * rows - height - edge)
        padded = functional.pad(images, padding)  # an odd last row that no pool looks at is cut off: negative padding
        return padded.view(-1, self.depth, rows, 2, columns, 2).permute(0, 1, 3, 5, 2, 4).contiguous()

    def forward(self, split: torch.Tensor, kernels: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Return relu(maximum + bias) [n · pools, channels] of split images.

        `kernels` are [channels, k · k · depth], channels of the image last.
        """
        table = self._table = self._tables.get(len(split)) or self._laid(len(split))
        side, (down, across) = self.kernel + 1, self.pooled
        image, channel, odd_row, odd_column, row, column = split.stride()
        seen = split.as_strided(
            (side // 2, 2, side // 2, 2, self.depth, len(split), down, across),
            (row, odd_row, column, odd_column, channel, image, row, column),
            split.storage_offset(),
        )
        table.patches.copy_(seen)
        self._kernels.copy_(kernels.view(self._kernels.shape))
        for slab, corner in zip(table.turned, table.corners, strict=True):
            torch.mm(slab, self._wide, out=corner)
        found = largest(table.corners, table.top) + bias
        return found.relu_() if self.rectified else found

    def backward(self, slope: torch.Tensor) -> torch.Tensor:
        """Return the gradient at the kernels from the slope at the pooled numbers (ReLU's part done)."""
        table = self._table
        table.whole.eq_(table.top)
        send_back(slope, table.corners)
        for number, (slab, corner) in enumerate(zip(table.slabs, table.corners, strict=True)):
            self._total.addmm_(slab, corner, beta=min(number, 1))
        return self._kept.reshape(self.channels, -1)

    def _laid(self, count: int) -> _Table:
        side, (down, across) = self.kernel + 1, self.pooled
        rows, wide = side * side * self.depth, count * down * across
        if self._scratch.grown(count):
            self._tables.clear()
        planes = self._scratch.tensor("planes", rows + self.depth, wide)
        planes[rows:].zero_()  # the last slab reaches one plane beyond, where the kernel is 0
        whole = self._scratch.tensor("corners", 4, wide, self.channels)
        slabs = tuple(planes[start : start + self.taps] for start in self.starts)
        table = _Table(
            patches=planes[:rows].view(side // 2, 2, side // 2, 2, self.depth, count, down, across),
            slabs=slabs,
            turned=tuple(slab.t() for slab in slabs),
            whole=whole,
            corners=whole.unbind(),
            top=self._scratch.tensor("top", wide, self.channels),
        )
        self._tables[count] = table
        return table


aten = torch.ops.aten


class FusedClient:
    """One client's model in native order and its training step; a thread uses one for all its clients in turn.

    `names` are the parameters that move.
    """

    def __init__(self, order: ConvOrder, second: PooledConvolution, descent: Descent, names: Collection[str]) -> None:
        self.first = FirstConvolution(order.image, order.kernel, order.channels[0], rectified=order.rectified)
        self.rectified, self.order = order.rectified, order
        self.second, self.rate, self.taken = second, descent.rate, 0
        self.model = on_large_pages(order.layout.size)
        self.named = order.views(self.model)
        self.gradients = None if descent.plain else torch.zeros_like(self.model)
        self.slopes = {} if self.gradients is None else order.views(self.gradients)
        self.names = names
        self.optimiser = StackDescent(descent, self.model[None], order.layout.columns(names))
        self._start: tuple[torch.Tensor, int, torch.Tensor] | None = None
        """The last start, its version, and in native order: clients often begin alike."""

    def begin(self, start: torch.Tensor, descent: Descent, correction: torch.Tensor | None) -> FusedClient:
        """Take the model that the next client starts from, this round's descent, and the client's correction."""
        if self._start is None or self._start[0] is not start or self._start[1] != start._version:
            self._start = start, start._version, self.order.native(start.to(self.model)[None])
        self.model.copy_(self._start[2][0])
        self.rate, self.taken = descent.rate, 0
        self.optimiser.descent = descent
        self.optimiser.begin(
            self.model[None], None if correction is None else self.order.native(correction.to(self.model)[None])
        )
        return self

    def step(
        self, images: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, gradient: OutputGradient
    ) -> torch.Tensor:
        """Do one step of SGD in place on images that are split already; return each sample's loss."""
        named, samples = self.named, len(labels)
        rows = self.first.forward(images, named["conv1.weight"], named["conv1.bias"])
        below1 = rows.view(samples, *self.first.pooled, -1)
        below2 = self.second.forward(below1, named["conv2.weight"]) + named["conv2.bias"]
        if self.rectified:
            below2.relu_()
        flat = below2.view(samples, -1)
        # Weights @ columns beats rows @ weights at small batches, so activations of dense layers stand on end.
        hidden = torch.addmm(named["dense1.bias"][:, None], named["dense1.weight"], flat.t()).relu_()
        outputs = torch.addmm(named["dense2.bias"][:, None], named["dense2.weight"], hidden)
        slope, each = gradient(outputs.t(), labels, weights)
        slope = slope.t().contiguous()

        below = aten.threshold_backward(named["dense2.weight"].t() @ slope, hidden, 0)
        self._product("dense2.weight", slope, hidden.t())
        self._add("dense2.bias", slope.sum(1))
        if "dense1.weight" in self.names:  # else nothing below the head moves
            self._body(below, flat, below2.shape, rows)
        if self.gradients is not None:
            self.optimiser.apply(self.model[None], self.gradients[None], self.taken)
            self.taken += 1
        return each

    def _body(self, slope: torch.Tensor, flat: torch.Tensor, grid: torch.Size, rows: torch.Tensor) -> None:
        """Take the slope at the hidden units down through the network."""
        below = slope.t().contiguous() @ self.named["dense1.weight"]
        self._product("dense1.weight", slope, flat)
        self._add("dense1.bias", slope.sum(1))
        slope = self._cut(below, flat).view(grid)
        self._add("conv2.bias", slope.sum((0, 1, 2)))
        below, kernels = self.second.backward(slope)
        self._add("conv2.weight", kernels)
        slope = self._cut(below.reshape(rows.shape), rows)
        self._add("conv1.bias", slope.sum(0))
        self._add("conv1.weight", self.first.backward(slope))

    def _cut(self, slope: torch.Tensor, passed: torch.Tensor) -> torch.Tensor:
        """The slope below a ReLU after a convolution, where the network has one."""
        return aten.threshold_backward(slope, passed, 0) if self.rectified else slope

    def _product(self, name: str, slope: torch.Tensor, inputs: torch.Tensor) -> None:
        if name not in self.names:
            return
        if self.gradients is None:
            self.named[name].addmm_(slope, inputs, alpha=-self.rate)
        else:
            torch.mm(slope, inputs, out=self.slopes[name])

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        if name not in self.names:
            return
        if self.gradients is None:
            self.named[name].sub_(gradient, alpha=self.rate)
        else:
            self.slopes[name].copy_(gradient)


class FusedEngine(LoopEngine):
    """Trains clients of a ConvNet one at a time on each thread; use it on the CPU.

    With `winograd` the second convolution, most of the work, takes fewer multiplications; it pays at small batches.
    """

    def __init__(self, setup: TrainingSetup, module: ConvNet, *, winograd: bool = False) -> None:
        super().__init__(setup, setup.threads)
        self.name = "fused/winograd" if winograd else "fused"
        self.order = ConvOrder(module, setup.layout)
        self._of_thread = threading.local()

    def stack(self, cohort: Cohort, jobs: Jobs, out: torch.Tensor, whole: int) -> torch.Tensor:
        client, losses = self._client(cohort.descent, cohort.part), list[torch.Tensor]()
        for job, row in enumerate(jobs):
            correction = None if cohort.corrections is None else cohort.corrections[job]
            client.begin(cohort.starts[cohort.origin[job]], cohort.descent, correction)
            losses.append(_train(client, cohort, job))
            out[row].copy_(self.order.restore(client.model[None])[0])
        return torch.stack(losses)

    def _client(self, descent: Descent, part: Part) -> FusedClient:
        """The model and memory of this thread, the same for every client that it trains with such a descent."""
        form = descent.form, part
        if getattr(self._of_thread, "form", None) != form:
            half = torch.bfloat16 if self.setup.precision == "bfloat16" else torch.float32
            kernel = self.order.kernel
            second = WinogradConvolution(kernel) if self.name == "fused/winograd" else LibraryConvolution(kernel, half)
            self._of_thread.client = FusedClient(self.order, second, descent, names_of(self.setup.module, part))
            self._of_thread.form = form
        return self._of_thread.client


def _train(client: FusedClient, cohort: Cohort, job: int) -> torch.Tensor:
    """Train one job of a cohort; return the mean loss of its last pass."""
    training = cohort.training
    features, labels = cohort.samples(job)
    images = features.reshape(-1, *client.order.image)
    augment, key = cohort.dataset.augment, cohort.chance(job)
    if augment is None:
        images = client.first.split(images)
    gradient = output_gradient(cohort.loss)
    order = torch.from_numpy(np.array(cohort.order(job))).to(labels.device)
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
            shown = client.first.split(augment(shown, torch.tensor([key, number])))
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
