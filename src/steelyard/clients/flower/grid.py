"""The clients of a federation across machines, as the round loop sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp import Grid

from steelyard.algorithms.settings import algorithm_table
from steelyard.base.errors import UserError, in_words
from steelyard.base.logs import logger
from steelyard.clients.flower import wire
from steelyard.clients.flower.mailbox import Errand, Exchange, Request, RequestSender
from steelyard.clients.flower.register import FederateSettings, Register
from steelyard.clients.flower.roster import Roster
from steelyard.clients.flower.survey import Survey
from steelyard.clients.flower.tasks import (
    Expected,
    Refusal,
    Signer,
    joined_evaluations,
    pack_parameters,
    read_evaluations,
    read_updates,
    write_question,
    write_task,
)
from steelyard.clients.flower.wire import EVALUATE, HEADS, TRAIN, HeadsForm, Refused, Vouchers, content
from steelyard.clients.protocol import Clients
from steelyard.data.preparation import Preparation
from steelyard.messages.algorithm import OWN
from steelyard.messages.payloads import DENSE, Codec, DenseModels, Payload
from steelyard.messages.updates import Evaluations, Failure, Question, Task, Updates
from steelyard.proof.signing import digest_of_task
from steelyard.proof.statements import Proof, SealedRound

LARGEST_ANSWER = 64 << 10
MOST_PROOFS = 256
"""Most proofs in one message; what is left goes with the next one."""
_MOST_KEPT = 512
"""Rounds that are held in memory for the next node: nodes are mostly equally far."""


class HeadSender:
    """Knows which proofs each node still lacks; `proofs` for a message, `arrived` once the node has answered it."""

    def __init__(self) -> None:
        self.sealed: Callable[[int], SealedRound | None] = lambda _: None
        """Where the rounds of the chain are found; none before the run says so."""
        self.reached: dict[tuple[str, str], int] = {}
        """By node (its public key) and federation: the last round of which it has the proof."""
        self.federations: set[str] = set()
        """Of which proofs were ever asked for."""
        self._kept: dict[int, SealedRound] = {}

    def proofs(self, node: str | None, federation: str) -> list[Proof]:
        """Return what a node lacks of one federation; none for a node without a key."""
        if not node:
            return []
        self.federations.add(federation)
        found: list[Proof] = []
        first = self.reached.get((node, federation), 0) + 1  # round 0 asks nobody
        for round in range(first, first + MOST_PROOFS):
            if (sealed := self._round(round)) is None:
                break
            found.append(sealed.proof(federation, node))
        return found

    def arrived(self, proofs: Sequence[Proof]) -> None:
        """Note that a node has these."""
        for proof in proofs:
            self.reached[proof.node, proof.federation] = proof.round

    def hand_out(
        self, sender: RequestSender, run: str, nodes: Mapping[int, str | None], seconds: float, round: int
    ) -> list[str]:
        """Send these nodes, by their keys, all that they still lack; returns in words who did not take it."""
        notes: list[str] = []
        while nodes:
            lacking = {node: self._all(key) for node, key in nodes.items()}
            sent = [node for node, proofs in lacking.items() if proofs]
            forms = [HeadsForm(run=run, proofs=lacking[node], seconds=seconds) for node in sent]
            requests = [
                Request(node, HEADS, content(form, {}), round, LARGEST_ANSWER)
                for node, form in zip(sent, forms, strict=True)
            ]
            answers = dict(zip(sent, sender.ask(requests, seconds), strict=True))
            silent = {node: answer for node, answer in answers.items() if isinstance(answer, str)}
            notes += [f"node {node} did not take the last heads: {answer}" for node, answer in silent.items()]
            for node in answers.keys() - silent.keys():
                self.arrived(lacking[node])
            nodes = {node: key for node, key in nodes.items() if node in answers and node not in silent}
        return notes

    def _all(self, key: str | None) -> list[Proof]:
        return [proof for name in sorted(self.federations) for proof in self.proofs(key, name)]

    def _round(self, round: int) -> SealedRound | None:
        found = self._kept.get(round) or self.sealed(round)
        if found is not None:
            self._kept[round] = found
            while len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        return found


class CohortAnswers:
    """What nodes answer to one task: take each answer up with `put` as it comes, and join them at the end."""

    def __init__(self, task: Task, codec: Codec) -> None:
        self.task, self.codec = task, codec

    def put(self, part: Updates) -> Updates:
        """Take an answer up."""
        return part

    def joined(self, parts: Sequence[Updates], failures: Sequence[Failure]) -> Updates:
        """Return the checked answers as one; with none, an empty one."""

        def payload(order: Sequence[int]) -> Payload:
            payloads = [part.payload for part in parts if part.clients]
            return self.codec.join(payloads or [self.codec.empty(self.task.parameters.numel())], order)

        return Updates.joined(self.task, parts, failures, payload)


class CohortRows(CohortAnswers):
    """The matrices of a whole cohort, into which whole models and an algorithm's vectors are copied as they arrive.

    No second copy of them is ever needed.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task, DENSE)
        self._row = {client: row for row, client in enumerate(sorted(task.clients))}
        shape = (len(self._row), task.parameters.numel())
        self._models = torch.empty(shape)
        self._vectors = {name: torch.empty(shape) for name in task.algorithm.sends}
        self._lock, self._closed = Lock(), False

    def put(self, part: Updates) -> Updates:
        """Take over the models and vectors of an answer; what is returned holds them no longer."""
        models = cast(DenseModels, part.payload).models
        with self._lock:
            if self._closed:  # Rows have moved: an answer after the deadline must not be written over another.
                raise Refused("came after the deadline")
            rows = [self._row[client] for client in part.clients]
            for matrix, found in ((self._models, models), *((self._vectors[n], v) for n, v in part.vectors.items())):
                for row, numbers in zip(rows, found, strict=True):
                    matrix[row].copy_(numbers)
        return replace(part, payload=DenseModels(models[:0].clone()), vectors={})

    def joined(self, parts: Sequence[Updates], failures: Sequence[Failure]) -> Updates:
        """Return all with their models; rows move up over those of clients left out."""
        clients = sorted(client for part in parts for client in part.clients)
        with self._lock:
            self._closed = True
        for matrix in (self._models, *self._vectors.values()):
            for row, client in enumerate(clients):
                if self._row[client] != row:
                    matrix[row].copy_(matrix[self._row[client]])
        models = DenseModels(self._models[: len(clients)])
        vectors = {name: matrix[: len(clients)] for name, matrix in self._vectors.items()}
        return replace(Updates.joined(self.task, parts, failures, lambda order: models), vectors=vectors)


_log = logger(__name__)

_NAMES = "registered-clients"
_OWNERS = "client-keys"
_KEEPING = "clients-that-keep"
_HEADS = "heads-sent"
_LAST_SECONDS = 30.0
"""Seconds that nodes have to take the last heads of a run."""
_MOST_EXTRA = 64 << 10
"""Bytes that an answer may have beside its form and its arrays: names of parts, Flower's own records."""
_PATIENCE = 2.0
"""Seconds that a newcomer, or a node that was silent, has before a round to say that it is there."""


class NoAnswers(UserError):
    """Not one client answered a question in time; the run stops and can be resumed."""


@dataclass(frozen=True, eq=False)
class Sending:
    """How one task travels: what goes out beside its form, and what its answers are made of."""

    arrays: ArrayRecord
    codec: Codec
    cohort: Sequence[str] = ()
    """Where updates are hidden: all clients of the round, whose keys are among the arrays."""
    attempt: str = ""
    vouchers: Vouchers | None = None


class FlowerClients(Clients):
    """Clients on other machines; implements the `Clients` protocol over Flower's grid.

    `criteria` are the measures that clients take themselves, each with the check of its range; `scores` is the range
    that a local score can have; `run` names the run, so that nodes keep its private states apart from others'; `codec`
    is how the updates of this kind of experiment travel; `experiment` is its text for the nodes; `known` is what it
    says of their data; `further` is what answers must say besides (`tasks.Expected`).
    Nothing that a node sends is used before it was checked.
    """

    complete = False

    def __init__(
        self,
        grid: Grid,
        criteria: Mapping[str, Refusal],
        settings: FederateSettings,
        scores: tuple[float, float] | None = None,
        run: str = "",
        codec: Codec = DENSE,
        experiment: str = "",
        register: Callable[[], Register] | None = None,
        known: Mapping[str, int | list[int]] | None = None,
        further: Collection[str] = (),
    ) -> None:
        self.settings = settings
        self.roster = Roster(
            *(RequestSender(grid), min(30.0, settings.timeout), experiment, register, settings.most_clients, known)
        )
        self._patience = min(_PATIENCE, settings.timeout / 2)
        self._sender = RequestSender(grid)
        self.exchange = Exchange(self.roster, self._sender)
        self._expected = Expected(dict(criteria), frozenset(further))
        self.scores = scores
        self._run = run
        self._experiment = experiment
        self._codec = codec
        self._noted: set[str] = set()
        """Clients whose claim of a large test set is in the notes."""
        self._heads = HeadSender()
        self.prepared: Preparation | None = None
        """What rows of the nodes go through; whoever asks them says it."""
        self._keeping: set[tuple[str, str]] = set()
        """By federation: clients that keep something for the algorithm since an earlier round."""

    def wait(self, *, alike: bool = True) -> None:
        """Wait for the nodes that the experiment asks for; call it before the first round.

        Without `alike` their data may differ in shape until they have agreed on words; call it again after that.
        """
        self.roster.wait_for(self.settings.nodes, self.settings.start_timeout, alike=alike)

    def hold_to(self, terms: Mapping[str, Any], experiment: str, *, anew: bool = False) -> None:
        """Ask nodes for the experiment as it is under their owners' terms; call it before the first round.

        `anew` asks them again what their data look like under it.
        """
        self.terms, self._experiment = {**self.terms, **terms}, experiment
        self.survey.experiment = experiment
        self.roster.ask_for(experiment, anew=anew)

    @cached_property
    def survey(self) -> Survey:
        """Ask nodes, where their owners allow it, what their columns hold; use it before the first round."""
        words = (self._run, self._experiment, self.settings.timeout)
        return Survey(self.roster, self.exchange, *words, self.settings.test_bound)

    def preparation(self, seed: int) -> Preparation | None:
        """Return what rows go through, as far as nodes tell of their columns."""
        return self.prepared

    def names(self, seed: int) -> Sequence[str]:
        """Return every client that ever registered in this run, ascending, also those whose node is away."""
        return sorted(self.roster.registered)

    def samples(self, seed: int) -> Mapping[str, int]:
        return self.roster.samples

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        """Send each task to the nodes of its cohort; who does not answer properly in time is named as a failure."""
        self.roster.round = max((task.round for task in tasks), default=0)
        self.meet()
        sendings = [Sending(pack_parameters(task), self._codec) for task in tasks]
        answers = self.send_tasks(tasks, sendings)
        if self.exchange.all_gone:
            self.meet()
            answers = self.send_tasks(tasks, sendings)
        return answers

    def meet(self) -> None:
        """Take note of who is there; where nobody is any more, wait for those who were, as before the first round.

        All nodes at once seldom leave: it is the server that was away, as a laptop that was closed.
        """
        before = self.roster.nodes
        self.roster.refresh(self._patience)
        if before and not self.roster.nodes:
            seconds = self.settings.start_timeout
            _log.warning(f"no node is connected any more; waiting for {before} up to {seconds:g} s")
            self.roster.wait_back(before, seconds)

    def send_tasks(self, tasks: Sequence[Task], sendings: Sequence[Sending]) -> list[Updates]:
        """Send each task as it is to travel, and join what comes back."""
        classes, seconds = self.roster.about.get("classes"), self._seconds(tasks)
        expected = replace(self._expected, classes=classes if isinstance(classes, int) else 0)
        if any(task.round == 0 for task in tasks):
            expected = Expected()  # Of columns: no model, of which nothing is measured.
        cohorts = [
            CohortRows(task) if sending.codec is DENSE else CohortAnswers(task, sending.codec)
            for task, sending in zip(tasks, sendings, strict=True)
        ]
        errands = [self._errand(*each, expected, seconds) for each in zip(cohorts, sendings, strict=True)]
        found = self.exchange.ask(errands, seconds)
        answers = [one.joined(each.parts, each.failures) for one, each in zip(cohorts, found, strict=True)]
        for task, answer in zip(tasks, answers, strict=True):
            if task.algorithm.keeps:
                self._note_lost(task, answer)
        return answers

    def _errand(self, cohort: CohortAnswers, sending: Sending, expected: Expected, seconds: float) -> Errand[Updates]:
        """Return what one task asks of nodes; each answer is put into the cohort's."""
        task = cohort.task
        digest = digest_of_task(task, algorithm_table(task.algorithm)) if self.roster.signs else ""
        proofs: dict[int, list[Proof]] = {}

        def write(node: int, asked: tuple[str, ...]) -> RecordDict:
            proofs[node] = self._heads.proofs(self.roster.key(node), task.federation)
            return write_task(
                *(task, asked, seconds, sending.arrays, self._run, self._experiment),
                cohort=sending.cohort,
                attempt=sending.attempt,
                vouchers=sending.vouchers,
                proofs=proofs[node],
            )

        def read(node: int, asked: tuple[str, ...], content: RecordDict) -> Updates:
            key = self.roster.key(node) if task.round else None
            signer = None if key is None else Signer(self._run, digest, key)
            self._heads.arrived(proofs[node])  # A node keeps them before it answers.
            return cohort.put(read_updates(content, task, asked, expected, cohort.codec, signer))

        def largest(clients: int) -> int:
            return _MOST_EXTRA + wire.largest_form(clients) + expected.largest(task, clients, cohort.codec)

        return Errand(TRAIN, task.round, task.clients, write, read, largest)

    def _note_lost(self, task: Task, answer: Updates) -> None:
        """Note clients that kept something in an earlier round and begin with nothing in this one."""
        for client in answer.started_over:
            if (task.federation, client) in self._keeping:
                kept = ", ".join(task.algorithm.keeps)
                again = "with the global model" if OWN in task.algorithm.keeps else "at 0"
                self.roster.note(
                    f"client {client} of {in_words(task.federation)} lost what it kept ({kept}); it begins {again}"
                )
        self._keeping |= {(task.federation, client) for client in answer.clients}

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        """Send each question to all nodes; raises `NoAnswers` where not one of them answers."""
        try:
            return self._evaluate(questions)
        except NoAnswers:
            if not self.exchange.all_gone:
                raise
            return self._evaluate(questions)

    def _evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        self.meet()
        seconds = self._seconds(questions)
        answers = self.exchange.ask([self._asking(question, seconds) for question in questions], seconds)
        for question, found in zip(questions, answers, strict=True):
            if not found.parts:
                why = "; ".join(f"{failure.client}: {failure.reason}" for failure in found.failures[:3])
                raise NoAnswers(f"round {question.round}: no client tested the model ({why or 'no node is connected'})")
        return [
            joined_evaluations(question, found.parts, found.failures, self._most_counted(found.parts))
            for question, found in zip(questions, answers, strict=True)
        ]

    def _asking(self, question: Question, seconds: float) -> Errand[Evaluations]:
        """Return what one question asks of nodes; most of them get the same message."""
        words = (question, seconds, self._run, self._experiment)
        same = write_question(*words)
        details = wire.details(question)

        def write(node: int, asked: tuple[str, ...]) -> RecordDict:
            gone = question.withdrawn.intersection(self.roster.clients_of(node))
            return write_question(*words, withdrawn=gone) if gone else same

        return Errand(
            *(EVALUATE, question.round, sorted(self.roster.registered - question.withdrawn), write),
            lambda _, asked, content: read_evaluations(content, question, asked, self.scores),
            lambda clients: _MOST_EXTRA + wire.largest_form(clients, len(question.models)) + details,
        )

    def _most_counted(self, parts: Sequence[Evaluations]) -> int:
        """Return how many test samples of one client count; who claims more is noted, once."""
        said = [pair for part in parts for pair in zip(part.clients, part.samples.tolist(), strict=True)]
        most = wire.most_counted([count for _, count in said], self.settings.test_bound)
        for client, count in said:
            if count > most and client not in self._noted:
                self._noted.add(client)
                self.roster.note(
                    f"client {client} says {count} test samples; {most} count, federate.test_bound = "
                    f"{self.settings.test_bound:g} times the median client's"
                )
        return most

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        """Return the names of the registered clients; all else that clients keep is on their nodes."""
        # With these a resumed run draws the same cohorts even before every node is back.
        found = {
            _NAMES: [(client,) for client in self.roster.registered],
            _OWNERS: self.roster.owners.items(),
            _KEEPING: self._keeping,
            _HEADS: [(key, name, str(round)) for (key, name), round in self._heads.reached.items()],
        }
        return {name: _tensor(sorted(map("\t".join, rows))) for name, rows in found.items()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Register the clients of a snapshot again."""
        self.roster.registered |= set(_lines(state, _NAMES))
        self.roster.owners |= dict(_pairs(state, _OWNERS))
        self._keeping = set(_pairs(state, _KEEPING))
        for key, rest in _pairs(state, _HEADS):
            name, _, round = rest.rpartition("\t")
            self._heads.reached[key, name] = int(round) if round.isdecimal() else 0

    def prove_by(self, sealed: Callable[[int], SealedRound | None]) -> None:
        """Send nodes, with their next task, what the signed heads of these rounds say of them."""
        self._heads.sealed = sealed

    def hand_out(self) -> None:
        """Send nodes the proofs that no task has brought them; who does not answer is noted."""
        nodes = {node: self.roster.key(node) for node in self.exchange.group(sorted(self.roster.registered), [])}
        seconds = min(_LAST_SECONDS, self.settings.timeout)
        for note in self._heads.hand_out(self._sender, self._run, nodes, seconds, self.roster.round):
            self.roster.note(note)

    @property
    def notes(self) -> Sequence[str]:
        """What was noted about nodes so far: who was refused, which clients were claimed twice."""
        return self.roster.notes

    def describe(self) -> Mapping[str, str]:
        """Return how many nodes and clients take part, and what was noted about them."""
        return {
            "clients": "flower",
            "federation_run": self._run,
            "nodes": str(self.roster.nodes),
            "registered": str(len(self.roster.registered)),
            "timeout": f"{self.settings.timeout:g} s",
            "federation_notes": "; ".join(self.notes),
        }

    def close(self) -> None:
        """Nothing to let go of: the grid belongs to Flower."""

    def _seconds(self, work: Sequence[object]) -> float:
        # A node does one thing after the other, so several federations side by side share its time.
        return self.settings.timeout * max(1, len(work))


def _tensor(lines: Sequence[str]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer("\n".join(lines).encode(), dtype=np.uint8).copy())


def _lines(state: Mapping[str, torch.Tensor], name: str) -> list[str]:
    if name not in state:
        return []
    return [line for line in state[name].to(torch.uint8).numpy().tobytes().decode().split("\n") if line]


def _pairs(state: Mapping[str, torch.Tensor], name: str) -> list[tuple[str, str]]:
    return [(first, second) for first, _, second in (line.partition("\t") for line in _lines(state, name))]
