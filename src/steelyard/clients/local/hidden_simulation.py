"""A simulation under [privacy.aggregation]: its clients hide their updates, and the loop gets one sum of them a round.

Training, criteria and tests are the simulation's own. Every simulated client has keys of its own in every round and
does what a client on a node does; what stays in this process is only what a real federation has on many machines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from steelyard.activity import doing
from steelyard.clients.local.weighted_steps import Absent, WeightedSteps
from steelyard.clients.protocol import CheckedClients, Clients, FingerprintedClients
from steelyard.messages import DenseModels, Evaluations, Failure, Floats, Question, Task, Updates
from steelyard.privacy.aggregation_requirements import check_installed
from steelyard.privacy.aggregation_settings import AggregationSettings
from steelyard.privacy.fixed_point import FixedPoint, Words
from steelyard.privacy.hidden import HiddenUpdates, Summed, check_weights
from steelyard.privacy.masked_sum import masked_sum
from steelyard.privacy.secure_client import PUBLIC_BYTES, SecureClient, round_context
from steelyard.privacy.secure_server import SecureServer
from steelyard.privacy.sharing import SHARE_BYTES
from steelyard.privacy.withdrawals import beyond

if TYPE_CHECKING:
    from steelyard.privacy.ckks import CkksKeys
    from steelyard.privacy.paillier import PaillierKeys


def _nobody(stage: str, round: int) -> frozenset[str]:
    return frozenset()


class HiddenSimulation:
    """The clients of a simulation with their updates hidden from the server; implements the `Clients` protocol.

    `inner` trains and tests; where devices add noise, it is what adds it, so that noise comes first and masks after.
    """

    def __init__(self, inner: Clients, settings: AggregationSettings, absent: Absent = _nobody) -> None:
        self.inner, self.settings = inner, settings
        self._absent = absent
        self._keys: PaillierKeys | CkksKeys | None = None

    def names(self, seed: int) -> Sequence[str]:
        return self.inner.names(seed)

    def check(self) -> None:
        """Refuse what the simulation refuses, and a missing library."""
        check_installed(self.settings)
        if isinstance(self.inner, CheckedClients):
            self.inner.check()

    def fingerprint(self, seed: int) -> Mapping[str, str]:
        """Return what tells the clients' data from others, where they can tell."""
        return self.inner.fingerprint(seed) if isinstance(self.inner, FingerprintedClients) else {}

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        return [self._hidden(task, answer) for task, answer in zip(tasks, self.inner.train(tasks), strict=True)]

    def _hidden(self, task: Task, answer: Updates) -> Updates:
        payload = answer.payload
        assert isinstance(payload, DenseModels)
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

            summing = EncryptedSums(steps, self._shared_keys(task), self.settings, self._absent)
        gone = self._absent("share", task.round)
        if gone:
            keep = [row for row, name in enumerate(answer.clients) if name not in gone]
            answer = answer.select(keep, [Failure(name, "dropped out") for name in answer.clients if name in gone])
        return replace(answer, payload=HiddenUpdates(answer.clients, summing, self.settings))

    def _shared_keys(self, task: Task) -> PaillierKeys | CkksKeys:
        """Return the keys that the clients share; made when they are first needed, and never part of a checkpoint."""
        if self._keys is None:
            from steelyard.clients.local.encrypted_sums import (
                make_keys,  # Late for speed of start; an extra of its own.
            )

            with doing("making the clients' keys"):
                self._keys = make_keys(self.settings, len(self.names(task.seed)))
        return self._keys

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        return self.inner.evaluate(questions)

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        return self.inner.snapshot()

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.inner.restore(state)

    def describe(self) -> Mapping[str, str]:
        return {**self.inner.describe(), "aggregation": self.settings.kind}

    def close(self) -> None:
        self.inner.close()


class MaskedSums:
    """Secure aggregation among simulated clients for one task; see `privacy.secure_client` for the stages."""

    def __init__(
        self, steps: WeightedSteps, names: Sequence[str], seed: int, settings: AggregationSettings, absent: Absent
    ) -> None:
        what = f"round {steps.round} of {steps.federation}"
        # Keys are fresh in every attempt at a round; the context only keeps keys of different uses apart.
        context = round_context("simulation", steps.federation, seed, steps.round, os.urandom(16).hex())
        self._steps, self._round, self._absent = steps, steps.round, absent
        self._clients = {name: SecureClient(name, context, settings) for name in names}
        self._server = SecureServer(context, settings, what)
        self._server.keys = {name: client.keys() for name, client in self._clients.items()}
        self._server.require(len(names), "are in the round")
        self._encoding = FixedPoint.of(settings.word_bits, settings.bound, len(names))
        self._sent = dict.fromkeys(names, 0)
        for name in sorted(set(names) - absent("share", steps.round)):
            letters = self._clients[name].share(self._server.keys)
            self._server.post(name, letters)
            self._sent[name] += PUBLIC_BYTES + sum(map(len, letters.values()))

    def sum(self, clients: Sequence[str], weights: Floats) -> Summed:
        """Let the clients hide w·Δ, add up what they send, and open the sum with the help of those who stayed."""
        self._server.require(len(clients), "shared their keys and can be weighed")
        members = [self._clients[name] for name in clients]
        with doing("hiding the updates"):
            for client in members:
                client.receive(clients, self._server.inbox(client.name, clients))
            gone = self._absent("mask", self._round)
            stayed = [row for row, name in enumerate(clients) if name not in gone]
            survivors = tuple(clients[row] for row in stayed)
            total = masked_sum(
                members, stayed, lambda begin, end: self._words(clients, weights, begin, end), self._steps.size,
                self._encoding,
            )  # fmt: skip
        with doing("opening their sum"):
            self._server.require(len(survivors), "sent their hidden update")
            check_weights(survivors, weights[stayed], self._server.settings)
            helpers = sorted(set(survivors) - self._absent("open", self._round))
            told = {name: self._clients[name].open(survivors) for name in helpers}
            plain = self._server.open(total, clients, survivors, told)
        for name in survivors:
            self._sent[name] += self._steps.size * self._encoding.dtype.itemsize
            self._sent[name] += SHARE_BYTES * len(clients) if name in told else 0
        dropped = tuple(Failure(name, "dropped out before its update arrived") for name in clients if name in gone)
        return Summed(self._encoding.decode(plain), survivors, dropped, {name: self._sent[name] for name in survivors})

    def _words(self, clients: Sequence[str], weights: Floats, begin: int, end: int) -> Words:
        return self._encoding.encode(self._steps.of(clients, weights, begin, end))
