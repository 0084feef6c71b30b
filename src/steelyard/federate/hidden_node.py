"""A node's part of a round with hidden updates: what it keeps between messages, and what it refuses.

The keys and the trained models wait on the node, in Flower's node state, from one message to the next; they never leave
it. A node that was restarted in between has forgotten them, and its clients count as dropped out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from steelyard.clients.flower import arrays as packing
from steelyard.clients.flower import wire
from steelyard.clients.flower.forms import FailureForm, Refused
from steelyard.clients.flower.hidden_forms import AnswerForm, Bytes, HideForm, Letters, OpenForm, RoundForm, rows
from steelyard.clients.flower.payloads import only_keys
from steelyard.messages import DenseModels, Failure, Task, Updates
from steelyard.privacy.aggregation_settings import AggregationSettings
from steelyard.privacy.fixed_point import FixedPoint, Words
from steelyard.privacy.secure_client import (
    LETTER_BYTES,
    PUBLIC_BYTES,
    PublicKeys,
    SecureClient,
    Withdrawn,
    round_context,
)
from steelyard.privacy.sharing import SHARE_BYTES
from steelyard.privacy.withdrawals import beyond

ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class HiddenRound:
    """The state of one federation's current round on this node; each message reads it and leaves it for the next."""

    state: RecordDict
    federation: str
    settings: AggregationSettings

    @property
    def _name(self) -> str:
        return f"hidden/{self.federation}"

    def keys(self, form: RoundForm) -> RecordDict:
        """Make fresh keys for the clients that are asked, and forget whatever round was before."""
        context = round_context(form.run, form.federation, form.seed, form.round, form.attempt)
        clients = {name: SecureClient(name, context, self.settings) for name in sorted(form.clients)}
        self._forget()
        self._keep(clients, context)
        shown = rows([client.keys().write() for client in clients.values()], PUBLIC_BYTES)
        return _answer(form, list(clients), {}, {"keys": shown})

    def trained(self, errand: wire.Errand, task: Task, updates: Updates) -> Updates:
        """Keep the trained models here, and return the clients' letters in their place."""
        context = round_context(errand.run, task.federation, task.seed, task.round, errand.attempt)
        clients = self._clients(context)
        assert isinstance(updates.payload, DenseModels)
        assert errand.keys is not None
        if errand.keys.shape[1] != PUBLIC_BYTES:
            raise Refused(f"keys: {errand.keys.shape[1]} bytes each; allowed: {PUBLIC_BYTES}")
        cohort = {name: PublicKeys.read(row.tobytes()) for name, row in zip(errand.cohort, errand.keys, strict=True)}
        found = beyond(updates.payload.models, task.parameters, self.settings.bound)
        faults = dict(zip(updates.clients, found, strict=True))

        def share(name: str) -> dict[str, bytes]:
            if (fault := faults[name]) is not None:
                raise Withdrawn(fault)
            return _known(clients, name).share(cohort)

        letters, failures = _each(updates.clients, share)
        keep = [row for row, name in enumerate(updates.clients) if name in letters]
        models = updates.payload.models[keep].detach().cpu().float().numpy()
        stay = {name: clients[name] for name in letters}
        self._keep(stay, context)
        self.state[f"{self._name}/models"] = ArrayRecord(
            {"models": Array(models), "start": Array(task.parameters.detach().cpu().float().numpy())}
        )
        empty = bytes(LETTER_BYTES)
        sent = [rows([mine.get(name, empty) for name in sorted(cohort)], LETTER_BYTES) for mine in letters.values()]
        payload = Letters(np.stack(sent) if sent else np.zeros((0, len(cohort), LETTER_BYTES), np.uint8))
        kept = updates.select(keep, [Failure(name, reason) for name, reason in failures.items()])
        return replace(kept, payload=payload)

    def hide(self, form: HideForm, letters: Bytes) -> RecordDict:
        """Return the sum of these clients' weighted updates with all masks on; the models are then forgotten."""
        context = round_context(form.run, form.federation, form.seed, form.round, form.attempt)
        clients = self._clients(context)
        if len(form.weights) != len(form.clients) or letters.shape[:2] != (len(form.clients), len(form.members)):
            raise Refused("weights, letters: not one for each client and member")
        record = self.state.get(f"{self._name}/models")
        if not isinstance(record, ArrayRecord):
            raise Refused("hide: nothing was trained for this round; allowed: after its task")
        models, start = record["models"].numpy(), record["start"].numpy().astype(np.float64)
        row = {name: number for number, name in enumerate(clients)}

        def hidden(name: str) -> Words:
            client, index = _known(clients, name), form.clients.index(name)
            weight = form.weights[index]
            if not 0 <= weight <= self.settings.largest_weight + 1e-9:
                raise Withdrawn(f"its weight would be {weight:.3g}; allowed: 0 to {self.settings.largest_weight:g}")
            inbox = {m: letter.tobytes() for m, letter in zip(form.members, letters[index], strict=True) if m != name}
            client.receive(form.members, inbox)
            encoding = FixedPoint.of(self.settings.word_bits, self.settings.bound, client.cohort_size)
            return client.mask(encoding.encode((models[row[name]].astype(np.float64) - start) * weight))

        found, failures = _each(sorted(form.clients), hidden)
        weights = dict(sorted(zip(form.clients, form.weights, strict=True)))
        self._keep({name: clients[name] for name in found}, context, weights)
        del self.state[f"{self._name}/models"]
        if not found:
            return _answer(form, [], failures, {})
        words = np.stack(list(found.values()))
        return _answer(form, list(found), failures, {"words": np.add.reduce(words, axis=0, dtype=words.dtype)})

    def open(self, form: OpenForm) -> RecordDict:
        """Return the shares that open the sum of the survivors, and forget the round."""
        context = round_context(form.run, form.federation, form.seed, form.round, form.attempt)
        clients = self._clients(context)
        self._refuse_second(form, clients)

        def opened(name: str) -> Bytes:
            client = _known(clients, name)
            told = client.open(form.survivors)
            return rows([(told.seeds.get(m) or told.keys[m]) for m in client.members], SHARE_BYTES)

        found, failures = _each(sorted(form.clients), opened)
        self._forget()
        return _answer(form, list(found), failures, {"shares": np.stack(list(found.values()))} if found else {})

    def _refuse_second(self, form: OpenForm, clients: Mapping[str, SecureClient]) -> None:
        """Refuse to open a round again for other clients or weights: from two sums a single update may follow.

        A run that was killed between the opening and its record repeats the round, and may do so for the same sum.
        """
        name = f"{self._name}/opened"
        members = sorted({member for client in clients.values() for member in client.members})
        weights = self.state[self._name].get("weights", "")
        sum_of = hashlib.sha256(json.dumps([members, sorted(form.survivors), weights]).encode()).hexdigest()
        record = self.state.get(name)
        before = dict(record) if isinstance(record, ConfigRecord) else {}
        key = json.dumps([form.run, form.round])
        if before.get(key, sum_of) != sum_of:
            raise Refused(
                "open: this round was opened before, for others or other weights; allowed: the same sum again"
            )
        last = {old: value for old, value in before.items() if json.loads(old)[0] == form.run}
        self.state[name] = ConfigRecord({**last, key: sum_of})

    def _clients(self, context: bytes) -> dict[str, SecureClient]:
        record = self.state.get(self._name)
        if not isinstance(record, ConfigRecord) or record.get("context") != context:
            raise Refused("attempt: this node has no keys for it; allowed: the round that it made keys for last")
        found = {name[1:]: value for name, value in record.items() if name.startswith("/")}
        return {name: SecureClient.load(text) for name, text in sorted(found.items()) if isinstance(text, bytes)}

    def _keep(
        self, clients: Mapping[str, SecureClient], context: bytes, weights: Mapping[str, float] | None = None
    ) -> None:
        held = {f"/{name}": client.dump() for name, client in clients.items()}
        self.state[self._name] = ConfigRecord({"context": context, "weights": json.dumps(weights or {}), **held})

    def _forget(self) -> None:
        for name in (self._name, f"{self._name}/models"):
            if name in self.state:
                del self.state[name]


def read_letters(records: RecordDict) -> tuple[HideForm, Bytes]:
    """Return the form and the letters of a message that asks for hidden updates."""
    text, found = wire.split(records)
    form = HideForm.read(text)
    only_keys(found, ["letters"])
    shape = (len(form.clients), len(form.members), LETTER_BYTES)
    return form, packing.unpack(found["letters"], "letters", "|u1", shape)


def _known(clients: Mapping[str, SecureClient], name: str) -> SecureClient:
    if name not in clients:
        raise Withdrawn("has no keys for this round")
    return clients[name]


def _each(names: Sequence[str], work: Callable[[str], ResultT]) -> tuple[dict[str, ResultT], dict[str, str]]:
    """Do the work for each client; one that withdraws is left out, with its reason."""
    found: dict[str, ResultT] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            found[name] = work(name)
        except Withdrawn as reason:
            failures[name] = str(reason)
    return found, failures


def _answer(
    form: RoundForm, clients: Sequence[str], failures: Mapping[str, str], arrays: Mapping[str, np.ndarray]
) -> RecordDict:
    told = [FailureForm(client=name, reason=reason) for name, reason in failures.items()]
    answer = AnswerForm(federation=form.federation, round=form.round, clients=sorted(clients), failures=told)
    return wire.content(answer, dict(arrays))
