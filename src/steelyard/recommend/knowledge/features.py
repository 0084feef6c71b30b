"""Item features: what is known of each item, as one sparse matrix of items × features with readable names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import counted
from steelyard.recommend.interactions import Codes, Flags

PREFIXES: Mapping[str, str] = {
    "dbo": "http://dbpedia.org/ontology/",
    "dbp": "http://dbpedia.org/property/",
    "dbr": "http://dbpedia.org/resource/",
    "dct": "http://purl.org/dc/terms/",
    "dc": "http://purl.org/dc/elements/1.1/",
    "foaf": "http://xmlns.com/foaf/0.1/",
    "gold": "http://purl.org/linguistics/gold/",
    "owl": "http://www.w3.org/2002/07/owl#",
    "prov": "http://www.w3.org/ns/prov#",
    "rdf": "http://www.w3.org/1999/02/22-rdf-syntax-ns#",
    "rdfs": "http://www.w3.org/2000/01/rdf-schema#",
    "schema": "http://schema.org/",
    "skos": "http://www.w3.org/2004/02/skos/core#",
    "wd": "http://www.wikidata.org/entity/",
    "wdt": "http://www.wikidata.org/prop/direct/",
}
"""Prefixes that may stand in settings, as in dbo:director."""

LABELS = frozenset({PREFIXES["rdfs"] + "label", PREFIXES["skos"] + "prefLabel"})
"""Predicates that name an entity: they make names, never features."""
INVERSE = "⁻¹"
"""Follows a predicate that is walked from its object to its subject."""
ARROW = " → "


def expanded(name: str) -> str:
    """Return the full IRI of a prefixed name such as dbo:director; anything else as it is."""
    prefix, colon, rest = name.partition(":")
    return PREFIXES[prefix] + rest if colon and prefix in PREFIXES and not rest.startswith("//") else name


def prefixed(iri: str) -> str:
    """Return an IRI in its short form where its vocabulary is known: dbo:director; anything else as it is."""
    for prefix, base in PREFIXES.items():
        if iri.startswith(base):
            return f"{prefix}:{iri[len(base) :]}"
    return iri


def words(text: str) -> str:
    """Return the last part of an IRI as words, "Steven Spielberg"; text that is no IRI stays as it is."""
    if "://" not in text:
        return text
    last = text.rstrip("/#").replace("#", "/").rsplit("/", 1)[-1]
    # A percent sign may hide bytes that are no text; those are replaced.
    return unquote(last, errors="replace").replace("_", " ").strip() or text


def distinct(names: Iterable[str], labels: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a readable form of each name: its label, else its words; where two would read the same, more of both."""
    known = labels or {}
    names = list(dict.fromkeys(names))
    short = {name: known.get(name) or words(name) for name in names}
    times = Counter(short.values())
    return {name: short[name] if times[short[name]] == 1 else prefixed(name) for name in names}


def readable(
    chains: Sequence[tuple[str, ...]], objects: Sequence[str], labels: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return each feature ⟨ρ, ω⟩ in words: "director → birthPlace: Cincinnati"."""
    steps = distinct((step.removesuffix(INVERSE) for chain in chains for step in chain), labels)
    ends = distinct(objects, labels)
    worded = {chain: ARROW.join(_step(step, steps) for step in chain) for chain in dict.fromkeys(chains)}
    return tuple(f"{worded[chain]}: {ends[end]}" for chain, end in zip(chains, objects, strict=True))


def _step(step: str, names: Mapping[str, str]) -> str:
    return names[step.removesuffix(INVERSE)] + (INVERSE if step.endswith(INVERSE) else "")


# The sieve: which features are kept: those of enough items and not of nearly all, and at most so many of each hop.


@dataclass(frozen=True)
class Limits:
    """How often a feature may and must occur."""

    min_items: int = 10
    max_share: float = 1.0
    max_features: int | None = None


class Sieve:
    """Takes features chain by chain, keeps those within the limits, and counts what it drops.

    The first `items` rows of every matrix are the data set's items; features are counted over all rows.
    """

    def __init__(self, items: int, limits: Limits) -> None:
        self.items = items
        self.limits = limits
        self._found: Counter[int] = Counter()
        self._rare: Counter[int] = Counter()
        self._common: Counter[int] = Counter()
        self._names: list[tuple[tuple[str, ...], str]] = []
        self._kept: list[Csr] = []

    def add(self, chains: Sequence[tuple[str, ...]], objects: Sequence[str], matrix: Csr) -> None:
        """Take the columns of a CSC matrix as features, each with its chain and its object."""
        hops = np.fromiter(map(len, chains), dtype=np.int64, count=len(chains))
        keep, rare, common = self._within(matrix)
        self._found.update(hops.tolist())
        self._rare.update(hops[rare].tolist())
        self._common.update(hops[common].tolist())
        columns = np.flatnonzero(keep)
        self._names += [(chains[column], objects[column]) for column in columns.tolist()]
        self._kept.append(matrix[: self.items, columns])

    def _within(self, matrix: Csr) -> tuple[Flags, Flags, Flags]:
        """Return which columns are kept, which are too rare (or no item of the data has them), which too common."""
        counts = np.diff(matrix.indptr)
        here = counts if matrix.shape[0] == self.items else np.diff(matrix[: self.items].indptr)
        rare = (counts < self.limits.min_items) | (here == 0)
        common = ~rare & (counts > self.limits.max_share * matrix.shape[0])
        return ~rare & ~common, rare, common

    def result(self, labels: dict[str, str]) -> tuple[ItemFeatures, list[HopCount]]:
        """Return the features that are kept, ordered by hop, chain and object, and the count of each hop."""
        from scipy import sparse  # For speed of start: much of the package needs no SciPy.

        none = sparse.csc_array((self.items, 0), dtype=bool)
        whole: Csr = sparse.hstack([none, *self._kept], format="csc")
        times = np.diff(whole.indptr)
        order = sorted(range(len(self._names)), key=self._names.__getitem__)
        chosen: list[int] = []
        counts: list[HopCount] = []
        for hop, found in sorted(self._found.items()):
            ours = [each for each in order if len(self._names[each][0]) == hop]
            best = set(sorted(ours, key=lambda each: -int(times[each]))[: self.limits.max_features])
            chosen += [each for each in ours if each in best]
            pairs = int(times[list(best)].sum())
            counts.append(HopCount(hop, found, self._rare[hop], self._common[hop], len(ours) - len(best), pairs))
        chains, objects = [self._names[each][0] for each in chosen], [self._names[each][1] for each in chosen]
        items, features = whole[:, chosen].nonzero()
        hops = np.array([len(chain) for chain in chains], dtype=np.int8)
        return build(items, features, self.items, readable(chains, objects, labels), hops), counts


# The account: what became of a graph on the way to features: how many came from which hop, and what was dropped where.


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


Hops = NDArray[np.int8]
Csr = Any
"""A scipy.sparse.csr_array, which has no types of its own."""


@dataclass(frozen=True, eq=False)
class ItemFeatures:
    """F_i of every item (thesis Eq. 6.1): row i of `matrix` marks the features ⟨ρ, ω⟩ of item i.

    Rows stand in the order of the data set's items, an item without features has an empty row. Use it as the one form
    in which content-based recommenders see a knowledge graph, genres or any other attributes.
    """

    matrix: Csr
    """[items, features], ones as int8; the column indices of each row ascend."""
    names: tuple[str, ...]
    """Each feature in words: predicate chain and object, as in "director: Steven Spielberg"."""
    hops: Hops
    """Length of each feature's predicate chain: 1 or 2, or more if the exploration went further."""

    def __post_init__(self) -> None:
        features = self.matrix.shape[1]
        if not features == len(self.names) == len(self.hops):
            raise ValueError(f"{features} columns, {len(self.names)} names and {len(self.hops)} hops of features")
        if not self.matrix.has_sorted_indices:
            raise ValueError("the column indices of each item must ascend")

    def __str__(self) -> str:
        items, features = self.matrix.shape
        by_hop = ", ".join(f"{count:,} of {counted(hop, 'hop')}" for hop, count in self.by_hop().items())
        shown = f"{counted(features, 'feature')} ({by_hop})" if features else "no features"
        return f"{shown} of {counted(items, 'item')} in {counted(self.matrix.nnz, 'pair')}"

    @property
    def items(self) -> int:
        """Number of items, also those without features."""
        return int(self.matrix.shape[0])

    @property
    def features(self) -> int:
        """Number of features."""
        return int(self.matrix.shape[1])

    def of(self, item: int) -> Codes:
        """Return the features of one item, ascending."""
        return self.matrix.indices[self.matrix.indptr[item] : self.matrix.indptr[item + 1]].astype(np.int64)

    def names_of(self, item: int) -> list[str]:
        """Return the features of one item in words."""
        return [self.names[feature] for feature in self.of(item).tolist()]

    def per_feature(self) -> Codes:
        """Return the number of items that have each feature."""
        return np.bincount(self.matrix.indices, minlength=self.features)

    def per_item(self) -> Codes:
        """Return the number of features of each item."""
        return np.diff(self.matrix.indptr).astype(np.int64)

    def by_hop(self) -> Mapping[int, int]:
        """Return how many features there are of each number of hops."""
        hops, counts = np.unique(self.hops, return_counts=True)
        return {int(hop): int(count) for hop, count in zip(hops, counts, strict=True)}


def build(
    items: Codes, features: Codes, count: int, names: Sequence[str], hops: Sequence[int] | Hops | None = None
) -> ItemFeatures:
    """Make item features from pairs of item and feature numbers; repeated pairs count once, hops default to 1.

    `count` is the number of items of the data set, also those that no pair names.
    """
    from scipy import sparse  # For speed of start: much of the package needs no SciPy.

    ones = np.ones(len(items), dtype=np.int8)
    found = sparse.coo_array((ones, (items, features)), shape=(count, len(names))).tocsr()
    # Repeated pairs are summed, which 128 of them would overflow.
    found.data = np.ones(found.nnz, dtype=np.int8)
    found.sort_indices()
    return ItemFeatures(
        found, tuple(names), np.ones(len(names), dtype=np.int8) if hops is None else np.asarray(hops, dtype=np.int8)
    )
