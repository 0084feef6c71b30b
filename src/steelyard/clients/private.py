"""Clients that add noise to what they send: around any others, on one machine or on a node of their own."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.clients.protocol import Clients, WrappedClients
from steelyard.messages.updates import Task, Updates
from steelyard.privacy.clipping import DeviceNoise


class PrivateClients(WrappedClients):
    """Clients whose devices clip and noise their updates; wrap them where they are built, before anything is sent.

    Tests of models are answered as they are: the guarantee does not cover them. The owner of a
    node can refuse them there (`NodeConfig.tests`).
    """

    def __init__(self, clients: Clients, noise: DeviceNoise) -> None:
        super().__init__(clients)
        self.noise = noise

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        answers = self.clients.train(tasks)
        return [self.noise.applied(task, updates) for task, updates in zip(tasks, answers, strict=True)]
