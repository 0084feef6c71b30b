"""The models that clients train: the papers' networks, a few small ones, or the user's own module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from steelyard.base.errors import UserError
from steelyard.base.randomness import stream_key
from steelyard.base.usercode import find_code
from steelyard.learning.catalogue import CONVOLUTIONAL, DENSE, NAMES, Convolutional, dense
from steelyard.learning.drawing_layers import name_draws
from steelyard.learning.keras_cnn import KerasNet
from steelyard.learning.networks import NETWORKS, image_shape
from steelyard.learning.settings import ModelSettings

Factory = Callable[..., nn.Module]


class ConvNet(nn.Module):
    """Two convolutions, each followed by ReLU and 2×2 pooling, then two dense layers (papers 000, 001, 003).

    With 28×28 images, channels (32, 64), kernel 5 and 512 hidden units it is the MNIST network with 1,663,370
    parameters; convolutions keep the size of the image. `rectified=False` leaves out the ReLU after the convolutions,
    as the programme of the authors of papers 000 and 004 does.
    """

    def __init__(
        self,
        image: tuple[int, int, int],
        channels: tuple[int, int],
        kernel: int,
        hidden: int,
        outputs: int,
        *,
        rectified: bool = True,
    ) -> None:
        super().__init__()
        depth, height, width = image
        self.image, self.rectified = image, rectified
        self.conv1 = nn.Conv2d(depth, channels[0], kernel, padding=kernel // 2)
        self.conv2 = nn.Conv2d(channels[0], channels[1], kernel, padding=kernel // 2)
        self.dense1 = nn.Linear(channels[1] * (height // 4) * (width // 4), hidden)
        self.dense2 = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, *self.image)
        for convolution in (self.conv1, self.conv2):
            x = convolution(x)
            x = nn.functional.max_pool2d(nn.functional.relu(x) if self.rectified else x, 2)
        return self.dense2(nn.functional.relu(self.dense1(x.flatten(1))))


class DenseNet(nn.Module):
    """Dense layers with ReLU between them; with no hidden layer it is logistic (or linear) regression."""

    def __init__(self, inputs: int, hidden: Sequence[int], outputs: int) -> None:
        super().__init__()
        sizes = [inputs, *hidden, outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for position, layer in enumerate(self.layers):
            x = layer(x if position == 0 else nn.functional.relu(x))
        return x


def build(
    settings: ModelSettings | Factory, feature_shape: Sequence[int], classes: int, seed: int, *, pixels: bool = False
) -> nn.Module:
    """Build a model whose first parameters are a pure function of the seed; the global generator is left alone.

    Use it wherever a fresh network is needed; server and clients of one seed get the same one. `pixels`: the classes
    are those of each pixel.
    """
    if not isinstance(settings, ModelSettings):
        settings = ModelSettings(name=settings)  # pyright: ignore[reportArgumentType]
    if settings.name == "auto" and pixels:
        settings = settings.model_copy(update={"name": "unet"})
    with torch.random.fork_rng(devices=[]):
        # On a machine without an accelerator torch.manual_seed still notes, for each kind, who asked: 10 ms a time.
        seeds = torch if torch.accelerator.is_available() else torch.default_generator
        seeds.manual_seed(stream_key(seed, purpose="model"))
        try:
            module = _construct(settings, tuple(feature_shape), classes)
        except (RuntimeError, MemoryError) as error:
            reason = "not enough memory" if "memory" in str(error) or not str(error) else str(error).splitlines()[0]
            raise UserError(f"model.name: {settings.name} cannot be built: {reason}") from error
    with torch.no_grad():
        # An LSTM keeps its weights once more, and with their history, where they are normed, it could not be copied.
        return module.to(torch.float32)


MOST_PARAMETERS = 10**9
"""A network of more parameters is a slip of the keyboard: one copy of it takes 4 GB, and each client has one."""


def _check_size(name: str, parameters: int) -> None:
    """Refuse a network that no memory holds."""
    if parameters > MOST_PARAMETERS:
        raise UserError(
            f"model.hidden, model.outputs: {name} would have {parameters:,} parameters; "
            f"allowed: at most {MOST_PARAMETERS:,}"
        )


def _fitting(shape: tuple[int, ...], classes: int) -> str:
    """Return the network that is a good first choice for samples of this shape."""
    if len(shape) in (2, 3) and min(shape[-2:]) >= 4:
        return "cnn"
    return "mlp" if classes else "linear"


def _construct(settings: ModelSettings, shape: tuple[int, ...], classes: int) -> nn.Module:
    if settings.name == "auto":
        settings = settings.model_copy(update={"name": _fitting(shape, classes)})
    name = settings.name
    outputs = settings.outputs or max(classes, 1)
    if name in CONVOLUTIONAL:
        usual = CONVOLUTIONAL[name]
        kernel = settings.kernel or usual.kernel
        if kernel % 2 == 0:
            raise UserError(f"model.kernel: got {kernel}; allowed: an odd number")
        if settings.hidden is not None and len(settings.hidden) != 1:
            raise UserError(f"model.hidden: got {list(settings.hidden)}; allowed: one number for {name}")
        image, channels = image_shape(shape), settings.channels or usual.channels
        units = settings.hidden[0] if settings.hidden else usual.hidden
        outputs = settings.outputs or usual.outputs or outputs
        sizes = Convolutional(channels, kernel, units, keras=usual.keras)
        _check_size(name, sizes.parameters(image, outputs))
        if usual.keras:
            if min(image[1:]) < 2 * kernel:
                raise UserError(
                    f"model.kernel: got {kernel} for images of {image[1]}×{image[2]}; allowed: at most half a side"
                )
            return KerasNet(image, channels, kernel, units, outputs)
        network = ConvNet(image, channels, kernel, units, outputs, rectified=not usual.authors)
        return start_glorot_normal(network) if usual.authors else network
    _refuse_shapes(settings)
    if name in DENSE:
        # A network without hidden layers stays one: that is what its name says.
        hidden = (settings.hidden or DENSE[name]) if DENSE[name] else ()
        _check_size(name, dense(prod(shape), hidden, outputs))
        return DenseNet(prod(shape), hidden, outputs)
    return _own(settings, shape, classes, outputs)


def start_glorot_normal(module: nn.Module) -> nn.Module:
    """Draw weights from N(0, 2 / (fan in + fan out)), biases 0 (Glorot and Bengio 2010); the module is changed."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.xavier_normal_(parameter)
    return module


def _refuse_shapes(settings: ModelSettings) -> None:
    """Refuse sizes that the network has no use for; they would be ignored in silence."""
    for field in ("hidden", "channels", "kernel"):
        value = getattr(settings, field)
        if value is not None and not (field == "hidden" and settings.name == "mlp"):
            allowed = f"{', '.join(CONVOLUTIONAL)}{', mlp' if field == 'hidden' else ''}"
            shown = list(value) if isinstance(value, tuple) else value
            raise UserError(f"model.{field}: got {shown} with model.name '{settings.name}'; allowed with: {allowed}")


def _own(settings: ModelSettings, shape: tuple[int, ...], classes: int, outputs: int) -> nn.Module:
    factory = NETWORKS.get(settings.name) or find_code(settings.name, "model.name", NAMES, _is_network)
    known = {"feature_shape": shape, "classes": classes, "outputs": outputs}
    arguments = dict(settings.arguments)
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        pass  # written in C: what it takes shows when it is called
    else:
        arguments |= {key: known[key] for key in known if key in signature.parameters and key not in arguments}
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise UserError(
                f"model.arguments: {settings.name} cannot be called with what it is given: {error}; allowed: arguments "
                f"named {', '.join(known)}, and those that model.arguments gives"
            ) from error
    try:
        module = factory(**arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"model.name: {settings.name} fails: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"model.name: {settings.name} returned {type(module).__name__}; allowed: a torch.nn.Module")
    if isinstance(module, torch.jit.ScriptModule):
        raise UserError(f"model.name: {settings.name} returned a scripted module; allowed: the module as it was before")
    if any(is_lazy(value) for value in (*module.parameters(), *module.buffers())):
        raise UserError(
            f"model.name: {settings.name} has lazy layers, whose sizes are not known yet; allowed: layers with sizes "
            "(the factory is given feature_shape, classes and outputs where it asks for them)"
        )
    if hidden := _hidden(module):
        raise UserError(
            f"model.name: {settings.name} holds layers in '{hidden}' that torch does not see, so they would not be "
            "trained; allowed: layers as attributes, in nn.ModuleList or nn.ModuleDict, or frozen"
        )
    held = (*module.parameters(), *module.buffers())
    kinds = {value.dtype for value in held if value.is_floating_point() or value.is_complex()}
    if other := sorted(str(kind) for kind in kinds - {torch.float32}):
        raise UserError(
            f"model.name: {settings.name} has parameters of {other[0]}; allowed: torch.float32 "
            '(compute.precision = "bfloat16" computes in less)'
        )
    if not any(parameter.requires_grad and parameter.numel() for parameter in module.parameters()):
        raise UserError(f"model.name: {settings.name} has no parameters to train; allowed: a module with some")
    return name_draws(module)


TORCHS = frozenset([*vars(nn.Module()), "_flat_weights"])
"""Lists and mappings that torch itself keeps in a module; that of an LSTM goes stale where weights are normed."""


def _hidden(module: nn.Module) -> str | None:
    """Return the plain list or mapping of a module that holds layers or parameters to train and is none of torch's."""
    known = {id(parameter) for parameter in module.parameters()}
    for layer in module.modules():
        for name, value in vars(layer).items():
            if name in TORCHS or not isinstance(value, list | tuple | dict):
                continue
            inside = value.values() if isinstance(value, dict) else value
            for each in inside:
                own = list(each.parameters()) if isinstance(each, nn.Module) else [each]
                if any(isinstance(one, nn.Parameter) and one.requires_grad and id(one) not in known for one in own):
                    return name
    return None


def _is_network(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, nn.Module)
