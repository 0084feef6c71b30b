"""Hand-made federations, states and records of rounds, small enough to check every number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Evaluations, Failure, LossState, Updates
from steelyard.rounds.plan import RoundValues
from steelyard.rounds.state import Federation, RoundRecord, RoundState
from steelyard.runs.store import Store
from steelyard.weighing.order import OrderState
from steelyard.weighing.rule import Rule, WeighingSettings

CRITERIA = ("DS", "LD")
# Normalised 0.75, 0.25 and 0.5, 0.5; with DS before LD the scores are 0.75 + 0.375 and 0.25 + 0.125.
RAW = np.array([[3.0, 4.0], [1.0, 4.0]])


def federation(name: str = "DS>LD", seed: int = 0, rule_name: str | None = None, **settings: Any) -> Federation:
    rule = Rule(WeighingSettings(criteria=settings.pop("criteria", CRITERIA), **settings))
    return Federation(name, name if rule_name is None else rule_name, seed, rule)


def state(round: int = 1, *parameters: float, **changes: Any) -> RoundState:
    given: dict[str, Any] = {"loss": LossState(), "orders": OrderState((0, 1), 0.5), **changes}
    return RoundState(round=round, parameters=torch.tensor(parameters or (1.0, 2.0)), **given)


def updates(name: str = "DS>LD", round: int = 1, **changes: Any) -> Updates:
    given: dict[str, Any] = {
        "clients": ("a", "b"),
        "samples": np.array([3, 1]),
        "criteria": {"DS": RAW[:, 0], "LD": RAW[:, 1]},
        "losses": np.array([0.25, np.inf]),
        "payload": DenseModels(torch.eye(2)),
        "failures": (Failure("c", "not registered"),),
        **changes,
    }
    return Updates(federation=name, round=round, **given)


def evaluations(name: str = "DS>LD", round: int = 1, **changes: Any) -> Evaluations:
    given: dict[str, Any] = {
        "clients": ("a", "d"),
        "samples": np.array([3, 1]),
        "scores": np.array([[0.5, 1.0]]),
        "losses": np.array([[0.75, np.nan]]),
        **changes,
    }
    return Evaluations(federation=name, round=round, **given)


def record(name: str = "DS>LD", round: int = 1, **changes: Any) -> RoundRecord:
    """Two clients answered, one failed, both combined and tested."""
    given: dict[str, Any] = {
        "seconds": 0.125,
        "updates": updates(name, round),
        "weighing": Rule(WeighingSettings(criteria=CRITERIA)).weigh(RAW),
        "order": (0, 1),
        "tried": (((0, 1), 0.625),),
        "evaluations": evaluations(name, round),
        "accuracy": 0.625,
        "loss": LossState(),
        **changes,
    }
    return RoundRecord(name, round, **given)


def values(round: int = 1) -> RoundValues:
    """What the two clients added in a round, over two groups of test rows."""
    table = np.array([[0.4, 0.3, 0.7], [0.05, 0.1, -0.1]]) / (1 + round)
    return RoundValues("loss", "shapley", ("a", "b"), table, np.array([0.0, 0.125]), np.array([3, 1]), 2.0, 1.5)


def begun(folder: Path, *names: str, **options: Any) -> Store:
    """Open a store with a federation of each name."""
    store = Store(folder, **options)
    store.register([federation(name) for name in names or ("DS>LD",)])
    return store


def add(store: Store, *records: RoundRecord, last: bool = False) -> None:
    """Write a round of which these are the records; the first parameter of each model is the round's number."""
    round = records[0].round
    states = {one.federation: state(round, float(round), 2.0) for one in records}
    store.commit(round, records, states, dict, last=last)
