"""The fitted rule: weights found by the server on rows of its own, starting from the weights of any rule.

The combined model is Θ(w) = Σ w_i Θ_i, so the server's loss L is a function of the weights, and its slope costs one
product and one backward pass:

    ∂L/∂w_i = ⟨∇L(Θ(w)), Θ_i⟩

Exponentiated gradient (Kivinen and Warmuth, 1997) goes downhill without leaving the simplex, k steps of rate η:

    w_i ← w_i · exp(−η ∂L/∂w_i) / Z        then        w ← (1 − s) w + s w⁰

A weight that starts at 0 stays there but for the shrinkage s towards the start w⁰. Use it where the server holds a few
rows that it trusts and clients may be of very unequal worth; it needs single models, so it does not go together with
secure aggregation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from steelyard.base.settings import Section
from steelyard.messages.updates import Floats


class FitSettings(Section):
    """[weighing.fit]: the rule's weights are the start; the server then fits them to its own rows."""

    steps: int = Field(default=10, ge=1, le=1000)
    """k: steps of exponentiated gradient in each round."""
    rate: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 3.0
    """η: how far each step goes."""
    shrink: Annotated[float, Field(ge=0, le=1)] = 0.0
    """s: after each step, this share of the weights goes back to the start; 1 leaves the rule as it was."""


Slopes = Callable[[Sequence[Floats]], Sequence[Floats]]
"""From the weights of several cohorts to ∂L/∂w of each."""


def fit_weights(starts: Sequence[Floats], slopes: Slopes, settings: Sequence[FitSettings]) -> list[Floats]:
    """Fit the weights of several cohorts side by side, each with its own settings; returns the fitted weights.

    `slopes` is asked once a step for all cohorts, so that rules and seeds that are compared share one pass.
    """
    weights = list(starts)
    for step in range(max((each.steps for each in settings), default=0)):
        for index, slope in enumerate(slopes(weights)):
            if step < settings[index].steps:
                weights[index] = one_step(weights[index], starts[index], slope, settings[index])
    return weights


def one_step(weights: Floats, start: Floats, slope: Floats, settings: FitSettings) -> Floats:
    """Take one step of exponentiated gradient, then shrink towards the start; a slope without sense moves nothing."""
    if not np.isfinite(slope).all():
        return weights
    # The least slope is taken off everywhere, which changes nothing after the division and keeps exp within range.
    grown = weights * np.exp(-settings.rate * (slope - slope.min()))
    total = grown.sum()
    if not total > 0:
        return weights
    return (1.0 - settings.shrink) * (grown / total) + settings.shrink * start
