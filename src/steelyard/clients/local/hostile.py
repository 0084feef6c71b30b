"""What hostile clients send in place of their updates; they act on the stacked models of a cohort, after training.

u is the client's own update Θ_a − Θ, μ and σ are the mean and the standard deviation of the honest updates of its
cohort, coordinate by coordinate. The omniscient attacks see them all, and all hostile clients send the same.

    reversed   −s · u                        sign flip for s = 1, scaled reversal for s = 10
    boosted    s · u, s = n/m by default     E. Bagdasaryan et al.: "How To Backdoor Federated Learning" (AISTATS 2020)
    bias       u + s · ‖u‖ · e_b             b is the bias of one class in the last layer
    gaussian   s · rms(u) · z, z ~ N(0, I)   noise s times as large as the update
    alie       μ − s · σ                     G. Baruch, M. Baruch, Y. Goldberg: "A Little Is Enough" (NeurIPS 2019)
    ipm        −s · μ                        C. Xie, O. Koyejo, I. Gupta: "Fall of Empires" (UAI 2019)
    min-max    μ − γ · σ                     V. Shejwalkar, A. Houmansadr: "Manipulating the Byzantine" (NDSS 2021)

with γ of min-max the greatest for which max_i ‖μ − γσ − u_i‖ ≤ max_ij ‖u_i − u_j‖ over the honest i, j.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from steelyard.base import randomness
from steelyard.data.dataset import HONEST, Behaviour
from steelyard.data.flaws import OMNISCIENT
from steelyard.learning.parameters import Layout
from steelyard.messages.payloads import DenseModels, spans
from steelyard.messages.updates import Task


def attack(
    task: Task,
    names: Sequence[str],
    models: torch.Tensor,
    behaviours: Mapping[str, Behaviour],
    layout: Layout | None = None,
) -> None:
    """Replace the rows of hostile clients in models [clients, parameters] of one cohort, in place.

    `layout` says where the biases of classes are, for those who push one.
    """
    kinds = [behaviours.get(name, HONEST) for name in names]
    # What adaptive colluders send is chosen once the whole cohort is there (rounds.colluding).
    hostile = [row for row, how in enumerate(kinds) if how.attack not in (None, "adaptive")]
    if not hostile:
        return
    origin = task.parameters.to(models.device)
    groups: dict[Behaviour, list[int]] = {}
    for row in hostile:
        if kinds[row].attack in OMNISCIENT:
            groups.setdefault(kinds[row], []).append(row)
        else:
            _alone(task, names[row], models[row], origin, kinds[row], layout)
    honest = [row for row in range(len(names)) if row not in hostile] or hostile
    for how, rows in groups.items():
        _together(models, origin, honest, rows, how)


def _alone(
    task: Task, name: str, model: torch.Tensor, origin: torch.Tensor, how: Behaviour, layout: Layout | None
) -> None:
    update = model - origin
    if how.attack in ("reversed", "boosted"):
        model.copy_(origin + (how.strength if how.attack == "boosted" else -how.strength) * update)
        return
    if how.attack == "bias":
        assert layout is not None, "whoever has models knows their layout"
        biases = layout.output[:, -1].tolist()
        # One output tells two classes apart: less of it is class 0.
        sign = -1.0 if len(biases) == 1 and how.target == 0 else 1.0
        model[biases[min(how.target, len(biases) - 1)]] += sign * how.strength * update.norm()
        return
    # Noise of the same seed, round and client is the same in every federation that is compared.
    chance = randomness.generator(task.seed, task.round, name, "attack/gaussian")
    noise = torch.from_numpy(chance.standard_normal(len(model), dtype=np.float32)).to(model.device)
    model.copy_(origin + how.strength * update.square().mean().sqrt() * noise)


def _together(models: torch.Tensor, origin: torch.Tensor, honest: list[int], rows: list[int], how: Behaviour) -> None:
    scale = _widest(models, origin, honest) if how.attack == "min-max" else how.strength
    for span in spans(models.shape[1], len(honest), models.device.type):
        part, start = models[:, span][honest], origin[span]
        mean = part.mean(dim=0)
        away = mean - start if how.attack == "ipm" else part.std(dim=0, correction=0)
        models[rows, span] = (start if how.attack == "ipm" else mean) - scale * away


def _widest(models: torch.Tensor, origin: torch.Tensor, honest: list[int]) -> float:
    """Return γ of min-max: for each honest i the positive root of ‖μ − u_i − γσ‖² = D², and of these the least."""
    gram = DenseModels(models[honest]).gram(origin)
    squares = np.diag(gram)
    widest = float((squares[:, None] + squares[None, :] - 2 * gram).max(initial=0.0))
    share = np.full(len(honest), 1.0 / len(honest))
    away = squares - 2 * gram @ share + share @ gram @ share
    length, along = 0.0, np.zeros(len(honest))
    for span in spans(models.shape[1], len(honest), models.device.type):
        exact = models[:, span][honest].to(torch.float64)
        deviation = exact.std(dim=0, correction=0)
        length += float(deviation.square().sum())
        along += ((exact.mean(dim=0) - exact) @ deviation).cpu().numpy()
    if length <= 0:
        return 0.0
    # a γ² − 2 b γ + c = 0 with a = ‖σ‖², b = ⟨μ − u_i, σ⟩, c = ‖μ − u_i‖² − D² ≤ 0.
    roots = (along + np.sqrt(np.maximum(np.square(along) - length * (away - widest), 0.0))) / length
    return float(roots.min())
