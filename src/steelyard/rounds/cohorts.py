"""Who takes part in a round: drawn from the seed, so that everybody can draw the same."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard import randomness
from steelyard.rounds.settings import cohort_size
from steelyard.rounds.state import Plan


def cohort_of(seed: int, round: int, names: Sequence[str], plan: Plan) -> tuple[str, ...]:
    """Return a round's cohort, ascending by client id; it depends on seed and round alone.

    With Poisson sampling, a cohort that falls short of `min_clients` is drawn again with just as many.
    """
    if not plan.poisson:
        return tuple(randomness.choose(seed, round, names, cohort_size(len(names), plan.fraction, plan.min_clients)))
    keys = randomness.stream_keys(seed, round, sorted(names), "cohort")
    drawn = randomness.uniforms(keys, 1)[:, 0]
    found = tuple(name for name, value in zip(sorted(names), drawn.tolist(), strict=True) if value < plan.fraction)
    least = min(len(names), max(1, plan.min_clients))
    return found if len(found) >= least else tuple(randomness.choose(seed, round, names, least))
