"""The verdict of an arena: its documents, the ranks of rules, and the sentence that says it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from enum import StrEnum

import pandas as pd
from pydantic import computed_field

from steelyard.base.documents import Document
from steelyard.base.measures import LEVEL, Estimate


class Decision(StrEnum):
    """What an arena comes to."""

    BETTER = "better"
    """Better in more scenes than worse."""
    NOT_BETTER = "not better"
    TOO_FEW_SEEDS = "too few seeds"
    FAILED = "failed"
    """In every scene."""
    NOTHING_DONE = "nothing done"


OPEN = ("not done", "untested", "not distinguishable")
"""Verdicts on a scene that more seeds may change."""


class ArenaRule(Document):
    """A rule in one scene: accuracy on rows that chose nothing, at its worst client, and what it gained."""

    rule: str
    value: Estimate
    worst: Estimate
    gain: Estimate | None
    """Over the baseline, seed by seed; None for the baseline."""


class ArenaScene(Document):
    """The candidate against the baseline in one scene; where it failed, `rules` has the others."""

    scene: str
    about: str
    where: str
    """On which rows, as the end of a sentence."""
    seeds: int
    """How many seeds the gain is the mean of."""
    rules: tuple[ArenaRule, ...]
    gain: Estimate | None
    worst_gain: Estimate | None
    p: float | None
    p_holm: float | None
    equal_p_holm: float | None
    """Of two one-sided tests that the gain lies within the margin, after Holm's correction over the scenes."""
    verdict: str
    """better, worse, equal, not distinguishable, untested, failed, or not done."""
    failed: str
    """Why the candidate has no figures."""


class ArenaRank(Document):
    """A rule over all scenes in which every rule has figures: its mean rank (1 is the best) and accuracy."""

    rule: str
    rank: float
    value: Estimate
    worst: Estimate


class ArenaVerdict(Document):
    """What the figures of an arena decide; an archive holds it."""

    decision: Decision
    verdicts: dict[str, str]
    """By scene."""
    better: int
    worse: int
    equal: int
    """In how many scenes the gain lies within the margin, whatever its sign."""
    failed: int
    mean_gain: float | None


class ArenaDocument(ArenaVerdict):
    """What the arena found about a candidate; `sentence` is the answer."""

    folder: str
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
    seeds: tuple[int, ...]
    margin: float
    scenes: tuple[ArenaScene, ...]
    gain_over_seeds: Estimate | None
    """The mean gain with its interval: over the scenes, seed by seed; None where scenes have other seeds."""
    ranks: tuple[ArenaRank, ...]
    critical_difference: float | None
    """Mean ranks that differ by less cannot be told apart (Nemenyi, 5 %); None with too few scenes."""

    @property
    def verdict(self) -> ArenaVerdict:
        """What is decided, without what it is decided by."""
        return ArenaVerdict(**{name: getattr(self, name) for name in ArenaVerdict.model_fields})

    @computed_field
    @property
    def sentence(self) -> str:
        """The answer in words."""
        return say(self)


# Ranks.


LEAST_SCENES = 3
"""With fewer, ranks are too coarse for any two of them to lie apart."""


def mean_ranks(values: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean rank of each column over the rows; the highest value has rank 1, equal ones share theirs."""
    return pd.DataFrame(values).rank(axis="columns", ascending=False).mean().tolist()


def critical_difference(rules: int, scenes: int) -> float | None:
    """Return how far the mean ranks of so many rules over so many scenes must lie apart to differ at 5 %."""
    if rules < 2 or scenes < LEAST_SCENES:
        return None
    return _studentised(rules) * math.sqrt(rules * (rules + 1) / (6 * scenes))


@functools.cache
def _studentised(rules: int) -> float:
    """Return the 95 % point of the studentised range of so many means, over √2."""
    # For speed of start: scipy.stats is large, and only an arena that has ended needs it.
    from scipy import stats

    return float(stats.studentized_range.ppf(LEVEL, rules, math.inf)) / math.sqrt(2)


# The sentence.


def say(found: ArenaDocument) -> str:
    """Return the answer in one sentence: better in how many scenes, worse in how many, by how much; or not better."""
    name, base, mean = found.candidate, found.baseline, found.mean_gain
    if mean is None:
        if found.decision is Decision.NOTHING_DONE:
            return f"Nothing can be said of {name} yet: no scene is done."
        why = next(scene.failed for scene in found.scenes if scene.failed)
        return f"{name} failed in {_all(found.failed, len(found.scenes))}: {why.rstrip('.')}."
    scenes = _scenes(sum(scene.gain is not None for scene in found.scenes))
    average = f"{_points(mean)} {'ahead' if mean >= 0 else 'behind'} on average"
    ending = _ending(found)
    if found.decision is Decision.TOO_FEW_SEEDS:
        count = {1: "one seed", 2: "two seeds"}[len(found.seeds)]
        return f"{name} cannot be told from {base} by {count}: over {scenes} it is {average}{ending}."
    better, worse = found.better, _count(found.worse)
    if found.decision is Decision.BETTER:
        by = f"by {_points(mean)} on average" if mean > 0 else average
        return f"{name} is better than {base} in {better} of {scenes}, worse in {worse}, {by}{ending}."
    within = f", equal within {_points(found.margin)} in {_count(found.equal)}"
    return (
        f"{name} is not better than {base}: better in {_count(better)} of {scenes}, worse in {worse}{within}, "
        f"{average}{ending}."
    )


def _ending(found: ArenaDocument) -> str:
    left = sum(scene.verdict == "not done" for scene in found.scenes)
    parts = [f"it failed in {_scenes(found.failed)}"] if found.failed else []
    parts += [f"{_scenes(left)} not done"] if left else []
    parts += ["on the seeds for choosing"] if found.draft else []
    if found.opened:
        most = max(scene.seeds for scene in found.scenes)
        undecided = sum(scene.verdict in OPEN for scene in found.scenes)
        seeds = f"{most} seed{'' if most == 1 else 's'}"
        parts += [f"{undecided} not decided by {seeds}" if undecided else f"all decided by {seeds} or fewer"]
    if found.opened > 1:
        parts += [f"held to {100 * found.level:.2g} % as the {_ordinal(found.opened)} candidate here"]
    return "".join(f"; {part}" for part in parts)


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _all(count: int, of: int) -> str:
    if count == of > 1:
        return "both scenes" if of == 2 else f"all {of} scenes"
    return f"{count} of {of} scene{'' if of == 1 else 's'}"


def _scenes(count: int) -> str:
    return f"{count} scene{'' if count == 1 else 's'}"


def _count(number: int) -> str:
    return "none" if not number else str(number)


def _points(share: float) -> str:
    shown = f"{abs(100 * share):.1f}"
    return "1 point" if shown == "1.0" else f"{shown} points"
