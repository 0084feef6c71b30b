"""What became of a graph on the way to features: how many came from which hop, and what was dropped where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from steelyard.recommend.knowledge.naming import counted, prefixed


@dataclass(frozen=True)
class HopCount:
    """The features of one number of hops: found, dropped for each reason, kept."""

    hop: int
    found: int
    rare: int
    """Dropped: of fewer items than knowledge.min_items."""
    common: int
    """Dropped: of a larger share of the items than knowledge.max_share."""
    beyond: int
    """Dropped: beyond knowledge.max_features."""
    pairs: int
    """Pairs of an item and a kept feature."""

    @property
    def kept(self) -> int:
        """Number of features that are left."""
        return self.found - self.rare - self.common - self.beyond


@dataclass(frozen=True)
class FeatureReport:
    """The account of one loading of features; read it to see what an experiment's items are described by."""

    sources: Sequence[str]
    """What each file held."""
    items: int
    linked: int
    """Items of the data set that the sources know."""
    described: int
    """Items that have at least one feature in the end."""
    hops: Sequence[HopCount]
    blocked: Mapping[str, int] = field(default_factory=dict[str, int])
    """Blocked predicates that the sources held, with the number of triples or pairs that were left out."""

    def lines(self) -> list[str]:
        """Return the account for people, one line each."""
        shown = [*self.sources]
        shown += [f"blocked: {prefixed(name)}, {counted(count, 'time')}" for name, count in self.blocked.items()]
        for each in self.hops:
            dropped = {"rare": each.rare, "common": each.common, "beyond the cap": each.beyond}
            reasons = ", ".join(f"{count:,} {why}" for why, count in dropped.items() if count) or "none"
            shown.append(
                f"{counted(each.hop, 'hop')}: {each.found:,} found, dropped: {reasons}, "
                f"kept: {each.kept:,} in {counted(each.pairs, 'pair')}"
            )
        shown.append(f"items: {self.items:,}, known to the sources: {self.linked:,}, with features: {self.described:,}")
        return shown

    def document(self) -> dict[str, Any]:
        """Return the account for programs."""
        return {
            "sources": list(self.sources),
            "items": self.items,
            "linked": self.linked,
            "described": self.described,
            "blocked": dict(self.blocked),
            "hops": [{**asdict(each), "kept": each.kept} for each in self.hops],
        }
