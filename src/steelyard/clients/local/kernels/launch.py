"""Calls of the convolution kernels: shapes, strides and room for what they return."""
# pyright: reportUnknownMemberType=false, reportIndexIssue=false, reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass

import torch

from steelyard.clients.local.kernels import convolve, images
from steelyard.clients.local.kernels.tiles import Arithmetic, power, tile


@dataclass(frozen=True)
class Images:
    """The images of a step: samples of the data set as they lie there, and which of them each client takes."""

    features: torch.Tensor
    """[rows, depth · height · width], bytes or float32."""
    rows: torch.Tensor
    """[steps, clients, samples] or [1, 1, samples] for images that every client looks at."""
    counter: torch.Tensor
    """The step."""
    samples: int

    @property
    def strides(self) -> tuple[int, int]:
        """From client to client and from step to step."""
        return (0 if self.rows.shape[1] == 1 else self.rows.stride(1)), self.rows.stride(0)


@dataclass(frozen=True)
class Shape:
    """A convolution: the images that enter and the kernels."""

    height: int
    width: int
    channels: int
    kernel: int
    outputs: int

    @property
    def pooled(self) -> tuple[int, int]:
        """The grid after pooling."""
        return self.height // 2, self.width // 2

    @property
    def area(self) -> int:
        """Pooled positions of an image."""
        return self.pooled[0] * self.pooled[1]

    @property
    def taps(self) -> int:
        """Numbers of one kernel."""
        return self.kernel**2 * self.channels

    @property
    def fixed(self) -> dict[str, int]:
        """What the kernels are compiled for."""
        return {
            "height": self.height,
            "width": self.width,
            "channels": self.channels,
            "kernel": self.kernel,
            "outputs": self.outputs,
        }

    @property
    def raw(self) -> dict[str, int]:
        """The same for images as they lie in the data set, channel by channel."""
        return {("depth" if name == "channels" else name): value for name, value in self.fixed.items()}

    @property
    def square(self) -> tuple[int, int]:
        """Room for the gradient by corner: outputs, and the square under four windows with the 1 of the bias."""
        return power(self.outputs), power((self.kernel + 1) ** 2 * self.channels + 1)


def first_forward(
    shape: Shape, source: Images, weights: torch.Tensor, how: Arithmetic, kind: torch.dtype, *, coded: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return relu(2×2 maximum of the convolution), [clients · samples, h, w, out], and where each maximum was.

    `weights` is [clients, out, columns] with any stride between clients; the bias stands after a kernel's last tap.
    """
    clients, samples = len(weights), source.samples
    pooled = torch.empty((clients * samples, *shape.pooled, shape.outputs), dtype=kind, device=weights.device)
    codes = torch.empty(pooled.shape if coded else (1,), dtype=torch.uint8, device=weights.device)
    cut = tile("first", how, clients * samples)
    images.forward[(-(-samples * shape.area // cut.block), clients)](
        source.features,
        source.rows,
        source.counter,
        weights,
        pooled,
        codes,
        samples,
        *source.strides,
        weights.stride(0),
        **shape.raw,
        columns=weights.shape[2],
        coded=coded,
        kind=how.kind,
        precision=how.precision,
        block=cut.block,
        taps=power(shape.taps + 1),
        wide=power(shape.outputs),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return pooled, codes


def first_step(
    shape: Shape,
    source: Images,
    slope: torch.Tensor,
    codes: torch.Tensor,
    models: torch.Tensor,
    into: torch.Tensor | None,
    columns: int,
    rate: float,
    how: Arithmetic,
) -> None:
    """Step the first convolution's kernels, which stand at the front of a model, or write their gradient."""
    clients, samples = len(models), source.samples
    cut = tile("first back", how, clients * samples)
    # Shares of the positions: as many programs as keep the device busy, whole blocks each.
    group = -(-samples * shape.area // -(-cut.programs // clients))
    group = -(-group // cut.block) * cut.block
    shares = -(-samples * shape.area // group)
    wide, places = shape.square
    partial = torch.empty((clients, shares, 4, wide, places), device=models.device)
    images.gradient[(shares, clients)](
        source.features,
        source.rows,
        source.counter,
        slope,
        codes,
        partial,
        samples,
        group,
        *source.strides,
        **shape.raw,
        kind=how.kind,
        precision=how.precision,
        block=cut.block,
        places=places,
        wide=wide,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    target = models if into is None else into
    images.step[(-(-shape.outputs * columns // 64), clients)](
        partial,
        models,
        target,
        shares,
        models.stride(0),
        target.stride(0),
        rate,
        depth=shape.channels,
        kernel=shape.kernel,
        outputs=shape.outputs,
        columns=columns,
        places=places,
        wide=wide,
        plain=into is None,
        block=64,
        height=32,
    )


def prepare(shape: Shape, weights: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernels in this kind of number, and turned for the way back: [clients, channels, taps · outputs]."""
    clients = len(weights)
    copied = weights.dtype != kind
    straight = torch.empty((clients, shape.outputs, shape.taps) if copied else (1,), dtype=kind, device=weights.device)
    turned = torch.empty((clients, shape.outputs * shape.taps), dtype=kind, device=weights.device)
    convolve.prepare[(shape.kernel**2, clients)](
        weights,
        straight,
        turned,
        weights.stride(0),
        channels=shape.channels,
        kernel=shape.kernel,
        outputs=shape.outputs,
        copied=copied,
        narrow=power(shape.channels),
        wide=power(shape.outputs),
    )
    return straight if copied else weights, turned


def forward(
    shape: Shape,
    source: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor,
    samples: int,
    how: Arithmetic,
    *,
    coded: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return relu(2×2 maximum of the convolution + bias) in float32, and where each maximum was.

    `source` is [clients · samples, height, width, channels], `weights` [clients, out, taps] of the same kind.
    """
    clients = len(weights)
    pooled = torch.empty((clients * samples, *shape.pooled, shape.outputs), device=weights.device)
    codes = torch.empty(pooled.shape if coded else (1,), dtype=torch.uint8, device=weights.device)
    cut = tile("second", how, clients * samples)
    convolve.forward[(-(-samples * shape.area // cut.block), clients)](
        source,
        weights,
        bias,
        pooled,
        codes,
        samples,
        weights.stride(0),
        bias.stride(0),
        **shape.fixed,
        coded=coded,
        precision=how.precision,
        block=cut.block,
        chunk=min(power(shape.taps), cut.chunk),
        wide=power(shape.outputs),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return pooled, codes


def spread(shape: Shape, slope: torch.Tensor, codes: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return pooled slopes sent back to where their maxima were, [images, height, width, outputs]."""
    out = torch.empty((len(codes), shape.height, shape.width, shape.outputs), dtype=kind, device=codes.device)
    convolve.spread[(-(-out.numel() // 1024),)](
        slope, codes, out, out.numel(), shape.height, shape.width, shape.outputs, block=1024
    )
    return out


def input_gradient(
    shape: Shape, slope: torch.Tensor, turned: torch.Tensor, samples: int, how: Arithmetic
) -> torch.Tensor:
    """Return the slopes at the inputs, [clients · samples, height, width, channels], from spread slopes."""
    clients = len(turned)
    size = (clients * samples, shape.height, shape.width, shape.channels)
    below = torch.empty(size, dtype=slope.dtype, device=slope.device)
    cut = tile("below", how, clients * samples)
    convolve.input_gradient[(-(-samples * shape.height * shape.width // cut.block), clients)](
        slope,
        turned,
        below,
        samples,
        **shape.fixed,
        precision=how.precision,
        block=cut.block,
        chunk=min(power(shape.kernel**2 * shape.outputs), cut.chunk),
        narrow=power(shape.channels),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return below


def second_step(
    shape: Shape,
    source: torch.Tensor,
    full: torch.Tensor,
    slope: torch.Tensor,
    codes: torch.Tensor,
    models: torch.Tensor,
    into: torch.Tensor | None,
    places: tuple[int, int],
    samples: int,
    rate: float,
    how: Arithmetic,
) -> None:
    """Step the second convolution's kernels and bias, or write their gradients; `places` are theirs in a model.

    `slope` is the pooled one and `full` what `spread` made of it. Shares of the samples are summed apart and added up
    in their order, so that two runs agree bit for bit.
    """
    clients = len(models)
    cut = tile("second back", how, clients * samples)
    chunk = min(power(shape.taps), cut.chunk)
    pieces = -(-shape.taps // chunk)
    wanted = max(1, min(samples, -(-cut.programs // (clients * pieces))))
    group = -(-samples // wanted)
    shares = -(-samples // group)
    size = shape.outputs * shape.taps
    partial = torch.empty((clients, shares, size), device=models.device)
    convolve.weight_gradient[(pieces, shares, clients)](
        source,
        full,
        partial,
        samples,
        group,
        **shape.fixed,
        precision=how.precision,
        block=cut.block,
        chunk=chunk,
        wide=power(shape.outputs),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    target = models if into is None else into
    convolve.step[(-(-size // 512) + 1, clients)](
        partial,
        slope,
        codes,
        models,
        target,
        samples,
        shares,
        models.stride(0),
        target.stride(0),
        *places,
        rate,
        area=shape.area,
        size=size,
        outputs=shape.outputs,
        plain=into is None,
        block=512,
        wide=power(shape.outputs),
    )
