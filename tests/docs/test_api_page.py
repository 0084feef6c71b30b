"""Every name on the page of Python has an example that runs, and says what it raises, which is what it raises."""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.warm import ROOT

import steelyard
from steelyard.adapters import recorder, rounds, server_rows
from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data import PartitionSettings, share_out
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.privacy import sharing

PAGE = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
BLOCKS = {block.rsplit(".", 1)[1]: block for block in re.findall(r"^::: ([\w.]+)$", PAGE, re.MULTILINE)}
WITHOUT = {  # plain records and results, which take what they are given; what made them has checked it
    *("UserError", "Algorithm", "LocalSteps", "LocalTraining", "ServerStep", "Dataset", "Population"),
    *("Reply", "Collected", "Combined", "ClientTest", "SimulationServer"),
}


def rows(count: int = 20) -> Any:
    return steelyard.in_memory(numpy.zeros((count, 3)), [0, 1] * (count // 2))


def simulated(compute: ComputeSettings | None = None) -> Any:
    populations = {1: share_out(rows(), PartitionSettings(clients=2), seed=1)}
    return Simulation(populations, ModelSettings(name="logistic"), TrainingSettings(epochs=5), compute)


def object_of(block: str) -> Any:
    module, name = block.rsplit(".", 1)
    if module == "steelyard.nvflare":
        pytest.importorskip("nvflare")
    if module == "steelyard.flower":
        pytest.importorskip("flwr")
    return getattr(import_module(module), name, None) or import_module(block)


MISTAKES: dict[str, Callable[[], object]] = {
    "Experiment": lambda: steelyard.Experiment(rounds={"count": 0}),  # type: ignore[arg-type]
    "Experiment.load": lambda: steelyard.Experiment.load("no such recipe"),
    "Experiment.run": lambda: steelyard.Experiment(data={"source": "memory"}).run(),  # type: ignore[arg-type]
    "Experiment.compare": lambda: steelyard.Experiment.load("quickstart").compare(["XX"]),
    "Experiment.sweep": lambda: steelyard.Experiment.load("quickstart").sweep({"training.rate": [1]}),
    "RecommendExperiment": lambda: steelyard.RecommendExperiment(),  # type: ignore[call-arg]
    "Result": lambda: steelyard.Result(Path("nowhere")).summary,
    "SweepResult": lambda: steelyard.SweepResult(Path("nowhere")).best,
    "resume": lambda: steelyard.resume("nowhere"),
    "History": lambda: steelyard.History("nowhere").rounds,
    "weigh": lambda: steelyard.weigh({}),
    "Weighed": lambda: _flower("adafed-is-no-rule"),
    "Rule": lambda: steelyard.Rule(steelyard.WeighingSettings()).weigh(numpy.array([[-1.0]])),
    "WeighingSettings": lambda: steelyard.WeighingSettings(score="nope"),
    "client_criterion": lambda: steelyard.client_criterion("DS")(lambda data: 1.0),
    "server_criterion": lambda: steelyard.server_criterion("a b")(lambda view: view.samples),  # type: ignore[arg-type,return-value]
    "model": lambda: steelyard.model(3),  # type: ignore[arg-type]
    "loss": lambda: steelyard.loss(3),  # type: ignore[arg-type]
    "algorithm": lambda: steelyard.algorithm("mine")(int),  # type: ignore[type-var]
    "in_memory": lambda: steelyard.in_memory([[1.0]], [0, 1]),
    "share_out": lambda: share_out(rows(4), PartitionSettings(clients=10), seed=1),
    "PartitionSettings": lambda: PartitionSettings(clients=0),
    "Simulation": lambda: simulated(ComputeSettings(device="cuda:99")),
    "ComputeSettings": lambda: ComputeSettings(engine=3),  # type: ignore[arg-type]
    "ModelSettings": lambda: ModelSettings(kernel=0),
    "TrainingSettings": lambda: TrainingSettings(epochs=0),
    "sharing": lambda: sharing.split(1, 1),
    "ServerRows": lambda: server_rows.ServerRows(torch.nn.Linear(3, 2), numpy.zeros((4, 3)), [0, 1]),
    "WeighedAggregator": lambda: import_module("steelyard.nvflare").WeighedAggregator(3),
    "WeighedRounds": lambda: rounds.WeighedRounds("XX"),
    "Recorder": lambda: _other_run(),
}


def _flower(rule: str) -> object:
    return import_module("steelyard.flower").Weighed(rule)


def _other_run() -> object:
    for rule in ("DS", "LD"):
        kept = recorder.Recorder("theirs", rounds.WeighedRounds(rule).rule, framework="ours")
        kept.write({"ann": 1.0}, {"ann": {rule: 30.0}})
        kept.finish()
    return None


def documented(name: str) -> Any:
    head, _, verb = name.partition(".")
    return getattr(object_of(BLOCKS[head]), verb) if verb else object_of(BLOCKS[head])


def test_every_name_is_tried() -> None:
    assert not set(BLOCKS) - {name.partition(".")[0] for name in MISTAKES} - WITHOUT


@pytest.mark.parametrize("name", MISTAKES)
def test_a_name_says_what_it_raises(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = inspect.getdoc(documented(name)) or ""
    raised = re.search(r"^Raises:\n    (\w+): .", said, re.MULTILINE)
    assert raised is not None, f"{name} does not say what it raises"
    expected = {"UserError": steelyard.UserError, "ValueError": ValueError}[raised[1]]
    with pytest.raises(expected):
        MISTAKES[name]()


@pytest.mark.parametrize("name", sorted(set(BLOCKS) - set(steelyard.__all__) | {"Weighed"}))
def test_a_name_beyond_the_first_ones_has_an_example_that_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that `steelyard` itself exports are tried by tests/test_gate.py."""
    monkeypatch.chdir(tmp_path)
    found = object_of(BLOCKS[name])
    examples = doctest.DocTestParser().get_examples(found.__doc__ or "")
    assert examples, f"{name} has no example"
    ones = numpy.ones(2)
    known: dict[str, Any] = {"steelyard": steelyard, "numpy": numpy, "torch": torch, "rows": rows(), "sharing": sharing}
    known |= {kept.__name__: kept for kept in (PartitionSettings, share_out, Simulation, SimulationServer)}
    known |= {kept.__name__: kept for kept in (ComputeSettings, ModelSettings, TrainingSettings)}
    known |= {"Recorder": recorder.Recorder, "ClientTest": recorder.ClientTest, "ServerRows": server_rows.ServerRows}
    known |= {kept.__name__: kept for kept in (rounds.Reply, rounds.WeighedRounds, rounds.Collected)}
    known["replies"] = [rounds.Reply("ann", {"layer": ones}, 30), rounds.Reply("bob", {"layer": -ones}, 10)]
    if name == "SimulationServer":
        known["clients"] = simulated()
    if name == "Weighed":
        known |= {"FedAvg": import_module("flwr.serverapp.strategy").FedAvg}
    known[name] = found
    for example in examples:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(example.source, name, "single"), known)
        if example.want:
            assert printed.getvalue() == example.want
