"""Tasks and updates as Flower records, and back; `questions` has those of testing.

Trust ends where the server reads: `read_updates` takes nothing from a node as given. A fault of the whole answer raises
`Refused`; a fault of one client's part leaves that client out, as a Failure. What several nodes answered is joined with
the clients in ascending order of id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray

from steelyard.algorithms.settings import algorithm_table
from steelyard.clients.flower import checks, wire
from steelyard.clients.flower.forms import LossForm, Refused, SignedForm, TaskForm, UpdateForm
from steelyard.clients.flower.wire import (
    Codec,
    CohortRows,
    Header,
    content,
    failure_forms,
    pack,
    split,
    tensor,
    unpack,
    written,
)
from steelyard.messages.algorithm import Vectors
from steelyard.messages.payloads import DenseModels, Payload
from steelyard.messages.updates import MOST_SAMPLES, Evaluations, Failure, Question, Signed, Task, Updates
from steelyard.proof.signing import DIGEST_BYTES, SALT_BYTES, holds, salted_digest
from steelyard.proof.statements import Proof, Statement

Refusal = Callable[[float], str | None]
"""Says why a criterion's value cannot be true, or None when it can."""
VECTOR = "vector/"
"""Before the name of each array that is a vector of the algorithm."""
LABEL_COUNTS = "label_counts"
_ARRAY_HEAD = 4096


# ---------------------------------------------------------------- server to node


def pack_parameters(task: Task) -> ArrayRecord:
    """Return the global model of a task and its algorithm's vectors, packed once for all the nodes they go to."""
    return pack({"parameters": _numbers(task.parameters), **_vector_arrays(task.vectors)})


def write_task(
    task: Task,
    clients: Sequence[str],
    seconds: float,
    parameters: ArrayRecord,
    run: str = "",
    experiment: str = "",
    *,
    cohort: Sequence[str] = (),
    attempt: str = "",
    proofs: Sequence[Proof] = (),
) -> RecordDict:
    """Return a task for those of its cohort that live on one node.

    Where updates are hidden, `cohort` names all clients of the round, and their keys are in `parameters` too. `proofs`
    are of earlier rounds, for the node to keep.
    """
    form = TaskForm(
        run=run,
        federation=task.federation,
        seed=task.seed,
        round=task.round,
        clients=list(clients),
        loss=LossForm.of(task.loss),
        algorithm=algorithm_table(task.algorithm),
        seconds=seconds,
        experiment=experiment,
        cohort=list(cohort),
        attempt=attempt,
        proofs=list(proofs),
    )
    return RecordDict({"form": written(form), "arrays": parameters})


def read_task(records: RecordDict) -> tuple[Task, Header]:
    """Return the task that a node received, and what it needs for it.

    Its algorithm and its learning rate are still FedAvg's: the node itself finds them in the experiment.
    """
    text, arrays = split(records)
    form = TaskForm.read(text)
    named = [name for name in arrays if name.startswith(VECTOR)]
    wire.only_keys(arrays, ["parameters", *named, *(["keys"] if form.cohort else [])])
    parameters = tensor(unpack(arrays["parameters"], "parameters", "<f4", (None,)))
    vectors = {
        name.removeprefix(VECTOR): tensor(unpack(arrays[name], name, "<f4", (len(parameters),))) for name in named
    }
    clients = tuple(sorted(form.clients))
    task = Task(*(form.federation, form.seed, form.round, clients, parameters, form.loss.state()), vectors=vectors)
    keys = unpack(arrays["keys"], "keys", "|u1", (len(form.cohort), None)) if form.cohort else None
    return task, Header(
        *(form.run, form.experiment, form.seconds, tuple(form.cohort), keys, form.attempt, form.algorithm, form.proofs)
    )


def _numbers(tensor: torch.Tensor) -> NDArray[np.float32]:
    return tensor.detach().to("cpu", torch.float32).numpy()


def _vector_arrays(vectors: Vectors) -> dict[str, NDArray[np.float32]]:
    return {f"{VECTOR}{name}": _numbers(vector) for name, vector in vectors.items()}


# ---------------------------------------------------------------- node to server


def write_updates(updates: Updates, codec: wire.Codec = wire.DENSE) -> RecordDict:
    """Return what a node's clients trained."""
    arrays = {**codec.packed(updates.payload), **_vector_arrays(updates.vectors)}
    if updates.label_counts is not None:
        arrays[LABEL_COUNTS] = np.asarray(updates.label_counts, dtype=np.int64)
    form = UpdateForm(
        federation=updates.federation,
        round=updates.round,
        clients=list(updates.clients),
        samples=[int(count) for count in updates.samples],
        criteria={name: [float(value) for value in values] for name, values in updates.criteria.items()},
        losses=[float(loss) for loss in updates.losses],
        payload=codec.kind,
        steps=None if updates.steps is None else [int(count) for count in updates.steps],
        first_losses=None if updates.first_losses is None else [float(loss) for loss in updates.first_losses],
        started_over=list(updates.started_over),
        signed=signed_form(updates.signed),
        failures=failure_forms(updates.failures),
    )
    return content(form, arrays)


@dataclass(frozen=True)
class Expected:
    """What the answers of a run must say of each client beside its model, its samples and its loss."""

    criteria: Mapping[str, Refusal] = field(default_factory=dict[str, Refusal])
    """The criteria that clients measure, with the check of each one's range."""
    further: frozenset[str] = frozenset()
    """Which of "steps", "first_losses" and "label_counts" a criterion or an algorithm of the run needs."""
    classes: int = 0
    """The number of classes, for label counts."""

    def largest(self, task: Task, clients: int, codec: wire.Codec) -> int:
        """Return the most bytes that the arrays of an honest answer of so many clients have."""
        vectors = len(task.algorithm.sends) * wire.DENSE.largest(clients, task.parameters)
        counts = 8 * clients * self.classes + _ARRAY_HEAD if LABEL_COUNTS in self.further else 0
        return codec.largest(clients, task.parameters) + vectors + counts


def read_updates(
    records: RecordDict,
    task: Task,
    asked: Sequence[str],
    expected: Expected,
    codec: wire.Codec = wire.DENSE,
    signer: Signer | None = None,
) -> Updates:
    """Return the usable part of a node's answer to a task; the clients left out are in its failures."""
    text, arrays = split(records)
    most, criteria = checks.largest_form(len(asked)), expected.criteria
    sent = checks.refuse_size(text, arrays, most, expected.largest(task, len(asked), codec))
    form = UpdateForm.read(text, most)
    checks.refuse_other(form.federation, form.round, task.federation, task.round)
    count = checks.refuse_clients(form.clients, form.failures, asked)
    checks.refuse_lengths(count, {"samples": form.samples, "losses": form.losses})
    checks.refuse_lengths(count, form.criteria)
    if set(form.criteria) != set(criteria):
        raise Refused(f"criteria: got {checks.names(form.criteria)}; allowed: exactly {checks.names(criteria)}")
    codec.refuse_other(form.payload)
    further = _further(form, arrays, task, expected)
    payload = codec.unpack(_without_further(arrays, task, expected), count, task.parameters)
    losses = checks.floats(form.losses)
    signed, unsound = ((), {}) if signer is None else signer.check(form, payload)
    faults = _faults(form, task, expected, payload, further, unsound)
    whole = Updates(
        federation=task.federation,
        round=task.round,
        clients=tuple(form.clients),
        # A number of samples that no array can hold is refused below with its client.
        samples=_bounded(form.samples),
        criteria={name: checks.floats(form.criteria[name]) for name in criteria},
        losses=losses,
        payload=payload,
        failures=checks.failures(form.failures, form.clients, asked),
        bytes_sent=np.full(count, sent // max(count, 1), dtype=np.int64),
        steps=further.steps,
        first_losses=further.first_losses,
        label_counts=further.label_counts,
        vectors=further.vectors,
        started_over=tuple(client for client in form.clients if client in form.started_over),
        signed=signed,
    )
    keep = [i for i in range(count) if faults[i] is None]
    refused = [Failure(form.clients[i], checks.clean(reason)) for i, reason in enumerate(faults) if reason is not None]
    return whole.select(keep, refused)


def _faults(
    form: UpdateForm, task: Task, expected: Expected, payload: Payload, further: _Further, unsound: Mapping[str, str]
) -> list[str | None]:
    """Return of each client in an answer why it is refused; None where it is not."""
    criteria, losses = expected.criteria, checks.floats(form.losses)
    finite, far = payload.finite(), checks.explosion(payload, task.parameters)
    return [
        checks.sample_fault(form.samples[i])
        or next((f for name, judge in criteria.items() if (f := judge(form.criteria[name][i]))), None)
        or next((f for n in criteria if (f := checks.criterion_fault(n, form.criteria[n][i], form.samples[i]))), None)
        or checks.loss_fault(losses[i : i + 1])
        or (None if finite[i] else "update: holds NaN or infinite numbers")
        or (f"update: farther than {checks.MOST_GROWTH:g} times the model; that is no training" if far[i] else None)
        or further.fault(i)
        or unsound.get(client)
        for i, client in enumerate(form.clients)
    ]


@dataclass(frozen=True, eq=False)
class _Further:
    """What an answer says beside the models because an algorithm or a criterion needs it; None where none does."""

    vectors: Mapping[str, torch.Tensor]
    steps: NDArray[np.int64] | None
    first_losses: NDArray[np.float64] | None
    label_counts: NDArray[np.int64] | None

    def fault(self, client: int) -> str | None:
        """Say what of it cannot be true for the client at this position, or None where all can."""
        if self.steps is not None and not 1 <= self.steps[client] < MOST_SAMPLES:
            return f"steps = {self.steps[client]}; allowed: 1 to {MOST_SAMPLES - 1}"
        if self.label_counts is not None:
            counts = self.label_counts[client]
            if counts.min(initial=0) < 0 or counts.max(initial=0) > MOST_SAMPLES:
                return f"{LABEL_COUNTS}: holds {counts.min()} to {counts.max()}; allowed: 0 to {MOST_SAMPLES}"
        for name, vectors in self.vectors.items():
            if not float(torch.linalg.vector_norm(vectors[client], torch.inf)) <= checks.MOST_WORTH:
                return f"vector {name}: holds NaN, infinity or a number beyond {checks.MOST_WORTH:g}"
        losses = self.first_losses
        return None if losses is None else checks.loss_fault(losses[client : client + 1], "first loss")


def _further(form: UpdateForm, arrays: ArrayRecord, task: Task, expected: Expected) -> _Further:
    """Return what was asked for beside the models; an answer that lacks any of it is refused."""
    count, needed = len(form.clients), set(expected.further)
    if task.algorithm.counts_steps:
        needed.add("steps")
    said: dict[str, Sequence[Any] | None] = {"steps": form.steps, "first_losses": form.first_losses}
    for name, values in said.items():
        if name in needed and values is None:
            raise Refused(f"{name}: missing; allowed: one for each client, since the run needs them")
        checks.refuse_lengths(count, {} if values is None else {name: values})
    for name in [f"{VECTOR}{name}" for name in task.algorithm.sends] + sorted(needed & {LABEL_COUNTS}):
        if name not in arrays:
            raise Refused(f"arrays: {name} is missing, which {task.algorithm.name} or a criterion of the run needs")
    shape = (count, task.parameters.numel())
    return _Further(
        {name: tensor(unpack(arrays[VECTOR + name], VECTOR + name, "<f4", shape)) for name in task.algorithm.sends},
        _bounded(form.steps) if "steps" in needed and form.steps is not None else None,
        checks.floats(form.first_losses) if "first_losses" in needed and form.first_losses is not None else None,
        unpack(arrays[LABEL_COUNTS], LABEL_COUNTS, "<i8", (count, expected.classes))
        if LABEL_COUNTS in needed
        else None,
    )


def _without_further(arrays: ArrayRecord, task: Task, expected: Expected) -> dict[str, Array]:
    """Return the arrays that are for the codec: all that this task does not ask for besides."""
    beside = {*expected.further, *(f"{VECTOR}{name}" for name in task.algorithm.sends)}
    return {name: array for name, array in arrays.items() if name not in beside}


def _bounded(counts: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray([min(max(n, -1), MOST_SAMPLES) for n in counts], dtype=np.int64)


_SIGNATURE_DIGITS = 2 * 104
"""Of the longest signature on P-384. How long one is, is chance; the size of an answer is recorded and must not be."""


@dataclass(frozen=True)
class Signer:
    """Whose signature an answer must bear, and what was asked; without one, signatures are not looked at."""

    run: str
    task: str
    """Digest of the task."""
    key: str
    """The node's public key, as one line of OpenSSH."""

    def check(self, form: UpdateForm, payload: Payload) -> tuple[tuple[Signed, ...], dict[str, str]]:
        """Return what the node signed, where that holds, and by client why its update cannot be used."""
        if form.signed is None:
            return (), {}
        signed = self._held(form, form.signed)
        if not isinstance(signed, Signed):
            return (), dict.fromkeys(form.clients, f"signature: {signed}")
        content = payload.content()
        faults: dict[str, str] = {}
        for at, client in enumerate(form.clients):
            if client not in signed.digests:
                faults[client] = "signature: does not name it"
            elif content is not None and (
                salted_digest(signed.salts.get(client, b""), content[at].reshape(-1).data) != signed.digests[client]
            ):
                faults[client] = "signature: its digest is not that of the update that came"
        return (signed,), faults

    def _held(self, form: UpdateForm, said: SignedForm) -> Signed | str:
        try:
            digests = {client: bytes.fromhex(text) for client, text in said.digests.items()}
            salts = {client: bytes.fromhex(text) for client, text in said.salts.items()}
            signature = bytes.fromhex(said.signature)
        except ValueError:
            return "not hexadecimal digits"
        lengths = {len(digest) for digest in digests.values()}, {len(salt) for salt in salts.values()}
        if lengths[0] - {DIGEST_BYTES} or lengths[1] - {SALT_BYTES}:
            return f"its digests have {sorted(lengths[0])} bytes and its salts {sorted(lengths[1])}"
        named = {*form.clients, *(failure.client for failure in form.failures)}
        if digests.keys() - named or salts.keys() - digests.keys():
            return "names a client that the answer does not"
        statement = Statement(self.run, form.federation, form.round, self.task, said.before, digests)
        if not holds(self.key, signature, statement.content()):
            return "does not hold by the key that its node has registered"
        return Signed(self.key, said.before, digests, salts, signature)


def signed_form(signed: tuple[Signed, ...]) -> SignedForm | None:
    """Return what a node signed as its answer says it."""
    for one in signed:
        digests = {client: digest.hex() for client, digest in one.digests.items()}
        salts = {client: salt.hex() for client, salt in one.salts.items()}
        signature = one.signature.hex().ljust(_SIGNATURE_DIGITS)
        return SignedForm(before=one.before, digests=digests, salts=salts, signature=signature)
    return None


NumberT = TypeVar("NumberT", np.int64, np.float64)

_NO_COUNTS = np.zeros(0, dtype=np.int64)
_NO_FLOATS = np.zeros(0, dtype=np.float64)


def joined_updates(
    task: Task, parts: Sequence[Updates], failures: Sequence[Failure], codec: Codec, rows: CohortRows | None = None
) -> Updates:
    """Join the checked updates of several nodes; with none, an empty answer.

    `rows` holds whole models and the algorithm's vectors already.
    """
    clients = [client for part in parts for client in part.clients]
    order = sorted(range(len(clients)), key=lambda i: clients[i])
    names = sorted({name for part in parts for name in part.criteria})
    ordered = tuple(clients[i] for i in order)
    if rows is None:
        payload, vectors = _payload(task, [part.payload for part in parts if part.clients], order, codec), {}
    else:
        payload, vectors = rows.joined(ordered)
    return Updates(
        federation=task.federation,
        round=task.round,
        clients=ordered,
        samples=_column([part.samples for part in parts], _NO_COUNTS)[order],
        criteria={name: _column([part.criteria[name] for part in parts], _NO_FLOATS)[order] for name in names},
        losses=_column([part.losses for part in parts], _NO_FLOATS)[order],
        payload=payload,
        failures=tuple(sorted(failures, key=lambda failure: failure.client)),
        bytes_sent=_column([part.bytes_sent for part in parts if part.bytes_sent is not None], _NO_COUNTS)[order],
        steps=_said_by_all([part.steps for part in parts], order),
        first_losses=_said_by_all([part.first_losses for part in parts], order),
        label_counts=_said_by_all([part.label_counts for part in parts], order),
        vectors=vectors,
        started_over=tuple(sorted(client for part in parts for client in part.started_over)),
        signed=tuple(signed for part in parts for signed in part.signed),
    )


def _said_by_all(columns: Sequence[NDArray[NumberT] | None], order: list[int]) -> NDArray[NumberT] | None:
    """Join what every node must say where it is asked for; None where it is not."""
    said = [column for column in columns if column is not None]
    return np.concatenate(said)[order] if said and len(said) == len(columns) else None


def _payload(task: Task, parts: Sequence[Payload], order: list[int], codec: Codec) -> Payload:
    if not parts:
        return DenseModels(torch.zeros(0, task.parameters.numel()))
    return codec.join(parts, order)


def joined_evaluations(
    question: Question, parts: Sequence[Evaluations], failures: Sequence[Failure], most: int = MOST_SAMPLES
) -> Evaluations:
    """Join the checked evaluations of several nodes; of each test set no more than the first `most` samples count."""
    return _joined(question, [_counted(part, most) for part in parts], failures)


def _counted(part: Evaluations, most: int) -> Evaluations:
    if not (part.samples > most).any():
        return part
    right = None
    if part.right is not None:
        right = np.concatenate([np.zeros(0, dtype=np.bool_), *(piece[:most] for piece in _pieces(part))])
    return replace(part, samples=np.minimum(part.samples, most), right=right)


def _joined(question: Question, parts: Sequence[Evaluations], failures: Sequence[Failure]) -> Evaluations:
    clients = [client for part in parts for client in part.clients]
    order = sorted(range(len(clients)), key=lambda i: clients[i])
    names = _metrics(parts)
    samples = _column([part.samples for part in parts], _NO_COUNTS)
    right = None
    if question.detailed:
        pieces = [piece for part in parts for piece in _pieces(part)]
        right = np.concatenate([np.zeros(0, dtype=np.bool_), *(pieces[i] for i in order)])
    return Evaluations(
        federation=question.federation,
        round=question.round,
        clients=tuple(clients[i] for i in order),
        samples=samples[order],
        scores=np.concatenate([part.scores for part in parts], axis=1)[:, order],
        losses=np.concatenate([part.losses for part in parts], axis=1)[:, order],
        metrics={
            name: _column([p.metrics.get(name, np.full(len(p.clients), np.nan)) for p in parts], _NO_FLOATS)[order]
            for name in names
        },
        right=right,
        failures=tuple(sorted(failures, key=lambda failure: failure.client)),
    )


def _metrics(parts: Sequence[Evaluations]) -> list[str]:
    """Return the metrics that were given for most clients: one node can neither add one nor take one away."""
    given = Counter[str]()
    for part in parts:
        given.update(dict.fromkeys(part.metrics, len(part.clients)))
    most = sum(len(part.clients) for part in parts) / 2
    return sorted(name for name, clients in given.items() if clients > most)


def _pieces(part: Evaluations) -> list[NDArray[np.bool_]]:
    assert part.right is not None
    return np.split(part.right, np.cumsum(part.samples)[:-1]) if len(part.samples) else []


def _column(columns: Sequence[NDArray[NumberT]], none: NDArray[NumberT]) -> NDArray[NumberT]:
    return np.concatenate([none, *columns])
