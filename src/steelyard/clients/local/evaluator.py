"""Testing many models on many samples: whole test sets in large batches, all models together where kernels do it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from steelyard.clients.local.convolution.stacked import ConvSteps
from steelyard.clients.local.device_data.dataset import DeviceDataset
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.networks import is_convolutional, is_dense
from steelyard.clients.local.engines.precision import arithmetic
from steelyard.clients.local.engines.worker_threads import threads_for
from steelyard.clients.local.kernels.available import kernel_steps
from steelyard.clients.local.settings import Precision
from steelyard.learning import losses
from steelyard.learning.descent import Descent
from steelyard.learning.evaluation import predictions
from steelyard.learning.training import class_weights
from steelyard.messages import LossState

if TYPE_CHECKING:
    from steelyard.clients.local.kernels.steps import KernelSteps


class Evaluator:
    """Runs models over rows of a data set; use it for every client's local test set and for the server's."""

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup
        self.module = copy.deepcopy(setup.module).to(setup.device).eval()
        self.kernels = self._kernels(setup)
        self._ours = is_convolutional(setup.module) or is_dense(setup.module)
        if setup.device.type == "cpu":
            # Convolutions and pooling run several times faster on the CPU with channels last; dense layers ignore it.
            self.module = self.module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    @staticmethod
    def _kernels(setup: TrainingSetup) -> KernelSteps | None:
        """Our own kernels, which test all models in one launch, where there are some for this network."""
        if not is_convolutional(setup.module) or setup.device.type != "cuda":
            return None
        steps = ConvSteps(setup.module, setup.layout, half=False)
        return kernel_steps(steps, Descent.of(setup.training), _tested(setup.precision), setup.device)

    def outputs(self, models: torch.Tensor, dataset: DeviceDataset, rows: torch.Tensor) -> torch.Tensor:
        """Return the outputs of each model on each row: [models, rows, outputs]."""
        if not len(models) or not len(rows):
            return torch.zeros((len(models), len(rows), max(dataset.classes, 1)), device=self.setup.device)
        small = threads_for(self.setup.device, self.setup.layout.size)
        with small, torch.no_grad(), arithmetic(_tested(self.setup.precision), self.setup.device):
            if self.kernels is not None:
                return self._together(self.kernels, models, dataset, rows)
            found: list[list[torch.Tensor]] = [[] for _ in range(len(models))]
            for part in rows.split(self._batch(dataset)):
                features = dataset.gather(part)
                for number, model in enumerate(models):
                    self.setup.layout.write(self.module, model)
                    # A user's module may write into what it is given: the next model must not see that.
                    found[number].append(self.module(features if self._ours else features.clone()))
        return torch.stack([torch.cat(parts) for parts in found])

    def _together(
        self, steps: KernelSteps, models: torch.Tensor, dataset: DeviceDataset, rows: torch.Tensor
    ) -> torch.Tensor:
        """All models in one launch, on as many rows at a time as a tenth of the memory holds."""
        native = steps.native(models.to(self.setup.device))
        fits = int(0.1 * self.setup.memory / (4 * len(models) * steps.sample_floats(len(rows))))
        parts = rows.split(max(64, min(fits, len(rows))))
        return torch.cat([steps.outputs_of(native, dataset, part) for part in parts], dim=1)

    def test(
        self, models: torch.Tensor, dataset: DeviceDataset, rows: torch.Tensor, loss: LossState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return predictions and per-sample losses (class weights left out), both [models, rows]."""
        outputs = self.outputs(models, dataset, rows)
        labels = dataset.labels[rows]
        each = losses.per_sample(loss)
        # Small operators too: two threads on a busy machine would wait for each other at every call.
        with threads_for(self.setup.device, self.setup.layout.size):
            per_model = [each(mine, labels) for mine in outputs]
        return predictions(outputs, dataset.classes), torch.stack(per_model) if per_model else outputs[..., 0]

    def losses(
        self, models: torch.Tensor, dataset: DeviceDataset, rows: torch.Tensor, labels: torch.Tensor, loss: LossState
    ) -> torch.Tensor:
        """Return per-sample losses [models, rows] on labels of one's own, class weights counted, as in training."""
        outputs = self.outputs(models, dataset, rows)
        each, weights = losses.per_sample(loss), class_weights(loss, outputs.device)
        with threads_for(self.setup.device, self.setup.layout.size):
            return torch.stack([losses.weigh(each(mine, labels), labels, weights) for mine in outputs])

    def _batch(self, dataset: DeviceDataset) -> int:
        """Rows at once: a tenth of the memory, with some 200 floats of activations per input number at the worst."""
        fits = int(0.1 * self.setup.memory / (200 * dataset.sample_bytes))
        return max(64, min(fits, 4096 if self.setup.device.type == "cuda" else 1024))


def _tested(precision: Precision) -> Precision:
    """A model is tested in TF32 where it is trained in bfloat16: what counts is the model, not its rounding."""
    return "tf32" if precision == "bfloat16" else precision
