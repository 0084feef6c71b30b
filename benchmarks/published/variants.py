"""SCAFFOLD as other code has it, as plugins: each takes one step differently, to see which of them ends at chance."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from steelyard.algorithms.registry import algorithm
from steelyard.algorithms.scaffold import CHANGE, CONTROL, Scaffold
from steelyard.messages.algorithm import ServerStep, Vectors


@algorithm("scaffold-inside")
class InsideMomentum(Scaffold):
    """The correction is added to the gradient, so that the client's momentum multiplies it."""

    corrects: ClassVar[Literal["nothing", "gradient", "step"]] = "gradient"


@algorithm("scaffold-unshared")
class Unshared(Scaffold):
    """The server's control moves by the cohort's mean change, as if all clients had taken part."""

    def step(self, server: ServerStep) -> tuple[torch.Tensor, Vectors]:
        assert server.sent is not None
        control = server.tensors[CONTROL] + server.weighted(server.sent[CHANGE])
        return server.parameters + self.server_rate * server.change, {CONTROL: control}


@algorithm("scaffold-frozen")
class Frozen(Scaffold):
    """The server's control stays 0: what is left where the server reads the clients' answers once and they are gone."""

    def step(self, server: ServerStep) -> tuple[torch.Tensor, Vectors]:
        return server.parameters + self.server_rate * server.change, {CONTROL: server.tensors[CONTROL]}


@algorithm("scaffold-both")
class Both(InsideMomentum, Unshared):
    """Both at once."""
