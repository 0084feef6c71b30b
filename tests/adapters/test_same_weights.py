"""One rule, the same weights: a simulation, `steelyard weigh` of its measures, and inside other frameworks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kit import SMALL, changed

import steelyard
from steelyard.adapters import Reply, ServerRows, WeighedRounds
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Task
from steelyard.runs.history import History
from steelyard.weighing.table import read_words

SAID = ("LD>DS", "mean(DS,LD)/max", "capped(DS;max_shares=1.2)", "owa(DS,LD;most)")
"""Rules of what clients say."""
MEASURED = ("MD>LD>DS", "VP>DS/max", "AG", "power(VP)^3")
"""Rules of what servers measure, each from the arrays that it gets."""
COLUMNS = ("DS", "LD", "MD", "VP", "AG")


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """A run of all rules, and the model that was sent, those that came back, and the server's rows."""
    rules = {rule: read_words(rule, COLUMNS).model_dump(mode="json", exclude_none=True) for rule in (*SAID, *MEASURED)}
    experiment = build(
        changed(SMALL, partition={"server": "fraction", "server_fraction": 0.2}, rounds={"count": 1}, beside=rules)
    )
    history = History(run(experiment, out=tmp_path_factory.mktemp("same") / "run"))
    clients, server = experiment.assemble()
    start = server.initial(experiment.seed)
    (updates,) = clients.train([Task("all", experiment.seed, 1, tuple(sorted(clients.names(experiment.seed))), start)])
    context = clients.context  # type: ignore[attr-defined]
    population = context.population(experiment.seed)
    kept = torch.from_numpy(population.source.server)
    rows = ServerRows(context.setup.module, population.dataset.gather(kept), population.dataset.labels[kept])
    assert isinstance(updates.payload, DenseModels)
    sent, *models = (
        {name: value.numpy().copy() for name, value in context.setup.layout.views(flat).items()}
        for flat in (start, *updates.payload.models)
    )
    return history, sent, dict(zip(updates.clients, models, strict=True)), rows


def of(history: History, rule: str) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Weights and raw criteria of a run, by client."""
    table = history.clients[(history.clients["rule"] == rule) & (history.clients["round"] == 1)]
    raw = table.set_index("client").filter(regex="^raw_").dropna(axis=1)
    raw.columns = raw.columns.str.removeprefix("raw_")
    return dict(zip(table["client"], table["weight"], strict=True)), raw.to_dict("index")


@pytest.mark.parametrize("rule", [*SAID, *MEASURED])
def test_a_rule_gives_the_same_weights_everywhere(cohort: tuple[Any, ...], rule: str) -> None:
    history, sent, models, rows = cohort
    weights, raw = of(history, rule)
    assert len(set(weights.values())) > 2
    table = steelyard.weigh(raw, rule)
    assert dict(zip(table.clients, table.weights, strict=True)) == pytest.approx(weights, abs=1e-12)
    # What clients say; whatever else a rule looks at, every server measures itself.
    replies = [Reply(name, models[name], row["DS"], row) for name, row in of(history, "LD>DS")[1].items()]
    found = WeighedRounds(rule, rows).combine(sent, replies)
    # Beside what clients say, the same arrays are measured, trained and sent as float32.
    gap = 1e-12 if rule in SAID else 1e-6
    assert found.weights == pytest.approx(weights, abs=gap)
    for client, row in raw.items():
        assert found.measures[client] == pytest.approx(row, rel=gap)
