"""Admission: what a client sent is checked before it is weighed; what fails is left out, with a reason."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.messages import Failure, Task, Updates
from steelyard.weighing.criteria import Criterion


def admit(task: Task, updates: Updates, criteria: Sequence[Criterion]) -> Updates:
    """Keep the updates that can be weighed: asked for, of this round, finite, with criteria in range.

    Call it on every answer, also of simulated clients: a local training that diverges to NaN is refused here.
    """
    if (updates.federation, updates.round) != (task.federation, task.round):
        wrong = f"answer for round {updates.round} of {updates.federation}; asked for round {task.round}"
        return updates.select([], [Failure(client, wrong) for client in updates.clients])
    asked = set(task.clients)
    finite = updates.payload.finite()
    keep: list[int] = []
    refused: list[Failure] = []
    for index, client in enumerate(updates.clients):
        reason = _refusal(index, updates, criteria, finite=bool(finite[index]), asked=client in asked)
        if reason is None:
            keep.append(index)
        else:
            refused.append(Failure(client, reason))
    return updates.select(keep, refused) if refused else updates


def _refusal(index: int, updates: Updates, criteria: Sequence[Criterion], *, finite: bool, asked: bool) -> str | None:
    if not asked:
        return "was not asked this round"
    if not finite:
        return "model holds NaN or infinity"
    if updates.samples[index] < 0:
        return f"samples = {updates.samples[index]}; allowed: 0 or more"
    for criterion in criteria:
        if criterion.measured_by != "client":
            continue
        if criterion.name not in updates.criteria:
            return f"criterion {criterion.name} is missing"
        reason = criterion.refusal(float(updates.criteria[criterion.name][index]))
        if reason is not None:
            return reason
    return None
