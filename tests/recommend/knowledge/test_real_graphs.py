"""The graphs of real data sets, where they are at hand: counts that are published or were counted another way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from steelyard.recommend.knowledge.loading import Loaded, load
from steelyard.recommend.knowledge.readers import read_links
from steelyard.recommend.knowledge.settings import KnowledgeSettings
from steelyard.recommend.reading import read


def folder(name: str) -> Path:
    folders = [Path(os.environ.get("STEELYARD_DATA", "../shared/data")), Path("../shared/data")]
    found = next((each / name for each in folders if (each / name).is_dir()), None)
    if found is None:
        pytest.skip(f"needs {name} in STEELYARD_DATA or ../shared/data")
    return found


def loaded(ratings: Path, **fields: Any) -> Loaded:
    return load(KnowledgeSettings.model_validate(fields), read(ratings).items)


def test_facebook_books_are_those_of_kgflex() -> None:
    data = folder("facebook_books")
    source = {"path": data / "item_features.tsv.gz", "predicates": data / "predicate_mapping.tsv.gz"}
    found = loaded(data / "dataset.tsv.gz", sources=[source], min_items=11, counted="source")
    # KGFlex's readme: 2,726 items, 306,847 features; all of more than 10 items.
    assert found.features.matrix.shape == (2726, 7761)
    assert found.features.matrix.nnz == 306_847
    assert found.features.by_hop() == {1: 523, 2: 7238}
    assert found.features.per_feature().min() == 11


def test_movielens_1m_has_the_features_that_pandas_counts() -> None:
    # How long it takes: `python -m benchmarks.knowledge`.
    data = folder("movielens_1m_dbpedia")
    links = data / "MappingMovielens2DBpedia-1.2.tsv"
    items, _ = read_links(links)
    source = {"path": data / "dbpedia_triples.tsv.gz", "links": links}
    one = load(KnowledgeSettings.model_validate({"sources": [source]}), items)
    two = load(KnowledgeSettings.model_validate({"sources": [source], "inverse": True}), items)
    # Counted with pandas: 407 pairs of property and object have 10 films or more.
    assert one.features.by_hop() == {1: 407}
    assert two.features.by_hop()[1] == 407
    assert two.features.by_hop()[2] > 7000
    assert "starring: Robert De Niro" in one.features.names_of(items.index("6"))


def test_yahoo_movies_have_features_without_names() -> None:
    data = folder("yahoo_movies")
    found = loaded(data / "trainingset.tsv.gz", sources=[{"path": data / "map.tsv.gz"}])
    assert found.report.hops[0].found == 127_171
    assert found.report.described == found.features.items == 2528
