"""One client of the convolutional network at a time: its model and its training step, derived by hand, on the CPU."""

from __future__ import annotations

import torch

from steelyard.clients.local.convolution.first import FirstConvolution
from steelyard.clients.local.convolution.order import ConvOrder
from steelyard.clients.local.convolution.pooled import PooledConvolution
from steelyard.clients.local.device_data.memory import on_large_pages
from steelyard.clients.local.steps.gradients import OutputGradient
from steelyard.learning.descent import Descent, StackDescent

aten = torch.ops.aten


class FusedClient:
    """One client's model in native order and its training step; a thread uses one for all its clients in turn."""

    def __init__(self, order: ConvOrder, second: PooledConvolution, descent: Descent) -> None:
        self.first = FirstConvolution(order.image, order.kernel, order.channels[0], rectified=order.rectified)
        self.rectified = order.rectified
        self.second, self.rate, self.taken = second, descent.rate, 0
        self.model = on_large_pages(order.layout.size)
        self.named = order.views(self.model)
        self.gradients = None if descent.plain else torch.zeros_like(self.model)
        self.slopes = {} if self.gradients is None else order.views(self.gradients)
        self.optimiser = StackDescent(descent, self.model)

    def begin(self, start: torch.Tensor, descent: Descent, correction: torch.Tensor | None) -> FusedClient:
        """Take the model that the next client starts from, this round's descent, and the client's correction."""
        self.model.copy_(start)
        self.rate, self.taken = descent.rate, 0
        self.optimiser.descent = descent
        self.optimiser.begin(start, correction)
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
        slope = below
        flat_slope = slope.t().contiguous() @ named["dense1.weight"]
        self._product("dense1.weight", slope, flat)
        self._add("dense1.bias", slope.sum(1))
        slope = self._cut(flat_slope, flat).view(below2.shape)
        self._add("conv2.bias", slope.sum((0, 1, 2)))
        below, kernels = self.second.backward(slope)
        self._add("conv2.weight", kernels)
        slope = self._cut(below.reshape(rows.shape), rows)
        self._add("conv1.bias", slope.sum(0))
        self._add("conv1.weight", self.first.backward(slope))
        if self.gradients is not None:
            self.optimiser.apply(self.model, self.gradients, self.taken)
            self.taken += 1
        return each

    def _cut(self, slope: torch.Tensor, passed: torch.Tensor) -> torch.Tensor:
        """The slope below a ReLU after a convolution, where the network has one."""
        return aten.threshold_backward(slope, passed, 0) if self.rectified else slope

    def _product(self, name: str, slope: torch.Tensor, inputs: torch.Tensor) -> None:
        if self.gradients is None:
            self.named[name].addmm_(slope, inputs, alpha=-self.rate)
        else:
            torch.mm(slope, inputs, out=self.slopes[name])

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        if self.gradients is None:
            self.named[name].sub_(gradient, alpha=self.rate)
        else:
            self.slopes[name].copy_(gradient)
