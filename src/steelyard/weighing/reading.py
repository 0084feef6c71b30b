"""Rules in words and as formulas, from their settings: each criterion, score, policy and robust rule brings its own.

A criterion reads as its description, after the colon; a score by the words that `@score` is given; a policy and a
robust rule by the first line of their classes.
"""

from __future__ import annotations

import numpy as np

from steelyard.base.documents import first_line
from steelyard.weighing import criterion, scores
from steelyard.weighing.rule import Rule, WeighingSettings

_NORMALISED = {
    "share": "",
    "max": ", each divided by the largest value in the round",
    "rank": ", each by its rank in the round",
}


def reading(settings: WeighingSettings) -> str:
    """Return what clients are weighted by: "number of training samples first, then number of distinct labels"."""
    if settings.trained_by == "server":
        return "no client trains; the server trains alone, on its own samples"
    words = f"{_joined(settings)}{_NORMALISED[settings.normalise]}"
    if settings.adjust is not None:
        words += f"; tests during training choose the order ({settings.adjust.strategy})"
    words += "" if settings.fit is None else "; then fitted to the server's validation set"
    words += "" if settings.bound is None else f"; what clients report is cut at {settings.bound:g} times the median"
    words += "; weights are capped" if settings.capped else ""
    words += f"; the loss adapts ({settings.loss.adapt})" if settings.loss and settings.loss.adapt != "none" else ""
    return words if settings.defence is None else f"{words}; updates: {_small(first_line(type(settings.defence)))}"


def _joined(settings: WeighingSettings) -> str:
    """Return how the criteria of a rule make one number."""
    first, *others = [phrase(settings.criteria[place]) for place in settings.order()]
    if settings.policy is not None:
        about = _small(first_line(type(settings.policy)).partition(";")[0])
        return f"{about} (the published method {settings.policy.name}), from {', '.join([first, *others])}"
    if settings.score == "prioritized":
        alone = f"{first} (FedAvg)" if settings.criteria == ("DS",) else first
        return f"{first} first, then {', then '.join(others)}" if others else alone
    reads = scores.known()[settings.score].reads
    return reads.format(", ".join(map(phrase, settings.criteria)), power=settings.power or 1.0)


def phrase(name: str) -> str:
    """Return a criterion in a few words; one that nobody registered here by its name."""
    found = criterion.find(name)
    return found.description.rpartition(": ")[2] if found is not None and found.description else name


def formula(settings: WeighingSettings) -> str:
    """Return the score of a client as a formula, such as "VP + VP·LD"; of another rule than a score, in words."""
    if settings.policy is not None or settings.trained_by == "server":
        return f"as published; see steelyard docs {settings.policy.name}" if settings.policy else "none"
    if settings.score == "prioritized":
        names = [settings.criteria[place] for place in settings.order()]
        return " + ".join("·".join(names[: count + 1]) for count in range(len(names)))
    about = first_line(scores.known()[settings.score].function)
    return f"{about.partition(';')[0]}, c = ({', '.join(settings.criteria)})"


def _small(text: str) -> str:
    return f"{text[:1].lower()}{text[1:]}"


def example(settings: WeighingSettings) -> dict[str, tuple[list[float], float]]:
    """Return three made-up clients with their criteria, each best at another one, and their weights in the first round.

    Empty for a rule that looks at more than criteria, such as updates or earlier rounds.
    """
    if settings.trained_by == "server" or (settings.policy is not None and not settings.policy.of_measures):
        return {}
    rule = Rule(settings)
    tops = [10.0 if each.at_most_classes else each.maximum or 100.0 for each in rule.criteria]
    spread = [(1.0, 1.0, 1.0) if each.name == "EQ" else (1.0, 0.6, 0.3) for each in rule.criteria]
    raw = [[top * spread[at][(client - at) % 3] for at, top in enumerate(tops)] for client in range(3)]
    names = ("client A", "client B", "client C")
    weights = rule.weigh(np.array(raw), clients=names).weights
    return {name: (raw[at], float(weights[at])) for at, name in enumerate(names)}
