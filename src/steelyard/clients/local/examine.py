"""Testing many models on many samples: whole test sets in large batches, one model after another."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from steelyard.clients.local.cohort import Workshop
from steelyard.clients.local.convolution import ConvSteps
from steelyard.clients.local.precision import arithmetic
from steelyard.clients.local.stock import Shelf
from steelyard.clients.local.team import threads_for
from steelyard.learning import losses
from steelyard.learning.evaluation import predictions
from steelyard.learning.models import ConvNet
from steelyard.messages import LossState


class Examiner:
    """Runs models over rows of a data set; use it for every client's local test set and for the server's."""

    def __init__(self, shop: Workshop) -> None:
        self.shop = shop
        self.module = copy.deepcopy(shop.module).to(shop.device).eval()
        self.steps: ConvSteps | None = None
        if shop.device.type == "cuda" and type(shop.module) is ConvNet:
            self.steps = ConvSteps(shop.module, shop.layout, half=False)
        if shop.device.type == "cpu":
            # Convolutions and pooling run several times faster on the CPU with channels last; dense layers ignore it.
            self.module = self.module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def outputs(self, models: torch.Tensor, shelf: Shelf, rows: torch.Tensor) -> torch.Tensor:
        """Return what each model says of each row: [models, rows, outputs]."""
        if not len(models) or not len(rows):
            return torch.zeros((len(models), len(rows), max(shelf.classes, 1)), device=self.shop.device)
        said: list[list[torch.Tensor]] = [[] for _ in range(len(models))]
        precision = "tf32" if self.shop.precision == "bfloat16" else self.shop.precision
        small = threads_for(self.shop.device, self.shop.layout.size)
        with small, torch.no_grad(), arithmetic(precision, self.shop.device):
            for part in rows.split(self._batch(shelf)):
                answer = self._answerer(shelf.gather(part))
                for place, model in enumerate(models):
                    said[place].append(answer(model))
        return torch.stack([torch.cat(parts) for parts in said])

    def _answerer(self, features: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function from a flat model to what it says of these samples."""
        if self.steps is not None:
            # What is gathered from the images serves every model that is tested on them.
            steps, seen = self.steps, self.steps.first_windows(features)
            return lambda model: steps.outputs(steps.native(model[None])[0], seen)

        def answer(model: torch.Tensor) -> torch.Tensor:
            self.shop.layout.write(self.module, model)
            return self.module(features)

        return answer

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
