"""The loop: what starts it, what rules side by side share, what it remembers, and faults in a training of one's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.kit import small
from tests.rounds.scripted import Server, federation
from tests.runs.contents import models
from tests.stopping import assert_a_stop_changes_nothing

from steelyard.algorithms.fedavg import FedAvg
from steelyard.base.errors import UserError
from steelyard.messages.updates import LossState, Task
from steelyard.rounds.weigh import told_in_one_line, training_fault
from steelyard.runs.history import History
from steelyard.weighing.order import OrderState


def test_rules_beside_share_cohorts_and_the_first_model(tmp_path: Path) -> None:
    half = {"rounds": {"fraction": 0.5}}
    beside = {"weighing": {"criteria": ["LD", "MD"]}, "beside": {"fedavg": {"criteria": ["DS"]}}}
    result, alone = small(**half, **beside).run(tmp_path / "run"), small(**half).run(tmp_path / "alone")
    assert torch.equal(models(result.folder)["fedavg"], models(alone.folder)["DS"])


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
    return local.received / inner({})

def inner(found):
    return found["nothing"]
"""


def test_a_train_that_raises_is_one_line_with_its_place(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    words = ["--set", 'algorithm.plugins=["mine.py"]', "--set", "algorithm.name=own-train-falls", "--trust"]
    line = refused("run", "quickstart", *words, "--quiet", "--out", "out")
    assert line.endswith("round 1: algorithm own-train-falls: inner (mine.py, line 15) fails: KeyError: 'nothing'")


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
