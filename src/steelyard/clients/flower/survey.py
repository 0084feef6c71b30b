"""What sites tell of their columns before the first round, over the grid: asked once, checked, put together.

A question names no column: a node tells of those that it trains on, and of no others. Who does not answer, or answers
what no site can have, is named, and the run goes on without its part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import RecordDict

from steelyard.clients.flower import wire
from steelyard.clients.flower.mailbox import Errand, Exchange
from steelyard.clients.flower.roster import Roster
from steelyard.clients.flower.wire import STATISTICS, Refused, StatisticsForm, SumsForm, unpack_all
from steelyard.data.site_sums import SiteSums
from steelyard.messages.payloads import Shape
from steelyard.messages.updates import Failure

_MOST_COLUMNS, _LONGEST_NAME = 10_000, 200
_LARGEST = 8 << 20
"""Most bytes of what a node tells, as it is sent and as it is read."""


@dataclass(frozen=True, eq=False)
class Told:
    """What one node told."""

    clients: tuple[str, ...]
    sums: SiteSums
    failures: Sequence[Failure] = ()


def write_sums(sums: SiteSums) -> RecordDict:
    """Return what a node tells as a message."""
    arrays = {"present": sums.present, "mean": sums.mean, "deviation": sums.deviation}
    return wire.content(SumsForm(columns=list(sums.columns)), arrays)


def words(sums: SiteSums) -> str:
    """Say for the owner what leaves."""
    told = int((sums.present > 0).sum())
    few = f"; of {len(sums.columns) - told} nothing, for they have too few" if told < len(sums.columns) else ""
    return f"number of cells, mean and deviation of {told} columns{few}"


def read_sums(content: RecordDict) -> SiteSums:
    """Return what a node told, or refuse it."""
    text, arrays = wire.split(content)
    wire.refuse_size(text, arrays, _LARGEST, _LARGEST)
    form = SumsForm.read(text, _LARGEST)
    if len(form.columns) > _MOST_COLUMNS or any(len(name) > _LONGEST_NAME for name in form.columns):
        raise Refused(f"columns: {len(form.columns)}; allowed: at most {_MOST_COLUMNS}, with names of {_LONGEST_NAME}")
    length = (len(form.columns),)
    shapes: dict[str, Shape] = {"present": ("<i8", length), "mean": ("<f8", length), "deviation": ("<f8", length)}
    found = unpack_all(arrays, shapes)
    sums = SiteSums(tuple(form.columns), found["present"], found["mean"], found["deviation"])
    if fault := sums.fault():
        raise Refused(fault)
    return sums


def ask_sums(roster: Roster, exchange: Exchange, run: str, experiment: str, seconds: float) -> list[Told]:
    """Ask each node whose owner allows it, once; what cannot be used is noted, with whose it is."""
    asked = roster.telling()
    silent = sorted(roster.registered - set(asked))
    question = wire.content(StatisticsForm(run=run, experiment=experiment, seconds=seconds), {})
    errand = Errand(
        *(STATISTICS, 0, asked, lambda node, clients: question),
        lambda node, clients, content: Told(clients, read_sums(content)),
        lambda clients: 2 * _LARGEST,
    )
    (answers,) = exchange.ask([errand], seconds)
    for failure in answers.failures:
        roster.note(f"statistics of {failure.client}: {failure.reason}; the run goes on without")
    if silent and answers.parts:
        roster.note(f"statistics of {wire.names(silent)}: not told, as the owner says; the run goes on without")
    return _alike(roster, answers.parts)


def _alike(roster: Roster, parts: Sequence[Told]) -> list[Told]:
    """Leave out, and note, who has other columns than most."""
    counted = Counter(tuple(sorted(part.sums.columns)) for part in parts)
    usual = max(sorted(counted), key=lambda columns: counted[columns], default=())
    for part in parts:
        if odd := sorted(set(part.sums.columns) ^ set(usual)):
            roster.note(f"statistics of {wire.names(part.clients)}: other columns than most: {wire.names(odd)}")
    return [_in_order(part, usual) for part in parts if set(part.sums.columns) == set(usual)]


def _in_order(part: Told, columns: Sequence[str]) -> Told:
    place = {name: number for number, name in enumerate(part.sums.columns)}
    order = np.array([place[name] for name in columns], dtype=np.int64)
    sums = part.sums
    return Told(part.clients, SiteSums(tuple(columns), sums.present[order], sums.mean[order], sums.deviation[order]))
