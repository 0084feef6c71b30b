"""A knowledge graph in memory: triples as three columns of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError, counted
from steelyard.recommend.interactions import Codes
from steelyard.recommend.knowledge.features import INVERSE, Csr

Texts = Sequence[str] | NDArray[np.object_]


@dataclass(frozen=True, eq=False)
class Graph:
    """The triples subject, predicate, object; nodes and predicates are numbered in ascending order of their text."""

    nodes: list[str]
    predicates: list[str]
    subject: Codes
    """The subject of each triple, as an index into `nodes`."""
    predicate: Codes
    object: Codes
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of nodes and predicates, where they are known."""

    def __len__(self) -> int:
        return len(self.subject)

    def __str__(self) -> str:
        counts = {"triple": len(self), "node": len(self.nodes), "predicate": len(self.predicates)}
        return ", ".join(counted(count, word) for word, count in counts.items())


@dataclass(frozen=True, eq=False)
class Triples:
    """Triples as a file gives them: three columns of text, and names of entities where the file has some."""

    subjects: Texts
    predicates: Texts
    objects: Texts
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


def build(parts: Sequence[Triples]) -> Graph:
    """Join the triples of one or more files into one graph, so that a chain may lead from one file into another.

    A triple that stands there several times is one.
    """
    # For speed of start: much of the package reads no tables.
    import pandas as pd

    def column(name: str) -> NDArray[np.object_]:
        return np.concatenate([np.asarray(getattr(part, name), dtype=object) for part in parts])

    subjects, objects = column("subjects"), column("objects")
    codes, nodes = pd.factorize(np.concatenate([subjects, objects]), sort=True)
    predicate, predicates = pd.factorize(column("predicates"), sort=True)
    triples = pd.DataFrame({"s": codes[: len(subjects)], "p": predicate, "o": codes[len(subjects) :]}).drop_duplicates()
    subject, predicate, target = (triples[name].to_numpy(dtype=np.int64) for name in "spo")
    return Graph(
        nodes=[str(node) for node in nodes],
        predicates=[str(name) for name in predicates],
        subject=subject,
        predicate=predicate,
        object=target,
        labels={name: label for part in parts for name, label in part.labels.items()},
    )


# Exploration from each item along predicate chains of up to n hops (thesis Eq. 6.1). A hop is one sparse product: items
# × nodes reached, times nodes × (predicate, object). Nothing loops over triples; the loop is over the predicates of the
# hop before, so that the features of one chain stand together.


BLOCK = 30_000_000
"""Pairs that one product may meet; a larger one is done in parts, predicate by predicate."""
MOST = 3_000_000_000
"""Pairs that the chains behind one predicate may meet: beyond, an exploration would not end."""


@dataclass(frozen=True)
class Walk:
    """How a graph is explored."""

    hops: int = 2
    blocked: frozenset[str] = frozenset()
    blocked_at_any: bool = False
    """Whether blocked predicates are left out at every hop; else at the first alone, as in the thesis."""
    inverse: bool = False


@dataclass(frozen=True, eq=False)
class Reached:
    """The features ⟨ρ, ω⟩ of one chain ρ: which item reaches which objects ω along it."""

    chain: tuple[str, ...]
    objects: Codes
    """The nodes that are objects, ascending."""
    matrix: Csr
    """[items, objects] of booleans, as CSC."""


@dataclass(frozen=True, eq=False)
class _Steps:
    """One hop from every node: columns are the pairs of predicate and object, in ascending order."""

    names: list[str]
    matrix: Csr
    """[nodes, columns] of booleans, as CSR."""
    predicate: Codes
    object: Codes


def explore(graph: Graph, links: Csr, walk: Walk) -> Iterator[Reached]:
    """Yield the features of every chain that an item reaches; `links` marks each item's entities, [items, nodes].

    Chains come in ascending order of their hops' names, a chain before those that continue it. A chain that comes back
    to the item where it began says nothing of it and is left out.
    """
    first = _steps(graph, walk, leave_out=True)
    later = _steps(graph, walk, leave_out=walk.blocked_at_any) if walk.hops > 1 else first
    nodes = np.arange(len(graph.nodes))
    yield from _follow(links, nodes, (), first, later, links, walk.hops)


def blocked_triples(graph: Graph, entities: Codes, walk: Walk) -> dict[str, int]:
    """Return how many triples of each blocked predicate are left out: those at the items' `entities`, or all.

    Use it for the account of features. Where a predicate is blocked at the first hop alone, its other triples count.
    """
    out = np.array([name in walk.blocked for name in graph.predicates], dtype=bool)[graph.predicate]
    if not walk.blocked_at_any:
        there = np.zeros(len(graph.nodes), dtype=bool)
        there[entities] = True
        out &= there[graph.subject] | (there[graph.object] & walk.inverse)
    times = np.bincount(graph.predicate[out], minlength=len(graph.predicates)).tolist()
    return {name: count for name, count in zip(graph.predicates, times, strict=True) if count}


def _follow(
    reached: Csr, nodes: Codes, chain: tuple[str, ...], steps: _Steps, later: _Steps, links: Csr, hops: int
) -> Iterator[Reached]:
    """Take one hop from `nodes`, which items reach along `chain`, and further hops from where it leads."""
    for found, start in _products(reached, steps.matrix[nodes], steps.predicate, chain):
        columns = np.arange(start, start + found.shape[1])
        if chain:
            found = _without(found, links[:, steps.object[columns]])
        met = np.diff(found.indptr) > 0
        found, columns = found[:, np.flatnonzero(met)], columns[met]
        predicates, begins = np.unique(steps.predicate[columns], return_index=True)
        ends = np.append(begins, len(columns))[1:]
        for predicate, begin, end in zip(predicates.tolist(), begins.tolist(), ends.tolist(), strict=True):
            longer = (*chain, steps.names[predicate])
            objects, part = steps.object[columns[begin:end]], found[:, begin:end]
            yield Reached(longer, objects, part)
            if len(longer) < hops:
                yield from _follow(part.tocsr(), objects, longer, later, later, links, hops)


def _products(reached: Csr, steps: Csr, predicate: Codes, chain: tuple[str, ...]) -> Iterator[tuple[Csr, int]]:
    """Yield reached @ steps as CSC, in parts that begin with a predicate, each with its first column."""
    pairs = int(np.bincount(reached.indices, minlength=steps.shape[0]) @ np.diff(steps.indptr))
    if pairs > MOST:
        behind = f"that go on from '{' ~ '.join(chain)}'" if chain else "of the first hop"
        raise UserError(
            f"knowledge.hops: the chains {behind} meet {pairs / 1e9:,.0f} billion pairs; "
            "allowed: fewer hops, or more predicates in knowledge.blocked with blocked_at = 'any'"
        )
    begins = np.flatnonzero(np.diff(predicate, prepend=-1))
    wanted = np.linspace(0, steps.shape[1], pairs // BLOCK + 1, endpoint=False)
    cuts = np.unique(begins[np.searchsorted(begins, wanted, side="right") - 1]) if len(begins) else np.array([0])
    for start, end in zip(cuts.tolist(), [*cuts[1:].tolist(), steps.shape[1]], strict=True):
        part = steps if len(cuts) == 1 else steps[:, start:end]
        yield (reached @ part).tocsc(), start


def _without(found: Csr, own: Csr) -> Csr:
    """Return what was found less what is the item itself."""
    both = found.multiply(own)
    if not both.nnz:
        return found
    left = (found.astype(np.int8) - both.astype(np.int8)).tocsc()
    left.eliminate_zeros()
    return left.astype(bool)


def _steps(graph: Graph, walk: Walk, *, leave_out: bool) -> _Steps:
    from scipy import sparse  # For speed of start: much of the package needs no SciPy.

    blocked = np.array([leave_out and name in walk.blocked for name in graph.predicates], dtype=bool)
    rows = np.flatnonzero(~blocked[graph.predicate]) if len(graph) else np.zeros(0, dtype=np.int64)
    names = list(graph.predicates)
    subject, predicate, target = graph.subject[rows], graph.predicate[rows], graph.object[rows]
    if walk.inverse:
        predicate = np.concatenate([predicate, predicate + len(names)])
        subject, target = np.concatenate([subject, target]), np.concatenate([target, subject])
        names += [name + INVERSE for name in names]
    # Ascending by name: a predicate and its inverse stand side by side.
    order = np.argsort(np.argsort(np.array(names, dtype=object), kind="stable"))
    names = sorted(names)
    width = max(len(graph.nodes), 1)
    packed, column = np.unique(order[predicate] * width + target, return_inverse=True)
    ones = np.ones(len(subject), dtype=bool)
    matrix = sparse.coo_array((ones, (subject, column.reshape(-1))), shape=(len(graph.nodes), len(packed))).tocsr()
    return _Steps(names, matrix, packed // width, packed % width)
