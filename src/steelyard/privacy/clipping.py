"""Updates that are clipped and get noise: by the server once (central), or by every device (local).

**Central**: clip every update to C, sum with bounded weights, add noise once.

    Θ ← Θ + Σ_a w_a · clip_C(u_a) + N(0, (z·C·w_max)² I)        w_a ≤ w_max

One client moves the sum by at most C·w_max, whatever its data are (H. B. McMahan, D. Ramage, K. Talwar, L. Zhang:
"Learning Differentially Private Recurrent Language Models", ICLR 2018, with weights of a rule in place of theirs). That
holds as long as no client's weight depends on another client; docs/algorithms/privacy.md has the argument. Each
client's part is cut to the noise's lattice towards 0, which never makes it longer, so the bound is exact and no
trailing bit shows it.

**Local**: every device clips its update and adds noise before anything leaves it.

    sent = Θ + clip_C(u) + N(0, (z·2C)² I)

Whatever two sets of data a device may hold, their clipped updates differ by at most 2C. Nobody is trusted, not even the
server, and whatever is done with what was sent costs nothing more. Criteria that a device sends are public, or noised
and charged as well; its losses are not sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from steelyard.base.errors import UserError
from steelyard.messages.payloads import DenseModels, Payload, spans
from steelyard.messages.updates import Floats, Task, Updates
from steelyard.privacy.noise import (
    Source,
    SystemSource,
    exponential,
    laplacians,
    lattice_step,
    normals,
    randomised_response,
)
from steelyard.privacy.settings import SIZE, LocalSettings, PrivacySettings

SLACK = 1e-9
"""Updates are clipped to C less this share: norms of millions of numbers round, and the bound must hold."""


def clip_factors(lengths: Floats, clip: float) -> Floats:
    """Return by how much each update is shortened: min(1, C/‖u‖), a little less so that rounding cannot exceed C.

    Nothing shortens an update without a length (NaN, infinite): its factor is 0, and whoever calls leaves it out.
    """
    lengths = np.where(np.isfinite(lengths), lengths, np.inf)
    return clip / np.maximum(lengths, clip) * (1.0 - SLACK)


def lengths_of(models: torch.Tensor, parameters: torch.Tensor) -> Floats:
    """Return ‖Θ_a − Θ‖₂ of each model [clients, parameters] in double precision, some parameters at a time."""
    squares = models.new_zeros(len(models), dtype=torch.float64)
    for _, changes in _changes(models, parameters):
        squares += changes.square().sum(dim=1)
    return squares.sqrt().cpu().numpy()


def bounded_sum(models: torch.Tensor, parameters: torch.Tensor, coefficients: Floats, fine: float) -> torch.Tensor:
    """Return Σ c_a (Θ_a − Θ) as whole multiples of the lattice's step, each client's part cut towards 0: [parameters].

    In double precision, in which whole numbers are exact: the order of the clients changes nothing.
    """
    total = models.new_zeros(models.shape[1], dtype=torch.float64)
    scale = torch.from_numpy(coefficients / fine)[:, None].to(total)
    for here, changes in _changes(models, parameters):
        total[here] = (changes * scale).trunc().sum(dim=0)
    return total


def clipped_sum(
    models: torch.Tensor, parameters: torch.Tensor, weights: Floats, clip: float, fine: float
) -> torch.Tensor:
    """Return Σ w_a clip_C(Θ_a − Θ) in steps of the lattice; who holds NaN or an infinite number is left out."""
    coefficients = weights * clip_factors(lengths_of(models, parameters), clip)
    if not coefficients.all():
        models, coefficients = models[torch.from_numpy(coefficients > 0)], coefficients[coefficients > 0]
    return bounded_sum(models, parameters, coefficients, fine)


def noise_on(like: torch.Tensor, deviation: float, fine: float, source: Source) -> torch.Tensor:
    """Return Gaussian noise of that standard deviation for each number of a vector, in steps of the lattice."""
    noise = np.rint(normals(source, len(like)) * (deviation / fine))
    return torch.from_numpy(noise).to(like.device)


def noisy_sum(
    models: torch.Tensor,
    parameters: torch.Tensor,
    weights: Floats,
    clip: float,
    deviation: float,
    source: Source,
    frozen: tuple[tuple[int, int], ...] = (),
) -> torch.Tensor:
    """Return Θ + Σ w_a clip_C(Θ_a − Θ) + noise of that standard deviation; what is frozen stays as it is.

    With no client at all it is Θ and noise: whether anybody was there must not show. An update that holds NaN or an
    infinite number is left out: no clipping bounds it, and where it holds them is a fact of the data without noise.
    """
    fine = lattice_step(deviation)
    steps = clipped_sum(models, parameters, weights, clip, fine) + noise_on(parameters, deviation, fine, source)
    for begin, end in frozen:
        steps[begin:end] = 0.0
    moved = parameters.to(steps) + steps * fine
    return moved.to(parameters.dtype)


def _changes(models: torch.Tensor, parameters: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield Θ_a − Θ of all models in double precision, some parameters at a time, and which these are."""
    for here in spans(models.shape[1], len(models), models.device.type):
        yield here, models[:, here].double() - parameters[here].to(models.device).double()


def noised(
    raw: Floats, bounds: Floats, noise: float, source: Source, settings: PrivacySettings | None = None
) -> Floats:
    """Return raw criteria [clients, criteria] as they may be released: cut to 0..bound, with noise, and cut again.

    Each number is a release of its own whose sensitivity is the bound: a client's value may be anything in the range.
    `settings` say by which mechanism; Gaussian noise without them.
    """
    mechanism = "gaussian" if settings is None else settings.criteria_mechanism
    released = np.empty_like(raw)
    for column, bound in enumerate(bounds.tolist()):
        if not np.isfinite(bound):
            released[:, column] = np.nan
            continue
        # NaN would go through the noise, and show something of the data by being there.
        cut = np.clip(np.nan_to_num(raw[:, column], nan=0.0), 0.0, bound)
        if settings is not None and settings.criteria_levels is not None:
            released[:, column] = (
                _levelled(cut / bound, mechanism, settings.criteria_levels, 1.0 / noise, source) * bound
            )
            continue
        fine = lattice_step(noise * bound)
        whole = np.trunc(cut / fine)
        draw = laplacians if mechanism == "laplace" else normals
        drawn = np.rint(draw(source, len(raw)) * (noise * bound / fine))
        released[:, column] = np.clip((whole + drawn) * fine, 0.0, bound)
    return released


def _levelled(shares: Floats, mechanism: str, levels: int, epsilon: float, source: Source) -> Floats:
    """Return numbers from 0 to 1 as levels that their owners release, each ε-private by itself."""
    mine = np.rint(shares * (levels - 1)).astype(np.int64)
    if mechanism == "randomised-response":
        return randomised_response(mine, levels, epsilon, source) / (levels - 1)
    # The utility of a level is how near it is; what another client's data would be is at most all levels away.
    every = np.arange(levels, dtype=np.float64)
    found = [exponential(-np.abs(every - level), levels - 1.0, epsilon, source) for level in mine.tolist()]
    return np.array(found, dtype=np.float64) / (levels - 1)


def noisy_models(
    payload: DenseModels, parameters: torch.Tensor, clip: float, deviation: float, source: Source
) -> DenseModels:
    """Return models as each device sends them: the change clipped, noise on every parameter that is trained."""
    sent = torch.empty_like(payload.models)

    def device(row: int) -> None:
        mine = payload.models[row : row + 1]
        sent[row] = noisy_sum(mine, parameters, np.ones(1), clip, deviation, source, payload.frozen)

    rows = range(len(payload.models))
    if not isinstance(source, SystemSource):
        for row in rows:  # a source of a test gives its words in order
            device(row)
        return DenseModels(sent, payload.frozen)
    # Drawing noise is what simulated devices take longest for, and each draws its own.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(device, rows))
    return DenseModels(sent, payload.frozen)


def without_losses(updates: Updates) -> Updates:
    """Return what devices with noise sent, with losses that are unknown, as they sent none; for the record."""
    return replace(updates, losses=np.full(len(updates.clients), np.nan))


class DeviceNoise:
    """What a device does to its answers before it sends them; under [privacy.records] its model carries noise already.

    How many samples a client has is known to all there, so that it stays with its answer.
    """

    def __init__(
        self, settings: PrivacySettings, noise: float, bounds: Mapping[str, float], source: Source | None = None
    ) -> None:
        self.settings, self.noise, self.source = settings, noise, source or SystemSource()
        self._bounds = dict(bounds)

    @property
    def criteria_count(self) -> int:
        """How many criteria a device sends with noise beside its update."""
        return len(self._bounds) if self.settings.criteria == "charged" else 0

    @property
    def criteria_noise(self) -> float:
        """The noise on a criterion that is sent, in units of its bound."""
        return self.settings.criteria_noise or self.noise

    def applied(self, task: Task, updates: Updates) -> Updates:
        """Return the answers of some devices to a task as they may leave them, each noised by itself."""
        local = self.settings.local
        if local is not None:
            updates = replace(updates, payload=self._noisy(task, updates, local), bytes_sent=None, steps=None)
        # A loss says something of the data: 0 travels in its place, and the server takes it for unknown.
        return replace(self._sent(updates), losses=np.zeros(len(updates.clients)), first_losses=None)

    def _noisy(self, task: Task, updates: Updates, local: LocalSettings) -> Payload:
        models, deviation = updates.payload.dense, self.noise * 2.0 * local.clip
        if models is not None:
            return noisy_models(models, task.parameters, local.clip, deviation, self.source)
        if (noisy := updates.payload.noised(local.clip, deviation, self.source)) is None:
            raise UserError(
                "privacy.local: noise cannot be added to what these clients send; allowed: no [privacy.local]"
            )
        return noisy

    def _sent(self, updates: Updates) -> Updates:
        """Return the answers with what may be sent beside the update: public as it is, charged with noise."""
        if self.settings.criteria == "public":
            return updates
        count, sized = len(updates.clients), self.settings.records is not None
        known = {name: values for name, values in updates.criteria.items() if sized and name == SIZE}
        names = [name for name in updates.criteria if name not in known]
        hidden = replace(updates, label_counts=None, criteria=known)
        if not sized:
            hidden = replace(hidden, samples=np.ones(count, dtype=np.int64))
        if self.settings.criteria is None or not names:
            return hidden
        raw = np.stack([updates.criteria[name] for name in names], axis=1)
        bounds = np.array([self._bounds[name] for name in names])
        values = noised(raw, bounds, self.criteria_noise, self.source, self.settings)
        found = {**known, **{name: values[:, column] for column, name in enumerate(names)}}
        if sized or SIZE not in found:
            return replace(hidden, criteria=found)
        # A size is a whole number from 1, and a server refuses one that differs from the samples that are claimed.
        size = np.maximum(1.0, np.rint(found[SIZE]))
        return replace(hidden, criteria={**found, SIZE: size}, samples=size.astype(np.int64))
