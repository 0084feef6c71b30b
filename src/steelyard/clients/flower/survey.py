"""What sites tell of their columns before the first round, over the grid: asked once, checked, put together, compared.

A question names no column: a node tells of those that it trains on, and of no others. Who does not answer, or answers
what no site can have, is named, and the run goes on without its part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.clients.flower import wire
from steelyard.clients.flower.mailbox import Errand, Exchange
from steelyard.clients.flower.roster import Roster
from steelyard.clients.flower.wire import (
    COMPARE,
    STATISTICS,
    ComparisonForm,
    FindingsForm,
    Refused,
    SaidFinding,
    StatisticsForm,
    SumsForm,
    most_counted,
    unpack_all,
)
from steelyard.data.findings import NAMES, Finding, found
from steelyard.data.site_sums import BINS, SiteSums, pooled
from steelyard.messages.payloads import Shape
from steelyard.messages.updates import Failure, Task, Updates
from steelyard.weighing.weights import limited

MOST_COLUMNS = 2_000
_LONGEST_NAME, _MOST_FINDINGS = 200, 50
_LARGEST = 16 << 20
"""Most bytes of what a node tells, as it is sent and as it is read."""


@dataclass(frozen=True, eq=False)
class Told:
    """What one node told."""

    clients: tuple[str, ...]
    sums: SiteSums
    failures: Sequence[Failure] = ()


@dataclass(frozen=True, eq=False)
class Said:
    """What seems wrong at one node."""

    findings: Sequence[Finding]
    failures: Sequence[Failure] = ()


@dataclass(eq=False)
class Survey:
    """The nodes of a run and what they told: `ask`, then `add_up` where nobody may see single ones, then `findings`."""

    roster: Roster
    exchange: Exchange
    run: str
    experiment: str
    """As the nodes are asked for it."""
    seconds: float
    bound: float
    """A node counts for so many times the rows of the median node at most."""
    known: SiteSums | None = None
    """What those who answered told, put together; None where nobody told anything."""
    together: SiteSums | None = None
    """What they have together, once it is known; None where fewer than two told anything."""
    _parts: dict[tuple[str, ...], SiteSums] = field(default_factory=dict[tuple[str, ...], SiteSums])
    _weights: dict[str, float] = field(default_factory=dict[str, float])
    """By client, the share of what is together, where that was added up without anybody seeing its parts."""

    def ask(self) -> int:
        """Ask those whose owners let them tell anything; returns how many did."""
        asked = self.roster.telling("sums", "findings")
        question = wire.content(StatisticsForm(run=self.run, experiment=self.experiment, seconds=self.seconds), {})
        errand = Errand(
            *(STATISTICS, 0, asked, lambda node, clients: question),
            lambda node, clients, content: Told(clients, read_sums(*wire.split(content))),
            lambda clients: 2 * _LARGEST,
        )
        (answers,) = self.exchange.ask([errand], self.seconds)
        self._note(answers.failures)
        silent = sorted(self.roster.registered - set(asked))
        if silent and answers.parts:
            self.roster.note(
                f"statistics of {wire.names(silent)}: not told, as the owner says; the run goes on without"
            )
        parts = _alike(self.roster, answers.parts)
        most = most_counted([part.sums.rows for part in parts], self.bound)
        self._parts.update({part.clients: part.sums.at_most(most) for part in parts})
        self.known = pooled(list(self._parts.values())) if parts else None
        self.together = self.known if len(parts) > 1 else None
        return len(parts)

    def add_up(
        self,
        train: Callable[[Sequence[Task]], list[Updates]],
        like: SiteSums,
        unit: float,
        high: Callable[[int], float],
    ) -> None:
        """Have nodes tell their shares as updates of a round before the first, of which nobody sees single ones.

        `like` says which columns and words there are, `unit` what a share of 1 travels as, `high` the largest weight
        among so many nodes. A sum that cannot be had is noted, and the run goes on without it.
        """
        names = tuple(sorted(clients[0] for clients in self._parts))
        task = Task(wire.SURVEY, 0, 0, names, torch.zeros(len(like.shares())))
        self.together = None
        try:
            (updates,) = train([task])
            self._note(updates.failures)
            rows = np.minimum(updates.samples, most_counted(updates.samples.tolist(), self.bound))
            weights = limited(rows / rows.sum(), high=high(len(rows)))
            total = updates.payload.aggregate(task.parameters, weights).double().numpy() / unit
        except UserError as error:
            self.roster.note(f"statistics: {error}")
            return
        summed = updates.payload.summed
        stayed = np.isin(updates.clients, updates.clients if summed is None else summed.clients)
        given = weights * stayed / (weights * stayed).sum()
        self._weights = dict(zip(updates.clients, given.tolist(), strict=True))
        self.together = like.of_shares(total, int(rows[stayed].sum()))

    def findings(self) -> list[Finding]:
        """Send each node that told something what the others have, and return what it finds wrong with itself."""
        together = self.together
        if together is None:
            return []
        words = {"run": self.run, "experiment": self.experiment, "seconds": self.seconds}

        def write(node: int, clients: tuple[str, ...]) -> RecordDict:
            weight = self._weights.get(clients[0], 0.0)
            others = together if self._weights else together.minus(self._parts[clients])
            return wire.content(ComparisonForm(**words, **_written(others), weight=weight), _arrays(others))

        def read(node: int, clients: tuple[str, ...], content: RecordDict) -> Said:
            return Said(read_findings(content, clients, self._parts[clients]))

        asked = [name for clients in self._parts for name in clients]
        (answers,) = self.exchange.ask([Errand(COMPARE, 0, asked, write, read, lambda clients: _LARGEST)], self.seconds)
        self._note(answers.failures)
        findings = [finding for part in answers.parts for finding in part.findings]
        explained = {finding.column for finding in findings if finding.name != "drift"}
        return [finding for finding in findings if finding.name != "drift" or finding.column not in explained]

    def _note(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            self.roster.note(f"statistics of {failure.client}: {failure.reason}; the run goes on without")


def write_sums(sums: SiteSums) -> RecordDict:
    """Return what a node tells as a message."""
    return wire.content(SumsForm(**_written(sums)), _arrays(sums))


def _written(sums: SiteSums) -> dict[str, Any]:
    words = {name: dict(counts) for name, counts in sums.words.items()}
    return {"rows": sums.rows, "columns": list(sums.columns), "words": words}


def _arrays(sums: SiteSums) -> Mapping[str, NDArray[Any]]:
    return {"present": sums.present, "mean": sums.mean, "deviation": sums.deviation, "bins": sums.bins}


def read_sums(text: object, arrays: ArrayRecord, of: type[SumsForm] = SumsForm) -> SiteSums:
    """Return what a node told, or what the others have together, or refuse it."""
    wire.refuse_size(text, arrays, _LARGEST, _LARGEST)
    form = of.read(text, _LARGEST)
    named = [*form.columns, *form.words, *(word for counts in form.words.values() for word in counts)]
    if len(form.columns) > MOST_COLUMNS or any(len(name) > _LONGEST_NAME for name in named):
        raise Refused(f"columns: {len(form.columns)}; allowed: at most {MOST_COLUMNS}, with names of {_LONGEST_NAME}")
    length = (len(form.columns),)
    shapes: dict[str, Shape] = {"present": ("<i8", length), "mean": ("<f8", length), "deviation": ("<f8", length)}
    numbers = unpack_all(arrays, {**shapes, "bins": ("<i8", (*length, BINS))})
    sums = SiteSums(form.rows, tuple(form.columns), **numbers, words=form.words)
    if fault := sums.fault():
        raise Refused(fault)
    return sums


def words(sums: SiteSums, *, scales: bool, counts: bool = True) -> str:
    """Say for the owner what leaves."""
    if not counts:
        named = ", ".join(f"{name}: {', '.join(sums.levels(name))}" for name in sums.words)
        return f"{sums.rows} rows, the names of {len(sums.columns)} columns of numbers{named and f', words of {named}'}"
    told = int((sums.present > 0).sum())
    few = f"; of {len(sums.columns) - told} nothing, for they have too few" if told < len(sums.columns) else ""
    what = "mean, deviation and cells" if scales else "cells"
    worded = f", and how often words are in {', '.join(sums.words)}" if sums.words else ""
    return f"{what} in bins of {told} columns of numbers{few}{worded}"


def write_findings(findings: Sequence[Finding], least: int) -> list[SaidFinding]:
    """Return what leaves of findings: none that rests on fewer rows than `least`, and nothing but name and factor."""
    told = [finding for finding in findings if finding.figures.get("rows", least) >= least]
    return [
        SaidFinding(name=one.name, column=one.column, factor=_coarse(one.figures.get("factor")))
        for one in told[:_MOST_FINDINGS]
    ]


def _coarse(factor: float | None) -> float | None:
    return None if factor is None else float(f"{factor:.0e}")


def read_findings(content: RecordDict, clients: Sequence[str], told: SiteSums) -> list[Finding]:
    """Return what a node says of itself, in our own words, or refuse it."""
    text, arrays = wire.split(content)
    wire.refuse_size(text, arrays, _LARGEST, 0)
    said = FindingsForm.read(text, _LARGEST).findings
    for one in said[: _MOST_FINDINGS + 1]:
        if one.name not in NAMES or one.column not in ("", *told.columns, *told.words):
            raise Refused(f"findings: got {one.name[:40]!r} of {one.column[:40]!r}; allowed: those that there are")
        if one.factor is not None and not (isfinite(one.factor) and 1e-12 <= one.factor <= 1e12):
            raise Refused(f"findings: a factor of {one.factor:g}; allowed: 1e-12 to 1e12")
    if len(said) > _MOST_FINDINGS:
        raise Refused(f"findings: {len(said)}; allowed: at most {_MOST_FINDINGS}")
    return [_in_words(one, ", ".join(clients)) for one in said]


def _in_words(said: SaidFinding, site: str) -> Finding:
    where = f"column '{said.column}' at '{site}'" if said.column else f"'{site}'"
    times = "" if said.factor is None else f" is about {said.factor:g} times as large as at the others,"
    figures = {} if said.factor is None else {"factor": said.factor}
    return found(said.name, f"{where}{times} as its node says", None, said.column, figures=figures, site=site)


def _alike(roster: Roster, parts: Sequence[Told]) -> list[Told]:
    """Leave out, and note, who has other columns than most."""
    counted = Counter(part.sums.columns for part in parts)
    usual = max(sorted(counted), key=lambda columns: counted[columns], default=())
    for part in parts:
        if odd := sorted(set(part.sums.columns) ^ set(usual)):
            roster.note(f"statistics of {wire.names(part.clients)}: other columns than most: {wire.names(odd)}")
    return [part for part in parts if part.sums.columns == usual]
