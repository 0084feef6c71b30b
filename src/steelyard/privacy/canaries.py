"""Is the promise kept? A lower bound on ε from the mechanism itself, by playing it with and without a canary.

A canary is a client whose update is as long as clipping allows, in a direction that the auditor knows. The mechanism is
played many times with it and many times without; how well the two can be told apart bounds ε from below:

    ε ≥ ln((1 − δ − β)/α)        α, β: rates of false alarms and misses, at their upper Clopper-Pearson bounds

(M. Jagielski, J. Ullman, A. Oprea: "Auditing Differentially Private Machine Learning", NeurIPS 2020).
A bound above the accounted ε would show a fault; one far below says only that this attack is not the worst one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import beta

from steelyard.messages import Floats
from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.central import noisy_sum
from steelyard.privacy.source import Source, SystemSource, uniforms


@dataclass(frozen=True)
class CanaryResult:
    """What an audit by canaries found."""

    noise: float
    rate: float
    rounds: int
    trials: int
    """Plays with the canary, and as many without."""
    lower: float
    """ε is at least this, with the stated confidence."""
    accounted: float
    """ε that the accountant promises at most."""
    delta: float
    confidence: float


def lower_bound(without: Floats, with_it: Floats, delta: float, confidence: float = 0.95) -> float:
    """Return a lower bound on ε from scores of plays without and with the canary, larger where it seems present.

    One half of the plays chooses the threshold, the other half is judged at it, so that the confidence is honest.
    """
    half = len(without) // 2
    seen = np.concatenate([without[:half], with_it[:half]])
    thresholds = np.unique(np.quantile(seen, np.linspace(0.005, 0.995, 199)))
    best = max(thresholds.tolist(), key=lambda t: _at(without[:half], with_it[:half], t, delta, confidence))
    return max(0.0, _at(without[half:], with_it[half:], best, delta, confidence))


def _at(without: Floats, with_it: Floats, threshold: float, delta: float, confidence: float) -> float:
    # Two rates are bounded, so each gets half of the error that is allowed; both directions of the test are valid.
    sure = 1.0 - (1.0 - confidence) / 2
    alarm = _upper(int((without > threshold).sum()), len(without), sure)
    miss = _upper(int((with_it <= threshold).sum()), len(with_it), sure)
    found = [
        math.log((1.0 - delta - first) / second)
        for first, second in ((miss, alarm), (alarm, miss))
        if 1.0 - delta - first > 0 and second > 0
    ]
    return max(found, default=0.0)


def _upper(count: int, trials: int, sure: float) -> float:
    """Return the upper Clopper-Pearson bound of a rate."""
    return 1.0 if count >= trials else float(beta.ppf(sure, count + 1, trials - count))


def scores(
    trials: int, noise: float, rate: float, rounds: int, *, present: bool, source: Source, size: int = 20
) -> Floats:
    """Play the noisy sum many times and return, for each play, how likely the canary seems to have been there.

    Other clients are there too; the auditor knows their part, as the strongest attacker of the definition does, and
    takes it away. The score is the log likelihood ratio of what is left in the canary's direction.
    """
    clip, weight = 1.0, 0.1
    parameters = torch.zeros(size)
    others = torch.from_numpy(uniforms(source, 3 * size).reshape(3, size) - 0.5).to(torch.float32)
    canary = torch.zeros((1, size))
    canary[0, 0] = 5.0  # longer than allowed: clipping is part of what is audited
    known = noisy_sum(others, parameters, np.full(3, weight), clip, 1e-9, source).to(torch.float64)
    deviation = noise * clip * weight
    found = np.zeros(trials)
    for _ in range(rounds):
        sampled = (uniforms(source, trials) < rate) & present
        for trial in range(trials):
            models = torch.cat([others, canary]) if sampled[trial] else others
            told = noisy_sum(models, parameters, np.full(len(models), weight), clip, deviation, source)
            along = float(told[0].to(torch.float64) - known[0]) / deviation
            moved = 1.0 / noise
            found[trial] += math.log(1.0 - rate + rate * math.exp(min(700.0, moved * along - moved**2 / 2)))
    return found


def audit_canary(
    noise: float,
    rate: float = 1.0,
    rounds: int = 1,
    trials: int = 1000,
    delta: float = 1e-5,
    confidence: float = 0.95,
    source: Source | None = None,
) -> CanaryResult:
    """Play the mechanism with and without a canary and hold the bound against the accountant's ε."""
    drawn = source or SystemSource()
    without = scores(trials, noise, rate, rounds, present=False, source=drawn)
    with_it = scores(trials, noise, rate, rounds, present=True, source=drawn)
    accounted = spent({Release(noise, "poisson", rate): rounds}, delta)
    lower = lower_bound(without, with_it, delta, confidence)
    return CanaryResult(noise, rate, rounds, trials, lower, accounted, delta, confidence)
