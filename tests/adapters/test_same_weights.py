"""One rule, five places: `steelyard weigh`, a simulation, `federate`, Flower's strategy, NVFlare's aggregator."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord
from tests.adapters.flower_grid import Nodes, record
from tests.federate.test_federate_apps import described, grid_of

from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.federate.server_app import federate
from steelyard.flower import ServerRows, Weighed
from steelyard.messages import Task
from steelyard.runs.reader import History
from steelyard.update_payloads import DenseModels
from steelyard.weighing.table import read_words

pytest.importorskip("nvflare")

from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from tests.adapters.test_nvflare import send

from steelyard.nvflare import WeighedAggregator

SAID = ("LD>DS", "mean(DS,LD)/max", "capped(DS;max_shares=1.2)", "owa(DS,LD;most)")
"""Rules of what clients say: all five see the same numbers."""
MEASURED = ("MD>LD>DS", "VP>DS/max", "AG", "power(VP)^3")
"""Rules of what servers measure: each computes it from the arrays that it gets."""
COLUMNS = ("DS", "LD", "MD", "VP", "AG")

Weights = Mapping[str, float]
Measures = Mapping[str, Mapping[str, float]]


@dataclass
class Cohort:
    """One round of a simulation: what was sent, what came back, and both runs of ours."""

    sent: dict[str, Any]
    models: dict[str, dict[str, Any]]
    rows: Callable[[], ServerRows]
    simulated: History
    federated: History

    def ours(self, history: History, rule: str) -> tuple[Weights, dict[str, dict[str, float]]]:
        """Weights and raw criteria of a run of ours, by client."""
        table = history.clients[(history.clients["rule"] == rule) & (history.clients["round"] == 1)]
        raw = table.set_index("client").filter(regex="^raw_").dropna(axis=1)
        raw.columns = raw.columns.str.removeprefix("raw_")
        return dict(zip(table["client"], table["weight"], strict=True)), raw.to_dict("index")


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Cohort:
    folder = tmp_path_factory.mktemp("same")
    rules = {rule: read_words(rule, COLUMNS).model_dump(mode="json", exclude_none=True) for rule in (*SAID, *MEASURED)}
    document = described(
        partition={"server": "fraction", "server_fraction": 0.2},
        rounds={"count": 1, "fraction": 1.0},
        weighing={"criteria": ["DS"], "priority": "DS"},
        beside=rules,
    )
    run(build(document), out=folder / "simulated")
    grid, config = grid_of(document, 2, out=str(folder / "federated"))
    federate(grid, config, "1")  # type: ignore[arg-type]
    clients, server = build(document).assemble()
    seed, start = document["seed"], server.initial(document["seed"])
    (updates,) = clients.train([Task("all", seed, 1, tuple(sorted(clients.names(seed))), start)])
    context = clients.context  # type: ignore[attr-defined]
    population = context.population(seed)
    assert isinstance(updates.payload, DenseModels)
    kept = torch.from_numpy(population.source.server)

    def arrays(flat: torch.Tensor) -> dict[str, Any]:
        return {name: value.numpy().copy() for name, value in context.setup.layout.views(flat).items()}

    return Cohort(
        sent=arrays(start),
        models={name: arrays(model) for name, model in zip(updates.clients, updates.payload.models, strict=True)},
        rows=lambda: ServerRows(context.setup.module, population.dataset.gather(kept), population.dataset.labels[kept]),
        simulated=History(folder / "simulated"),
        federated=History(folder / "federated"),
    )


def by_table(raw: Mapping[str, Mapping[str, float]], rule: str, folder: Path, command: Any) -> Weights:
    """The command `steelyard weigh` on a CSV of measures."""
    with (folder / "clients.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        columns = list(next(iter(raw.values())))
        writer.writerow(["client", *columns])
        writer.writerows([client, *(repr(float(row[name])) for name in columns)] for client, row in raw.items())
    ended = command("weigh", "clients.csv", "--by", rule, "--format", "json", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return {row["client"]: row["weight"] for row in json.loads(ended.stdout)["clients"]}


def by_flower(cohort: Cohort, said: Measures, rule: str) -> tuple[Weights, Measures]:
    strategy, names = Weighed(rule, rows=cohort.rows()), list(said)
    nodes: Any = Nodes(
        {
            number: lambda sent, name=name: (
                cohort.models[name],
                {"num-examples": said[name]["DS"], "LD": said[name]["LD"]},
            )
            for number, name in enumerate(names, 1)
        }
    )
    messages = strategy.configure_train(1, record(cohort.sent), ConfigRecord(), nodes)
    strategy.aggregate_train(1, nodes.send_and_receive(messages))
    found = strategy.rounds[1]
    by_name = {node: names[int(node) - 1] for node in found.weights}
    return (
        {by_name[node]: weight for node, weight in found.weights.items()},
        {by_name[node]: measures for node, measures in found.measures.items()},
    )


def by_nvflare(cohort: Cohort, said: Measures, rule: str) -> tuple[Weights, Measures]:
    aggregator = WeighedAggregator(rule, cohort.rows())
    send(aggregator, cohort.sent)
    for name, row in said.items():
        meta = {"client_name": name, "NUM_STEPS_CURRENT_ROUND": row["DS"]}
        aggregator.accept_model(FLModel(ParamsType.FULL, cohort.models[name], metrics={"LD": row["LD"]}, meta=meta))
    aggregator.aggregate_model()
    return aggregator.rounds[0].weights, aggregator.rounds[0].measures


@pytest.mark.parametrize("rule", [*SAID, *MEASURED])
def test_a_rule_gives_the_same_weights_everywhere(cohort: Cohort, rule: str, tmp_path: Path, command: Any) -> None:
    weights, raw = cohort.ours(cohort.simulated, rule)
    # What clients say; whatever else a rule looks at, every server measures itself.
    said = cohort.ours(cohort.simulated, "LD>DS")[1]
    found = {
        "weigh": (by_table(raw, rule, tmp_path, command), raw),
        "federate": cohort.ours(cohort.federated, rule),
        "flower": by_flower(cohort, said, rule),
        "nvflare": by_nvflare(cohort, said, rule),
    }
    assert len(set(weights.values())) > 2
    for place, (other, measures) in found.items():
        # `weigh` gets the measures themselves; the others measure the same arrays, trained and sent as float32.
        gap = 1e-12 if rule in SAID or place == "weigh" else 1e-6
        assert other == pytest.approx(weights, abs=gap), place
        for client, row in raw.items():
            assert measures[client] == pytest.approx(row, rel=gap), (place, client)
