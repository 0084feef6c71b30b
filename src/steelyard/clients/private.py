"""Clients that add noise to what they send: around any others, on one machine or on a node of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steelyard.algorithms.algorithm import Algorithm
from steelyard.clients.protocol import CheckedClients, Clients, FingerprintedClients, WrappedClients
from steelyard.messages import Task, Updates
from steelyard.privacy.local import DeviceNoise


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

    def check(self, algorithms: Sequence[Algorithm]) -> None:
        """Refuse what the clients themselves refuse."""
        if isinstance(self.clients, CheckedClients):
            self.clients.check(algorithms)

    def fingerprint(self, seed: int) -> Mapping[str, str]:
        """Return what tells the clients' data from others, where they can tell."""
        return self.clients.fingerprint(seed) if isinstance(self.clients, FingerprintedClients) else {}
