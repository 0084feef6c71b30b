"""Tasks and updates, questions and evaluations as Flower records, and back.

Trust ends where the server reads: `read_updates` takes nothing from a node as given. A fault of the whole answer raises
`Refused`; a fault of one client's part leaves that client out, as a Failure. What several nodes answered is joined with
the clients in ascending order of id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from steelyard.algorithms.settings import algorithm_table
from steelyard.base.tallies import Leading, tally_fault
from steelyard.clients.flower import wire
from steelyard.clients.flower.wire import (
    EVALUATIONS,
    UPDATES,
    ClientsForm,
    QuestionForm,
    Refused,
    SignedForm,
    TaskForm,
    UpdateForm,
    Vouchers,
    cleaned,
    content,
    pack,
    split,
    tensor,
    unpack,
    unpack_all,
    written,
)
from steelyard.messages.payloads import DENSE, Codec, Payload, Shape, bytes_of
from steelyard.messages.updates import (
    MOST_SAMPLES,
    Answer,
    Column,
    Evaluations,
    Failure,
    Question,
    Signed,
    Task,
    Updates,
    joined_columns,
)
from steelyard.privacy.secure import PUBLIC_BYTES
from steelyard.proof.signing import DIGEST_BYTES, SALT_BYTES, holds, salted_digest
from steelyard.proof.statements import Proof, Statement

Refusal = Callable[[float], str | None]
"""Says why a criterion's value cannot be true, or None when it can."""
VECTOR, COUNTS = "vector/", "label_counts"
"""Before the name of each array that is a vector of the algorithm, and the name of that with the labels' counts."""


# ---------------------------------------------------------------- server to node


def pack_parameters(task: Task) -> ArrayRecord:
    """Return the global model of a task and its algorithm's vectors, packed once for all the nodes they go to."""
    sent = {"parameters": task.parameters, **{VECTOR + name: vector for name, vector in task.vectors.items()}}
    return pack({name: numbers.detach().to("cpu", torch.float32).numpy() for name, numbers in sent.items()})


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
    vouchers: Vouchers | None = None,
    proofs: Sequence[Proof] = (),
) -> RecordDict:
    """Return a task for those of its cohort that live on one node.

    Where updates are hidden, `cohort` names all clients of the round, and their keys are in `parameters` too; nodes
    vouch for them. `proofs`
    are of earlier rounds, for the node to keep.
    """
    form = TaskForm(
        run=run,
        federation=task.federation,
        seed=task.seed,
        round=task.round,
        clients=list(clients),
        loss=task.loss,
        algorithm=algorithm_table(task.algorithm),
        seconds=seconds,
        experiment=experiment,
        cohort=list(cohort),
        attempt=attempt,
        vouchers=vouchers or {},
        proofs=list(proofs),
    )
    return RecordDict({"form": written(form), "arrays": parameters})


def read_task(records: RecordDict) -> tuple[Task, TaskForm]:
    """Return the task that a node received, and the form that says what it needs for it.

    Its algorithm and its learning rate are still FedAvg's: the node itself finds them in the experiment.
    """
    text, arrays = split(records)
    form = TaskForm.read(text)
    named = [name for name in arrays if name.startswith(VECTOR)]
    shapes: dict[str, Shape] = dict.fromkeys(["parameters", *named], ("<f4", (None,)))
    found = unpack_all(arrays, shapes | ({"keys": _keys(form)} if form.cohort else {}))
    parameters = tensor(found["parameters"])
    for name in named:
        if len(found[name]) != len(parameters):
            raise Refused(f"array {name}: shape {found[name].shape}; allowed: {tuple(parameters.shape)}")
    vectors = {name.removeprefix(VECTOR): tensor(found[name]) for name in named}
    clients = tuple(sorted(form.clients))
    task = Task(*(form.federation, form.seed, form.round, clients, parameters, form.loss), vectors=vectors)
    return task, form


def _keys(form: TaskForm) -> Shape:
    return "|u1", (len(form.cohort), PUBLIC_BYTES)


def read_keys(records: RecordDict, form: TaskForm) -> NDArray[np.uint8]:
    """Return the public keys of each client of a task's cohort, where updates are hidden."""
    return unpack(split(records)[1]["keys"], "keys", *_keys(form))


# ---------------------------------------------------------------- node to server


def write_updates(updates: Updates, codec: Codec = DENSE) -> RecordDict:
    """Return what a node's clients trained."""
    form = UPDATES(
        federation=updates.federation,
        round=updates.round,
        clients=list(updates.clients),
        payload=codec.kind,
        started_over=list(updates.started_over),
        signed=signed_form(updates.signed),
        failures=cleaned(updates.failures),
        **said(updates),
    )
    return content(form, {**codec.pack(updates.payload), **beside(updates)})


def said(answer: Answer) -> dict[str, Any]:
    """Return the columns that a form writes."""
    columns, written = type(answer).columns(), answer.write()
    return {name: each for name, each in written.items() if columns[name].told != "never" and not columns[name].array}


def beside(answer: Answer) -> dict[str, NDArray[Any]]:
    """Return the columns that travel as arrays."""
    found: dict[str, NDArray[Any]] = {}
    for name, column in type(answer).columns().items():
        if column.array and (held := getattr(answer, name)) is not None:
            named = {column.array + each: one for each, one in held.items()} if column.named else {column.array: held}
            found |= {each: _numbers(one, column) for each, one in named.items()}
    return found


def _numbers(values: NDArray[Any] | torch.Tensor, column: Column) -> NDArray[Any]:
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values
    return np.asarray(array, dtype=column.kind)


@dataclass(frozen=True)
class Expected:
    """What the answers of a run must say of each client beside its model, its samples and its loss."""

    criteria: Mapping[str, Refusal] = field(default_factory=dict[str, Refusal])
    """The criteria that clients measure, with the check of each one's range."""
    further: frozenset[str] = frozenset()
    """Which of "steps", "first_losses" and "label_counts" a criterion or an algorithm of the run needs."""
    classes: int = 0
    """The number of classes, for label counts."""

    def largest(self, task: Task, clients: int, codec: Codec) -> int:
        """Return the most bytes that the arrays of an honest answer of so many clients have."""
        return codec.largest(clients, task.parameters.numel()) + bytes_of(self.arrays(task, clients).values())

    def names(self, task: Task) -> frozenset[str]:
        """Return which columns that only some runs need an answer must have."""
        return self.further | {"steps"} if task.algorithm.counts_steps else self.further

    def arrays(self, task: Task, clients: int) -> dict[str, Shape]:
        """Return the arrays that an answer of so many clients must have beside its models."""
        vector, counts = ("<f4", (clients, task.parameters.numel())), ("<i8", (clients, self.classes))
        vectors: dict[str, Shape] = {VECTOR + name: vector for name in task.algorithm.sends}
        return vectors | ({COUNTS: counts} if COUNTS in self.further else {})


def read_updates(
    records: RecordDict,
    task: Task,
    asked: Sequence[str],
    expected: Expected,
    codec: Codec = DENSE,
    signer: Signer | None = None,
) -> Updates:
    """Return the usable part of a node's answer to a task; the clients left out are in its failures."""
    text, arrays = split(records)
    most, criteria = wire.largest_form(len(asked)), expected.criteria
    sent = wire.refuse_size(text, arrays, most, expected.largest(task, len(asked), codec))
    form = UPDATES.read(text, most)
    wire.refuse_other(form.federation, form.round, task.federation, task.round)
    count = wire.refuse_clients(form.clients, form.failures, asked)
    found = read_columns(Updates, form, expected.names(task))
    if set(found["criteria"]) != set(criteria):
        raise Refused(f"criteria: got {wire.names(found['criteria'])}; allowed: exactly {wire.names(criteria)}")
    if form.payload != codec.kind:
        raise Refused(f"payload: got {form.payload!r}; allowed: {codec.kind}")
    parameters = task.parameters.numel()
    numbers = unpack_all(arrays, {**codec.shapes(count, parameters), **expected.arrays(task, count)})
    vectors = {name: tensor(numbers.pop(VECTOR + name)) for name in task.algorithm.sends}
    counts = numbers.pop(COUNTS, None)
    payload = codec.unpack(numbers, count, parameters)
    signed, unsound = ((), {}) if signer is None else signer.check(form, payload)
    whole = Updates(
        federation=task.federation,
        round=task.round,
        clients=tuple(form.clients),
        payload=payload,
        failures=wire.failures(form.failures, form.clients, asked),
        bytes_sent=np.full(count, sent // max(count, 1), dtype=np.int64),
        started_over=tuple(client for client in form.clients if client in form.started_over),
        signed=signed,
        label_counts=counts,
        vectors=vectors,
        **found,
    )
    faults = _faults(whole, task, expected, unsound)
    keep = [i for i in range(count) if faults[i] is None]
    refused = [Failure(form.clients[i], wire.clean(reason)) for i, reason in enumerate(faults) if reason is not None]
    return whole.select(keep, refused)


def read_columns(of: type[Answer], form: ClientsForm, needed: Collection[str]) -> dict[str, Any]:
    """Return the columns that a form has; one that lacks what is needed, or is not one for each client, is refused."""
    found: dict[str, Any] = {}
    for name, column in of.columns().items():
        if column.array or column.told == "never" or (column.told == "asked" and name not in needed):
            continue
        if (written := getattr(form, name)) is None:
            raise Refused(f"{name}: missing; allowed: one for each client, since the run needs them")
        for each in written.items() if column.named else [(name, written)]:
            wire.refuse_lengths(len(form.clients), each, rows=column.axes == (1,))
        found[name] = column.read(written)
    return found


def _faults(updates: Updates, task: Task, expected: Expected, unsound: Mapping[str, str]) -> list[str | None]:
    """Return of each client in an answer why it is refused; None where it is not."""
    finite, far = updates.payload.finite(), _exploded(updates.payload, task.parameters)
    columns = [(column, getattr(updates, name)) for name, column in Updates.columns().items()]
    said = {name: values.tolist() for name, values in updates.criteria.items()}
    return [
        next((fault for column, values in columns if (fault := column.fault(values, i))), None)
        or next((fault for name, judge in expected.criteria.items() if (fault := judge(said[name][i]))), None)
        or wire.size_fault(said, updates.samples, i)
        or (None if finite[i] else "update: holds NaN or infinite numbers")
        or (f"update: farther than {wire.MOST_GROWTH:g} times the model; that is no training" if far[i] else None)
        or unsound.get(client)
        for i, client in enumerate(updates.clients)
    ]


def _exploded(payload: Payload, parameters: torch.Tensor) -> NDArray[np.bool_]:
    """Return for each client whether its update is so far away that it can only be a mistake or an attack."""
    largest = float(parameters.abs().max()) if parameters.numel() else 0.0
    return payload.far(parameters, wire.MOST_GROWTH * max(1.0, largest))


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


def joined_evaluations(
    question: Question, parts: Sequence[Evaluations], failures: Sequence[Failure], most: int = MOST_SAMPLES
) -> Evaluations:
    """Join the checked evaluations of several nodes; of each test set no more than the first `most` samples count."""
    counted, failures = [_counted(part, most) for part in parts], list(failures)
    widths = Counter[int]()
    for part in counted:
        if part.tallies is not None:
            widths[part.tallies.shape[2]] += len(part.clients)
    kept: list[Evaluations] = []
    for part in counted:
        if part.tallies is None or part.tallies.shape[2] == max(widths, key=lambda width: (widths[width], -width)):
            kept.append(part)
        else:
            failures += [
                Failure(name, "sums: of another number of classes than most clients'") for name in part.clients
            ]
    return _joined(question, kept, failures)


def _counted(part: Evaluations, most: int) -> Evaluations:
    if not (part.samples > most).any():
        return part
    right = None
    if part.right is not None:
        pieces = np.split(part.right, np.cumsum(part.samples)[:-1])
        right = np.concatenate([piece[:most] for piece in pieces])
    samples = np.minimum(part.samples, most)
    tallies = None if part.tallies is None else part.tallies * (samples / part.samples)[:, None]
    return replace(part, samples=samples, right=right, tallies=tallies)


def _joined(question: Question, parts: Sequence[Evaluations], failures: Sequence[Failure]) -> Evaluations:
    names = _metrics(parts)
    alike = [
        replace(part, metrics={name: part.metrics.get(name, np.full(len(part.clients), np.nan)) for name in names})
        for part in parts
    ]
    found, _ = joined_columns(Evaluations, alike)
    ordered = tuple(sorted(failures, key=lambda failure: failure.client))
    return Evaluations(question.federation, question.round, **found, failures=ordered)


def _metrics(parts: Sequence[Evaluations]) -> list[str]:
    """Return the metrics that were given for most clients: one node can neither add one nor take one away."""
    given = Counter[str]()
    for part in parts:
        given.update(dict.fromkeys(part.metrics, len(part.clients)))
    most = sum(len(part.clients) for part in parts) / 2
    return sorted(name for name, clients in given.items() if clients > most)


# ---------------------------------------------------------------- questions and evaluations


def write_question(
    question: Question, seconds: float, run: str = "", experiment: str = "", *, withdrawn: Collection[str] = ()
) -> RecordDict:
    """Return a question with all its candidate models, for a node on which these clients have withdrawn."""
    form = QuestionForm(
        run=run,
        federation=question.federation,
        seed=question.seed,
        round=question.round,
        candidates=len(question.models),
        detailed=question.detailed,
        measure=question.measure.name if question.measure is not None else "",
        threshold=question.measure.threshold if question.measure is not None else 0.5,
        seconds=seconds,
        experiment=experiment,
        algorithm=algorithm_table(question.algorithm) if question.algorithm.personal else {},
        withdrawn=sorted(withdrawn),
    )
    return content(form, {"models": question.models.detach().to("cpu", torch.float32).numpy()})


def read_question(records: RecordDict) -> tuple[Question, QuestionForm]:
    """Return the question that a node received, and the form that says what it needs for it."""
    text, arrays = split(records)
    form = QuestionForm.read(text)
    models = tensor(unpack_all(arrays, {"models": ("<f4", (form.candidates, None))})["models"])
    question = Question(
        *(form.federation, form.seed, form.round, models, form.detailed),
        withdrawn=frozenset(form.withdrawn),
        measure=Leading(form.measure, form.threshold) if form.measure else None,
    )
    return question, form


def write_evaluations(answer: Evaluations) -> RecordDict:
    """Return how a node's clients found the models of a question."""
    form = EVALUATIONS(
        federation=answer.federation,
        round=answer.round,
        clients=list(answer.clients),
        failures=cleaned(answer.failures),
        **said(answer),
    )
    return content(form, beside(answer))


def read_evaluations(
    records: RecordDict, question: Question, asked: Sequence[str], scores: tuple[float, float] | None = None
) -> Evaluations:
    """Return the usable part of a node's answer to a question; `scores` is the range that a score can have."""
    text, arrays = split(records)
    most = wire.largest_form(len(asked), len(question.models))
    wire.refuse_size(text, arrays, most, wire.details(question))
    form = EVALUATIONS.read(text, most)
    wire.refuse_other(form.federation, form.round, question.federation, question.round)
    wire.refuse_clients(form.clients, form.failures, asked)
    found = read_columns(Evaluations, form, ())
    wire.refuse_metrics(found["metrics"])
    for name in ("scores", "losses"):
        if len(found[name]) != len(question.models):
            raise Refused(f"{name}: {len(found[name])} rows; allowed: {len(question.models)}, one per candidate")
    further: dict[str, Shape] = {"right": ("|b1", (int(found["samples"].sum()),))} if question.detailed else {}
    if question.measure is not None:
        further["tallies"] = "<f8", (len(question.models), len(form.clients), None)
    whole = Evaluations(
        federation=question.federation,
        round=question.round,
        clients=tuple(form.clients),
        failures=wire.failures(form.failures, form.clients, asked, "its node gave no test of it (no test samples?)"),
        **unpack_all(arrays, further),
        **found,
    )
    columns = dict(Evaluations.columns())
    if scores is not None:
        columns["scores"] = replace(columns["scores"], least=scores[0], most=scores[1])
    checked = [(columns[name], getattr(whole, name)) for name in ("samples", "scores", "losses", "tallies")]
    refused: list[Failure] = []
    for row, client in enumerate(form.clients):
        fault = next((fault for column, values in checked if (fault := column.fault(values, row))), None)
        if fault is None and whole.tallies is not None:
            fault = tally_fault(whole.tallies[:, row], int(whole.samples[row]))
        if fault:
            refused.append(Failure(client, wire.clean(fault)))
    kept = whole.without([failure.client for failure in refused])
    return replace(kept, failures=(*kept.failures, *refused))
