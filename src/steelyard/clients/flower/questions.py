"""Questions and evaluations as Flower records, and back; what a node answers is checked as `tasks` checks updates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from flwr.app import RecordDict

from steelyard.algorithms.settings import algorithm_table
from steelyard.clients.flower import checks, wire
from steelyard.clients.flower.forms import EVALUATIONS, QuestionForm, Refused
from steelyard.clients.flower.tasks import beside, read_columns, said
from steelyard.clients.flower.wire import Header, content, failure_forms, split, tensor, unpack
from steelyard.messages.updates import Evaluations, Failure, Question


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
    form = EVALUATIONS(
        federation=answer.federation,
        round=answer.round,
        clients=list(answer.clients),
        failures=failure_forms(answer.failures),
        **said(answer),
    )
    return content(form, beside(answer))


def read_evaluations(
    records: RecordDict, question: Question, asked: Sequence[str], scores: tuple[float, float] | None = None
) -> Evaluations:
    """Return the usable part of a node's answer to a question; `scores` is the range that a score can have."""
    text, arrays = split(records)
    most = checks.largest_form(len(asked), len(question.models))
    checks.refuse_size(text, arrays, most, checks.LARGEST_DETAILS if question.detailed else 0)
    form = EVALUATIONS.read(text, most)
    checks.refuse_other(form.federation, form.round, question.federation, question.round)
    checks.refuse_clients(form.clients, form.failures, asked)
    found = read_columns(Evaluations, form, ())
    checks.refuse_metrics(found["metrics"])
    for name in ("scores", "losses"):
        if len(found[name]) != len(question.models):
            raise Refused(f"{name}: {len(found[name])} rows; allowed: {len(question.models)}, one per candidate")
    wire.only_keys(arrays, ["right"] if question.detailed else [])
    if question.detailed:
        found["right"] = unpack(arrays["right"], "right", "|b1", (int(found["samples"].sum()),))
    whole = Evaluations(
        federation=question.federation,
        round=question.round,
        clients=tuple(form.clients),
        failures=checks.failures(form.failures, form.clients, asked, "its node gave no test of it (no test samples?)"),
        **found,
    )
    columns = dict(Evaluations.columns())
    if scores is not None:
        columns["scores"] = replace(columns["scores"], least=scores[0], most=scores[1])
    checked = [(columns[name], getattr(whole, name)) for name in ("samples", "scores", "losses")]
    refused: list[Failure] = []
    for row, client in enumerate(form.clients):
        if fault := next((fault for column, values in checked if (fault := column.fault(values, row))), None):
            refused.append(Failure(client, checks.clean(fault)))
    kept = whole.without([failure.client for failure in refused])
    return replace(kept, failures=(*kept.failures, *refused))
