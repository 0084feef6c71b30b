"""Transfer learning: MNIST's images become as small as the digits, and only the last layer is trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import transfer


def test_an_image_becomes_means_of_blocks() -> None:
    image = torch.zeros(1, 28, 28, dtype=torch.uint8)
    image[0, 2:6, 6:10] = 255  # with two pixels of padding: the block of row 1, column 2
    found = transfer.small(image).reshape(8, 8)
    assert found[1, 2] == 1.0
    assert found.sum() == 1.0


def test_only_the_last_layer_is_trained_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 10))
    monkeypatch.setattr(transfer, "pretrained", lambda: layers)
    model = transfer.network()
    assert [name for name, value in model.named_parameters() if value.requires_grad] == ["2.weight", "2.bias"]
    below = model.get_parameter("1.weight")
    assert torch.equal(below, layers[1].weight)
    assert not torch.equal(model.get_parameter("2.weight"), layers[2].weight)


def test_the_rules_are_those_of_adafed() -> None:
    described = transfer.experiment(0.3)
    assert {described.weighing.name, *described.beside} == set(transfer.RULES)
    assert [(flaw.kind, flaw.share) for flaw in described.flaws] == [("labels-flipped", 0.3)]
    assert transfer.experiment(0.0).flaws == ()
