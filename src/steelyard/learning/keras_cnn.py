"""The network of Keras' example mnist_cnn, which paper 001 cites: two convolutions, one pooling, dropout twice."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from steelyard.learning.dropout import NamedDropout

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
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.xavier_uniform_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv1(x.reshape(-1, *self.image)))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        # Units count channels last, the order in which stacked steps keep them.
        x = self.dropped(x.permute(0, 2, 3, 1).flatten(1), 0, RATES[0])
        x = functional.relu(self.dense1(x))
        return self.dense2(self.dropped(x, 1, RATES[1]))
