"""Every kernel against torch in float64, and every pass and step against torchs operators, on whatever device."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.nn import functional

from steelyard.clients.local.convolution.passes import TorchPasses
from steelyard.clients.local.convolution.windows import unpool
from steelyard.clients.local.kernels import first as first_layer
from steelyard.clients.local.kernels import layers
from steelyard.clients.local.kernels import second as second_layer
from steelyard.clients.local.kernels.descent import KernelDescent
from steelyard.clients.local.kernels.passes import KernelPasses
from steelyard.clients.local.kernels.shapes import Images, Shape
from steelyard.clients.local.kernels.tiles import ARITHMETIC
from steelyard.learning.descent import Descent

ALLOWED = {"float32": 3e-6, "tf32": 1e-2, "bfloat16": 2e-2}
"""Relative error; float32 must be as good as float32 is."""
RATE = 0.1


@dataclass(frozen=True)
class Case:
    """A stack of clients: images, channels, kernel and the units of the dense layers."""

    image: tuple[int, int, int]
    channels: tuple[int, int]
    kernel: int
    clients: int
    samples: int
    hidden: int = 20
    outputs: int = 10


ODD = Case((2, 11, 9), (3, 5), 5, 3, 4)
SMALL = Case((3, 8, 8), (4, 6), 3, 2, 5, hidden=7, outputs=3)
MNIST = Case((1, 28, 28), (32, 64), 5, 4, 10, hidden=512)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖, with anything that is no number as infinite."""
    expected = expected.detach().double()
    apart = float((found.double() - expected).norm() / expected.norm())
    return apart if apart == apart else float("inf")


def draw(*shape: int, device: str, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=device).to(kind)


def convolved(images: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Full convolution of images [clients, samples, h, w, c] with weights [clients, out, k, k, c], channels last."""
    edge = weights.shape[2] // 2
    parts = [
        functional.conv2d(i.double().permute(0, 3, 1, 2), w.double().permute(0, 3, 1, 2), b.double(), padding=edge)
        for i, w, b in zip(images, weights, bias, strict=True)
    ]
    return torch.cat(parts).permute(0, 2, 3, 1)


def pooled_error(pooled: torch.Tensor, codes: torch.Tensor, full: torch.Tensor) -> float:
    """Of the pooled numbers, and of those that the codes point at: near ties, either may be called the largest."""
    rows, columns = full.shape[1] // 2, full.shape[2] // 2
    quads = full[:, : 2 * rows, : 2 * columns].unflatten(1, (rows, 2)).unflatten(3, (columns, 2))
    quads = quads.permute(0, 1, 3, 5, 2, 4).flatten(-2)
    expected = quads.amax(-1).relu()
    pointed = quads.gather(-1, codes.long().clamp(max=3)[..., None]).squeeze(-1)
    pointed = torch.where(codes == 4, 0.0, pointed)
    return max(error(pooled, expected), error(pointed, expected))


def kernel_gradient(images: torch.Tensor, slope: torch.Tensor, kernel: int) -> torch.Tensor:
    """Gradient of the kernels [clients, out, k, k, c] from images and full slopes, both [clients, samples, h, w, ·]."""
    parts = [
        torch.nn.grad.conv2d_weight(
            i.double().permute(0, 3, 1, 2), (s.shape[-1], i.shape[-1], kernel, kernel), s.double().permute(0, 3, 1, 2),
            padding=kernel // 2,
        )
        for i, s in zip(images, slope, strict=True)
    ]  # fmt: skip
    return torch.stack(parts).permute(0, 1, 3, 4, 2)


def first(case: Case, precision: str, device: str, *, bytes_: bool) -> dict[str, float]:
    """The first convolution on images picked by row, and the step of its kernels."""
    how, kind = ARITHMETIC[precision], torch.bfloat16 if precision == "bfloat16" else torch.float32
    depth, height, width = case.image
    shape = Shape(height, width, depth, case.kernel, case.channels[0])
    features = torch.randint(0, 256, (30, depth, height, width), device=device).to(torch.uint8)
    if not bytes_:
        features = draw(30, depth, height, width, device=device)
    rows = torch.randint(0, 30, (2, case.clients, case.samples), device=device)
    source = Images(features.flatten(1), rows, torch.ones(1, dtype=torch.int64, device=device), case.samples)
    columns = -(-(shape.taps + 1) // 16) * 16
    models = draw(case.clients, shape.outputs * columns + 7, device=device)
    weights = models[:, : shape.outputs * columns].view(case.clients, shape.outputs, columns)
    images = features[rows[1]].double().permute(0, 1, 3, 4, 2) / (255 if bytes_ else 1)
    full = convolved(images, weights[..., : shape.taps].unflatten(2, (case.kernel, case.kernel, depth)),
                     weights[..., shape.taps])  # fmt: skip
    pooled, codes = first_layer.forward(shape, source, weights, how, kind)
    slope = draw(*pooled.shape, device=device, kind=kind)
    spread = unpool(slope, codes, height, width).unflatten(0, (case.clients, case.samples))
    expected = torch.cat(
        [kernel_gradient(images, spread, case.kernel).flatten(2), spread.double().sum((1, 2, 3))[..., None]], 2
    )
    gradients = torch.full_like(models, 9.0)
    first_layer.step(shape, source, slope, codes, models, gradients, columns, RATE, how)
    found = gradients[:, : shape.outputs * columns].view_as(weights)[..., : shape.taps + 1]
    before = weights[..., : shape.taps + 1].double()
    first_layer.step(shape, source, slope, codes, models, None, columns, RATE, how)
    return {
        "forward": pooled_error(pooled, codes, full),
        "gradient": error(found, expected),
        "step": error(before - weights[..., : shape.taps + 1].double(), RATE * expected),
        "beyond": float((gradients[:, shape.outputs * columns :] != 9).sum()),
    }


def second(case: Case, precision: str, device: str) -> dict[str, float]:
    """The second convolution, the way back through it, and the step of its kernels and bias."""
    how, kind = ARITHMETIC[precision], torch.bfloat16 if precision == "bfloat16" else torch.float32
    height, width = case.image[1] // 2, case.image[2] // 2
    inner, outer = case.channels
    shape = Shape(height, width, inner, case.kernel, outer)
    size = outer * shape.taps
    models = draw(case.clients, size + outer + 32, device=device)
    offsets = (16, 16 + size)
    weights = models[:, 16 : 16 + size].view(case.clients, outer, -1)
    bias = models[:, 16 + size : 16 + size + outer]
    source = draw(case.clients * case.samples, height, width, inner, device=device, kind=kind)
    images = source.unflatten(0, (case.clients, case.samples))
    grid = weights.unflatten(2, (case.kernel, case.kernel, inner))
    kernels, turned = second_layer.prepare(shape, weights, kind)
    expected_turned = grid.flip(2, 3).permute(0, 4, 2, 3, 1).reshape(case.clients, -1).to(kind)
    prepared = (turned != expected_turned).sum() + (kernels != weights.to(kind)).sum()
    pooled, codes = second_layer.forward(shape, source, kernels, bias, case.samples, how)
    slope = draw(case.clients, case.samples, shape.area * outer, device=device)
    full = second_layer.spread(shape, slope, codes, kind)
    expected_full = unpool(slope.view(codes.shape), codes, height, width)
    below = second_layer.input_gradient(shape, full, turned, case.samples, how)
    spread = full.unflatten(0, (case.clients, case.samples))
    back = [
        functional.conv_transpose2d(
            s.double().permute(0, 3, 1, 2), w.double().permute(0, 3, 1, 2), padding=case.kernel // 2
        )
        for s, w in zip(spread, grid, strict=True)
    ]
    expected = kernel_gradient(images, spread, case.kernel).flatten(1)
    sums = expected_full.double().unflatten(0, (case.clients, case.samples)).sum((1, 2, 3))
    step = (shape, source, full, slope, codes, models)
    convolution = pooled_error(pooled, codes, convolved(images, grid, bias))
    gradients = torch.full_like(models, 9.0)
    second_layer.step(*step, gradients, offsets, case.samples, RATE, how)
    before = models.double()
    second_layer.step(*step, None, offsets, case.samples, RATE, how)
    moved = before - models.double()
    return {
        "prepare": float(prepared),
        "forward": convolution,
        "spread": float((full != expected_full.to(kind)).sum()),
        "below": error(below, torch.cat(back).permute(0, 2, 3, 1)),
        "gradient": error(gradients[:, 16 : 16 + size], expected),
        "bias": error(gradients[:, 16 + size : 16 + size + outer], sums),
        "step": error(moved[:, 16 : 16 + size], RATE * expected),
        "bias step": error(moved[:, 16 + size : 16 + size + outer], RATE * sums),
        "beyond": float((gradients[:, :16] != 9).sum() + (gradients[:, 16 + size + outer :] != 9).sum()),
    }


def head(case: Case, precision: str, device: str, inputs: int = 150) -> dict[str, float]:
    """The dense layers with cross-entropy: outputs are never seen, so losses and gradients stand for them."""
    how = ARITHMETIC["float32" if precision == "float32" else "tf32"]
    clients, samples, hidden, outputs = case.clients, case.samples, case.hidden, case.outputs
    sizes = {"w1": hidden * inputs, "b1": hidden, "w2": outputs * hidden, "b2": outputs}
    begins, total = {}, 0
    for name, size in sizes.items():
        begins[name] = total
        total += -(-size // 32) * 32
    models = draw(clients, total, device=device) / 5
    cut = {name: models[:, begins[name] : begins[name] + size] for name, size in sizes.items()}
    leaves = models.double().requires_grad_()
    parts = {name: leaves[:, begins[name] : begins[name] + size] for name, size in sizes.items()}
    x = draw(clients, samples, inputs, device=device)
    entered = x.double().requires_grad_()
    labels = torch.randint(0, outputs, (2, clients, samples), device=device)
    weights, report = torch.rand(2, clients, samples, device=device), torch.rand(2, clients, samples, device=device)
    report[:, :, 0] = 0
    units = torch.baddbmm(parts["b1"][:, None], entered, parts["w1"].view(clients, hidden, inputs).transpose(1, 2))
    logits = torch.baddbmm(parts["b2"][:, None], units.relu(), parts["w2"].view(clients, outputs, -1).transpose(1, 2))
    each = functional.cross_entropy(logits.flatten(0, 1), labels[1].flatten(), reduction="none").view(clients, samples)
    (each * weights[1]).sum().backward()
    counter = torch.ones(1, dtype=torch.int64, device=device)
    offsets = layers.HeadOffsets(begins["w2"], begins["b2"], begins["b1"])
    w1 = cut["w1"].view(clients, hidden, inputs)

    def step(into: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        losses = torch.ones(clients, dtype=torch.float64, device=device)
        shares = layers.forward(x, w1, how)
        tables = (labels, weights, report)
        slope = layers.head(shares, models, into, tables, counter, losses, offsets, outputs, RATE, how)
        target = None if into is None else into[:, : sizes["w1"]].view_as(w1)
        return layers.backward(slope, x, w1, target, RATE, how), losses

    gradients = torch.zeros_like(models)
    _, losses = step(gradients)
    before = models.double()
    below, _ = step(None)
    assert leaves.grad is not None
    assert entered.grad is not None
    found = {f"{name} gradient": error(gradients[:, begins[name] : begins[name] + size],
                                       leaves.grad[:, begins[name] : begins[name] + size])
             for name, size in sizes.items()}  # fmt: skip
    return {
        **found,
        "losses": error(losses, 1 + (each * report[1]).sum(1)),
        "below": error(below, entered.grad),
        "step": error(before - models.double(), RATE * leaves.grad),
    }


TINY = (2, 3, (2, 9, 8), (3, 5))
"""Clients, samples, the image and the channels; a row and no column is left over by pooling."""
IMAGES = (3, 7, (1, 28, 28), (32, 64))
SIDE = 3


def passes(case: tuple[int, int, tuple[int, int, int], tuple[int, int]], kind: torch.dtype, device: str) -> None:
    """Exactly equal where numbers are only moved, and to the rounding of `kind` where they are added up."""
    clients, samples, (depth, height, width), (inner, outer) = case
    mine, torchs = KernelPasses(), TorchPasses()
    count, drawn = clients * samples, functools.partial(draw, device=device, kind=kind)

    images = drawn(count, height, width, depth)
    taps = SIDE**2 * depth
    for wide, ones in ((taps, False), (taps + 5, False), (taps + 5, True)):
        seen = mine.windows(images, SIDE, wide, ones=ones)
        assert torch.equal(seen, torchs.windows(images, SIDE, wide, ones=ones))
    height, width = height - 2 * (SIDE - 1), width - 2 * (SIDE - 1)
    raw = drawn(count, height, width, outer)
    bias = torch.randn(clients, outer + 4, device=device)[:, 2:-2]
    (pooled, codes), (expected, places) = mine.pool(raw, bias), torchs.pool(raw, bias)
    if kind == torch.float32:
        assert torch.equal(pooled, expected)
        assert torch.equal(codes, places)
    # The bias is added in float32 here and in the activations' own kind there.
    rough = 4 * torch.finfo(kind).eps
    torch.testing.assert_close(pooled, expected, rtol=rough, atol=8 * rough)
    slope = drawn(*pooled.shape)
    assert torch.equal(mine.unpool(slope, places, height, width), torchs.unpool(slope, places, height, width))
    entered = drawn(count, height + SIDE - 1, width + SIDE - 1, inner)
    parts = drawn(clients, samples * height * width, SIDE**2 * inner)
    # Nine numbers are added in float32 here, one by one in their own kind there.
    found, expected = mine.added(parts, entered, SIDE), torchs.added(parts, entered, SIDE)
    torch.testing.assert_close(found, expected, rtol=rough, atol=8 * rough)
    chance = torch.stack([torch.randint(1 << 62, (clients,)), torch.arange(clients) + 1000], 1).to(device)
    for layer, units, rate in ((0, 4 * outer + 3, 0.25), (1, 2050, 0.5)):
        masks = mine.mask(chance, layer, samples, units, rate)
        assert torch.equal(masks, torchs.mask(chance, layer, samples, units, rate))
    slope = drawn(clients, samples * height * width, outer)
    exact = torchs.product(slope.double(), parts.double(), samples)
    # A float32 sum of thousands of numbers is off by a few times its last digit.
    apart = (mine.product(slope, parts, samples).double() - exact).norm() / exact.norm()
    assert apart < rough


def steps(device: str) -> None:
    """Three steps of each optimiser; one client is done before the others."""
    for optimiser, rate in (("adam", 0.01), ("adadelta", 1.0)):
        descent = Descent(rate, 0.0, 0.01, optimiser, 0.2)
        results: list[list[torch.Tensor]] = []
        for each in (descent, KernelDescent.like(descent)):
            draw = torch.Generator().manual_seed(5)
            models = torch.randn(3, 2100, generator=draw).to(device)
            memory, start = each.remember(models), models.clone()
            for number in range(3):
                gradients = torch.randn(3, 2100, generator=draw).to(device)
                rates = torch.tensor([rate, rate, rate if number < 2 else 0.0], device=device)
                each.apply(models, gradients, memory, start, torch.tensor([number], device=device), rates)
            results.append([models, *memory])
        for found, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def assert_near_float64(
    case: Case, precision: str, device: str, *, bytes_: bool, inputs: int = 150
) -> dict[str, dict[str, float]]:
    """Run all kernels, the dense layers behind so many inputs (0 leaves them out); return the errors by name."""
    found = {"first": first(case, precision, device, bytes_=bytes_), "second": second(case, precision, device)}
    if inputs:
        found["head"] = head(case, precision, device, inputs)
    wrong = {
        (kernel, part): size
        for kernel, errors in found.items()
        for part, size in errors.items()
        if not size <= ALLOWED[precision]
    }
    assert not wrong, wrong
    return found
