"""Clients on a node that give no answer which rests on too few of its rows, and draw what a server cannot foretell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from steelyard.base.randomness import stream_key
from steelyard.clients.protocol import Clients, WrappedClients
from steelyard.messages.updates import Evaluations, Failure, LossState, Question, Task, Updates


class EnoughRows(WrappedClients):
    """Clients of a node with a file of its owner's; wrap them where they are built, before anything is sent.

    `tested` is the number of test rows of each client, `labelled` its number of training rows of each class, and
    `behind` how many of these are at least behind an update; left out: all. `secret` is a number that follows from the
    file, which the server does not have: the order of rows, masks and decoys are drawn with it, so that no server can
    show which rows are behind which part of an answer.
    """

    def __init__(
        self,
        clients: Clients,
        min_rows: int,
        secret: int,
        tested: Mapping[str, int],
        labelled: Mapping[str, Sequence[int]] | None = None,
        behind: Mapping[str, Sequence[float]] | None = None,
        *,
        counts_labels: bool = False,
    ) -> None:
        super().__init__(clients)
        self._min_rows, self._secret = min_rows, secret
        self._tested, self._labelled, self._counts_labels = tested, labelled or {}, counts_labels
        self._behind = self._labelled if behind is None else behind

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        few = [{name: why for name in task.clients if (why := self._few(name, task.loss))} for task in tasks]
        asked = [
            replace(task, seed=self._seed(task.seed), clients=tuple(name for name in task.clients if name not in left))
            for task, left in zip(tasks, few, strict=True)
        ]
        return [
            replace(answer, failures=(*answer.failures, *(Failure(name, why) for name, why in left.items())))
            for answer, left in zip(self.clients.train(asked), few, strict=True)
        ]

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        asked = [
            replace(question, seed=self._seed(question.seed), detailed=question.detailed and self._min_rows == 1)
            for question in questions
        ]
        answers = self.clients.evaluate(asked)
        return [self._allowed(question, answer) for question, answer in zip(questions, answers, strict=True)]

    def _allowed(self, question: Question, answer: Evaluations) -> Evaluations:
        """Return an answer without clients whose tests have too few rows, and never right or wrong of a single one."""
        single = question.detailed and self._min_rows > 1
        keep = [
            row for row, name in enumerate(answer.clients) if not single and self._tested.get(name, 0) >= self._min_rows
        ]
        if len(keep) == len(answer.clients):
            return answer
        what = "right or wrong of each row rests on one" if single else "the test set has fewer"
        why = f"tests: {what}, and this node answers with {self._min_rows} rows or more"
        left = [Failure(name, why) for row, name in enumerate(answer.clients) if row not in keep]
        return replace(
            answer,
            clients=tuple(answer.clients[row] for row in keep),
            samples=answer.samples[keep],
            scores=answer.scores[:, keep],
            losses=answer.losses[:, keep],
            metrics={name: values[keep] for name, values in answer.metrics.items()},
            right=np.zeros(0, dtype=np.bool_) if question.detailed else None,
            failures=(*answer.failures, *left),
        )

    def _few(self, client: str, loss: LossState) -> str:
        """Say what sets apart a class of which this client has some rows, but too few; empty where nothing does.

        Its counts of labels would disclose how many, and two answers with other class weights how they differ.
        """
        counts, least = self._labelled.get(client, ()), self._min_rows
        if self._counts_labels and any(0 < count < least for count in counts):
            return f"label counts: a class has fewer than {least} rows, and its number is not told"
        weights = {weight for weight, count in zip(loss.class_weights or (), counts, strict=False) if count}
        behind = self._behind.get(client, counts)
        if len(weights) < 2 or all(rows >= least for count, rows in zip(counts, behind, strict=True) if count):
            return ""
        return f"loss: under its class weights, fewer than {least} rows of a class are behind an update"

    def _seed(self, seed: int) -> int:
        return stream_key(self._secret, client=str(seed), purpose="node")
