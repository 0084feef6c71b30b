"""The document of the arena: `steelyard arena --format json`."""

from __future__ import annotations

from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.base.measures import EstimateJson


class ArenaRule(TypedDict):
    """A rule in one scene: accuracy on rows that chose nothing, at its worst client, and what it gained."""

    rule: str
    value: EstimateJson
    worst: EstimateJson
    gain: EstimateJson | None
    """Over the baseline, seed by seed; None for the baseline."""


class ArenaScene(TypedDict):
    """The candidate against the baseline in one scene; where it failed, `rules` has the others."""

    scene: str
    about: str
    where: str
    """On which rows, as the end of a sentence."""
    seeds: int
    """How many seeds the gain is the mean of."""
    rules: list[ArenaRule]
    gain: EstimateJson | None
    worst_gain: EstimateJson | None
    p: float | None
    p_holm: float | None
    equal_p_holm: float | None
    """Of two one-sided tests that the gain lies within the margin, after Holm's correction over the scenes."""
    verdict: str
    """better, worse, equal, not distinguishable, untested, failed, or not done."""
    failed: str
    """Why the candidate has no figures."""


class ArenaRank(TypedDict):
    """A rule over all scenes in which every rule has figures: its mean rank (1 is the best) and accuracy."""

    rule: str
    rank: float
    value: EstimateJson
    worst: EstimateJson


class ArenaDocument(TypedDict):
    """What the arena found about a candidate; `sentence` is the answer."""

    sentence: str
    candidate: str
    baseline: str
    suite: str
    version: int
    sha256: str
    whole: bool
    draft: bool
    opened: int
    """--until-decided: which candidate this is that opened the held-out seeds here; else 0."""
    level: float
    """At which tests decide: 0.05, or less for a candidate that opened held-out seeds after others."""
    tried: dict[str, float]
    """The settings among which the candidate was chosen, with the accuracy that chose; empty where there was one."""
    seeds: list[int]
    margin: float
    scenes: list[ArenaScene]
    better: int
    worse: int
    equal: int
    failed: int
    mean_gain: float | None
    gain_over_seeds: EstimateJson | None
    """The same with its interval: the mean over the scenes, seed by seed; None where scenes have other seeds."""
    ranks: list[ArenaRank]
    critical_difference: float | None
    """Mean ranks that differ by less cannot be told apart (Nemenyi, 5 %); None with too few scenes."""
