"""How far a criterion can be trusted, and bounds on what clients say of themselves.

| kind | who vouches for the number |
|---|---|
| measured | the server took it from the update itself or from rows of its own |
| bounded | the client says it, but it counts no more than the task can hold or a multiple of the cohort's median |
| attested | the client says it, and whoever runs the federation declares that it can be believed |
| self-reported | the client says it, and nothing limits what it says: such a criterion is named in the run's notes |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from steelyard.messages.updates import Counts, Floats
from steelyard.weighing.criteria import Criterion

if TYPE_CHECKING:
    from steelyard.weighing.rule import Rule, WeighingSettings

Trust = Literal["measured", "bounded", "attested", "self-reported"]


def trust_of(criterion: Criterion, settings: WeighingSettings) -> Trust:
    """Return how far a criterion can be trusted under a rule."""
    if criterion.measured_by == "server" and not criterion.uses_claims:
        return "measured"
    if criterion.name in settings.attested:
        return "attested"
    limited = criterion.maximum is not None or criterion.at_most_classes
    return "bounded" if limited or settings.bound is not None else "self-reported"


def trusted(rule: Rule) -> dict[str, Trust]:
    """Return how far each criterion of a rule can be trusted, by name."""
    return {criterion.name: trust_of(criterion, rule.settings) for criterion in rule.criteria}


def limit_of(values: Floats, bound: float) -> float:
    """Return what a value counts at most: `bound` times the cohort's median, or where that is 0 of values above 0."""
    middle = float(np.median(values)) if len(values) else 0.0
    if middle <= 0:
        above = values[values > 0]
        middle = float(np.median(above)) if len(above) else 0.0
    return bound * middle


def bounded(raw: Floats, criteria: Sequence[Criterion], settings: WeighingSettings) -> Floats:
    """Return raw measures [clients, criteria] in which what clients say of themselves is cut at its bound."""
    if settings.bound is None:
        return raw
    found = raw.copy()
    for column, criterion in enumerate(criteria):
        # Losses and label counts are what clients say too, although the server makes the measure of them.
        said = criterion.measured_by == "client" or criterion.needs.first_losses or criterion.needs.label_counts
        if said and criterion.name not in settings.attested:
            found[:, column] = np.minimum(found[:, column], limit_of(found[:, column], settings.bound))
    return found


def bounded_samples(samples: Counts, settings: WeighingSettings) -> Counts:
    """Return the numbers of samples that clients claim, cut likewise, for criteria of the server that use them."""
    if settings.bound is None or "DS" in settings.attested or not len(samples):
        return samples
    most = max(1, int(limit_of(samples.astype(np.float64), settings.bound)))
    return np.minimum(samples, most)


def warnings(rules: Iterable[Rule]) -> list[str]:
    """Return one line that names the criteria of some rules which nothing limits; none where there are none."""
    return unlimited((rule.settings, trusted(rule)) for rule in rules)


def unlimited(rules: Iterable[tuple[WeighingSettings, Mapping[str, str]]]) -> list[str]:
    """Return the same where it is noted already how far the criteria of each rule can be trusted."""
    found = dict.fromkeys(
        name
        for settings, trust in rules
        if settings.trained_by == "clients" and not settings.capped
        for name, trusted_as in trust.items()
        if trusted_as == "self-reported"
    )
    if not found:
        return []
    names = ", ".join(found)
    return [f"{names}: self-reported without a bound; a hostile client could claim any weight (see weighing.bound)"]
