import pytest
import torch
from torch import nn

from steelyard.errors import UserError
from steelyard.learning.parameters import Layout


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.dense(x))


def test_parameters_come_first_then_floating_buffers() -> None:
    layout = Layout.of(Normed())
    names = [slot.name for slot in layout.slots]
    assert names == ["dense.weight", "dense.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]
    assert layout.trained == 6 + 2 + 2 + 2
    assert layout.size == 12 + 4


def test_read_and_write_are_inverse() -> None:
    layout = Layout.of(Normed())
    module = Normed()
    wanted = torch.arange(16.0)
    layout.write(module, wanted)
    assert torch.equal(layout.read(module), wanted)
    assert module.dense.weight.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert module.norm.running_var.tolist() == [14.0, 15.0]


def test_views_share_memory_and_stack() -> None:
    layout = Layout.of(nn.Linear(3, 2))
    stacked = torch.zeros(4, layout.size)
    views = layout.views(stacked)
    assert views["weight"].shape == (4, 2, 3)
    views["weight"][2, 1, 2] = 7.0
    assert stacked[2, 5] == 7.0
    assert torch.equal(layout.flatten(views), stacked)


def test_the_rows_of_the_last_layer_with_their_bias() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    layout = Layout.of(module)
    flat = layout.read(module)
    rows = flat[torch.from_numpy(layout.output)]
    last = module[2]
    assert isinstance(last, nn.Linear)
    assert torch.equal(rows, torch.cat([last.weight, last.bias[:, None]], dim=1))
    bare = nn.Sequential(nn.Linear(3, 2, bias=False))
    assert Layout.of(bare).output.tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(UserError, match="no layer with a row of weights"):
        _ = Layout.of(nn.LayerNorm(3)).output
