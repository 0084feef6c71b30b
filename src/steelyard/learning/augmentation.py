"""Images changed at random each time they are trained on: a window of the padded image, mirrored or not.

Draws are by name, as those of dropout (`dropout`): a pure function of the client's stream, the step and the sample's
place in its batch. So they are the same in every engine, on every device and after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from steelyard.base.errors import UserError
from steelyard.learning.dropout import LAYERS, first_words

LAYER = LAYERS - 1
"""The place of these draws in a step's part of a stream; layers of a network are counted from 0."""

Padding = Literal["zero", "reflect"]


@dataclass(frozen=True)
class Augmentation:
    """What happens to images [channels, height, width] while they are trained on; tests see them as they are.

    With p = `pad`, row and column of the window are drawn from 0 … 2p: He et al. (2016) use p = 4 and flips.
    """

    pad: int = 0
    padding: Padding = "zero"
    flip: bool = False
    black: tuple[float, ...] = ()
    """What a pixel of 0 has become in each channel by normalising; padding of zeros takes it. Empty: 0."""

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse samples that are no images, or too small to be reflected."""
        if len(shape) != 3:
            raise UserError(f"data.augment: got samples of shape {shape}; allowed: images of (channels, height, width)")
        if self.padding == "reflect" and self.pad >= min(shape[1:]):
            raise UserError(
                f"data.augment.pad: got {self.pad} with padding 'reflect' for images of {shape[1]}×{shape[2]}; "
                f"allowed: less than {min(shape[1:])}"
            )

    def __call__(self, images: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
        """Return images [..., samples, channels, height, width] as one step sees them; the same shape.

        `chance` is [..., 2]: the key of a client's stream and the number of its step.
        """
        *_, samples, channels, height, width = images.shape
        words = first_words(chance, LAYER, samples).reshape(-1)
        down, across = (_below(words >> shift, 2 * self.pad + 1) - self.pad for shift in (0, 16))
        rows = down[:, None] + torch.arange(height, device=images.device)
        columns = across[:, None] + torch.arange(width, device=images.device)
        if self.flip:
            columns = torch.where((words >> 32 & 1).bool()[:, None], columns.flip(1), columns)
        flat = images.reshape(-1, channels, height, width)
        one = torch.arange(len(flat), device=images.device)[:, None, None, None]
        depth = torch.arange(channels, device=images.device)[:, None, None]
        y, x = (_inside(*line, self.padding) for line in ((rows, height), (columns, width)))
        seen = flat[one, depth, y[:, None, :, None], x[:, None, None, :]]
        if self.pad and self.padding == "zero":
            beyond = (rows != y)[:, None, :, None] | (columns != x)[:, None, None, :]
            seen = torch.where(beyond, _on_device(self.black or (0.0,), images.device), seen)
        return seen.view(images.shape)


def _on_device(black: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """One number for each channel, made on the device: nothing can be copied there while a graph is captured."""
    return torch.cat([torch.full((1,), value, device=device) for value in black]).view(-1, 1, 1)


def _below(words: torch.Tensor, limit: int) -> torch.Tensor:
    """A whole number below `limit` from the lowest sixteen bits of each word."""
    return (words & 0xFFFF) * limit >> 16


def _inside(places: torch.Tensor, length: int, padding: Padding) -> torch.Tensor:
    """Where the pixel at each place of a padded line is taken from; a reflection leaves the edge itself out."""
    if padding == "zero":
        return places.clamp(0, length - 1)
    return (length - 1) - ((length - 1) - places.abs()).abs()
