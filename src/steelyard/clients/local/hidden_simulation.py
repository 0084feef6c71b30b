"""A simulation under [privacy.aggregation]: its clients hide their updates, and the loop gets one sum of them a round.

Training, criteria and tests are the simulation's own. Every simulated client has keys of its own in every round and
does what a client on a node does; what stays in this process is only what a real federation has on many machines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.errors import in_words
from steelyard.base.logs import doing
from steelyard.clients.protocol import Sending, Step
from steelyard.messages.payloads import Summed
from steelyard.messages.updates import Failure, Floats, Task, Updates
from steelyard.privacy.hidden import FixedPoint, Grid, HiddenUpdates, Words, beyond, check_installed
from steelyard.privacy.secure import (
    PUBLIC_BYTES,
    Opened,
    SecureClient,
    SecureServer,
    Unreadable,
    round_context,
    vector_digest,
)
from steelyard.privacy.secure_round import HiddenWords, masked_sum, secure_sum
from steelyard.privacy.settings import FEWEST, AggregationSettings
from steelyard.privacy.sharing import SHARE_BYTES

if TYPE_CHECKING:
    from steelyard.clients.local.encrypted_sums import CkksKeys


Absent = Callable[[str, int], frozenset[str]]
"""From a stage (share, mask, open) and a round to the clients that have dropped out by then; for tests and trials."""


def _nobody(stage: str, round: int) -> frozenset[str]:
    return frozenset()


class Hide(Step[Sending]):
    """Simulated clients hide their updates from the server, which opens their sum alone."""

    name = "hide"

    def __init__(self, settings: AggregationSettings, absent: Absent = _nobody) -> None:
        self.settings, self._absent = settings, absent
        self._keys: CkksKeys | None = None

    def check(self) -> None:
        """Refuse a missing library."""
        check_installed(self.settings)

    def out(self, sending: Sending) -> None:
        sending.updates = self._hidden(sending.task, sending.updates)

    def _hidden(self, task: Task, answer: Updates) -> Updates:
        payload = answer.payload.dense
        assert payload is not None
        faults = beyond(payload.models, task.parameters, self.settings.bound)
        keep = [row for row, fault in enumerate(faults) if fault is None]
        left = [Failure(answer.clients[row], fault) for row, fault in enumerate(faults) if fault is not None]
        if left:
            answer = answer.select(keep, left)
            payload = payload.select(keep)
        steps = WeightedSteps(task, answer.clients, payload.models)
        if self.settings.kind == "secure":
            summing = MaskedSums(steps, answer.clients, task.seed, self.settings, self._absent)
        else:
            from steelyard.clients.local.encrypted_sums import EncryptedSums  # Late for speed of start; an extra too.

            summing = EncryptedSums(
                steps, self._shared_keys(max(task.registered, len(task.clients))), self.settings, self._absent
            )
        gone = self._absent("share", task.round)
        if gone:
            keep = [row for row, name in enumerate(answer.clients) if name not in gone]
            answer = answer.select(keep, [Failure(name, "dropped out") for name in answer.clients if name in gone])
        return replace(answer, payload=HiddenUpdates(answer.clients, summing, self.settings))

    def _shared_keys(self, clients: int) -> CkksKeys:
        """Return the keys that the clients share; made when they are first needed, and never part of a checkpoint."""
        if self._keys is None:
            from steelyard.clients.local.encrypted_sums import CkksKeys  # Late for speed of start; an extra too.

            with doing("making the clients' keys"):
                self._keys = CkksKeys(Grid.of(self.settings.bound, clients))
        return self._keys

    def describe(self) -> Mapping[str, str]:
        return {"aggregation": self.settings.kind}


class MaskedSums:
    """Secure aggregation among simulated clients for one task: the messages that `privacy.secure_round` asks for."""

    def __init__(
        self, steps: WeightedSteps, names: Sequence[str], seed: int, settings: AggregationSettings, absent: Absent
    ) -> None:
        self._steps, self._seed, self._settings, self._absent = steps, seed, settings, absent
        self.sent = dict.fromkeys(names, 0)
        self.server = self._begin(names)

    def _begin(self, names: Sequence[str], fewest: int = FEWEST) -> SecureServer:
        """Make fresh keys for these clients, and let them share what opens their masks."""
        steps = self._steps
        # Keys are fresh in every try at a round; the context only keeps keys of different uses apart.
        context = round_context("simulation", steps.federation, self._seed, steps.round, os.urandom(16).hex())
        self._clients = {name: SecureClient(name, context, self._settings, fewest=fewest) for name in names}
        server = SecureServer(
            context, self._settings, f"round {steps.round} of {in_words(steps.federation)}", fewest=fewest
        )
        server.keys = {name: client.keys() for name, client in self._clients.items()}
        server.require(len(names), "are in the round")
        self._encoding = FixedPoint.of(self._settings.word_bits, self._settings.bound, len(names))
        for name in sorted(set(names) - self._absent("share", steps.round)):
            shares = self._clients[name].share(server.keys)
            server.keep_shares(name, shares)
            self.sent[name] += PUBLIC_BYTES + sum(map(len, shares.values()))
        return server

    def sum(self, clients: Sequence[str], weights: Floats) -> Summed:
        """Let the clients hide w·Δ, add up what they send, and open the sum with the help of those who stayed."""
        return secure_sum(self, clients, weights, self._settings)

    def again(self, clients: Sequence[str]) -> tuple[tuple[str, ...], Mapping[str, str]]:
        self.server = self._begin(clients, self.server.least)
        return tuple(clients), {}

    def hide(self, members: Sequence[str], weights: Mapping[str, float]) -> HiddenWords:
        clients = [self._clients[name] for name in members]
        given, vector = np.array([weights[name] for name in members]), vector_digest(members, weights)
        unreadable: dict[str, Sequence[str]] = {}
        with doing("hiding the updates"):
            for client in clients:
                try:
                    client.receive(members, self.server.shares_for(client.name, members), vector)
                except Unreadable as error:
                    unreadable[client.name] = error.senders
            gone = self._absent("mask", self._steps.round) | set(unreadable)
            stayed = [row for row, name in enumerate(members) if name not in gone]
            total = masked_sum(
                clients, stayed, lambda begin, end: self._words(members, given, begin, end), self._steps.size,
                self._encoding,
            )  # fmt: skip
        for row in stayed:
            self.sent[members[row]] += self._steps.size * self._encoding.dtype.itemsize
        return HiddenWords(total, tuple(members[row] for row in stayed), {}, unreadable)

    def open(self, members: Sequence[str], survivors: Sequence[str]) -> Mapping[str, Opened]:
        with doing("opening their sum"):
            revealed = {
                name: self._clients[name].open(survivors)
                for name in sorted(set(survivors) - self._absent("open", self._steps.round))
            }
        for name in revealed:
            self.sent[name] += SHARE_BYTES * len(members)
        return revealed

    def _words(self, clients: Sequence[str], weights: Floats, begin: int, end: int) -> Words:
        return self._encoding.encode(self._steps.of(clients, weights, begin, end))


class WeightedSteps:
    """What the simulated clients write down: w·Δ in words, some parameters at a time; each row is one client's own."""

    def __init__(self, task: Task, names: Sequence[str], models: torch.Tensor) -> None:
        self._row = {name: row for row, name in enumerate(names)}
        self._start, self._models = task.parameters.to(models.device), models
        self.federation, self.round, self.cohort = task.federation, task.round, len(names)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self._start.numel()

    def of(self, clients: Sequence[str], weights: Floats, begin: int, end: int) -> NDArray[np.float64]:
        """Return w·Δ of these clients for a span of parameters: [clients, parameters]."""
        rows = [self._row[name] for name in clients]
        step = self._models[:, begin:end][rows].to(torch.float64) - self._start[begin:end].to(torch.float64)
        return step.cpu().numpy() * weights[:, None]
