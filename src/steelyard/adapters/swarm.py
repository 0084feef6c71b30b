"""A federation without a server, in which one site aggregates each round: what it hands on, and what it writes down.

With the model goes what the rule remembers, so that the next site weighs as if it had seen all rounds. Every site keeps
a journal of the rounds that it aggregated, in which each names the one before it by its digest: `steelyard import`
joins the journals of all sites into one run, and finds where one of them was changed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from steelyard.adapters.rounds import Combined, WeighedRounds
from steelyard.base.errors import UserError, told_as
from steelyard.base.journal import Journal

HANDED_ON = "steelyard"
"""The name under which a model's meta has what one site hands on to the next."""
BEFORE, RULE, MEASURE, TESTED = "round_before", "rule", "measure", "accuracy_before"
"""Columns of a journal: the digest of the round before, the rule, what tests are in, and a client's test of the model
that it got, which the round before has made."""


class Handed(BaseModel, extra="forbid", strict=True):
    """What a site knows of the rounds so far."""

    round: int = Field(default=0, ge=0)
    memory: dict[str, Any] = Field(default_factory=dict)
    digest: str = ""
    """Of the last round's rows."""


def digest_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the digest of a round's rows, in the order of clients."""
    ordered = sorted(rows, key=lambda row: str(row["client"]))
    return hashlib.sha256("\n".join(json.dumps(row, sort_keys=True) for row in ordered).encode()).hexdigest()


class Site:
    """One site of a swarm; `take_up` before it weighs a round, `hand_on` after. Without a folder it keeps no journal.

    Raises:
        UserError: the folder holds rounds of another job, or cannot be written.
    """

    def __init__(self, weighing: WeighedRounds, folder: Path | None, name: str, measure: str) -> None:
        self._weighing, self._measure, self._journal = weighing, measure, None
        self._digest = ""
        if folder is not None:
            file = folder / (re.sub(r"[^\w.-]", "_", name) + ".jsonl")
            with told_as(f"folder: {folder} cannot be written", "a folder on each site's machine"):
                folder.mkdir(parents=True, exist_ok=True)
                if file.exists():
                    raise UserError(f"folder: {file} holds rounds of another job; allowed: a new folder")
            self._journal = Journal(file)

    def take_up(self, meta: Mapping[str, Any]) -> str:
        """Go on from what the last site handed on; returns in words what was wrong with it, empty where nothing was."""
        handed, fault = Handed(), ""
        try:
            handed = Handed.model_validate_json(str(meta.get(HANDED_ON) or handed.model_dump_json()))
        except ValidationError as error:
            fault = f"what the last site handed on cannot be read: {error.errors()[0]['msg']}; the rule starts anew"
        self._weighing.go_on(handed.round, handed.memory)
        self._digest = handed.digest
        return fault

    def hand_on(self, combined: Combined, tests: Mapping[str, float], word: str) -> dict[str, str]:
        """Write a round down, and return what goes with its model."""
        number = self._weighing.round
        same = {"round": number, BEFORE: self._digest, RULE: word, MEASURE: self._measure}
        rows = [
            {
                **same,
                "client": client,
                "weight": combined.weights.get(client),
                "reason": combined.reasons.get(client, ""),
                "samples": combined.samples.get(client),
                TESTED: score if math.isfinite(score := tests.get(client, math.nan)) else None,
                **{name: combined.measures.get(client, {}).get(name) for name in self._weighing.rule.names},
            }
            for client in sorted({*combined.weights, *combined.reasons})
        ]
        if self._journal is not None:
            with told_as(f"folder: {self._journal.path} cannot be written"):
                self._journal.append([json.dumps(row, sort_keys=True) for row in rows])
        handed = Handed(round=number, memory=dict(self._weighing.memory), digest=digest_of(rows))
        return {HANDED_ON: handed.model_dump_json()}
