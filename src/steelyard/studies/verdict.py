"""The verdict of an arena: its documents, the ranks of rules, and the sentence that says it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from enum import StrEnum

import pandas as pd
from pydantic import computed_field

from steelyard.base.documents import Document
from steelyard.base.errors import counted
from steelyard.base.measures import LEVEL, MEASURES, Estimate
from steelyard.report.decide import amount


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
    """Mean ranks that differ by less do not differ significantly (Nemenyi, 5%); None with too few scenes."""

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


# The sentence, in the words of `report.decide`: there one comparison is decided, here its answers are counted.


def say(found: ArenaDocument) -> str:
    """Return the answer in one sentence: better in how many tasks, worse in how many, by how much; or not better."""
    name, base, mean = found.candidate, found.baseline, found.mean_gain
    if mean is None:
        if found.decision is Decision.NOTHING_DONE:
            return f"No recommendation: no task has ended under {name}."
        why = next(scene.failed for scene in found.scenes if scene.failed)
        return f"{name} failed in {found.failed} of {counted(len(found.scenes), 'task')}: {why.rstrip('.')}."
    tasks = counted(sum(scene.gain is not None for scene in found.scenes), "task")
    points, ending = amount(mean, MEASURES["accuracy"]), _ending(found)
    average = f"{points} {'ahead' if mean >= 0 else 'behind'} on average"
    if found.decision is Decision.TOO_FEW_SEEDS:
        few = {1: "One seed is", 2: "Two seeds are"}[len(found.seeds)]
        return f"{few} too few to compare {name} with {base}: over {tasks} it is {average}{ending}."
    better, worse = found.better or "none", found.worse or "none"
    if found.decision is Decision.BETTER:
        by = f"by {points} on average" if mean > 0 else average
        return f"{name} is better than {base} in {better} of {tasks}, worse in {worse}, {by}{ending}."
    within = f"equal within {amount(found.margin, MEASURES['accuracy'])} in {found.equal or 'none'}"
    return (
        f"{name} is not better than {base}: better in {better} of {tasks}, worse in {worse}, {within}, "
        f"{average}{ending}."
    )


def _ending(found: ArenaDocument) -> str:
    left = sum(scene.verdict == "not done" for scene in found.scenes)
    parts = [f"it failed in {counted(found.failed, 'task')}"] if found.failed else []
    parts += [f"{counted(left, 'task')} not done"] if left else []
    parts += ["on the tuning seeds"] if found.draft else []
    if found.opened:
        seeds = counted(max(scene.seeds for scene in found.scenes), "seed")
        undecided = sum(scene.verdict in OPEN for scene in found.scenes)
        parts += [f"{undecided} not decided by {seeds}" if undecided else f"all decided by {seeds} or fewer"]
    if found.opened > 1:
        parts += [f"tested at {100 * found.level:.2g}% as candidate {found.opened} here"]
    return "".join(f"; {part}" for part in parts)
