"""Questions and evaluations as Flower records, and back; what a node answers is checked as `tasks` checks updates."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from steelyard.algorithms.settings import algorithm_table
from steelyard.clients.flower import checks, wire
from steelyard.clients.flower.forms import EvaluationForm, QuestionForm
from steelyard.clients.flower.wire import Header, content, failure_forms, split, tensor, unpack
from steelyard.messages.updates import MOST_SAMPLES, Evaluations, Failure, Question


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
        seconds=seconds,
        experiment=experiment,
        algorithm=algorithm_table(question.algorithm) if question.algorithm.personal else {},
        withdrawn=sorted(withdrawn),
    )
    return content(form, {"models": question.models.detach().to("cpu", torch.float32).numpy()})


def read_question(records: RecordDict) -> tuple[Question, Header]:
    """Return the question that a node received, and what it needs for it."""
    text, arrays = split(records)
    form = QuestionForm.read(text)
    wire.only_keys(arrays, ["models"])
    models = tensor(unpack(arrays["models"], "models", "<f4", (form.candidates, None)))
    question = Question(
        form.federation, form.seed, form.round, models, form.detailed, withdrawn=frozenset(form.withdrawn)
    )
    return question, Header(form.run, form.experiment, form.seconds, algorithm=form.algorithm)


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
        failures=failure_forms(answer.failures),
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
    samples = np.asarray([min(max(n, 0), MOST_SAMPLES) for n in form.samples], dtype=np.int64)
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
    wire.only_keys(arrays, ["right"] if detailed else [])
    if not detailed:
        return None
    right = unpack(arrays["right"], "right", "|b1", (int(samples.sum()),))
    pieces = np.split(right, np.cumsum(samples)[:-1]) if len(samples) else []
    return np.concatenate([np.zeros(0, dtype=np.bool_), *(pieces[i] for i in keep)])
