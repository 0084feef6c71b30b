"""Steps of the convolutional network for stacked clients through kernels of our own: about ten launches a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from steelyard.clients.local.cnn import first, layers, second
from steelyard.clients.local.cnn.steps import ConvSteps
from steelyard.clients.local.cnn.tiles import ARITHMETIC, Images, Shape
from steelyard.clients.local.cohort import CurrentStep
from steelyard.clients.local.population import DeviceDataset
from steelyard.clients.local.steps import SHARES, Writer, dense, dense_back, output_gradient, writer
from steelyard.learning.descent import Descent
from steelyard.messages.updates import LossState

FEW = 64
"""Samples a client up to which a dense layer is bound by reading its weights; beyond, the library's products are."""
WIDEST = 128
"""Outputs up to which the last layer and the loss fit one program."""


MOST_CHANNELS = 64
"""Channels of a convolution up to which its sums fit the registers of one program."""
MOST_SUMS = 4096
"""The same for the sums of the first convolution's gradient: outputs times numbers under four windows."""


class KernelSteps:
    """One step of a stack on a GPU with Triton; use it in place of the gathered windows of ConvSteps."""

    def __init__(self, steps: ConvSteps, descent: Descent, precision: str) -> None:
        self.steps, self.descent, self.size, self.trained = steps, descent, steps.size, steps.size
        self.shares, self.draws, self.first_is_shared = SHARES, False, False
        self.moved: Sequence[slice] = [slice(None)]
        self.order: object = steps
        self.native, self.restore = steps.native, steps.restore
        self.how = ARITHMETIC[precision]
        self.below = ARITHMETIC["float32" if precision == "float32" else "tf32"]
        """Dense layers are bound by memory: shorter numbers than TF32 would gain nothing."""
        self.kind = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self.stream: torch.cuda.Stream | None = None
        depth, height, width = steps.image
        inner, outer = steps.channels
        self.first = Shape(height, width, depth, steps.kernel, inner, steps.rectified)
        self.second = Shape(height // 2, width // 2, inner, steps.kernel, outer, steps.rectified)
        self.outputs = steps.slots["dense2.weight"][1][0]
        self.head = layers.HeadOffsets(
            *(steps.slots[name][0] for name in ("dense2.weight", "dense2.bias", "dense1.bias"))
        )

    @property
    def fits(self) -> bool:
        """Whether programs of these kernels are large enough for the network's channels."""
        wide, pixels = self.first.square
        return max(self.steps.channels) <= MOST_CHANNELS and wide * pixels <= MOST_SUMS

    def sample_floats(self, samples: int) -> int:
        """Numbers a sample takes while a step runs: what the layers keep, codes as quarters of a number."""
        inner = self.first.area * self.first.outputs
        outer = self.second.area * self.second.outputs
        dense = sum(3 * shape[0] for name, (_, shape) in self.steps.slots.items() if name.startswith("dense"))
        return 3 * inner + 8 * outer + dense

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, current: CurrentStep, loss: LossState) -> None:
        """Do the step in place (`into` is None) or write the gradients; add up the losses."""
        samples, rate, how = current.samples, self.descent.rate, self.how
        views, slots = self.steps.views(models), self.steps.slots
        images = self._seen(current, len(models))
        below, codes = first.forward(self.first, images, views["conv1.weight"], how, self.kind)
        kernels, turned = second.prepare(self.second, views["conv2.weight"], self.kind)
        flat, codes2 = second.forward(self.second, below, kernels, views["conv2.bias"], samples, how)
        flat = flat.view(len(models), samples, -1)
        dense_layers = self._few if samples <= FEW else self._many
        slope = dense_layers(models, into, flat, current, loss)
        full = second.spread(self.second, slope, codes2, self.kind)
        own = (slots["conv2.weight"][0], slots["conv2.bias"][0])
        with self._beside(models.device):
            second.step(self.second, below, full, slope, codes2, models, into, own, samples, rate, how)
        slope1 = second.input_gradient(self.second, full, turned, samples, how)
        first.step(self.first, images, slope1, codes, models, into, self.steps.widths[0], rate, how)
        self._together(models.device)

    def _few(
        self, models: torch.Tensor, into: torch.Tensor | None, flat: torch.Tensor, current: CurrentStep, loss: LossState
    ) -> torch.Tensor:
        """The dense layers where they are bound by memory: every weight is read twice and written once."""
        views = self.steps.views(models)
        target = None if into is None else self.steps.views(into)["dense1.weight"]
        shares = layers.forward(flat, views["dense1.weight"], self.below)
        if loss.name == "cross-entropy" and self.outputs <= WIDEST:
            tables = (current.tables.labels, current.tables.weights, current.tables.report)
            slope = layers.head(
                shares, models, into, tables, current.counter, current.losses, self.head, self.outputs,
                self.descent.rate, self.below,
            )  # fmt: skip
        else:
            hidden = shares.sum(0).add_(views["dense1.bias"][:, None, :]).relu_()
            slope = self._head(models, into, hidden, current, loss)
            self._writer(models, into).sum("dense1.bias", slope)
        return layers.backward(slope, flat, views["dense1.weight"], target, self.descent.rate, self.below)

    def _many(
        self, models: torch.Tensor, into: torch.Tensor | None, flat: torch.Tensor, current: CurrentStep, loss: LossState
    ) -> torch.Tensor:
        """The dense layers where they are bound by arithmetic: the library's batched products."""
        views = self.steps.views(models)
        hidden = dense(flat, "dense1", views).relu_()
        slope = self._head(models, into, hidden, current, loss)
        return dense_back(slope, flat, "dense1", views, self._writer(models, into))

    def _head(
        self,
        models: torch.Tensor,
        into: torch.Tensor | None,
        hidden: torch.Tensor,
        current: CurrentStep,
        loss: LossState,
    ) -> torch.Tensor:
        """The last layer with any loss; returns the slope at the hidden layer."""
        views = self.steps.views(models)
        slope, each = output_gradient(loss)(dense(hidden, "dense2", views), current.labels, current.weights)
        current.add(each)
        below = dense_back(slope, hidden, "dense2", views, self._writer(models, into))
        return torch.ops.aten.threshold_backward(below, hidden, 0)

    def _beside(self, device: torch.device) -> AbstractContextManager[Any]:
        """A second stream for work that nothing waits for in this step: small kernels leave much of a device idle.

        What it reads must stay alive until `_together`: memory that is let go would be handed out again at once.
        """
        if device.type != "cuda":
            return nullcontext()
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self.stream)

    def _together(self, device: torch.device) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(device).wait_stream(self.stream)

    def _writer(self, models: torch.Tensor, into: torch.Tensor | None) -> Writer:
        return writer(self.steps.views(models), None if into is None else self.steps.views(into), self.descent.rate)

    def _seen(self, current: CurrentStep, clients: int) -> Images:
        """The images of a training step."""
        if current.dataset.augment is not None:
            return _laid_out(current.features)
        return self.images(current.dataset, current.tables.rows, current.counter, clients, current.samples)

    def images(
        self, dataset: DeviceDataset, rows: torch.Tensor, counter: torch.Tensor, clients: int, samples: int
    ) -> Images:
        """The images of rows where they lie; kinds of numbers other than bytes and float32 are gathered first."""
        features = dataset.features
        if features.dtype not in (torch.uint8, torch.float32):
            return _laid_out(dataset.gather(rows.index_select(0, counter)[0, :clients, :samples]))
        return Images(features.flatten(1) if features.dim() > 1 else features, rows, counter, samples)

    def outputs_of(self, models: torch.Tensor, dataset: DeviceDataset, rows: torch.Tensor) -> torch.Tensor:
        """Return the outputs of each model on rows of the data set, [models, rows, outputs]; use it for testing.

        `rows` are for all models, [rows], or each model's own, [models, rows].
        """
        counter, samples = torch.zeros(1, dtype=torch.int64, device=models.device), rows.shape[-1]
        images = self.images(dataset, rows.view(1, -1, samples), counter, len(models), samples)
        views = self.steps.views(models)
        below, _ = first.forward(self.first, images, views["conv1.weight"], self.how, self.kind, coded=False)
        kernels = views["conv2.weight"].to(self.kind)
        bias = views["conv2.bias"]
        flat, _ = second.forward(self.second, below, kernels, bias, samples, self.how, coded=False)
        flat = flat.view(len(models), samples, -1)
        return dense(dense(flat, "dense1", views).relu_(), "dense2", views)


def _laid_out(features: torch.Tensor) -> Images:
    """Images [clients, samples, ...] that were made for one step."""
    clients, samples = features.shape[:2]
    rows = torch.arange(clients * samples, device=features.device).view(1, clients, samples)
    counter = torch.zeros(1, dtype=torch.int64, device=features.device)
    return Images(features.reshape(clients * samples, -1), rows, counter, samples)
