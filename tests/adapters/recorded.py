"""Rounds of a federation that somebody else runs, as an adapter writes them down."""

from __future__ import annotations

import numpy as np

from steelyard.adapters.recorder import ClientTest, Recorder
from steelyard.adapters.rounds import WeighedRounds
from steelyard.weighing.rule import Rule

CLIENTS = ("north", "south", "west")
REFUSED_RULES = (
    ({"rule": "VP>DS"}, "VP is measured on the server's test set, and no rows were given"),
    ({"rule": "online(DS>MD)"}, "steers training itself"),
    ({"rule": "fltrust(EQ)"}, "trains at the server"),
    ({"rule": "quality"}, "got 'quality'"),
    ({"rule": ""}, "rule: got ''"),
)
"""Arguments of an adapter that cannot work, and what every one of them says."""


def rule_of(words: str = "quality>DS/max") -> Rule:
    return WeighedRounds(words, metrics=["quality"]).rule


def measures_of(number: int) -> dict[str, dict[str, float]]:
    return {name: {"DS": 10.0 * i, "quality": 0.1 * (i + number)} for i, name in enumerate(CLIENTS, 1)}


def write_round(recorder: Recorder, rule: Rule) -> int:
    """Write a round as an adapter does: weights by the rule, one client left out, tests at the others."""
    number = recorder.round + 1
    measures = measures_of(number)
    raw = np.array([[measures[name][criterion] for criterion in rule.names] for name in CLIENTS])
    return recorder.write(
        dict(zip(CLIENTS, rule.weigh(raw).weights.tolist(), strict=True)),
        measures,
        reasons={"east": "model holds NaN or infinity"},
        tests={name: ClientTest(0.1 * number, 10 * i, 0.5, {"f1": 0.3}) for i, name in enumerate(CLIENTS, 1)},
        server={"accuracy": 0.2 * number, "loss": 1.5},
        model={"w": np.full((100, 200), number, np.float32), "steps": np.array(number)},
        memory={"AG": [1.0 * number]},
    )
