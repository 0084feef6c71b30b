"""Clients across machines whose updates the server never sees: keys, task, hidden sum, opening, over Flower's grid."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from steelyard.clients.flower import arrays as packing
from steelyard.clients.flower import checks, wire
from steelyard.clients.flower.courier import Letter
from steelyard.clients.flower.forms import Form, Refused
from steelyard.clients.flower.grid import Errand, FlowerClients, Sending
from steelyard.clients.flower.hidden_forms import (
    HIDE,
    KEYS,
    OPEN,
    AnswerForm,
    HideForm,
    Letters,
    OpenForm,
    RoundForm,
    letter_codec,
    rows,
)
from steelyard.clients.flower.payloads import only_keys
from steelyard.clients.flower.settings import FederateSettings
from steelyard.messages import Failure, Floats, Task, Updates
from steelyard.privacy.aggregation_settings import AggregationSettings
from steelyard.privacy.fixed_point import FixedPoint
from steelyard.privacy.hidden import HiddenUpdates, Summed, check_weights
from steelyard.privacy.secure_client import LETTER_BYTES, PUBLIC_BYTES, Opened, PublicKeys, round_context
from steelyard.privacy.secure_server import SecureServer
from steelyard.privacy.sharing import SHARE_BYTES

_MOST_EXTRA = 1 << 20


@dataclass(frozen=True, eq=False)
class _Answer:
    """What a node sent for some of its clients, checked: one array, and who it is of."""

    clients: tuple[str, ...]
    found: NDArray[Any]
    failures: tuple[Failure, ...]
    sent: int = 0
    """Bytes for each client."""


@dataclass(eq=False)
class _Round:
    """One attempt at a round of one federation, on the server."""

    task: Task
    attempt: str
    server: SecureServer
    failures: list[Failure] = field(default_factory=list[Failure])
    sent: dict[str, int] = field(default_factory=dict[str, int])

    def form(self, run: str, clients: Sequence[str], seconds: float, experiment: str) -> dict[str, Any]:
        task = self.task
        return {
            "run": run,
            "federation": task.federation,
            "seed": task.seed,
            "round": task.round,
            "attempt": self.attempt,
            "clients": list(clients),
            "seconds": seconds,
            "experiment": experiment,
        }


class HiddenClients(FlowerClients):
    """Clients on other machines under [privacy.aggregation]; what the loop gets of their updates is one sum a round."""

    def __init__(
        self,
        grid: Grid,
        criteria: Mapping[str, wire.Refusal],
        settings: FederateSettings,
        aggregation: AggregationSettings,
        **further: Any,
    ) -> None:
        super().__init__(grid, criteria, settings, **further)
        self._aggregation = aggregation

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        """Collect keys, send the tasks with them, and return criteria with letters kept for the sum."""
        if not tasks:
            return []
        self.roster.round = max(task.round for task in tasks)
        self.roster.refresh(self._patience)
        begun = [self._begin(task) for task in tasks]
        self._collect_keys(begun)
        cohorts = [tuple(sorted(work.server.keys)) for work in begun]
        smaller = [replace(work.task, clients=cohort) for work, cohort in zip(begun, cohorts, strict=True)]
        answers = self.send_tasks(smaller, [self._sending(work) for work in begun])
        return [self._hidden(work, answer) for work, answer in zip(begun, answers, strict=True)]

    def _begin(self, task: Task) -> _Round:
        attempt = os.urandom(16).hex()  # on a resume the same round has other keys
        context = round_context(self._run, task.federation, task.seed, task.round, attempt)
        what = f"round {task.round} of {task.federation}"
        return _Round(task, attempt, SecureServer(context, self._aggregation, what))

    def _collect_keys(self, begun: Sequence[_Round]) -> None:
        def form(work: _Round, asked: Sequence[str], seconds: float) -> tuple[Form, dict[str, NDArray[Any]]]:
            return RoundForm(**work.form(self._run, asked, seconds, self._experiment)), {}

        def shape(work: _Round, clients: int) -> tuple[str, tuple[int, ...]]:
            return "|u1", (clients, PUBLIC_BYTES)

        groups = [work.task.clients for work in begun]
        for work, answers in zip(begun, self._ask(KEYS, "keys", begun, groups, form, shape), strict=True):
            for answer in answers:
                for client, row in zip(answer.clients, answer.found, strict=True):
                    keys = PublicKeys.read(row.tobytes())
                    if not keys.usable():
                        # All others would withdraw because of it; the one that shows it is left out instead.
                        work.failures.append(Failure(client, "shows a key that is none"))
                        continue
                    work.server.keys[client] = keys
                    work.sent[client] = answer.sent
            why = "; ".join(f"{failure.client}: {failure.reason}" for failure in work.failures[:3])
            work.server.require(len(work.server.keys), f"showed keys ({why})" if why else "showed keys")

    def _sending(self, work: _Round) -> Sending:
        cohort = sorted(work.server.keys)
        keys = rows([work.server.keys[name].write() for name in cohort], PUBLIC_BYTES)
        arrays = ArrayRecord({**wire.pack_parameters(work.task), **packing.pack({"keys": keys})})
        return Sending(arrays, letter_codec(len(cohort)), cohort, work.attempt)

    def _hidden(self, work: _Round, answer: Updates) -> Updates:
        failures = tuple(sorted([*answer.failures, *work.failures], key=lambda failure: failure.client))
        cohort = sorted(work.server.keys)
        letters = answer.payload.letters if isinstance(answer.payload, Letters) else np.zeros((0, 0, 0), np.uint8)
        for client, mine in zip(answer.clients, letters, strict=True):
            to = {name: row.tobytes() for name, row in zip(cohort, mine, strict=True) if name != client}
            work.server.post(client, to)
        sent = np.zeros(len(answer.clients)) if answer.bytes_sent is None else answer.bytes_sent
        for client, count in zip(answer.clients, sent.tolist(), strict=True):
            work.sent[client] = work.sent.get(client, 0) + int(count)
        payload = HiddenUpdates(answer.clients, _GridSums(self, work), self._aggregation)
        return replace(answer, payload=payload, failures=failures)

    # ------------------------------------------------------------ the sum, once the weights are known

    def hide(self, work: _Round, members: Sequence[str], weights: Mapping[str, float]) -> list[_Answer]:
        """Ask the members for their weighted updates, hidden; a node answers with the sum of its clients'."""
        encoding = FixedPoint.of(self._aggregation.word_bits, self._aggregation.bound, len(work.server.keys))

        def form(work: _Round, asked: Sequence[str], seconds: float) -> tuple[Form, dict[str, NDArray[Any]]]:
            empty = bytes(LETTER_BYTES)
            inboxes = [work.server.inbox(client, members) for client in asked]
            letters = [rows([inbox.get(name, empty) for name in members], LETTER_BYTES) for inbox in inboxes]
            fields = work.form(self._run, asked, seconds, self._experiment)
            told = HideForm(**fields, members=list(members), weights=[weights[client] for client in asked])
            return told, {"letters": np.stack(letters)}

        def shape(work: _Round, clients: int) -> tuple[str, tuple[int, ...]]:
            return encoding.dtype.str, (work.task.parameters.numel(),)

        return self._ask(HIDE, "words", [work], [members], form, shape)[0]

    def open(self, work: _Round, members: Sequence[str], survivors: Sequence[str]) -> dict[str, Opened]:
        """Ask the survivors for what opens their sum."""

        def form(work: _Round, asked: Sequence[str], seconds: float) -> tuple[Form, dict[str, NDArray[Any]]]:
            fields = work.form(self._run, asked, seconds, self._experiment)
            return OpenForm(**fields, survivors=list(survivors)), {}

        def shape(work: _Round, clients: int) -> tuple[str, tuple[int, ...]]:
            return "|u1", (clients, len(members), SHARE_BYTES)

        told: dict[str, Opened] = {}
        stayed = set(survivors)
        for answer in self._ask(OPEN, "shares", [work], [survivors], form, shape)[0]:
            for client, mine in zip(answer.clients, answer.found, strict=True):
                shares = {name: row.tobytes() for name, row in zip(members, mine, strict=True)}
                told[client] = Opened(
                    {name: share for name, share in shares.items() if name in stayed},
                    {name: share for name, share in shares.items() if name not in stayed},
                )
                work.sent[client] = work.sent.get(client, 0) + answer.sent
        return told

    def _ask(
        self,
        kind: str,
        array: str,
        works: Sequence[_Round],
        groups: Sequence[Sequence[str]],
        form: Callable[[_Round, Sequence[str], float], tuple[Form, dict[str, NDArray[Any]]]],
        shape: Callable[[_Round, int], tuple[str, tuple[int, ...]]],
    ) -> list[list[_Answer]]:
        """Send one message to each node of each group, and return what was answered properly, by round."""
        errands: list[Errand] = []
        failures: list[list[Failure]] = [[] for _ in works]
        seconds = self._seconds(works)
        for index, (work, group) in enumerate(zip(works, groups, strict=True)):
            for node, asked in self.group(group, failures[index]).items():
                written, arrays = form(work, asked, seconds)
                dtype, sizes = shape(work, len(asked))
                largest = _MOST_EXTRA + 2 * int(np.prod(sizes)) * np.dtype(dtype).itemsize
                letter = Letter(node, kind, wire.content(written, arrays), work.task.round, largest)
                errands.append(Errand(index, node, asked, letter))

        def read(errand: Errand, content: RecordDict) -> _Answer:
            return _read(content, errand.asked, works[errand.index], array, shape)

        parts = self.exchange(errands, seconds, read, failures)
        for work, found in zip(works, failures, strict=True):
            work.failures += found
        return [parts.get(index, []) for index in range(len(works))]


def _read(
    content: RecordDict,
    asked: Sequence[str],
    work: _Round,
    array: str,
    shape: Callable[[_Round, int], tuple[str, tuple[int, ...]]],
) -> _Answer:
    text, found = wire.split(content)
    dtype, sizes = shape(work, len(asked))
    sent = checks.refuse_size(text, found, len(asked), int(np.prod(sizes)) * np.dtype(dtype).itemsize + 4096)
    form = AnswerForm.read(text)
    checks.refuse_other(form.federation, form.round, work.task.federation, work.task.round)
    count = checks.refuse_clients(form.clients, form.failures, asked)
    if form.clients != sorted(form.clients):
        raise Refused("clients: not in ascending order")
    only_keys(found, [array] if count else [])
    dtype, sizes = shape(work, count)
    values = packing.unpack(found[array], array, dtype, sizes) if count else np.zeros(0, np.dtype(dtype))
    return _Answer(
        tuple(form.clients), values, checks.failures(form.failures, form.clients, asked), sent // max(count, 1)
    )


class _GridSums:
    """The sum of one round's hidden updates; the second half of the round's exchange with the nodes."""

    def __init__(self, clients: HiddenClients, work: _Round) -> None:
        self._clients, self._work = clients, work

    def sum(self, clients: Sequence[str], weights: Floats) -> Summed:
        """Collect hidden words from the clients, and open their sum with the help of those who stayed."""
        work, settings = self._work, self._clients._aggregation
        work.server.require(len(clients), "shared their keys and can be weighed")
        work.failures.clear()
        given = dict(zip(clients, weights.tolist(), strict=True))
        answers = self._clients.hide(work, clients, given)
        encoding = FixedPoint.of(settings.word_bits, settings.bound, len(work.server.keys))
        total = np.zeros(work.task.parameters.numel(), dtype=encoding.dtype)
        for answer in answers:
            total += answer.found if answer.clients else total.dtype.type(0)
            for client in answer.clients:
                work.sent[client] = work.sent.get(client, 0) + answer.sent
        survivors = tuple(sorted(client for answer in answers for client in answer.clients))
        reasons = {failure.client: failure.reason for failure in work.failures}
        why = "; ".join(f"{client}: {reason}" for client, reason in list(reasons.items())[:3])
        work.server.require(len(survivors), f"sent their hidden update ({why})" if why else "sent their hidden update")
        check_weights(survivors, np.array([given[client] for client in survivors]), settings)
        told = self._clients.open(work, clients, survivors)
        plain = work.server.open(total, clients, survivors, told)
        dropped = [
            Failure(client, f"dropped out before its update arrived: {reasons.get(client, 'no answer')}")
            for client in clients
            if client not in survivors
        ]
        sent = {client: work.sent.get(client, 0) for client in survivors}
        return Summed(encoding.decode(plain), survivors, tuple(dropped), sent)
