"""Tasks, updates, questions and evaluations as Flower records, and back.

Trust ends where the server reads: `read_updates` and `read_evaluations` take nothing from a node as given. A fault of
the whole answer raises `Refused`; a fault of one client's part leaves that client out, as a Failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from steelyard.clients.flower import arrays as packing
from steelyard.clients.flower import checks, payloads
from steelyard.clients.flower.forms import (
    EvaluationForm,
    FailureForm,
    Form,
    LossForm,
    QuestionForm,
    Refused,
    TaskForm,
    UpdateForm,
)
from steelyard.messages import Evaluations, Failure, Question, Task, Updates

Refusal = Callable[[float], str | None]
"""Says why a criterion's value cannot be true, or None when it can."""


def content(form: Form, arrays: Mapping[str, NDArray[Any]]) -> RecordDict:
    """Return the content of a message: one form and the arrays beside it."""
    return RecordDict({"form": _written(form), "arrays": packing.pack(arrays)})


def _written(form: Form) -> ConfigRecord:
    return ConfigRecord({"json": form.write()})


def split(records: RecordDict) -> tuple[object, ArrayRecord]:
    """Return the form's text and the arrays of a message, or refuse a message of another make."""
    if set(records) != {"form", "arrays"}:
        raise Refused(f"records: got {', '.join(sorted(records))[:200] or 'none'}; allowed: exactly arrays, form")
    form, arrays = records["form"], records["arrays"]
    if not isinstance(form, ConfigRecord) or not isinstance(arrays, ArrayRecord) or set(form) != {"json"}:
        raise Refused("records: 'form' must hold one JSON text and 'arrays' must hold arrays")
    return form["json"], arrays


# ---------------------------------------------------------------- server to node


def pack_parameters(task: Task) -> ArrayRecord:
    """Return the global model of a task, packed once for all the nodes it goes to."""
    return packing.pack({"parameters": task.parameters.detach().to("cpu", torch.float32).numpy()})


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
) -> RecordDict:
    """Return a task for those of its cohort that live on one node.

    Where updates are hidden, `cohort` names all clients of the round, and their keys are in `parameters` too.
    """
    form = TaskForm(
        run=run,
        federation=task.federation,
        seed=task.seed,
        round=task.round,
        clients=list(clients),
        loss=LossForm.of(task.loss),
        seconds=seconds,
        experiment=experiment,
        cohort=list(cohort),
        attempt=attempt,
    )
    return RecordDict({"form": _written(form), "arrays": parameters})


@dataclass(frozen=True)
class Header:
    """What a message to a node says beside its task or question."""

    run: str
    """Name of the run that it belongs to."""
    experiment: str
    """The experiment as JSON."""
    seconds: float
    """How long the server waits."""
    cohort: tuple[str, ...] = ()
    """Where updates are hidden: all clients of the round."""
    keys: NDArray[np.uint8] | None = None
    """Where updates are hidden: the public keys of each of them."""
    attempt: str = ""


def read_task(records: RecordDict) -> tuple[Task, Header]:
    """Return the task that a node received, and what it needs for it."""
    text, arrays = split(records)
    form = TaskForm.read(text)
    payloads.only_keys(arrays, ["keys", "parameters"] if form.cohort else ["parameters"])
    parameters = packing.tensor(packing.unpack(arrays["parameters"], "parameters", "<f4", (None,)))
    clients = tuple(sorted(form.clients))
    task = Task(form.federation, form.seed, form.round, clients, parameters, form.loss.state())
    keys = packing.unpack(arrays["keys"], "keys", "|u1", (len(form.cohort), None)) if form.cohort else None
    return task, Header(form.run, form.experiment, form.seconds, tuple(form.cohort), keys, form.attempt)


def write_question(question: Question, seconds: float, run: str = "", experiment: str = "") -> RecordDict:
    """Return a question with all its candidate models."""
    form = QuestionForm(
        run=run,
        federation=question.federation,
        seed=question.seed,
        round=question.round,
        candidates=len(question.models),
        detailed=question.detailed,
        seconds=seconds,
        experiment=experiment,
    )
    return content(form, {"models": question.models.detach().to("cpu", torch.float32).numpy()})


def read_question(records: RecordDict) -> tuple[Question, Header]:
    """Return the question that a node received, and what it needs for it."""
    text, arrays = split(records)
    form = QuestionForm.read(text)
    payloads.only_keys(arrays, ["models"])
    models = packing.tensor(packing.unpack(arrays["models"], "models", "<f4", (form.candidates, None)))
    question = Question(form.federation, form.seed, form.round, models, form.detailed)
    return question, Header(form.run, form.experiment, form.seconds)


# ---------------------------------------------------------------- node to server


def write_updates(updates: Updates, codec: payloads.Codec = payloads.DENSE) -> RecordDict:
    """Return what a node's clients trained."""
    arrays = codec.packed(updates.payload)
    form = UpdateForm(
        federation=updates.federation,
        round=updates.round,
        clients=list(updates.clients),
        samples=[int(count) for count in updates.samples],
        criteria={name: [float(value) for value in values] for name, values in updates.criteria.items()},
        losses=[float(loss) for loss in updates.losses],
        payload=codec.kind,
        failures=_failure_forms(updates.failures),
    )
    return content(form, arrays)


def read_updates(
    records: RecordDict,
    task: Task,
    asked: Sequence[str],
    criteria: Mapping[str, Refusal],
    codec: payloads.Codec = payloads.DENSE,
) -> Updates:
    """Return the usable part of a node's answer to a task; the clients left out are in its failures."""
    text, arrays = split(records)
    most = checks.largest_form(len(asked))
    sent = checks.refuse_size(text, arrays, most, codec.largest(len(asked), task.parameters))
    form = UpdateForm.read(text, most)
    checks.refuse_other(form.federation, form.round, task.federation, task.round)
    count = checks.refuse_clients(form.clients, form.failures, asked)
    checks.refuse_lengths(count, {"samples": form.samples, "losses": form.losses})
    checks.refuse_lengths(count, form.criteria)
    if set(form.criteria) != set(criteria):
        raise Refused(f"criteria: got {checks.names(form.criteria)}; allowed: exactly {checks.names(criteria)}")
    codec.refuse_other(form.payload)
    payload = codec.unpack(arrays, count, task.parameters)
    finite = payload.finite()
    far = checks.explosion(payload, task.parameters)
    losses = checks.floats(form.losses)
    faults = [
        checks.sample_fault(form.samples[i])
        or next((f for name, judge in criteria.items() if (f := judge(form.criteria[name][i]))), None)
        or next((f for n in criteria if (f := checks.criterion_fault(n, form.criteria[n][i], form.samples[i]))), None)
        or checks.loss_fault(losses[i : i + 1])
        or (None if finite[i] else "update: holds NaN or infinite numbers")
        or (f"update: farther than {checks.MOST_GROWTH:g} times the model; that is no training" if far[i] else None)
        for i in range(count)
    ]
    whole = Updates(
        federation=task.federation,
        round=task.round,
        clients=tuple(form.clients),
        # A number of samples that no array can hold is refused below with its client.
        samples=np.asarray([min(max(n, -1), checks.MOST_SAMPLES) for n in form.samples], dtype=np.int64),
        criteria={name: checks.floats(form.criteria[name]) for name in criteria},
        losses=losses,
        payload=payload,
        failures=checks.failures(form.failures, form.clients, asked),
        bytes_sent=np.full(count, sent // max(count, 1), dtype=np.int64),
    )
    keep = [i for i in range(count) if faults[i] is None]
    refused = [Failure(form.clients[i], checks.clean(reason)) for i, reason in enumerate(faults) if reason is not None]
    return whole.select(keep, refused)


def write_evaluations(answer: Evaluations) -> RecordDict:
    """Return how a node's clients found the models of a question."""
    form = EvaluationForm(
        federation=answer.federation,
        round=answer.round,
        clients=list(answer.clients),
        samples=[int(count) for count in answer.samples],
        scores=[[float(value) for value in row] for row in answer.scores],
        losses=[[float(value) for value in row] for row in answer.losses],
        metrics={name: [float(value) for value in values] for name, values in answer.metrics.items()},
        failures=_failure_forms(answer.failures),
    )
    return content(form, {} if answer.right is None else {"right": np.asarray(answer.right, dtype=np.bool_)})


def read_evaluations(
    records: RecordDict, question: Question, asked: Sequence[str], scores: tuple[float, float] | None = None
) -> Evaluations:
    """Return the usable part of a node's answer to a question; `scores` is the range that a score can have."""
    text, arrays = split(records)
    most = checks.largest_form(len(asked), len(question.models))
    checks.refuse_size(text, arrays, most, checks.LARGEST_DETAILS if question.detailed else 0)
    form = EvaluationForm.read(text, most)
    checks.refuse_other(form.federation, form.round, question.federation, question.round)
    count = checks.refuse_clients(form.clients, form.failures, asked)
    checks.refuse_lengths(count, {"samples": form.samples})
    checks.refuse_lengths(count, form.metrics)
    checks.refuse_metrics(form.metrics)
    table = checks.table("scores", form.scores, len(question.models), count)
    losses = checks.table("losses", form.losses, len(question.models), count)
    faults = [
        checks.sample_fault(form.samples[i])
        or checks.score_fault(table[:, i], scores)
        or checks.loss_fault(losses[:, i])
        for i in range(count)
    ]
    keep = [i for i in range(count) if faults[i] is None]
    samples = np.asarray([min(max(n, 0), checks.MOST_SAMPLES) for n in form.samples], dtype=np.int64)
    return Evaluations(
        federation=question.federation,
        round=question.round,
        clients=tuple(form.clients[i] for i in keep),
        samples=samples[keep],
        scores=table[:, keep],
        losses=losses[:, keep],
        metrics={name: checks.floats(values)[keep] for name, values in form.metrics.items()},
        right=_right(arrays, samples, keep, question.detailed),
        failures=(
            *checks.failures(form.failures, form.clients, asked, "its node gave no test of it (no test samples?)"),
            *(Failure(form.clients[i], checks.clean(reason)) for i, reason in enumerate(faults) if reason is not None),
        ),
    )


def _right(
    arrays: ArrayRecord, samples: NDArray[np.int64], keep: list[int], detailed: bool
) -> NDArray[np.bool_] | None:
    payloads.only_keys(arrays, ["right"] if detailed else [])
    if not detailed:
        return None
    right = packing.unpack(arrays["right"], "right", "|b1", (int(samples.sum()),))
    pieces = np.split(right, np.cumsum(samples)[:-1]) if len(samples) else []
    return np.concatenate([np.zeros(0, dtype=np.bool_), *(pieces[i] for i in keep)])


def _failure_forms(failures: Sequence[Failure]) -> list[FailureForm]:
    return [FailureForm(client=failure.client, reason=checks.clean(failure.reason)) for failure in failures]
