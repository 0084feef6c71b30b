"""Testing many models on many samples: whole test sets in large batches, all models together where kernels do it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from steelyard.clients.local import kernels
from steelyard.clients.local.convolution.stacked import ConvSteps
from steelyard.clients.local.device_data.cohort import Workshop
from steelyard.clients.local.device_data.dataset import Shelf
from steelyard.clients.local.engines.precision import arithmetic
from steelyard.clients.local.engines.worker_threads import threads_for
from steelyard.clients.local.settings import Precision
from steelyard.clients.local.steps.gradients import Sgd
from steelyard.learning import losses
from steelyard.learning.evaluation import predictions
from steelyard.learning.models import ConvNet
from steelyard.messages import LossState

if TYPE_CHECKING:
    from steelyard.clients.local.kernels.steps import KernelSteps


class Examiner:
    """Runs models over rows of a data set; use it for every client's local test set and for the server's."""

    def __init__(self, shop: Workshop) -> None:
        self.shop = shop
        self.module = copy.deepcopy(shop.module).to(shop.device).eval()
        self.kernels = self._kernels(shop)
        if shop.device.type == "cpu":
            # Convolutions and pooling run several times faster on the CPU with channels last; dense layers ignore it.
            self.module = self.module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    @staticmethod
    def _kernels(shop: Workshop) -> KernelSteps | None:
        """Our own kernels, which test all models in one launch, where there are some for this network."""
        if type(shop.module) is not ConvNet or shop.device.type != "cuda":
            return None
        steps = ConvSteps(shop.module, shop.layout, half=False)
        return kernels.steps_for(steps, Sgd.of(shop.training), _tested(shop.precision), shop.device)

    def outputs(self, models: torch.Tensor, shelf: Shelf, rows: torch.Tensor) -> torch.Tensor:
        """Return what each model says of each row: [models, rows, outputs]."""
        if not len(models) or not len(rows):
            return torch.zeros((len(models), len(rows), max(shelf.classes, 1)), device=self.shop.device)
        small = threads_for(self.shop.device, self.shop.layout.size)
        with small, torch.no_grad(), arithmetic(_tested(self.shop.precision), self.shop.device):
            if self.kernels is not None:
                return self._together(self.kernels, models, shelf, rows)
            said: list[list[torch.Tensor]] = [[] for _ in range(len(models))]
            for part in rows.split(self._batch(shelf)):
                features = shelf.gather(part)
                for place, model in enumerate(models):
                    self.shop.layout.write(self.module, model)
                    said[place].append(self.module(features))
        return torch.stack([torch.cat(parts) for parts in said])

    def _together(self, steps: KernelSteps, models: torch.Tensor, shelf: Shelf, rows: torch.Tensor) -> torch.Tensor:
        """All models in one launch, on as many rows at a time as a tenth of the memory holds."""
        native = steps.native(models.to(self.shop.device))
        fits = int(0.1 * self.shop.memory / (4 * len(models) * steps.sample_floats(len(rows))))
        parts = rows.split(max(64, min(fits, len(rows))))
        return torch.cat([steps.outputs_of(native, shelf, part) for part in parts], dim=1)

    def judge(
        self, models: torch.Tensor, shelf: Shelf, rows: torch.Tensor, loss: LossState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return predictions and per-sample losses (class weights left out), both [models, rows]."""
        outputs = self.outputs(models, shelf, rows)
        labels = shelf.labels[rows]
        each = losses.per_sample(loss)
        lost = [each(said, labels) for said in outputs]
        return predictions(outputs, shelf.classes), torch.stack(lost) if lost else outputs[..., 0]

    def _batch(self, shelf: Shelf) -> int:
        """Rows at once: a tenth of the memory, with some 200 floats of activations per input number at the worst."""
        fits = int(0.1 * self.shop.memory / (200 * shelf.sample_bytes))
        return max(64, min(fits, 4096 if self.shop.device.type == "cuda" else 1024))


def _tested(precision: Precision) -> Precision:
    """A model is tested in TF32 where it is trained in bfloat16: what counts is the model, not its rounding."""
    return "tf32" if precision == "bfloat16" else precision
