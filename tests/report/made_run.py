"""A run folder written by hand: every kind of row that a report shows, and no training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.kit import made_once
from tests.runs.records import evaluations, record, state, updates

from steelyard.base.settings import validated
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import RUN_FILE, to_toml
from steelyard.experiment.parts import federations_of
from steelyard.experiment.resuming import versions
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Failure, LossState
from steelyard.rounds.state import Federation, RoundRecord
from steelyard.runs.facts import RunFacts
from steelyard.runs.store import Store
from steelyard.weighing.order import OrderState

RULES = ("VP>DS", "fedavg", "online(DS>LD)")


def shared_run(factory: pytest.TempPathFactory) -> Path:
    """Return a run of six rounds, eight clients and two seeds that is made once and only read."""
    return made_once(factory, "report", lambda folder: make_run(folder, rounds=6, clients=8, seeds=(1, 2)))


def described(rules: tuple[str, ...], rounds: int) -> LearningDescription:
    known = {
        "VP>DS": {"criteria": ["VP", "DS"], "loss": {"adapt": "class-f1"}, "name": "VP>DS"},
        "fedavg": {"criteria": ["DS"], "name": "fedavg"},
        "online(DS>LD)": {"criteria": ["DS", "LD"], "adjust": {"strategy": "online"}, "name": "online(DS>LD)"},
    }
    first, *others = rules
    document = {
        "name": "made",
        "description": "A run <script>alert(1)</script> written by hand.",
        "data": {"source": "digits"},
        "partition": {"scheme": "iid", "clients": 8, "server": "fraction", "server_report": "apart"},
        "rounds": {"count": rounds or 5, "targets": [0.2, 0.6], "shares": [0.5, 1.0]},
        "weighing": known[first],
        "beside": {name: known[name] for name in others},
    }
    return validated(LearningDescription, document, "experiment")


def make_run(
    folder: Path,
    *,
    rounds: int,
    clients: int,
    seeds: tuple[int, ...],
    rules: tuple[str, ...] = RULES,
    status: str = "finished",
) -> Path:
    """Write a run with two flawed clients, one of them with markup in its flaw, and one client that fails at times."""
    experiment = described(rules, rounds)
    store = Store(folder, checkpoint_every=max(1, rounds))
    (folder / RUN_FILE).write_text(to_toml(experiment), encoding="utf-8")
    federations = federations_of(experiment, seeds)
    store.register(federations)
    names = [f"client-{index}" for index in range(clients)]
    flaws = {"client-0": ["labels flipped <b>badly</b>"], "client-1": ["few steps"]}
    every = {str(seed): flaws for seed in seeds}
    store.note(RunFacts(rounds=rounds or 5, seeds=list(seeds), flaws=every, others=versions()))
    chance = np.random.default_rng(0)
    for number in range(rounds + 1):
        # A chain begins with round 0; here it holds no figures.
        count = max(3, clients - 2)
        records = [
            _record(each, number, rounds, names, count, chance) if number else RoundRecord(each.name, 0, 0.0)
            for each in federations
        ]
        states = {each.name: state(number, 0.0, orders=OrderState((0,), 0.0)) for each in federations}
        store.commit(number, records, states, dict, last=number == rounds)
    store.note(RunFacts(status=status))
    store.close()
    return folder


def _record(
    federation: Federation, round: int, rounds: int, names: list[str], count: int, chance: np.random.Generator
) -> RoundRecord:
    """One round: so many clients are asked, one of them fails, scores rise with the rounds."""
    drawn = chance.choice(len(names), size=count, replace=False).tolist()
    asked, failing = sorted(drawn[:-1]), drawn[-1]
    rule = federation.rule
    measured = {
        "DS": np.array([10.0 + 5 * index for index in asked]),
        "LD": np.array([1.0 + index % 4 for index in asked]),
        "VP": np.array([0.1 if index < 2 else 0.8 for index in asked]),
    }
    sent = updates(
        federation.name,
        round,
        clients=tuple(names[index] for index in asked),
        samples=measured["DS"].astype(np.int64),
        criteria={},
        losses=np.ones(len(asked)),
        payload=DenseModels(torch.zeros(len(asked), 1)),
        failures=(Failure(names[failing], "no answer within <i>30 s</i>"),),
    )
    level = {"VP>DS": 0.9, "fedavg": 0.5, "online(DS>LD)": 0.6}[federation.rule_name]
    scores = np.clip(level * round / rounds + chance.normal(0, 0.05, len(names)), 0, 1)
    tested = {"samples": np.full(len(names), 10), "scores": scores[None], "losses": np.ones((1, len(names)))}
    mean = float(scores.mean())
    adjusted = rule.settings.adjust is not None and round % 2 == 0
    tried = (((0, 1), 0.4), ((1, 0), 0.5)) if adjusted else ((rule.start_order, mean),)
    return record(
        federation.name,
        round,
        bytes_each=8,
        updates=sent,
        weighing=rule.weigh(np.stack([measured[name] for name in rule.names], axis=1)),
        order=tried[-1][0],
        tried=tried,
        tests=len(tried) - 1,
        evaluations=evaluations(federation.name, round, clients=tuple(names), **tested),
        accuracy=mean,
        loss=LossState(class_weights=(1.0, 2.0 / round)) if rule.settings.loss else LossState(),
        server_accuracy=mean,
        server_macro_f1=float(scores[:2].mean()),
        server_metrics={"f1": scores[:2].tolist()},
    )
