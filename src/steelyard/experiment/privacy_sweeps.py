"""Audits over a range of protections, for figures: what is found out the more noise there is, or the larger the sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch

from steelyard.experiment.digit_audits import Attack, Protection, attack_many, attack_one, guess, victims
from steelyard.experiment.run_audits import CanaryResult, audit_runs
from steelyard.learning.inversion import likeness
from steelyard.privacy.noise import Source

EPSILONS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0)
COHORTS = (1, 2, 3, 5, 10, 20, 50, 100)
NOISES = (0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
SHOWN = (
    Protection("the update"),
    Protection("sum of 10", clients=10),
    Protection("sum of 100", clients=100),
    Protection("ε = 1000", epsilon=1000.0),
    Protection("ε = 100", epsilon=100.0),
    Protection("ε = 10", epsilon=10.0),
)


ATTACKS = (Attack("linear", 1, "analytic"), Attack("MLP", 1, "analytic"), Attack("MLP", 4, "search"))


class InversionPoint(TypedDict):
    """How alike what an attack finds is to the sample, at one strength of a protection."""

    attack: str
    protection: str
    value: float
    likeness: float


class InversionSweep(TypedDict):
    """Attacks under more and more protection; `guess` is the control's likeness."""

    rows: list[InversionPoint]
    guess: float


class Picture(TypedDict):
    """A sample, or what the server finds in its place."""

    case: str
    title: str
    likeness: float
    pixels: list[list[float]]


def sweep_inversion(
    tries: int = 20,
    steps: int = 300,
    source: Source | None = None,
    epsilons: Sequence[float] = EPSILONS,
    cohorts: Sequence[int] = COHORTS,
) -> InversionSweep:
    """Attack clients under more and more noise, and in larger and larger sums; `guess` is the control's likeness."""
    held = victims()
    rows: list[InversionPoint] = []
    wanted = [(Protection("noise", epsilon=epsilon), epsilon) for epsilon in epsilons]
    wanted += [(Protection("sum", clients=count), float(count)) for count in cohorts]
    for each in ATTACKS if steps else ATTACKS[:2]:
        count = tries if each.way == "analytic" else max(1, tries // 5)
        for protection, value in wanted:
            found = attack_many(held, each, protection, count, steps, source)
            rows.append(
                {"attack": each.name, "protection": protection.name, "value": value, "likeness": float(found.mean())}
            )
    return {"rows": rows, "guess": float(guess(held, 1, max(tries, 50)).mean())}


def show_inversion(steps: int = 300, source: Source | None = None, each: int = 2) -> list[Picture]:
    """Return pictures of samples and of what the server finds in their place: one entry a picture.

    An image is stretched to the range from 0 to 1, since what is read off noise has any size.
    """
    held = victims()
    found: list[Picture] = []
    for kind in (ATTACKS[0], ATTACKS[2]) if steps else ATTACKS[:1]:
        for number in range(each):
            case = f"{kind.name} ({number + 1})"
            for index, protection in enumerate(SHOWN):
                images, samples = attack_one(held, kind, protection, steps, number, source)
                if index == 0:
                    found.append(_picture(case, "sample", samples[0], 1.0))
                alike = likeness(images, samples[:1])
                best = max(images, key=lambda image: float(likeness(image[None], samples[:1])[0]))
                found.append(_picture(case, protection.name, best, float(alike[0])))
    return found


def _picture(case: str, title: str, image: torch.Tensor, alike: float) -> Picture:
    side = round(image.numel() ** 0.5)
    low, high = float(image.min()), float(image.max())
    pixels = ((image - low) / max(high - low, 1e-12)).reshape(side, side)
    return {"case": case, "title": title, "likeness": alike, "pixels": pixels.tolist()}


def sweep_canaries(noises: Sequence[float] = NOISES, **audit: Any) -> list[CanaryResult]:
    """Audit whole runs at several noise multipliers; `audit` as of `audit_runs`."""
    return [audit_runs(noise, **audit) for noise in noises]
