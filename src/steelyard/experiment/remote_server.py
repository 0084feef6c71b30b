"""The server of a learning experiment across machines that holds no data."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from steelyard.base.errors import UserError
from steelyard.learning.models import build
from steelyard.learning.parameters import Layout
from steelyard.learning.settings import ModelSettings
from steelyard.messages.payloads import Counts, ServerTest

MOST_INPUTS = 10**8
"""More numbers per sample than any model here takes; a node that says so is mistaken or lying."""


class RemoteServer:
    """A server without data: it knows of the samples only what the nodes say, and can make the first model."""

    def __init__(self, model: ModelSettings, about: Mapping[str, int | list[int]]) -> None:
        shape, classes = about.get("features"), about.get("classes")
        if not isinstance(shape, list) or not isinstance(classes, int) or classes < 0:
            raise UserError(
                "federate: the nodes do not give the shape of their samples and the number of classes, but "
                f"{dict(about)}"
            )
        if min(shape, default=0) < 1 or prod(shape) > MOST_INPUTS or classes > MOST_INPUTS:
            raise UserError(
                f"federate: the nodes say samples of shape {shape} in {classes} classes; allowed: shapes and numbers "
                "above 0"
            )
        self._model, self._shape, self._classes = model, torch.Size(shape), classes
        self._pixels = bool(about.get("pixels"))

    @property
    def classes(self) -> int:
        """Number of classes, as the nodes say."""
        return self._classes

    def initial(self, seed: int) -> torch.Tensor:
        """Return the first global model, the same as a simulation's for this seed."""
        module = self._build(seed)
        return Layout.of(module).read(module)

    def _build(self, seed: int) -> torch.nn.Module:
        return build(self._model, self._shape, self._classes, seed, pixels=self._pixels)

    def output_layer(self, seed: int) -> Counts:
        """Return where the rows of the network's last layer stand in the flat model."""
        return Layout.of(self._build(seed)).output

    def kernels(self, seed: int) -> Counts:
        """Return where the kernels of the network's layers begin and end in the flat model."""
        return Layout.of(self._build(seed)).kernels

    def adapters(self, seed: int) -> Counts:
        """Return where the factors of the network's low-rank adapters stand in the flat model."""
        return Layout.of(self._build(seed)).adapters

    def test(self, seed: int, models: torch.Tensor) -> ServerTest:
        """Refuse: there is nothing to test on."""
        raise UserError("partition.server: 'none' leaves the server without a test set; allowed: held-out, fraction")
