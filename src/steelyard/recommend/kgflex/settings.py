"""[kgflex]: scoring by features in place of items' own factors."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from steelyard.settings import Section

Limit = Annotated[int, Field(ge=0, le=1_000_000)]


class KgflexSettings(Section):
    """[kgflex]: score items by the features that a user and an item share; [knowledge] says where features come from.

    With it, `fpl.factors` is the length of a feature's vectors, and the rest of [fpl] is the protocol that trains them.
    """

    limits: tuple[Limit, ...] = Field(default=(100, 100), min_length=1, max_length=4)
    """How many features of one hop a user keeps at most, of two hops, and so on: those with the most information."""
    others: float = Field(default=1.0, gt=0, le=1000)
    """Items of others per item of hers that gains are measured on: 1 in the thesis; more make small gains surer."""
    own_rate: float | None = Field(default=None, gt=0)
    """Step of users' own vectors, which no server sums over users; default: fpl.learning_rate, as in the thesis."""
    batch: int | None = Field(default=None, ge=1, le=1_000_000)
    """Train centrally, in batches of so many triples with all data in one place; default: the rounds of FPL."""
