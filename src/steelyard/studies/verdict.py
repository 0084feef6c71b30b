"""The answer of an arena as a pure function of its figures: a paired test in each scene, Holm over all, one sentence.

Scenes are one family: with ten of them, a rule that is no better is called better in any of them in one case of twenty
at most. Whether it is equal within the margin is another question, which the same correction answers.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence

from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.base.measures import LEVEL, EstimateJson, estimate
from steelyard.report.statistics import (
    ALPHA,
    LEAST_SEEDS,
    anytime_equivalence_p,
    anytime_p,
    equivalence_p,
    holm,
    paired_p,
    spent,
    verdict,
)
from steelyard.studies.arena import Arena
from steelyard.studies.scenes import SceneFigures

LEAST_SCENES = 3
"""With fewer, ranks are too coarse for any two of them to lie apart."""


def mean_ranks(values: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean rank of each column over the rows; the highest value has rank 1, equal ones share theirs."""
    ranks = [_ranks_in(row) for row in values]
    return [math.fsum(row[column] for row in ranks) / len(ranks) for column in range(len(values[0]))]


def _ranks_in(row: Sequence[float]) -> list[float]:
    return [1 + sum(other > value for other in row) + (row.count(value) - 1) / 2 for value in row]


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


# The verdict.


OPEN = ("not done", "untested", "not distinguishable")
"""Verdicts that more seeds may change."""


def judge(arena: Arena, figures: Mapping[str, SceneFigures]) -> ArenaDocument:
    """Return what the figures say of the candidate; scenes that are not done yet are named as such."""
    candidate, baseline = arena.candidate.label, arena.suite.baseline
    sound = [name for name, found in figures.items() if candidate in found.values and baseline in found.values]
    differences = {name: _minus(figures[name].values, candidate, baseline) for name in sound}
    level = spent(ALPHA, arena.opened) if arena.opened else ALPHA
    same = [name for name in sound if _same_models(figures[name].models, candidate, baseline)]
    tests = _until_decided(arena, differences) if arena.opened else _once(arena, differences, same)
    scenes = [_scene(arena, name, figures.get(name), tests.get(name, _NONE), level) for name in arena.scenes]
    verdicts = [scene["verdict"] for scene in scenes]
    gains = [estimate(differences[name]).mean for name in sound]
    rules, complete = _complete(figures)
    ranks = _ranks(rules, complete)
    document: ArenaDocument = {
        "sentence": "",
        "candidate": candidate,
        "baseline": baseline,
        "suite": arena.suite.name,
        "version": arena.suite.version,
        "sha256": arena.suite.sha256,
        "whole": arena.whole,
        "draft": arena.draft,
        "opened": arena.opened,
        "level": level,
        "tried": dict(arena.tried),
        "seeds": list(arena.seeds),
        "margin": arena.suite.margin,
        "scenes": scenes,
        "better": verdicts.count("better"),
        "worse": verdicts.count("worse"),
        "equal": sum(scene["equal_p_holm"] is not None and scene["equal_p_holm"] < level for scene in scenes),
        "failed": verdicts.count("failed"),
        "mean_gain": math.fsum(gains) / len(gains) if gains else None,
        "gain_over_seeds": _over_scenes(list(differences.values()))
        if len({len(each) for each in differences.values()}) == 1
        else None,
        "ranks": ranks,
        "critical_difference": critical_difference(len(ranks), len(complete)),
    }
    document["sentence"] = sentence(document)
    return document


_Tests = tuple[float | None, float | None, float | None]
"""The p of a difference, the same and that of equality after Holm's correction."""
_NONE: _Tests = (None, None, None)


def _same_models(models: Mapping[str, Sequence[str]], one: str, other: str) -> bool:
    """Say whether two rules came to the same model, bit for bit, in every seed, as `EQ` and FedAvg on equal sizes."""
    return bool(models.get(one)) and models.get(one) == models.get(other)


def _once(arena: Arena, differences: Mapping[str, Sequence[float]], same: Sequence[str]) -> dict[str, _Tests]:
    """Test scenes whose number of seeds was fixed before; where models are the same, no test need show it."""
    enough = len(arena.seeds) >= LEAST_SEEDS
    raw = [paired_p(each) if enough else None for each in differences.values()]
    equal = [
        0.0 if name in same and enough else equivalence_p(each, arena.suite.margin) if enough else None
        for name, each in differences.items()
    ]
    return dict(zip(differences, zip(raw, holm(raw), holm(equal), strict=True), strict=True))


def _until_decided(arena: Arena, differences: Mapping[str, Sequence[float]]) -> dict[str, _Tests]:
    """Test scenes after any number of seeds; those that are not done yet count in the correction, as 1.

    None of these p ever rises when seeds are added, so a verdict stays what it is.
    """
    raw = [anytime_p(differences.get(name, ())) for name in arena.scenes]
    equal = [anytime_equivalence_p(differences.get(name, ()), arena.suite.margin) for name in arena.scenes]
    found = dict(zip(arena.scenes, zip(raw, holm(raw), holm(equal), strict=True), strict=True))
    return {name: tests for name, tests in found.items() if name in differences}


def _minus(values: Mapping[str, Sequence[float]], one: str, other: str) -> list[float]:
    return [ours - theirs for ours, theirs in zip(values[one], values[other], strict=True)]


def _scene(arena: Arena, name: str, found: SceneFigures | None, tests: _Tests, level: float) -> ArenaScene:
    candidate, baseline = arena.candidate.label, arena.suite.baseline
    values = {} if found is None else found.values
    both = candidate in values and baseline in values
    gain = estimate(_minus(values, candidate, baseline)) if both else None
    failed = "" if found is None or both else found.failed or f"{baseline} has no figures"
    p, p_holm, equal = tests
    if gain is None:
        word = "not done" if found is None else "failed"
    else:
        word = verdict(gain.mean, p_holm, level)
        word = "equal" if word == "not distinguishable" and equal is not None and equal < level else word
    return {
        "scene": name,
        "about": arena.suite.scenes[name].about,
        "where": "" if found is None else found.where,
        "seeds": len(gain.values) if gain else 0,
        "rules": [] if found is None else [_rule(rule, found, baseline) for rule in found.values],
        "gain": None if gain is None else gain.as_json(),
        "worst_gain": estimate(_minus(found.worst, candidate, baseline)).as_json()
        if found and both and found.worst
        else None,
        "p": p,
        "p_holm": p_holm,
        "equal_p_holm": equal,
        "verdict": word,
        "failed": failed,
    }


def _rule(rule: str, found: SceneFigures, baseline: str) -> ArenaRule:
    against = rule != baseline and baseline in found.values
    return {
        "rule": rule,
        "value": estimate(found.values[rule]).as_json(),
        "worst": estimate(found.worst.get(rule, ())).as_json(),
        "gain": estimate(_minus(found.values, rule, baseline)).as_json() if against else None,
    }


def _complete(figures: Mapping[str, SceneFigures]) -> tuple[list[str], list[SceneFigures]]:
    """Return the rules that have figures anywhere, and the scenes in which every one of them has."""
    every = list(dict.fromkeys(rule for found in figures.values() for rule in found.values))
    return every, [found for found in figures.values() if set(found.values) == set(every) and every]


def _ranks(rules: Sequence[str], scenes: Sequence[SceneFigures]) -> list[ArenaRank]:
    """Return every rule with its mean rank over scenes in which all have figures, the best first."""
    if not scenes:
        return []
    means = [[estimate(found.values[rule]).mean for rule in rules] for found in scenes]
    rows: list[ArenaRank] = [
        {
            "rule": rule,
            "rank": rank,
            "value": _over_scenes([found.values[rule] for found in scenes]),
            "worst": _over_scenes([found.worst.get(rule, ()) for found in scenes]),
        }
        for rule, rank in zip(rules, mean_ranks(means), strict=True)
    ]
    return sorted(rows, key=lambda row: row["rank"])


def _over_scenes(values: Sequence[Sequence[float]]) -> EstimateJson:
    """Return the mean over the scenes, seed by seed, with its interval over the seeds that all scenes have."""
    return estimate([math.fsum(each) / len(values) for each in zip(*values, strict=False)]).as_json()


def sentence(document: ArenaDocument) -> str:
    """Return the answer in one sentence: better in how many scenes, worse in how many, by how much; or not better."""
    name, base = document["candidate"], document["baseline"]
    done = [scene for scene in document["scenes"] if scene["gain"] is not None]
    scenes = _scenes(len(done))
    mean = document["mean_gain"]
    if mean is None:
        why = next((scene["failed"] for scene in document["scenes"] if scene["failed"]), "")
        if not why:
            return f"Nothing can be said of {name} yet: no scene is done."
        return f"{name} failed in {_all(document['failed'], len(document['scenes']))}: {why.rstrip('.')}."
    average = f"{_points(mean)} {'ahead' if mean >= 0 else 'behind'} on average"
    ending = _ending(document)
    if len(document["seeds"]) < LEAST_SEEDS:
        count = {1: "one seed", 2: "two seeds"}[len(document["seeds"])]
        return f"{name} cannot be told from {base} by {count}: over {scenes} it is {average}{ending}."
    better, worse = document["better"], document["worse"]
    if better > worse:
        by = f"by {_points(mean)} on average" if mean > 0 else average
        return f"{name} is better than {base} in {better} of {scenes}, worse in {_count(worse)}, {by}{ending}."
    within = f", equal within {_points(document['margin'])} in {_count(document['equal'])}"
    return (
        f"{name} is not better than {base}: better in {_count(better)} of {scenes}, worse in {_count(worse)}{within}, "
        f"{average}{ending}."
    )


_VERDICTS = ("is not better than", "is better than", "cannot be told from", "Nothing can be said", "failed in")
_WORDS = {"none": "0", "one": "1", "two": "2", "both": "2"}


def claims(text: str, document: ArenaDocument) -> tuple[str, bool, tuple[float, ...]]:
    """Return what a sentence on these two rules says, however it is worded: verdict, behind or not, its numbers.

    Use it to hold a sentence of an older version against today's: archives keep the words of their time.
    """
    for name in (document["candidate"], document["baseline"]):
        text = text.replace(name, "")
    found: list[str] = re.findall(rf"\d+(?:\.\d+)?|\b(?:{'|'.join(_WORDS)})\b", text)
    numbers = tuple(float(_WORDS.get(word, word)) for word in found)
    return next((words for words in _VERDICTS if words in text), ""), "behind" in text, numbers


def _ending(document: ArenaDocument) -> str:
    left = sum(scene["verdict"] == "not done" for scene in document["scenes"])
    parts = [f"it failed in {_scenes(document['failed'])}"] if document["failed"] else []
    parts += [f"{_scenes(left)} not done"] if left else []
    parts += ["on the seeds for choosing"] if document["draft"] else []
    if document["opened"]:
        most = max(scene["seeds"] for scene in document["scenes"])
        undecided = sum(scene["verdict"] in OPEN for scene in document["scenes"])
        seeds = f"{most} seed{'' if most == 1 else 's'}"
        parts += [f"{undecided} not decided by {seeds}" if undecided else f"all decided by {seeds} or fewer"]
    if document["opened"] > 1:
        parts += [f"held to {100 * document['level']:.2g} % as the {_ordinal(document['opened'])} candidate here"]
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


# The document of the answer: `steelyard arena --format json`.


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
