import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import steelyard
from steelyard.errors import UserError
from steelyard.learning.models import ModelSettings, build
from steelyard.learning.parameters import Layout


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("cnn-mnist", (1, 28, 28), 10, 1_663_370),
        ("cnn-mnist", (784,), 10, 1_663_370),
        ("cnn-mnist-authors", (28, 28), 10, 1_663_370),
        ("cnn-keras", (28, 28), 10, 1_199_882),
        ("cnn-femnist", (28, 28), 62, 6_603_710),
        ("cnn-celeba", (3, 64, 64), 2, 8_409_025),
        ("logistic", (784,), 10, 7_850),
        ("linear", (5,), 0, 6),
    ],
)
def test_parameter_counts(name: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    assert Layout.of(build(ModelSettings(name=name), shape, classes, 0)).trained == parameters


@pytest.mark.parametrize("shape", [(1, 16, 18), (1, 18, 16), (1, 18, 18)])
def test_a_unet_takes_no_image_with_a_side_that_it_cannot_halve(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=f"depth 2 for images of {shape[1]}×{shape[2]}; allowed"):
        build(ModelSettings(name="unet"), shape, 2, 0)
    assert build(ModelSettings(name="unet"), (1, 16, 20), 3, 0)(torch.zeros(2, 1, 16, 20)).shape == (2, 3 * 16 * 20)


def test_the_authors_network_has_no_activation_after_its_convolutions_and_glorot_starts() -> None:
    module = build(ModelSettings(name="cnn-mnist-authors"), (28, 28), 10, 3)
    named = dict(module.named_parameters())
    fans = {"conv1": (25, 800), "conv2": (800, 1600), "dense1": (3136, 512), "dense2": (512, 10)}
    for layer, (inside, outside) in fans.items():
        assert not named[f"{layer}.bias"].any()
        weight = named[f"{layer}.weight"].detach()
        # Thousands of draws from N(0, 2 / (fan in + fan out)); 800 in the first layer.
        assert float(weight.std()) == pytest.approx((2 / (inside + outside)) ** 0.5, rel=0.08)
    # Without a ReLU, a constant taken off the second bias comes out of the pooling as it is, below 0 too.
    x = torch.rand(2, 28, 28)
    entered: list[torch.Tensor] = []
    module.dense1.register_forward_pre_hook(lambda _, given: entered.append(given[0]))  # type: ignore[union-attr]
    module(x)
    with torch.no_grad():
        named["conv2.bias"].sub_(5)
    module(x)
    assert torch.allclose(entered[1], entered[0] - 5, atol=1e-5)
    assert float(entered[1].detach().max()) < 0


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
    with pytest.raises(UserError, match=r"model.kernel: got 5 for images of 9×8; allowed: at most half a side"):
        build(ModelSettings(name="cnn-keras", kernel=5), (2, 9, 8), 3, 1)


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


def test_mlp_has_the_hidden_layers_asked_for() -> None:
    module = build(ModelSettings(name="mlp", hidden=(64,)), (28, 28), 10, 0)
    assert Layout.of(module).trained == 785 * 64 + 65 * 10
    assert module(torch.zeros(3, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize("name", ["cnn-digits", "cnn-keras", "cnn-adafed", "cnn", "mlp", "logistic"])
def test_models_take_small_images(name: str) -> None:
    assert build(ModelSettings(name=name), (8, 8), 10, 0)(torch.zeros(2, 8, 8)).shape == (2, 10)


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


@steelyard.model
def with_layers(layers: int) -> nn.Module:
    return nn.Linear(2, layers)


@steelyard.model
def no_network() -> dict[str, int]:
    return {}


class Own(nn.Module):
    def __init__(self, feature_shape: tuple[int, ...], classes: int, width: int = 2) -> None:
        super().__init__()
        self.a = nn.Linear(feature_shape[0], width)
        self.b = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def test_own_model_from_python() -> None:
    assert Layout.of(build(Own, (4,), 3, 0)).trained == 10 + 9
    settings = ModelSettings(name=Own, arguments={"width": 5})  # type: ignore[arg-type]
    assert Layout.of(build(settings, (4,), 3, 0)).trained == 25 + 18
    assert Layout.of(build(lambda: nn.Linear(4, 3), (4,), 3, 0)).trained == 15


def test_own_model_from_file(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("from torch import nn\ndef make(classes):\n    return nn.Linear(4, classes)\n")
    assert Layout.of(build(ModelSettings(name=f"{file}:make"), (4,), 3, 0)).trained == 15
    file.write_text("from torch import nn\nclass Wide(nn.Linear):\n    pass\n")
    wide = ModelSettings(name=f"{tmp_path / 'wide.py'}:Wide", arguments={"in_features": 4, "out_features": 3})
    file.rename(tmp_path / "wide.py")
    assert Layout.of(build(wide, (4,), 3, 0)).trained == 15
    assert any(name.startswith("steelyard_user_net") for name in sys.modules)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ModelSettings(name="no_such_package:make"), "'no_such_package:make' is not declared for Steelyard"),
        (ModelSettings(name="no/such/file.py:make"), "no file 'no/such/file.py'"),
        (ModelSettings(name=f"{__name__}:NoSuchLayer"), "no function or class 'NoSuchLayer'"),
        (ModelSettings(name="builtins:dict"), "'builtins' is part of Python"),
        (ModelSettings(name=f"{__name__}:no_network"), "returned dict"),
        (ModelSettings(name="cnn", kernel=4), "model.kernel: got 4"),
        (ModelSettings(name="cnn", hidden=(4, 5)), "model.hidden"),
        (ModelSettings(name=f"{__name__}:with_layers"), "model.arguments"),
    ],
)
def test_mistakes_are_named(settings: ModelSettings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(settings, (8, 8), 10, 0)


def test_a_misspelt_name_is_refused_when_it_is_given() -> None:
    with pytest.raises(UserError, match=r"name: got 'cnn-mnits' .did you mean 'cnn-mnist'"):
        ModelSettings(name="cnn-mnits")


def test_a_convolution_needs_an_image() -> None:
    with pytest.raises(UserError, match="images of at least"):
        build(ModelSettings(name="cnn"), (7,), 2, 0)
