"""Gradient inversion finds what it should, and nothing where nothing can be found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steelyard.learning.inversion import gradient, likeness, read_off, search


def test_one_sample_is_read_off_a_dense_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    row = torch.rand(1, 6)
    told = gradient(model, row, torch.tensor([1]))
    assert read_off(told[0], told[1]).tolist() == pytest.approx(row[0].tolist(), abs=1e-4)


def test_a_layer_whose_biases_did_not_move_tells_nothing() -> None:
    assert read_off(torch.zeros(3, 4), torch.zeros(3)).tolist() == [0.0] * 4


def test_the_search_finds_two_samples_of_an_mlp() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
    rows, labels = torch.rand(2, 16), torch.tensor([0, 3])
    found = search(model, gradient(model, rows, labels), (16,), labels, steps=150)
    assert float(likeness(found, rows).min()) > 0.9


def test_likeness_is_correlation_with_the_nearest() -> None:
    true = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    found = torch.tensor([[0.0, 2.0, 0.0], [0.5, 0.5, 1.0]])
    assert likeness(found, true).tolist() == pytest.approx([1.0, -0.5], abs=1e-6)
