"""How long a knowledge graph takes to become features: MovieLens 1M, one hop, two hops backwards, two made-up hops.

    python -m benchmarks.knowledge --format json

The triples at hand are about films alone, so a real second hop over people and companies cannot be had. The third case
makes one up: each of their objects gets facts of its own, drawn by seed, as many as give about the 2.28 million pairs
of film and feature that KGFlex's authors report for MovieLens 1M. It measures time and memory and nothing else.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit import Format, peak_mb, start, table
from steelyard.base.randomness import generator
from steelyard.data.files import find
from steelyard.recommend.knowledge.loading import KnowledgeSettings, load
from steelyard.recommend.knowledge.readers import read_links, read_triples

FOLDER = "movielens_1m_dbpedia"
FACTS = {
    "birthPlace": (2, 400),
    "occupation": (5, 60),
    "subject": (58, 6000),
    "spouse": (1, 5000),
    "award": (4, 300),
    "genre": (6, 80),
    "knownFor": (10, 4000),
    "activeYears": (4, 80),
    "nationality": (2, 60),
    "label": (4, 300),
}
"""Made-up predicates of a second hop: facts for each object, and how many values there are to draw from."""


def made_up(objects: list[str], seed: int = 1) -> list[tuple[str, str, str]]:
    """Return facts about objects; values are drawn by 1 / rank, so that few are common and many rare."""
    source = generator(seed, 0, "", "made-up second hop")
    rows: list[tuple[str, str, str]] = []
    for predicate, (facts, values) in FACTS.items():
        chances = 1.0 / np.arange(1, values + 1)
        drawn = source.choice(values, size=(len(objects), facts), p=chances / chances.sum())
        rows += [
            (name, f"made-up:{predicate}", f"made-up:{predicate}/{value}")
            for name, values_of in zip(objects, drawn.tolist(), strict=True)
            for value in values_of
        ]
    return rows


def cases(folder: Path, second: Path) -> dict[str, dict[str, Any]]:
    """Return the sections [knowledge] to be timed."""
    graph = {"path": folder / "dbpedia_triples.tsv.gz", "links": folder / "MappingMovielens2DBpedia-1.2.tsv"}
    further = {"path": second, "format": "triples", "links": graph["links"]}
    return {
        "one hop": {"hops": 1, "sources": [graph]},
        "two hops, backwards": {"inverse": True, "sources": [graph]},
        "two hops, the second made up": {"sources": [graph, further]},
    }


def measure() -> dict[str, dict[str, float]]:
    """Load the features of each case and return seconds, counts and the peak memory so far."""
    folder = find(Path(FOLDER), "MovieLens 1M with DBpedia triples", field="data")
    items, _ = read_links(folder / "MappingMovielens2DBpedia-1.2.tsv")
    objects = sorted(set(read_triples(folder / "dbpedia_triples.tsv.gz").objects))
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        second = Path(scratch) / "second.tsv"
        second.write_text("".join("\t".join(row) + "\n" for row in made_up(objects)), encoding="utf-8")
        for name, fields in cases(folder, second).items():
            begun = time.perf_counter()
            features = load(KnowledgeSettings.model_validate(fields), items).features
            found[name] = {
                "seconds": round(time.perf_counter() - begun, 2),
                "features": features.features,
                "pairs": features.matrix.nnz,
                "peak_mb": round(peak_mb()),
            }
    return found


def main(format: Format = "text") -> None:
    """Print the table, or one JSON document."""
    found = measure()
    print(json.dumps(found) if format == "json" else table([{"case": name, **row} for name, row in found.items()]))


if __name__ == "__main__":
    start(main)
