"""The models that clients train: the papers' networks, a few small ones, or the user's own module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import isqrt, prod

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from steelyard.base.errors import UserError
from steelyard.base.randomness import stream_key
from steelyard.base.usercode import find_code
from steelyard.learning.dropout import NamedDropout, name_draws
from steelyard.learning.settings import CONVOLUTIONAL, DENSE, NAMES, Convolutional, ModelSettings, dense

Shape = tuple[int, ...]


def image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (channels, height, width) for features of this shape; a flat square counts as a grey image."""
    if len(shape) == 1 and isqrt(shape[0]) ** 2 == shape[0]:
        shape = (1, isqrt(shape[0]), isqrt(shape[0]))
    if len(shape) == 2:
        shape = (1, *shape)
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise UserError(f"model.name: a convolutional network needs images of at least 4×4, the data have {shape}")
    return shape[0], shape[1], shape[2]


class Shaped(nn.Module):
    """Layers for images, whatever form the images come in: a grey one may be flat."""

    def __init__(self, image: tuple[int, int, int], *layers: nn.Module) -> None:
        super().__init__()
        self.image, self.layers = image, nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.reshape(-1, *self.image))


def lenet(
    feature_shape: Shape, outputs: int, first: int = 6, second: int = 16, hidden: Sequence[int] = (120, 84)
) -> nn.Module:
    """NIID-Bench's network (Li et al. 2022): convolutions of 6 and 16 kernels of side 5, then 120 and 84 units.

    With 32 and 64 kernels and 512 units it is PFLlib's.
    """
    depth, height, width = image = image_shape(feature_shape)
    if min(height, width) < 16:
        raise UserError(f"model.name: lenet needs images of at least 16×16, the data have {height}×{width}")
    flat = second * prod(((side - 4) // 2 - 4) // 2 for side in (height, width))
    layers = [nn.Conv2d(depth, first, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    for inputs, units in pairwise([flat, *hidden]):
        layers += [nn.Linear(inputs, units), nn.ReLU()]
    return Shaped(image, *layers, nn.Linear([flat, *hidden][-1], outputs))


def moderate_cnn(feature_shape: Shape, outputs: int) -> nn.Module:
    """FedMA's network (Wang et al. 2020): six convolutions in three stages, then 1,024 and 512 units, with dropout."""
    depth, height, width = image = image_shape(feature_shape)
    if min(height, width) < 8:
        raise UserError(f"model.name: moderate-cnn needs images of at least 8×8, the data have {height}×{width}")

    def stage(inputs: int, first: int, second: int) -> list[nn.Module]:
        layers = [nn.Conv2d(inputs, first, 3, padding=1), nn.ReLU(), nn.Conv2d(first, second, 3, padding=1), nn.ReLU()]
        return [*layers, nn.MaxPool2d(2)]

    return Shaped(
        image, *stage(depth, 32, 64), *stage(64, 128, 128), nn.Dropout2d(0.05), *stage(128, 256, 256), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(256 * (height // 8) * (width // 8), 1024), nn.ReLU(), nn.Linear(1024, 512),
        nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, outputs),
    )  # fmt: skip


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with group norm, added to what came in (He et al. 2016; Wu and He 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(groups(outputs), outputs) for _ in range(2))
        alike = stride == 1 and inputs == outputs
        self.across = nn.Identity() if alike else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norms[1](self.second(functional.relu(self.norms[0](self.first(x)))))
        return functional.relu(inner + self.across(x))


def groups(channels: int) -> int:
    """Return how many groups group norm makes of so many channels: 32, or half of few channels."""
    return min(32, channels // 2)


class ResidualNet(nn.Module):
    """A residual network for small images: a 3×3 convolution, stages of blocks, the mean, one dense layer."""

    def __init__(self, image: tuple[int, int, int], outputs: int, widths: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        self.image = image
        self.stem = nn.Conv2d(image[0], widths[0], 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(groups(widths[0]), widths[0])
        layers: list[nn.Module] = []
        inputs = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                layers.append(ResidualBlock(inputs, width, 2 if stage and not block else 1))
                inputs = width
        self.body, self.dense = nn.Sequential(*layers), nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.stem(x.reshape(-1, *self.image))))
        return self.dense(self.body(x).mean(dim=(2, 3)))


def resnet18(feature_shape: Shape, outputs: int) -> nn.Module:
    """ResNet-18 with group norm in place of batch norm (Hsieh et al. 2020), for small images."""
    return ResidualNet(image_shape(feature_shape), outputs, (64, 128, 256, 512), 2)


class Lstm(nn.Module):
    """Tokens to numbers, one LSTM or several, one dense layer on the last step (LEAF's networks for text)."""

    def __init__(self, outputs: int, tokens: int = 256, wide: int = 8, hidden: int = 64, depth: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, wide)
        self.lstm = nn.LSTM(wide, hidden, depth, batch_first=True)
        self.dense = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.lstm(self.embedding(x))[0][:, -1])


class Attention(nn.Module):
    """Self-attention of several heads, then two dense layers, each added to what came in (Vaswani et al. 2017)."""

    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for _ in range(2))
        self.inputs, self.output = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.up, self.down = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, wide = x.shape
        parts = self.inputs(self.norms[0](x)).view(samples, length, 3, self.heads, wide // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.output(found.transpose(1, 2).reshape(samples, length, wide))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Tokens and their places to numbers, blocks of attention, one dense layer on the mean over the places."""

    def __init__(
        self, feature_shape: Shape, outputs: int, tokens: int = 256, wide: int = 64, depth: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, wide)
        self.places = nn.Parameter(0.02 * torch.randn(feature_shape[0], wide))
        self.blocks = nn.ModuleList(Attention(wide, heads) for _ in range(depth))
        self.norm, self.dense = nn.LayerNorm(wide), nn.Linear(wide, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) + self.places[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.dense(self.norm(x).mean(dim=1))


class UNet(nn.Module):
    """A small U-Net: stages of two convolutions, down and up again, each joined by what stood at its size before.

    O. Ronneberger, P. Fischer, T. Brox: "U-Net", MICCAI 2015; here with padding, so that the mask has the image's size,
    group norm in place of none, and nearest pixels on the way up. Outputs are flat, [samples, classes · pixels], class
    after class.
    """

    def __init__(self, feature_shape: Shape, outputs: int, wide: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.image = image_shape(feature_shape)
        if any(side % 2**depth for side in self.image[1:]):
            # Each stage halves the sides, and the way up must meet what stood there before.
            raise UserError(
                f"model.arguments: depth {depth} for images of {self.image[1]}×{self.image[2]}; allowed: sides that "
                f"can be halved {depth} times (data.size), or a smaller depth"
            )
        widths = [wide * 2**stage for stage in range(depth + 1)]
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip([self.image[0], *widths], widths, strict=False))
        self.up = nn.ModuleList(_twice(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.last = nn.Conv2d(wide, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down[0](x.reshape(-1, *self.image))
        before: list[torch.Tensor] = []
        for stage in list(self.down)[1:]:
            before.append(x)
            x = stage(functional.max_pool2d(x, 2))
        for stage in self.up:
            samples, channels, height, width = x.shape
            wider = x[..., None, :, None].expand(samples, channels, height, 2, width, 2)
            x = stage(torch.cat([wider.reshape(samples, channels, 2 * height, 2 * width), before.pop()], dim=1))
        return self.last(x).flatten(1)


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for entering in (inputs, outputs):
        layers += [nn.Conv2d(entering, outputs, 3, padding=1), nn.GroupNorm(groups(outputs), outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def tabular(feature_shape: Shape, outputs: int, wide: int = 128, depth: int = 2) -> nn.Module:
    """Dense layers with layer norm and dropout, for columns of numbers."""
    layers: list[nn.Module] = [nn.Flatten()]
    for number in range(depth):
        inputs = wide if number else prod(feature_shape)
        layers += [nn.Linear(inputs, wide), nn.LayerNorm(wide), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(wide, outputs))


NETWORKS: Mapping[str, Callable[..., nn.Module]] = {
    "lenet": lenet,
    "moderate-cnn": moderate_cnn,
    "resnet18": resnet18,
    "lstm": Lstm,
    "transformer": Transformer,
    "tabular": tabular,
    "unet": UNet,
}
"""Networks by name; `model.arguments` gives them what has a default here."""


# Keras' example mnist_cnn, which paper 001 cites.


RATES = (0.25, 0.5)
"""Dropout after the pooling and after the first dense layer."""


class KerasNet(NamedDropout):
    """Convolution, convolution (both 3×3 without padding, ReLU), 2×2 pooling, dropout, dense, dropout, dense.

    With 28×28 images, channels (32, 64) and 128 hidden units it has 1,199,882 parameters. Starts are Keras' own:
    Glorot-uniform weights, biases 0.
    """

    def __init__(
        self, image: tuple[int, int, int], channels: tuple[int, int], kernel: int, hidden: int, outputs: int
    ) -> None:
        super().__init__()
        depth, height, width = image
        self.image = image
        self.conv1 = nn.Conv2d(depth, channels[0], kernel)
        self.conv2 = nn.Conv2d(channels[0], channels[1], kernel)
        lost = 2 * (kernel - 1)
        self.dense1 = nn.Linear(channels[1] * ((height - lost) // 2) * ((width - lost) // 2), hidden)
        self.dense2 = nn.Linear(hidden, outputs)
        start_glorot(self, nn.init.xavier_uniform_)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv1(x.reshape(-1, *self.image)))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        # Units count channels last, the order in which stacked steps keep them.
        x = self.dropped(x.permute(0, 2, 3, 1).flatten(1), 0, RATES[0])
        x = functional.relu(self.dense1(x))
        return self.dense2(self.dropped(x, 1, RATES[1]))


# Models by name, and from the outside.


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
        if usual.authors:
            start_glorot(network, nn.init.xavier_normal_)
        return network
    _refuse_shapes(settings)
    if name in DENSE:
        # A network without hidden layers stays one: that is what its name says.
        hidden = (settings.hidden or DENSE[name]) if DENSE[name] else ()
        _check_size(name, dense(prod(shape), hidden, outputs))
        return DenseNet(prod(shape), hidden, outputs)
    return _own(settings, shape, classes, outputs)


def start_glorot(module: nn.Module, draw: Callable[[torch.Tensor], object]) -> None:
    """Draw weights with variance 2 / (fan in + fan out), biases 0 (Glorot and Bengio 2010); the module is changed."""
    for name, parameter in module.named_parameters():
        (nn.init.zeros_ if name.endswith("bias") else draw)(parameter)


def _refuse_shapes(settings: ModelSettings) -> None:
    """Refuse sizes that the network has no use for; they would be ignored in silence."""
    for field in ("hidden", "channels", "kernel"):
        value = getattr(settings, field)
        if value is not None and not (field == "hidden" and settings.name == "mlp"):
            allowed = f"{', '.join(CONVOLUTIONAL)}{', mlp' if field == 'hidden' else ''}"
            shown = list(value) if isinstance(value, tuple) else value
            raise UserError(f"model.{field}: got {shown} with model.name '{settings.name}'; allowed with: {allowed}")


def _own(settings: ModelSettings, shape: tuple[int, ...], classes: int, outputs: int) -> nn.Module:
    factory = NETWORKS.get(settings.name) or find_code(
        settings.name, "model.name", NAMES, lambda found: isinstance(found, type) and issubclass(found, nn.Module)
    )
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
    held = (*module.parameters(), *module.buffers())
    if any(map(is_lazy, held)):
        raise UserError(
            f"model.name: {settings.name} has lazy layers, whose sizes are not known yet; allowed: layers with sizes "
            "(the factory is given feature_shape, classes and outputs where it asks for them)"
        )
    if hidden := _hidden(module):
        raise UserError(
            f"model.name: {settings.name} holds layers in '{hidden}' that torch does not see, so they would not be "
            "trained; allowed: layers as attributes, in nn.ModuleList or nn.ModuleDict, or frozen"
        )
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
