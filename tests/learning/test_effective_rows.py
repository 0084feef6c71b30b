"""How many rows an update rests on: held to what training really does to each row's part of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from steelyard.algorithms.feddyn import FedDyn
from steelyard.algorithms.fedprox import FedProx
from steelyard.algorithms.scaffold import Scaffold
from steelyard.learning.descent import Descent
from steelyard.learning.effective_rows import effective_rows, effective_rows_of
from steelyard.learning.parameters import Layout
from steelyard.learning.settings import TrainingSettings
from steelyard.learning.training import train_client
from steelyard.messages.updates import LossState


def measured(size: int, training: TrainingSettings) -> float:
    """Train on rows whose gradients are apart and constant, so that each parameter of the update is one row's part.

    The decay is one towards the start, so that the start itself adds nothing to the update.
    """
    plain = training.model_copy(update={"weight_decay": 0.0})
    module = nn.Linear(size, 1, bias=False)
    order = np.broadcast_to(np.arange(size), (training.epochs, size))
    rows, labels = torch.eye(size), torch.zeros(size, dtype=torch.int64)
    start = torch.full((size,), 40.0)  # So wrong that the slope of the loss is 1 and stays 1.
    loss = LossState("binary-cross-entropy")
    descent = Descent.of(plain, pull=training.weight_decay)
    trained, _ = train_client(module, Layout.of(module), start, rows, labels, order, plain, loss, descent=descent)
    parts = (start - trained).abs().double()
    return float(parts.sum() ** 2 / parts.square().sum())


@pytest.mark.parametrize(
    ("size", "fields", "rows"),
    [
        (96, {"batch_size": 4}, 96.0),
        (96, {"batch_size": 19, "learning_rate": 0.1, "weight_decay": 10.0}, 1.0),  # the last batch, of one row
        (96, {"batch_size": 12, "learning_rate": 0.1, "weight_decay": 10.0}, 12.0),
        (11, {"batch_size": 10}, 4 / 1.1),  # the eleventh row weighs as much as the ten before it
        (30, {"batch_size": 1, "learning_rate": 0.5, "weight_decay": 1.8}, 0.99 / 0.81),  # weights 1, 0.1, 0.01, ...
        (96, {"batch_size": 4, "updates": 3}, 12.0),
    ],
)
def test_known_cases(size: int, fields: dict[str, object], rows: float):
    assert effective_rows(size, TrainingSettings.model_validate(fields)) == pytest.approx(rows)


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({"batch_size": 4}, 20.0),
        ({"batch_size": 4, "updates": 24}, 20.0),
        ({"batch_size": 4, "updates": 22}, 12.0),  # 8 rows are not visited: they may all be of the class
        ({"batch_size": 4, "updates": 19}, 0.0),
        ({"batch_size": 12, "learning_rate": 0.1, "weight_decay": 10.0}, 2.5),  # 12 of the 96 count
    ],
)
def test_of_a_class_those_count_that_are_behind_an_update_for_sure(fields: dict[str, object], rows: float):
    found = effective_rows_of(20, 96, TrainingSettings.model_validate(fields))
    assert found == pytest.approx(rows)


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(2, 24),
    batch=st.integers(1, 24),
    momentum=st.sampled_from([0.0, 0.5]),
    decay=st.floats(0.0, 5.0),
    pull=st.floats(0.0, 4.0),
)
def test_one_epoch_is_as_training_does_it_and_an_algorithms_pull_forgets_as_weight_decay_does(
    size: int, batch: int, momentum: float, decay: float, pull: float
):
    training = TrainingSettings(batch_size=batch, momentum=momentum, weight_decay=decay, learning_rate=0.1)
    both = training.model_copy(update={"weight_decay": decay + pull})
    assert effective_rows(size, training, FedProx(mu=pull)) == pytest.approx(measured(size, both), rel=1e-3)


def test_the_worst_rate_of_a_schedule_counts():
    training = TrainingSettings(batch_size=1, learning_rate=0.2, weight_decay=10.0)
    assert effective_rows(30, training) == pytest.approx(30.0)  # 1 − 0.2·10 = −1: all steps count alike.
    assert effective_rows(30, training, rates=[1.0, 0.5]) == pytest.approx(1.0)  # 1 − 0.1·10 = 0: the last row alone.
    still = TrainingSettings(batch_size=1, learning_rate=0.2)
    assert effective_rows(30, still, rates=[1.0, 0.5, 1e-9]) == pytest.approx(30.0)


@pytest.mark.parametrize("algorithm", [Scaffold(), FedDyn()])
@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({"batch_size": "full", "epochs": 3}, 96),
        ({"batch_size": 12}, 12),
        ({"batch_size": 19}, 1),  # a last batch of one row
        ({"batch_size": 19, "updates": 5}, 19),  # which is not reached
        ({"batch_size": 19, "updates": 6}, 1),
    ],
)
def test_where_a_server_can_move_the_model_within_a_round_one_batch_counts(
    algorithm: Scaffold, fields: dict[str, object], rows: int
):
    assert effective_rows(96, TrainingSettings.model_validate(fields), algorithm) == rows
