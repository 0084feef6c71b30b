"""Who trains what: clients, or whole federations, go to the ranks by their known steps, longest first."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

SLACK = 1.1
"""Whole federations go to one rank each where that takes at most so many times as long: no sum is then sent around."""

Unit = tuple[int, tuple[str, ...], int]
"""What is given to one rank as a whole: a task by its place, some of its clients, and their steps."""
Shares = list[list[list[str]]]
"""For each rank and each task the clients that the rank trains, ascending."""


def share_out(steps: Sequence[Mapping[str, int]], whole: Sequence[bool], ranks: int) -> Shares:
    """Give the clients of tasks to ranks; `steps` are those of each task's clients, `whole` tasks are not split."""
    together: list[Unit] = [(task, tuple(clients), sum(clients.values())) for task, clients in enumerate(steps)]
    apart: list[Unit] = [
        unit
        for task, clients in enumerate(steps)
        for unit in ([together[task]] if whole[task] else [(task, (name,), n) for name, n in clients.items()])
    ]
    split, longest = _given(apart, ranks)
    if len(steps) > 1:
        unsplit, longest_unsplit = _given(together, ranks)
        if longest_unsplit <= SLACK * longest:
            split = unsplit
    found: Shares = [[[] for _ in steps] for _ in range(ranks)]
    for rank, units in enumerate(split):
        for task, clients, _ in units:
            found[rank][task] += clients
    return [[sorted(clients) for clients in tasks] for tasks in found]


def _given(units: Sequence[Unit], ranks: int) -> tuple[list[list[Unit]], int]:
    """Give each unit, longest first, to the rank that has least; returns also the most steps that a rank has."""
    given: list[list[Unit]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for unit in sorted(units, key=lambda unit: (-unit[2], unit[0], unit[1])):
        load, rank = heapq.heappop(loads)
        given[rank].append(unit)
        heapq.heappush(loads, (load + unit[2], rank))
    return given, max(load for load, _ in loads)
