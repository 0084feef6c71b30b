"""Every pass and step of the Triton kernels against torch's operators, on whatever device."""

from __future__ import annotations

import functools

import torch

from steelyard.clients.local.convolution.passes import TorchPasses
from steelyard.clients.local.kernels.descent import KernelDescent
from steelyard.clients.local.kernels.passes import KernelPasses
from steelyard.learning.descent import Descent


def draw(*shape: int, device: str, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=device).to(kind)


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
