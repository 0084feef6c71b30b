"""What the kernels work on: the images of a step, and the measures of a convolution."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
    rectified: bool = True
    """Whether ReLU follows the pooling."""

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
        """Sizes of the gradient by corner: outputs, and the square under four windows with the 1 of the bias."""
        return power(self.outputs), power((self.kernel + 1) ** 2 * self.channels + 1)


def power(number: int) -> int:
    """The power of two that holds this many, 16 at the least: what matrix units take."""
    return max(16, 1 << (number - 1).bit_length())
