"""The loop against a slow reference written straight from the papers, what starts it, and what it remembers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import small
from tests.rounds.scripted import Server, federation
from tests.stopping import assert_a_stop_changes_nothing

from steelyard import Experiment
from steelyard.algorithms.fedavg import FedAvg
from steelyard.base import randomness
from steelyard.base.errors import UserError
from steelyard.data import load, share_out
from steelyard.learning.models import build
from steelyard.learning.parameters import Layout
from steelyard.learning.training import orders as batch_orders
from steelyard.learning.training import train_client
from steelyard.messages.updates import LossState, Task
from steelyard.rounds.weigh import told_in_one_line, training_fault
from steelyard.runs.checkpoint import read_tensors
from steelyard.runs.history import History
from steelyard.weighing.order import OrderState


def experiment(**changes: Any) -> Experiment:
    return small(
        **{
            "partition": {"clients": 8, "size_spread": 0.5, "minimum": 8},
            "model": {"name": "mlp", "hidden": [16]},
            "training": {"learning_rate": 0.5, "epochs": 2, "batch_size": 60},
            "rounds": {"count": 4, "fraction": 0.5},
            "weighing": {"criteria": ["DS", "LD", "MD"], "priority": "LD>MD>DS"},
            **changes,
        }
    )


def final_models(folder: Path) -> dict[str, torch.Tensor]:
    files = list((folder / "checkpoints").glob("*.safetensors"))
    assert len(files) == 1
    return read_tensors(files[0])


def reference(described: Experiment, priority: list[str], rounds: int) -> tuple[torch.Tensor, list[dict[str, float]]]:
    """FedAvg's loop with the prioritized weights, one client at a time."""
    data = load(described.data)
    population = share_out(data, described.partition, described.seed)
    module = build(described.model, data.features.shape[1:], data.classes, described.seed)
    layout = Layout.of(module)
    model = layout.read(module).clone()
    weights_seen: list[dict[str, float]] = []
    for round in range(1, rounds + 1):
        count = max(1, math.floor(described.rounds.fraction * len(population.clients) + 0.5))
        cohort = randomness.choose(described.seed, round, population.names, count)
        trained: list[torch.Tensor] = []
        raw: list[list[float]] = []
        for name in cohort:
            rows = population.by_name[name]
            features = data.features[torch.from_numpy(rows.train)]
            labels = population.train_labels(rows)
            order = batch_orders(described.seed, round, [name], len(labels), described.training)[0]
            loss = LossState("cross-entropy")
            new, _ = train_client(module, layout, model, features, labels, order, described.training, loss)
            distance = math.sqrt(float(((new - model).double() ** 2).sum()))
            of = {"DS": len(labels), "LD": len(set(labels.tolist())), "MD": 1 / math.sqrt(distance + 1)}
            trained.append(new)
            raw.append([of[criterion] for criterion in priority])
        # The first criterion, the first times the second, all three; each a client's part of its column.
        gates = np.cumprod(np.array(raw) / np.sum(raw, axis=0), axis=1)
        weights = gates.sum(axis=1) / gates.sum()
        weights_seen.append(dict(zip(cohort, weights.tolist(), strict=True)))
        model = (torch.from_numpy(weights) @ torch.stack(trained).double()).float()
    return model, weights_seen


def test_the_loop_equals_the_papers_equations(tmp_path: Path) -> None:
    described = experiment()
    result = described.run(tmp_path / "run")
    expected, weights = reference(described, ["LD", "MD", "DS"], described.rounds.count)
    found = final_models(result.folder)["models/LD>MD>DS"]
    # The loop combines in float32, the reference in float64: in each of four rounds some dozen roundings of 6e-8 of
    # numbers up to 1, which training passes on.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    frame = result.history.clients
    for round, wanted in enumerate(weights, start=1):
        stored = frame[frame["round"] == round].set_index("client")["weight"]
        # Divergence is measured on float32 models that differ by the roundings above, and enters by its root.
        assert dict(stored) == pytest.approx(wanted, rel=1e-6)


def test_rules_beside_share_cohorts_and_the_first_model(tmp_path: Path) -> None:
    result = experiment(beside={"fedavg": {"criteria": ["DS"]}}).run(tmp_path / "run")
    alone = experiment(weighing={"criteria": ["DS"]}).run(tmp_path / "alone")
    assert torch.equal(final_models(result.folder)["models/fedavg"], final_models(alone.folder)["models/DS"])


# Remembers how often each client was in a cohort, and an average of its losses; weighs by both.
PLUGIN = """
import numpy as np
from steelyard import Needs, server_criterion

@server_criterion("SEEN", needs=Needs(first_losses=True, label_counts=True))
def seen(view):
    times = dict(view.memory.get("SEEN", {}))
    for client, loss in zip(view.clients, view.first_losses, strict=True):
        times[client] = 0.5 * times.get(client, 0.0) + loss
    view.remember("SEEN", times)
    return np.array([times[client] for client in view.clients]) + view.label_counts.max(axis=1) / 1e3 + view.steps / 1e6
"""


def test_memory_reaches_the_next_rounds_and_survives_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tmp_path / "seen.py"
    plugin.write_text(PLUGIN)
    weighing = {"criteria": ["SEEN", "DS"], "plugins": [str(plugin)]}
    described = small(rounds={"count": 5, "fraction": 0.5}, weighing=weighing)
    assert_a_stop_changes_nothing(described, tmp_path, monkeypatch)
    history = History(tmp_path / "stopped")
    remembered = history.last_checkpoint()[0]["SEEN>DS"].memory["SEEN"]
    # Everyone who was ever asked is still there, also those of the first round who were not asked again.
    assert set(remembered) == set(history.clients["client"])
    for _, row in history.clients.query("round == 5").iterrows():
        # A class has fewer than 190 rows: counts of labels and steps add less than .2 to what is remembered.
        assert remembered[row["client"]] == pytest.approx(row["raw_SEEN"], abs=0.2)


OWN = """from steelyard import Algorithm, algorithm

@algorithm("own-train-falls")
class Falls(Algorithm):
    '''Falls in the first batch.'''
    by_hand = True

    def train(self, local):
        return helper(local), {}

def helper(local):
    return local.received / {}["nothing"]
"""


def test_a_train_that_raises_is_one_line_with_its_place(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    words = ["--set", 'algorithm.plugins=["mine.py"]', "--set", "algorithm.name=own-train-falls", "--trust"]
    line = refused("run", "quickstart", *words, "--quiet", "--out", "out")
    assert line.endswith("round 1: algorithm own-train-falls: helper (mine.py, line 12) fails: KeyError: 'nothing'")


def test_a_fault_of_ours_is_not_blamed_on_an_algorithm() -> None:
    task = Task("f", 0, 1, ("a",), torch.zeros(2), algorithm=FedAvg())
    with pytest.raises(KeyError), told_in_one_line(partial(training_fault, [task])):
        raise KeyError("ours")


def test_what_is_told_already_stays() -> None:
    with pytest.raises(UserError, match=r"^field: wrong$"), told_in_one_line(partial(training_fault, [])):
        raise UserError("field: wrong")


def test_a_federation_starts_with_the_servers_model_and_its_own_order() -> None:
    begun = federation(seed=4, criteria=("DS", "LD"), priority="LD>DS").start(Server())
    assert begun.parameters.tolist() == [4.0] * 10
    assert begun.orders == OrderState((1, 0), 0.0, 0, {})
    assert begun.loss == LossState()
    assert (begun.round, begun.finished, begun.memory) == (0, False, {})
