"""Record-level differential privacy: what one sample of a client changes in all that the client sends (DP-SGD).

In each step a client draws a batch in which each of its n samples is with probability q = B/n, independently of the
others, clips the gradient of each sample to C, and adds noise to their sum:

    g ← (Σ_{i ∈ batch} clip_C(∇ℓ_i(θ)) + N(0, (z·C)² I)) / (q·n)

(M. Abadi et al.: "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.) The optimiser takes g in place of
the batch's gradient; whatever it and the algorithm make of it costs nothing more.

**What is guaranteed.** Two neighbouring cases: a client's sample is there, or a sample that adds nothing to any sum
stands in its place. How many samples a client has is the same in both, so that q, the number of steps and q·n tell
nothing; it is known to all. Each step is then one release about a Poisson batch with Gaussian noise z, and the steps of
all rounds add up as `privacy.accounting` says, for the steps that are taken, and of the clients that are asked. Who
exchanges a sample for another does both at once: (2ε, (1 + e^ε)·δ).

Batches and noise come from the operating system, never from the seed. A batch's realised size is told to nobody: who
knows that a batch was large knows that a sample is more likely in it, which would cost more than is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.learning.settings import TrainingSettings, batches
from steelyard.privacy.accounting import Release
from steelyard.privacy.clipping import clipped_sum, noise_on
from steelyard.privacy.noise import Source, SystemSource, lattice_step, uniforms
from steelyard.privacy.planning import criteria_release, noise_for
from steelyard.privacy.settings import OWNERS_DELTA, PrivacySettings, RecordSettings

Gradients = Callable[[torch.Tensor, NDArray[np.int64]], torch.Tensor]
"""(model, some of a client's samples by their places) → the gradient of each sample, [samples, parameters]."""


class RecordNoise:
    """What each client does to its gradients under [privacy.records], and what that costs each of its samples.

    `criteria` are released beside each update. `most` is the ε that the owner of a node allows at `OWNERS_DELTA`, for
    `rules` side by side: where it takes more noise than the experiment asks for, the node adds that much.
    """

    hosted: Sequence[int] = ()
    """How many samples the clients of a node have; the owner's ε holds for each of their samples, whose ever it is."""

    def __init__(
        self,
        privacy: PrivacySettings,
        training: TrainingSettings,
        rounds: int,
        *,
        criteria: int = 0,
        most: float | None = None,
        rules: int = 1,
        source: Source | None = None,
    ) -> None:
        assert privacy.records is not None
        self.settings: RecordSettings = privacy.records
        self.source = source or SystemSource()
        self._privacy, self._training, self._rounds, self._most = privacy, training, rounds, most
        self._criteria = criteria if privacy.criteria == "charged" else 0
        self._rules = rules
        self.noise = cache(self._noise)
        """From a client's number of samples to its noise multiplier z: the same wherever it is computed."""

    def release(self, samples: int) -> tuple[Release, int]:
        """Return what one step of a client with so many samples is to the accountant, and how many a round has."""
        rate, steps = batches(samples, self._training)
        return Release(self.noise(samples), "poisson", rate), steps

    def deviation(self, samples: int) -> float:
        """Return the standard deviation of a round's noise on each number of an update, by plain steps of length 1."""
        rate, steps = batches(samples, self._training)
        return math.sqrt(steps) * self.noise(samples) * self.settings.clip / (rate * samples)

    def _noise(self, samples: int) -> float:
        """Return the noise that is given, or the least that keeps all rounds within the budget; the owner's if more."""
        budget = self._privacy.budget
        asked = self.settings.noise
        if asked is None:
            assert budget.epsilon is not None, "settings without noise and budget are refused"
            asked = self._least((samples,), budget.epsilon, budget.delta, 1)
        if self._most is None:
            return asked
        return max(asked, self._least(self.hosted or (samples,), self._most, OWNERS_DELTA, self._rules))

    def worst(self, clients: Sequence[int]) -> tuple[float, int]:
        """Return the largest batches and the most steps of some clients: no sample of theirs loses more by its own."""
        found = [batches(samples, self._training) for samples in clients]
        return max(rate for rate, _ in found), max(steps for _, steps in found)

    def _least(self, clients: Sequence[int], epsilon: float, delta: float, rules: int) -> float:
        rate, steps = self.worst(clients)
        times = self._rounds * rules
        beside: dict[Release, int] = {}
        if self._criteria:
            assert self._privacy.criteria_noise is not None, "settings without it are refused"
            beside[criteria_release(self._privacy, self._privacy.criteria_noise)] = self._criteria * times
        return noise_for(epsilon, delta, [(Release(1.0, "poisson", rate), steps * times)], beside)

    def slope(self, model: torch.Tensor, samples: int, gradients: Gradients, at_once: int) -> torch.Tensor:
        """Return g of one step at a model [parameters]; the gradients of `at_once` samples lie in memory together."""
        clip, deviation = self.settings.clip, self.noise(samples) * self.settings.clip
        rate, _ = batches(samples, self._training)
        fine = lattice_step(deviation)
        batch = np.flatnonzero(uniforms(self.source, samples) < rate)
        total = torch.zeros_like(model, dtype=torch.float64)
        for begin in range(0, len(batch), at_once):
            each = gradients(model, batch[begin : begin + at_once])
            total += clipped_sum(each, torch.zeros_like(model), np.ones(len(each)), clip, fine)
        total += noise_on(model, deviation, fine, self.source)
        return (total * (fine / (rate * samples))).to(model.dtype)
