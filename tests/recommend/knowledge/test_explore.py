"""Exploration: the thesis' example, chains by hand, and any small graph against a walk triple by triple."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from tests.kit import assert_refused

from steelyard.recommend.knowledge import graph as knowledge_graph
from steelyard.recommend.knowledge.graph import Graph, Triples, Walk, build, explore

Found = set[tuple[str, tuple[str, ...], str]]
"""Item, chain and object."""

PLACES = [
    ("Vondelpark", "type", "Location"),
    ("Vondelpark", "type", "Urban Park"),
    ("Vondelpark", "location", "Amsterdam"),
    ("Rijksmuseum", "type", "Art Museum"),
    ("Rijksmuseum", "location", "Amsterdam"),
    ("Amsterdam", "country", "Netherlands"),
    ("Amsterdam", "type", "City"),
]


def graph_of(triples: list[tuple[str, str, str]]) -> Graph:
    columns = list(zip(*triples, strict=True)) if triples else [(), (), ()]
    return build([Triples(*(list(column) for column in columns))])


def explored(triples: list[tuple[str, str, str]], items: list[str], **walk: object) -> Found:
    graph = graph_of(triples)
    known = [(row, graph.nodes.index(item)) for row, item in enumerate(items) if item in graph.nodes]
    rows, nodes = np.array(known, dtype=np.int64).reshape(-1, 2).T
    links = sparse.coo_array((np.ones(len(rows), bool), (rows, nodes)), shape=(len(items), len(graph.nodes))).tocsr()
    return {
        (items[row], reached.chain, graph.nodes[reached.objects[column]])
        for reached in explore(graph, links, Walk(**walk))  # type: ignore[arg-type]
        for row, column in zip(*reached.matrix.nonzero(), strict=True)
    }


def walked(
    triples: list[tuple[str, str, str]], items: list[str], hops: int, blocked: set[str], any_hop: bool, inverse: bool
) -> Found:
    """The same, one triple at a time, as Eq. 6.1 reads."""
    edges = set(triples)
    if inverse:
        edges |= {(o, p + "⁻¹", s) for s, p, o in triples}
    found: Found = set()
    for item in items:
        paths: set[tuple[tuple[str, ...], str]] = {((), item)}
        for hop in range(hops):
            paths = {
                ((*chain, p), o)
                for chain, at in paths
                for s, p, o in edges
                if s == at
                and not (p.removesuffix("⁻¹") in blocked and (hop == 0 or any_hop))
                and not (hop > 0 and o == item)
            }
            found |= {(item, chain, at) for chain, at in paths}
    return found


def test_the_example_of_the_thesis() -> None:
    here = ("location",)
    assert explored(PLACES, ["Rijksmuseum"], hops=2) == {
        ("Rijksmuseum", ("type",), "Art Museum"),
        ("Rijksmuseum", here, "Amsterdam"),
        ("Rijksmuseum", (*here, "country"), "Netherlands"),
        ("Rijksmuseum", (*here, "type"), "City"),
    }


NODES = st.sampled_from("abcde")
TRIPLES = st.lists(st.tuples(NODES, st.sampled_from("pqr"), NODES), max_size=14)


@settings(max_examples=100)
@given(TRIPLES, st.integers(1, 3), st.sets(st.sampled_from("pq"), max_size=1), st.booleans(), st.booleans())
def test_products_find_what_a_walk_finds(
    triples: list[tuple[str, str, str]], hops: int, blocked: set[str], any_hop: bool, inverse: bool
) -> None:
    found = explored(
        triples, ["a", "c", "z"], hops=hops, blocked=frozenset(blocked), blocked_at_any=any_hop, inverse=inverse
    )
    assert found == walked(triples, ["a", "c", "z"], hops, blocked, any_hop, inverse)


def test_an_exploration_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knowledge_graph, "MOST", 1)
    assert_refused(lambda: explored(PLACES, ["Rijksmuseum"], hops=2), "knowledge.hops", "fewer hops")
