"""Networks that users write and that cannot work: each is refused in one line, before a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest

import steelyard
from steelyard.errors import UserError

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, outputs=10, after=lambda x: x):
        super().__init__()
        self.layer, self.after = nn.Linear(64, outputs), after
    def forward(self, x):
        return self.after(self.layer(x.flatten(1)))

good = Net
few = lambda: Net(3)
pair = lambda: Net(after=lambda x: (x, x))
named = lambda: Net(after=lambda x: {"logits": x})
nothing = lambda: Net(after=lambda x: None)
chosen = lambda: Net(after=lambda x: x.argmax(1, keepdim=True))
flat = lambda: Net(after=lambda x: x.flatten())
lazy = lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
empty = lambda: nn.Flatten()
frozen = lambda: Net().requires_grad_(False)
narrow = lambda: nn.Linear(3, 10)
text = lambda: "net"
typed = lambda width: Net()
def mistyped(outputs):
    return nn.Linear(torch.empty("x"), outputs)
def broken():
    raise KeyError("size")
class Training(Net):
    def forward(self, x):
        return (self.layer(x.flatten(1)),) * 2 if self.training else super().forward(x)
class Ten(Net):
    def forward(self, x):
        return self.layer(x.reshape(10 if self.training else len(x), 64))
class Ungraded(Net):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)
def elsewhere():
    net = Net()
    net.forward = lambda x: Net.forward(net, x)  # copies of it still call this one
    return net
class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, slope):
        raise IndexError("on the way back")
backward = lambda: Net(after=Wrong.apply)
class Lists(Net):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(64, 10)]
    def forward(self, x):
        return super().forward(x) + self.layers[0](x.flatten(1))
class Locked(Net):
    def __init__(self):
        super().__init__()
        self.lock = __import__("threading").Lock()
class Underscored(Net):
    def __init__(self):
        super().__init__()
        self._parts = {"last": nn.Linear(64, 10)}
    def forward(self, x):
        return super().forward(x) + self._parts["last"](x.flatten(1))
def whole():
    net = Net()
    net._cells = nn.utils.parametrizations.weight_norm(nn.LSTM(64, 64), "weight_hh_l0")  # torch keeps the old weights
    net.order, net.fixed = [net.layer], {"body": nn.Linear(64, 64).requires_grad_(False)}
    net.blocks = [nn.Sequential(net.layer, nn.ReLU())]  # torch sees its one layer elsewhere
    return net
scripted = lambda: torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
class Turning(Net):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.ones(10, dtype=torch.complex64))
class Raising(Net):
    def forward(self, x):
        raise AttributeError("no such thing")
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("few", "model.outputs: got 3 for 10 classes"),
        ("pair", "returned tuple; allowed: one tensor"),
        ("named", "returned dict; allowed: one tensor"),
        ("nothing", "returned NoneType"),
        ("chosen", "returned whole numbers"),
        ("flat", "returned shape (20,)"),
        ("lazy", "has lazy layers"),
        ("empty", "no parameters to train"),
        ("frozen", "no parameters to train"),
        ("narrow", "does not take features of shape (1, 8, 8)"),
        ("text", "returned str; allowed: a torch.nn.Module"),
        (
            "typed",
            "'width'; allowed: arguments named feature_shape, classes, outputs, and those that model.arguments gives",
        ),
        ("mistyped", "fails: TypeError: empty"),
        ("broken", "fails: KeyError: 'size'"),
        ("Raising", "AttributeError: no such thing"),
        ("Training", "returned tuple while it trains, for 10 samples; allowed: one tensor"),
        ("Ungraded", "its outputs have no gradient while it trains"),
        ("elsewhere", "none of its parameters has a part in its outputs"),
        ("backward", "no gradient can be taken of the model: IndexError: on the way back"),
        ("Lists", "holds layers in 'layers' that torch does not see"),
        ("Underscored", "holds layers in '_parts' that torch does not see"),
        ("Locked", "the model cannot be copied, as every engine must: TypeError: cannot pickle"),
        ("scripted", "returned a scripted module"),
        ("Turning", "has parameters of torch.complex64; allowed: torch.float32"),
        ("missing", "has no function or class 'missing'"),
    ],
)
def test_own_models_that_cannot_work(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(CODE)
    changes = ["rounds.count=1", "compute.engine=loop", f"model.name='nets.py:{name}'"]
    experiment = steelyard.Experiment.load("quickstart", changes)
    with pytest.raises(UserError) as caught:
        experiment.run("out")
    assert words in str(caught.value)
    assert not Path("out").exists()


def test_a_model_that_fails_in_a_later_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes batches of ten alone, and the last one of a client is shorter: one line, whatever trains it."""
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(CODE)
    for engine in ("auto", "loop", "threads", "vmap"):
        changes = ["rounds.count=1", f"compute.engine={engine}", "model.name='nets.py:Ten'"]
        with pytest.raises(UserError, match=r"the model fails while it trains, on \d samples of shape \(1, 8, 8\): "):
            steelyard.Experiment.load("quickstart", changes).run(engine)


def test_an_own_model_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(CODE)
    for name in ("good", "whole"):
        changes = ["rounds.count=1", "compute.engine=loop", f"model.name='nets.py:{name}'"]
        assert steelyard.Experiment.load("quickstart", changes).run(name).summary["rules"][0]["rounds"] == 1
