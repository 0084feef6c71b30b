"""A knowledge graph in memory: triples as three columns of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from steelyard.recommend.interactions import Codes
from steelyard.recommend.knowledge.naming import counted

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
