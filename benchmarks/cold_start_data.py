"""Data sets of which some items are new: what is read of each, and draws that hold a share of the items out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.base.randomness import generator
from steelyard.data.files import find
from steelyard.recommend.interactions import Codes, Interactions, build, core, read, single
from steelyard.recommend.knowledge.features import ItemFeatures
from steelyard.recommend.knowledge.loading import KnowledgeSettings, load_features
from steelyard.recommend.metrics import GroundTruth

SHARE = 0.2
"""Of the items, so many are new in a draw."""


@dataclass(frozen=True)
class Case:
    """A data set: its files, what is kept of it, what is known of its items, and how many triples make a round."""

    files: tuple[str, ...]
    core: int
    knowledge: dict[str, Any]
    threshold: float | None = None
    triples: int = 5
    rate: float = 0.1
    epochs: tuple[int, ...] = (5, 15, 40)
    """Among these the length of KGFlex' training is chosen."""


CASES = {
    "books": Case(
        ("facebook_books/dataset.tsv.gz",),
        5,
        {
            "sources": [
                {
                    "path": "facebook_books/item_features.tsv.gz",
                    "predicates": "facebook_books/predicate_mapping.tsv.gz",
                }
            ]
        },
    ),
    "yahoo": Case(
        ("yahoo_movies/trainingset.tsv.gz", "yahoo_movies/testset.tsv.gz"),
        10,
        {"sources": [{"path": "yahoo_movies/map.tsv.gz"}]},
        3,
        epochs=(5, 15),
    ),
    "ml1m": Case(
        ("movielens_1m/ratings.dat.gz",),
        10,
        {
            "inverse": True,
            "sources": [
                {
                    "path": "yahoo_movies/map.tsv.gz",
                    "format": "map",
                    "links": "movielens_1m_dbpedia/MappingMovielens2DBpedia-1.2.tsv",
                    "entities": "yahoo_movies/mappingLinkedData.tsv",
                },
                {
                    "path": "movielens_1m_dbpedia/dbpedia_triples.tsv.gz",
                    "links": "movielens_1m_dbpedia/MappingMovielens2DBpedia-1.2.tsv",
                },
                {"path": "movielens_1m/movies.dat"},
            ],
        },
        3,
        rate=0.02,
        epochs=(2, 4),
    ),
}
"""As in the recipes; features are those of at least 11 items, whether these are held out or not: they are public."""


@dataclass(frozen=True, eq=False)
class Draw:
    """One draw of new items: the training without them, and the test on them alone, numbered apart."""

    train: Interactions
    """All items of the catalogue have numbers here; the new ones have no rows."""
    new: Codes
    """The numbers of the new items, ascending."""
    truth: GroundTruth
    """The test: users as in `train`, items by their index in `new`."""
    features: ItemFeatures

    @property
    def old(self) -> Codes:
        """The numbers of all other items."""
        return np.setdiff1d(np.arange(len(self.train.items)), self.new)


def data_of(case: Case) -> Interactions:
    """Read and filter a data set's interactions, test files included."""
    parts = [read(find(Path(name), "interactions", field=name)) for name in case.files]
    users = [user for part in parts for user in part.users[part.user].tolist()]
    items = [item for part in parts for item in part.items[part.item].tolist()]
    rating = np.concatenate([part.rating for part in parts]).tolist()
    return core(single(build(users, items, rating)), case.core, case.core)


def prepared(name: str) -> tuple[Case, Interactions, ItemFeatures]:
    """Read a data set and what is known of its items."""
    case = CASES[name]
    data = data_of(case)
    settings = KnowledgeSettings.model_validate({"min_items": 11, **case.knowledge})
    return case, data, load_features(settings, data.items)


def draw(data: Interactions, features: ItemFeatures, case: Case, number: int) -> Draw:
    """Hold a share of the items out of training; users who have nothing left are left out of the test too."""
    items = len(data.items)
    count = round(SHARE * items)
    new = np.sort(generator(number, 0, "", "new items").choice(items, size=count, replace=False))
    held = np.isin(data.item, new)
    train = data.select(~held, renumber=False)
    test = data.select(held & (train.per_user()[data.user] > 0), renumber=False)
    relevant = np.ones(len(test), dtype=bool) if case.threshold is None else test.rating >= case.threshold
    pairs = np.unique(test.user[relevant] * count + np.searchsorted(new, test.item[relevant]))
    nobody = np.zeros(0, dtype=np.int64)
    truth = GroundTruth(len(data.users), count, nobody, nobody, pairs // count, pairs % count)
    return Draw(train, new, truth, features)
