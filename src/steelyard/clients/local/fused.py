"""One client of the convolutional network after another, with the step derived by hand on the library's convolutions.

On the CPU, clients are shared out to threads with one operator thread each. What is saved over autograd: no gradient
buffers (products go straight into the weights), pooling before ReLU, channels last throughout, the gradients of a
convolution asked for one by one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from steelyard.clients.local.cohort import Cohort, Workshop
from steelyard.clients.local.convolution import ConvOrder
from steelyard.clients.local.gradients import OutputGradient, Sgd, output_gradient
from steelyard.clients.local.precision import arithmetic
from steelyard.clients.local.stacked import by_work
from steelyard.clients.local.team import Team
from steelyard.learning.models import ConvNet
from steelyard.learning.training import batch_limit

aten = torch.ops.aten


class FusedEngine:
    """Trains clients of a ConvNet one at a time on each thread; use it on the CPU."""

    name = "fused"

    def __init__(self, shop: Workshop, module: ConvNet) -> None:
        self.shop = shop
        self.order = ConvOrder(module, shop.layout)
        self.team = Team(shop.threads)

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        lost = torch.zeros(len(cohort), dtype=torch.float64, device=self.shop.device)
        starts = {int(place): self.order.native(cohort.starts[place].to(out.device)[None])[0]
                  for place in np.unique(cohort.origin)}  # fmt: skip

        def work(job: np.int64) -> None:
            model = starts[int(cohort.origin[job])].clone()
            client = FusedClient(self.order, model, Sgd.of(self.shop.training), self.shop.precision == "bfloat16")
            lost[job] = self._one(cohort, int(job), client)
            out[job].copy_(self.order.restore(model[None])[0])

        with arithmetic(self.shop.precision, self.shop.device), torch.no_grad():
            # Longest first, so that no thread is left with a long client at the end.
            self.team.run(work, list(by_work(cohort, self.shop.training)))
        return lost.cpu().numpy()

    def _one(self, cohort: Cohort, job: int, client: FusedClient) -> torch.Tensor:
        training = self.shop.training
        features, labels = cohort.samples(job)
        images = features.reshape(-1, *self.order.image).contiguous(memory_format=torch.channels_last)
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
    """One client's model in native order and its training step."""

    def __init__(self, order: ConvOrder, model: torch.Tensor, sgd: Sgd, half: bool) -> None:
        self.order, self.model, self.sgd = order, model, sgd
        self.dtype = torch.bfloat16 if half else torch.float32
        self.named = order.views(model)
        self.kernels1, self.kernels2 = order.kernels(model, "conv1.weight"), order.kernels(model, "conv2.weight")
        self.gradients = None if sgd.plain else torch.zeros_like(model)
        self.slopes = {} if self.gradients is None else order.views(self.gradients)
        self.velocity = torch.zeros_like(model) if sgd.momentum else None
        self.start = model.clone() if sgd.proximal else None

    def step(
        self, images: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, gradient: OutputGradient
    ) -> torch.Tensor:
        """Do one step of SGD in place; return each sample's loss."""
        named, samples = self.named, len(labels)
        # The first convolution of a grey image is too thin for half precision to pay.
        first = self.dtype if images.shape[1] > 1 else torch.float32
        images = images.to(first)
        kernels1, kernels2 = self.kernels1.to(first), self.kernels2.to(self.dtype)
        raw1, below1, where1 = self._convolve(images, kernels1, named["conv1.bias"])
        raw2, below2, where2 = self._convolve(below1, kernels2, named["conv2.bias"])
        flat = below2.permute(0, 2, 3, 1).reshape(samples, -1).float()
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
        slope = flat_slope.view(samples, *below2.shape[2:], -1).permute(0, 3, 1, 2)
        slope = self._unpool(slope, raw2, where2, "conv2.bias").to(self.dtype)
        below = self._convolution_slope(slope, below1, kernels2, inputs=True).to(below1.dtype)
        self._add_kernels("conv2.weight", self._convolution_slope(slope, below1, kernels2, inputs=False))
        slope = self._unpool(aten.threshold_backward(below, below1, 0), raw1, where1, "conv1.bias").to(first)
        self._add_kernels("conv1.weight", self._convolution_slope(slope, images, kernels1, inputs=False))
        if self.gradients is not None:
            self.sgd.apply(self.model, self.gradients, self.velocity, self.start)
        return each

    def _convolve(
        self, images: torch.Tensor, kernels: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raw = functional.conv2d(images.to(kernels.dtype), kernels, padding=self.order.kernel // 2).float()
        pooled, where = aten.max_pool2d_with_indices(raw, [2, 2])
        return raw, pooled.add_(bias[:, None, None]).relu_(), where

    def _unpool(self, slope: torch.Tensor, raw: torch.Tensor, where: torch.Tensor, bias: str) -> torch.Tensor:
        self._add(bias, slope.sum((0, 2, 3)))
        return aten.max_pool2d_with_indices_backward(
            slope, raw, [2, 2], [2, 2], [0, 0], [1, 1], False, where
        )  # fmt: skip

    def _convolution_slope(
        self, slope: torch.Tensor, images: torch.Tensor, kernels: torch.Tensor, *, inputs: bool
    ) -> torch.Tensor:
        """The gradient at a convolution's inputs or kernels; asked for together they take longer than one by one."""
        edge = self.order.kernel // 2
        both = aten.convolution_backward(
            slope,
            images.to(kernels.dtype),
            kernels,
            None,
            [1, 1],
            [edge, edge],
            [1, 1],
            False,
            [0, 0],
            1,
            [inputs, not inputs, False],
        )
        return (both[0] if inputs else both[1]).float()

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

    def _add_kernels(self, name: str, gradient: torch.Tensor) -> None:
        """Gradients of kernels come as [out, in, height, width]; the model keeps them channels last."""
        self._add(name, gradient.permute(0, 2, 3, 1).reshape(len(gradient), -1))
