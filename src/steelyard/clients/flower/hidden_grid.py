"""Clients across machines whose updates the server never sees: keys, task, hidden sum, opening, over Flower's grid."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from steelyard.algorithms.settings import algorithm_table
from steelyard.base.errors import in_words
from steelyard.clients.flower import wire
from steelyard.clients.flower.grid import Errand, FlowerClients, Sending
from steelyard.clients.flower.hidden_messages import (
    Answer,
    HideForm,
    KeysForm,
    KeyShares,
    KeySharesCodec,
    OpenForm,
    RoundForm,
    RoundTry,
    Shape,
    ShareForm,
    Written,
    asked_digest,
    keep_shares,
    key_rows,
    read_answer,
    rows,
)
from steelyard.clients.flower.register import FederateSettings
from steelyard.clients.flower.tasks import Refusal, pack_parameters
from steelyard.clients.flower.wire import pack
from steelyard.messages.payloads import Summed
from steelyard.messages.updates import Failure, Floats, Task, Updates
from steelyard.privacy.hidden import FixedPoint, HiddenUpdates
from steelyard.privacy.secure import KEY_SHARES_BYTES, PUBLIC_BYTES, Opened, PublicKeys, SecureServer, round_context
from steelyard.privacy.secure_round import HiddenWords, secure_sum
from steelyard.privacy.settings import FEWEST, AggregationSettings
from steelyard.privacy.sharing import SHARE_BYTES

_MOST_EXTRA = 1 << 20


class HiddenClients(FlowerClients):
    """Clients on other machines under [privacy.aggregation]; what the loop gets of their updates is one sum a round."""

    def __init__(
        self,
        grid: Grid,
        criteria: Mapping[str, Refusal],
        settings: FederateSettings,
        aggregation: AggregationSettings,
        **options: Any,
    ) -> None:
        super().__init__(grid, criteria, settings, **options)
        self.aggregation = aggregation

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        """Collect keys, send the tasks with them, and return criteria; their key shares are kept for the sum."""
        if not tasks:
            return []
        self.roster.round = max(task.round for task in tasks)
        self.meet()
        begun = [self._begin(task) for task in tasks]
        self._collect_keys(begun)
        cohorts = [tuple(sorted(work.server.keys)) for work in begun]
        smaller = [replace(work.task, clients=cohort) for work, cohort in zip(begun, cohorts, strict=True)]
        answers = self.send_tasks(smaller, [self._sending(work) for work in begun])
        return [self._hidden(work, answer) for work, answer in zip(begun, answers, strict=True)]

    def _begin(self, task: Task, fewest: int = FEWEST) -> RoundTry:
        attempt = os.urandom(16).hex()  # on a resume, and in another try, the same round has other keys
        context = round_context(self._run, task.federation, task.seed, task.round, attempt)
        what = f"round {task.round} of {in_words(task.federation)}"
        asked = asked_digest(task, algorithm_table(task.algorithm), self._experiment)
        return RoundTry(task, attempt, SecureServer(context, self.aggregation, what, fewest=fewest, asked=asked))

    def _collect_keys(self, begun: Sequence[RoundTry], *, again: bool = False) -> None:
        found = self._ask(
            *(KeysForm, begun, [work.task.clients for work in begun]),
            lambda work, fields: (KeysForm(**fields, again=again), {}),
            lambda clients: ("|u1", (clients, PUBLIC_BYTES)),
        )
        for work, answers in zip(begun, found, strict=True):
            shown: dict[str, PublicKeys] = {}
            for answer in answers:
                for client, row in zip(answer.clients, answer.found, strict=True):
                    shown[client] = PublicKeys.read(row.tobytes())
                for key, signed in answer.vouchers.items():
                    work.vouchers.setdefault(key, {}).update(signed)
            work.failures += [Failure(client, reason) for client, reason in work.server.admit(shown).items()]
            why = "; ".join(f"{failure.client}: {failure.reason}" for failure in work.failures[:3])
            work.server.require(len(work.server.keys), f"showed keys ({why})" if why else "showed keys")

    def _sending(self, work: RoundTry) -> Sending:
        arrays = ArrayRecord({**pack_parameters(work.task), **pack({"keys": key_rows(work)})})
        cohort = sorted(work.server.keys)
        return Sending(arrays, KeySharesCodec(len(cohort)), cohort, work.attempt, work.vouchers)

    def _hidden(self, work: RoundTry, answer: Updates) -> Updates:
        failures = tuple(sorted([*answer.failures, *work.failures], key=lambda failure: failure.client))
        keep_shares(work, answer.clients, cast(KeyShares, answer.payload).shares)
        sent = np.zeros(len(answer.clients)) if answer.bytes_sent is None else answer.bytes_sent
        for client, count in zip(answer.clients, sent.tolist(), strict=True):
            work.sent[client] = work.sent.get(client, 0) + int(count)
        payload = HiddenUpdates(answer.clients, _GridSums(self, work), self.aggregation)
        return replace(answer, payload=payload, failures=failures)

    # ------------------------------------------------------------ the sum, once the weights are known

    def again(self, work: RoundTry, clients: Sequence[str]) -> RoundTry:
        """Return another try at the round among these clients, with fresh keys and key shares; nothing is trained."""
        fresh = self._begin(replace(work.task, clients=tuple(clients)), work.server.least)
        fresh.sent = work.sent
        self._collect_keys([fresh], again=True)
        cohort = sorted(fresh.server.keys)
        (answers,) = self._ask(
            *(ShareForm, [fresh], [cohort]),
            lambda work, fields: (
                ShareForm(**fields, cohort=cohort, vouchers=work.vouchers),
                {"keys": key_rows(work)},
            ),
            lambda clients: ("|u1", (clients, len(cohort), KEY_SHARES_BYTES)),
        )
        for answer in answers:
            keep_shares(fresh, answer.clients, answer.found)
        return fresh

    def hide(self, work: RoundTry, members: Sequence[str], weights: Mapping[str, float]) -> list[Answer]:
        """Ask the members for their weighted updates, hidden; a node answers with the sum of its clients'."""
        encoding = FixedPoint.of(self.aggregation.word_bits, self.aggregation.bound, len(work.server.keys))

        def form(work: RoundTry, fields: dict[str, Any]) -> tuple[RoundForm, dict[str, NDArray[Any]]]:
            empty = bytes(KEY_SHARES_BYTES)
            received = [work.server.shares_for(client, members) for client in fields["clients"]]
            shares = [rows([mine.get(name, empty) for name in members], KEY_SHARES_BYTES) for mine in received]
            told = [weights[member] for member in members]
            return HideForm(**fields, members=list(members), weights=told), {"key_shares": np.stack(shares)}

        shape = (encoding.dtype.str, (work.task.parameters.numel(),))
        return self._ask(HideForm, [work], [members], form, lambda clients: shape)[0]

    def open(self, work: RoundTry, members: Sequence[str], survivors: Sequence[str]) -> dict[str, Opened]:
        """Ask the survivors for what opens their sum."""
        (answers,) = self._ask(
            *(OpenForm, [work], [survivors]),
            lambda work, fields: (OpenForm(**fields, survivors=list(survivors)), {}),
            lambda clients: ("|u1", (clients, len(members), SHARE_BYTES)),
        )
        revealed: dict[str, Opened] = {}
        stayed = set(survivors)
        for answer in answers:
            for client, mine in zip(answer.clients, answer.found, strict=True):
                shares = {name: row.tobytes() for name, row in zip(members, mine, strict=True)}
                revealed[client] = Opened(
                    {name: share for name, share in shares.items() if name in stayed},
                    {name: share for name, share in shares.items() if name not in stayed},
                )
        return revealed

    def _ask(
        self,
        of: type[RoundForm],
        works: Sequence[RoundTry],
        groups: Sequence[Sequence[str]],
        form: Written,
        shape: Shape,
    ) -> list[list[Answer]]:
        """Send one message to each node of each group, and return what was answered properly, by round; count it."""
        seconds = self._seconds(works)

        def errand(work: RoundTry, group: Sequence[str]) -> Errand[Answer]:
            def largest(clients: int) -> int:
                dtype, sizes = shape(clients)
                return _MOST_EXTRA + 2 * int(np.prod(sizes)) * np.dtype(dtype).itemsize

            return Errand(
                *(of.kind, work.task.round, group),
                lambda _, asked: wire.content(*form(work, work.fields(self._run, asked, seconds, self._experiment))),
                lambda _, asked, content: read_answer(content, asked, work, of.answered, shape),
                largest,
            )

        answers = self.exchange.ask([errand(*each) for each in zip(works, groups, strict=True)], seconds)
        for work, found in zip(works, answers, strict=True):
            work.failures += found.failures
            for answer in found.parts:
                for client in answer.clients:
                    work.sent[client] = work.sent.get(client, 0) + answer.sent
        return [found.parts for found in answers]


class _GridSums:
    """The sum of one round's hidden updates; the second half of the round's exchange with the nodes."""

    def __init__(self, clients: HiddenClients, work: RoundTry) -> None:
        self._clients, self._work = clients, work

    @property
    def server(self) -> SecureServer:
        return self._work.server

    @property
    def sent(self) -> Mapping[str, int]:
        return self._work.sent

    def sum(self, clients: Sequence[str], weights: Floats) -> Summed:
        """Collect hidden words from the clients, and open their sum with the help of those who stayed."""
        return secure_sum(self, clients, weights, self._clients.aggregation)

    def again(self, clients: Sequence[str]) -> tuple[tuple[str, ...], Mapping[str, str]]:
        self._work = self._clients.again(self._work, clients)
        shared = {sender for received in self.server.key_shares.values() for sender in received}
        return tuple(sorted(shared)), {failure.client: failure.reason for failure in self._work.failures}

    def hide(self, members: Sequence[str], weights: Mapping[str, float]) -> HiddenWords:
        work = self._work
        work.failures.clear()
        answers = self._clients.hide(work, members, weights)
        parts = [answer.found for answer in answers if answer.clients]
        total = sum(parts[1:], start=parts[0]) if parts else np.zeros(0, np.uint32)
        return HiddenWords(
            total,
            tuple(sorted(client for answer in answers for client in answer.clients)),
            {failure.client: failure.reason for failure in work.failures},
            {
                client: [sender for sender in senders if sender in set(members) - {client}]
                for answer in answers
                for client, senders in answer.unreadable.items()
            },
        )

    def open(self, members: Sequence[str], survivors: Sequence[str]) -> Mapping[str, Opened]:
        return self._clients.open(self._work, members, survivors)
