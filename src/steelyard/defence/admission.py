"""Admission: what a client sent is checked before it is weighed; what fails is left out, with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from steelyard.messages.updates import Failure, Task, Updates

NOT_FINITE = "model holds NaN or infinity"
"""Why an update is refused whose numbers are no numbers: its training has diverged, or it was made to look so."""


class Checked(Protocol):
    """What admission asks of a criterion: its name, who measures it, and what cannot be true of it."""

    @property
    def name(self) -> str: ...

    @property
    def measured_by(self) -> str: ...

    def refusal(self, value: float, classes: int | None = None) -> str | None:
        """Say why a value sent by a client cannot be true, or None when it can."""
        ...


def admit(task: Task, updates: Updates, criteria: Sequence[Checked], classes: int | None = None) -> Updates:
    """Keep the updates that can be weighed: asked for, of this round, finite, with criteria in range.

    Call it on every answer, also of simulated clients: a local training that diverges to NaN is refused here.
    `classes` is the number of classes of the task, where the server knows it.
    """
    if (updates.federation, updates.round) != (task.federation, task.round):
        wrong = f"answer for round {updates.round} of {updates.federation}; asked for round {task.round}"
        return updates.select([], [Failure(client, wrong) for client in updates.clients])
    strangers = set(updates.clients) - {*task.clients, *updates.late}
    finite = updates.payload.finite()
    for name in task.algorithm.sends:
        if name not in updates.vectors:
            missing = f"the vector {name} of {task.algorithm.name} is missing"
            return updates.select([], [Failure(client, missing) for client in updates.clients])
        finite = finite & updates.vectors[name].isfinite().all(dim=1).cpu().numpy()
    claims = [criterion for criterion in criteria if criterion.measured_by == "client"]
    everybody = range(len(updates.clients))
    # Cohorts may have a hundred thousand clients: who claims nothing is looked at only where something is wrong.
    few = np.flatnonzero(~finite | (updates.samples < 1)).tolist()
    refused: dict[int, Failure] = {}
    for index in everybody if claims or strangers else few:
        client = updates.clients[index]
        reason = (
            "was not asked this round"
            if client in strangers
            else _refusal(index, updates, claims, classes, finite=bool(finite[index]))
        )
        if reason is not None:
            refused[index] = Failure(client, reason)
    if not refused:
        return updates
    return updates.select([index for index in everybody if index not in refused], list(refused.values()))


def _refusal(
    index: int, updates: Updates, claims: Sequence[Checked], classes: int | None, *, finite: bool
) -> str | None:
    if not finite:
        return NOT_FINITE
    if updates.samples[index] < 1:
        return f"samples = {updates.samples[index]}; allowed: 1 or more, for who trained on nothing gets no weight"
    for criterion in claims:
        if criterion.name not in updates.criteria:
            return f"criterion {criterion.name} is missing"
        reason = criterion.refusal(float(updates.criteria[criterion.name][index]), classes)
        if reason is not None:
            return reason
    return None
