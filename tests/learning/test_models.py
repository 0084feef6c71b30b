"""Networks: sizes of the papers, what their layers compute, flat parameters, and own ones, refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit import assert_refused
from torch import nn

import steelyard
from steelyard.base.errors import UserError
from steelyard.learning.models import ModelSettings, build
from steelyard.learning.parameters import Layout
from steelyard.learning.settings import BUILT_IN, BuiltIn


@pytest.mark.parametrize("shape", [(1, 16, 18), (1, 18, 16)])
def test_a_unet_takes_no_image_with_a_side_that_it_cannot_halve(shape: tuple[int, ...]) -> None:
    assert_refused(lambda: build(ModelSettings(name="unet"), shape, 2, 0), "depth 2", f"{shape[1]}×{shape[2]}")


def test_the_authors_network_has_no_activation_after_its_convolutions_and_glorot_starts() -> None:
    module = build(ModelSettings(name="cnn-mnist-authors"), (28, 28), 10, 3)
    named = dict(module.named_parameters())
    fans = {"conv1": (25, 800), "conv2": (800, 1600), "dense1": (3136, 512), "dense2": (512, 10)}
    for layer, (inside, outside) in fans.items():
        assert not named[f"{layer}.bias"].any()
        # Thousands of draws from N(0, 2 / (fan in + fan out)); 800 in the first layer.
        spread = float(named[f"{layer}.weight"].detach().std())
        assert spread == pytest.approx((2 / (inside + outside)) ** 0.5, rel=0.08)
    # Without a ReLU, a constant taken off the second bias comes out of the pooling as it is, below 0 too.
    entered: list[torch.Tensor] = []
    module.dense1.register_forward_pre_hook(lambda _, given: entered.append(given[0]))  # type: ignore[union-attr]
    x = torch.rand(2, 28, 28)
    with torch.no_grad():
        module(x)
        named["conv2.bias"].sub_(5)
        module(x)
    assert torch.allclose(entered[1], entered[0] - 5, atol=1e-5)
    assert float(entered[1].max()) < 0


def test_keras_network_computes_what_its_layers_say() -> None:
    module = build(ModelSettings(name="cnn-keras", channels=(3, 4), hidden=(5,)), (2, 9, 8), 3, 3)
    by_layers = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)
    ).eval()
    with torch.no_grad():
        for index, name in ((0, "conv1"), (2, "conv2")):
            by_layers[index].load_state_dict(getattr(module, name).state_dict())
    x = torch.randn(6, 2, 9, 8)
    flat = by_layers(x).permute(0, 2, 3, 1).flatten(1)
    assert (flat == 0).any()  # where the second ReLU had something to cut
    expected = module.dense2(torch.relu(module.dense1(flat)))  # type: ignore[union-attr, operator]
    # Float32 sums in another order.
    assert torch.allclose(module.eval()(x), expected, atol=1e-6)
    assert not torch.allclose(module.train()(x), expected, atol=1e-3)


def test_keras_network_drops_a_quarter_after_the_pooling_and_half_after_the_dense_layer() -> None:
    module = build(ModelSettings(name="cnn-keras", hidden=(400,)), (28, 28), 10, 1)
    entered: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for layer in ("conv1", "conv2", "dense1"):
            getattr(module, layer).weight.zero_()
            getattr(module, layer).bias.fill_(1)  # every unit is 1, so a 0 is one that was dropped
        for layer in ("dense1", "dense2"):
            getattr(module, layer).register_forward_pre_hook(lambda _, x, layer=layer: entered.update({layer: x[0]}))
        module.train()(torch.rand(50, 28, 28))
    shares = {layer: float((x == 0).double().mean()) for layer, x in entered.items()}
    # 460,800 and 20,000 draws: four standard deviations are 0.003 and 0.014.
    assert shares["dense1"] == pytest.approx(0.25, abs=0.003)
    assert shares["dense2"] == pytest.approx(0.5, abs=0.014)


def test_first_parameters_depend_on_the_seed_alone() -> None:
    settings = ModelSettings(name="mlp")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = build(settings, (4,), 3, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    layout = Layout.of(one)
    assert torch.equal(layout.read(one), layout.read(build(settings, (4,), 3, seed=5)))
    assert not torch.equal(layout.read(one), layout.read(build(settings, (4,), 3, seed=6)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "cnn-mnits"}, ("name", "cnn-mnits", "'cnn-mnist'")),
        ({"name": "no_such_package:make"}, ("no_such_package:make",)),
        ({"name": "no/such/file.py:make"}, ("no/such/file.py",)),
        ({"name": "cnn-keras", "kernel": 5}, ("model.kernel", 5, "8×8")),
        ({"name": "cnn", "hidden": (4, 5)}, ("model.hidden",)),
        ({"name": "cnn"}, ("images of at least",)),
    ],
)
def test_networks_that_cannot_be_built_are_refused(settings: dict[str, object], said: tuple[object, ...]) -> None:
    shape = (7,) if "images of at least" in said else (8, 8)
    assert_refused(lambda: build(ModelSettings(**settings), shape, 10, 0), *said)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "shape", "classes", "parameters"),
    [
        ({"name": "cnn-mnist"}, (784,), 10, 1_663_370),
        ({"name": "cnn-mnist-authors"}, (28, 28), 10, 1_663_370),
        ({"name": "cnn-keras"}, (28, 28), 10, 1_199_882),
        ({"name": "cnn-femnist"}, (28, 28), 62, 6_603_710),
        ({"name": "cnn-celeba"}, (3, 64, 64), 2, 8_409_025),
        ({"name": "lenet", "arguments": {"first": 32, "second": 64, "hidden": [512]}}, (1, 28, 28), 10, 582_026),
        ({"name": lambda classes, width: nn.Linear(width, classes), "arguments": {"width": 4}}, (4,), 3, 15),
    ],
)
def test_networks_have_the_sizes_of_the_papers(
    settings: dict[str, Any], shape: tuple[int, ...], classes: int, parameters: int
) -> None:
    assert Layout.of(build(ModelSettings(**settings), shape, classes, 0)).trained == parameters


@pytest.mark.parametrize("model", BUILT_IN, ids=lambda model: model.name)
def test_parameters_are_those_of_the_network(model: BuiltIn) -> None:
    module = build(ModelSettings(name=model.name), model.shape, model.outputs, seed=0)
    assert model.parameters == sum(weights.numel() for weights in module.parameters())
    assert set(model.fields) <= set(ModelSettings.model_fields)


def test_parameters_lie_flat_before_floating_buffers() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    layout = Layout.of(module)
    names = [slot.name for slot in layout.slots]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"]
    assert (layout.trained, layout.size) == (6 + 2 + 2 + 2, 12 + 4)
    layout.write(module, torch.arange(16.0))
    assert layout.read(module).tolist() == list(range(16))
    assert module[0].weight.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert module[1].running_var.tolist() == [14.0, 15.0]  # type: ignore[union-attr, operator]


def test_the_rows_of_the_last_layer_with_their_bias() -> None:
    # 16 numbers of the first layer and 8 of the norm lie before.
    last = Layout.of(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    assert last.output.tolist() == [[24, 25, 26, 27, 32], [28, 29, 30, 31, 33]]
    assert Layout.of(nn.Linear(3, 2, bias=False)).output.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert_refused(lambda: Layout.of(nn.LayerNorm(3)).output, "no layer with a row of weights")


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
        ("chosen", "returned whole numbers"),
        ("flat", "returned shape (20,)"),
        ("lazy", "has lazy layers"),
        ("empty", "no parameters to train"),
        ("narrow", "does not take features of shape (1, 8, 8)"),
        ("text", "returned str; allowed: a torch.nn.Module"),
        (
            "typed",
            "'width'; allowed: arguments named feature_shape, classes, outputs, and those that model.arguments gives",
        ),
        ("mistyped", "fails: TypeError: empty"),
        ("Raising", "AttributeError: no such thing"),
        ("Training", "returned tuple while it trains, for 10 samples; allowed: one tensor"),
        ("Ungraded", "its outputs have no gradient while it trains"),
        ("elsewhere", "none of its parameters has a part in its outputs"),
        ("backward", "no gradient can be taken of the model: IndexError: on the way back"),
        ("Lists", "holds layers in 'layers' that torch does not see"),
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


def test_an_own_model_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(CODE)
    for name in ("good", "whole"):
        changes = ["rounds.count=1", "compute.engine=loop", f"model.name='nets.py:{name}'"]
        assert steelyard.Experiment.load("quickstart", changes).run(name).comparison.rules[0].rounds == 1
