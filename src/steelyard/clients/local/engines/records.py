"""DP-SGD: clients in turn, the gradient of each of a batch's samples by itself through vmap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]

from steelyard.base.errors import UserError, fault
from steelyard.clients.local.cohort import Cohort, Schedule, longest_first
from steelyard.clients.local.engines.engine import Engine, Jobs, Slopes, TrainingSetup
from steelyard.clients.local.engines.steps import MappedGradient
from steelyard.clients.local.hardware import shortened
from steelyard.clients.local.layers import stackable
from steelyard.clients.local.population import DeviceDataset
from steelyard.learning.descent import StackDescent
from steelyard.learning.parameters import still_layers
from steelyard.learning.records import RecordNoise
from steelyard.learning.training import class_weights
from steelyard.messages.updates import LossState

SampleGradients = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(model, features, labels, streams of chance) → the gradient of each sample by itself, [samples, parameters]."""
_COPIES = 8
"""Times the gradients of some samples that they and what is computed on the way take in memory."""


class RecordsEngine(Engine):
    """Trains clients by DP-SGD; use it, and no other, under [privacy.records]: no loss is reported."""

    name, choice = "records", "auto"

    def __init__(self, setup: TrainingSetup, noise: RecordNoise) -> None:
        super().__init__(setup)
        self.noise = noise
        self.at_once = max(1, setup.memory // (_COPIES * 4 * setup.layout.size))
        self._module = stackable(setup.module, products=False).to(setup.device)

    def cut(self, cohort: Cohort) -> list[Jobs]:
        return list(longest_first(cohort)[:, None])

    def stack(self, cohort: Cohort, jobs: Jobs, out: torch.Tensor, whole: int) -> torch.Tensor:
        for job, row in enumerate(jobs):
            out[row].copy_(self._trained(cohort, job))
        return torch.zeros(len(jobs), dtype=torch.float64, device=self.setup.device)

    def slopes(self, cohort: Cohort, plan: Schedule, whole: int) -> Slopes:
        raise NotImplementedError("algorithms that take the steps themselves are refused with [privacy.records]")

    def _trained(self, cohort: Cohort, job: int) -> torch.Tensor:
        """Return the model that a client ends a round with."""
        size, device, corrections = int(cohort.sizes[job]), self.setup.device, cohort.corrections
        model = cohort.starts[cohort.origin[job]].to(device)[None].clone()
        optimiser = StackDescent(cohort.descent, model, (slice(self.setup.layout.trained),))
        optimiser.begin(model, None if corrections is None else corrections[job : job + 1].to(device))
        gradients = self._gradients(cohort, job)
        for step in range(int(cohort.counts[job])):
            slope = self.noise.slope(model[0], size, partial(gradients, step), self.at_once)
            optimiser.apply(model, slope[None], step)
        return model[0]

    def _gradients(self, cohort: Cohort, job: int) -> Callable[[int, torch.Tensor, NDArray[np.int64]], torch.Tensor]:
        """Return what takes, in a step of a client, the gradients of some of its samples."""
        of_each = self.of_each(cohort.loss_of(job))
        features, labels = cohort.samples(job)
        key, augment = cohort.chance(job), cohort.dataset.augment

        def gradients(step: int, model: torch.Tensor, places: NDArray[np.int64]) -> torch.Tensor:
            rows = torch.from_numpy(places).to(features.device)
            seen = features[rows]
            if augment is not None:
                seen = augment(seen, torch.tensor([key, step], device=seen.device))
            # A stream for each sample, so that dropout leaves out other units in each.
            return of_each(model, seen, labels[rows], torch.stack([rows ^ key, torch.full_like(rows, step)], dim=1))

        return gradients

    def of_each(self, loss: LossState) -> SampleGradients:
        """Return what takes the gradients of single samples under a loss."""
        layout, kappa = self.setup.layout, class_weights(loss, self.setup.device)
        gradient = MappedGradient(self._module, layout.trained_names, loss, shared=True)

        def of(model: torch.Tensor, seen: torch.Tensor, target: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
            weights = seen.new_ones(len(seen), dtype=torch.float32) if kappa is None else kappa[target.long()]
            samples = [each[:, None] for each in (seen, target, weights, torch.ones_like(weights, dtype=torch.bool))]
            with shortened(self.setup.precision, seen.device):
                found, _ = gradient(layout.views(model), *samples, chance)
            flat = torch.cat([found[slot.name].reshape(len(seen), -1) for slot in layout.trained_slots], dim=1)
            return pad(flat, (0, layout.size - layout.trained))

        return of

    def check(self, loss: LossState, dataset: DeviceDataset) -> None:
        """Refuse a model or a loss under which a sample of this data set has no gradient of its own."""
        still = set(map(id, still_layers(self.setup.module)))
        layers = [layer for layer in self.setup.module.modules() if id(layer) not in still]
        running = any(isinstance(layer, _InstanceNorm) and layer.track_running_stats for layer in layers)
        if self.setup.batch_norm or running:
            what = "keeps running means of the samples (instance norm)" if running else "has batch norm"
            raise UserError(
                f"model.name: the model {what}, so that a sample changes what others give, and privacy.records cannot "
                "clip that; allowed: group norm (torch.nn.GroupNorm) or layer norm in its place"
            )
        if loss.name == "cox":
            raise UserError(
                "training.loss: got 'cox' with privacy.records, and it compares the samples of a batch, so that none "
                "has a gradient of its own; allowed: other losses, or privacy.local"
            )

        few = torch.arange(min(2, len(dataset.labels)), device=dataset.device)
        try:
            with torch.no_grad():
                model = self.setup.layout.read(self.setup.module).to(dataset.device)
                chance = torch.zeros(len(few), 2, dtype=torch.int64, device=dataset.device)
                self.of_each(loss)(model, dataset.gather(few), dataset.labels[few], chance)
        except UserError:
            raise
        except Exception as error:  # whatever a module of the user's does
            raise UserError(
                "model.name: no gradient can be taken of single samples, which privacy.records needs "
                f"({fault(error)}); allowed: a model that torch.func.vmap takes"
            ) from error

    def settled(self, cohort: Cohort) -> str:
        """Return what compute.engine is, since there is no other engine to choose."""
        return self.choice

    def describe(self) -> Mapping[str, str]:
        """Return what was chosen and why."""
        return {"engine_choice": self.choice, "engine_reason": "gradients of single samples, for privacy.records"}
