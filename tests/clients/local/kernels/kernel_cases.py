"""Every kernel against torch in float64, on whatever device: each function returns the errors by name."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from steelyard.clients.local.convolution.windows import unpool
from steelyard.clients.local.kernels import first as first_layer
from steelyard.clients.local.kernels import layers
from steelyard.clients.local.kernels import second as second_layer
from steelyard.clients.local.kernels.shapes import Images, Shape
from steelyard.clients.local.kernels.tiles import ARITHMETIC

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
