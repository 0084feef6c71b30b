"""The data sets of the recommender tables, filtered and split as the recipes do, once per process tree."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.foursquare_groups import group_of
from steelyard.recommend import filters, splits
from steelyard.recommend.interactions import Interactions
from steelyard.recommend.ranking import Ground, memberships
from steelyard.recommend.reading import read, read_columns
from steelyard.recommend.sampling import Histories
from steelyard.recommend.splits import Split, SplitKind
from steelyard.recommend.users import Users

VALIDATION = 0.2
"""Share of each user's training rows on which settings are chosen, as the thesis does (§4.5.3)."""
CITIES = ("Milan", "Rome", "Turin", "Florence", "Bologna", "Venice")


@dataclass(frozen=True)
class Source:
    """Where a data set is found below the data folder, and how it is split."""

    files: tuple[str, ...]
    split: SplitKind = "temporal"
    categories: str | None = None
    """A column of the interactions, or a file below the data folder (MovieLens' movies.dat)."""


SOURCES: Mapping[str, Source] = {
    "amazon": Source(("amazon_digital_music/AmazonDigitalMusic.tsv.gz",)),
    "italy": Source(tuple(f"foursquare_italy/{city}.tsv.gz" for city in CITIES), categories="type"),
    "ml1m": Source(("movielens_1m/ratings.dat.gz",), categories="movielens_1m/movies.dat"),
    # A fifth of LibraryThing's ratings, without times: drawn from each user's own stream.
    "librarything": Source(("librarything/ratings_20pct.tsv.gz",), split="random"),
    **{city.lower(): Source((f"foursquare_italy/{city}.tsv.gz",), categories="type") for city in CITIES},
}
"""Data sets by name, the most important first; "italy" is the six cities together."""


@dataclass(frozen=True, eq=False)
class Data:
    """One side of a data set's use: training rows, and those that lists are judged by."""

    split: Split
    users: Users

    @property
    def histories(self) -> Histories:
        return self.users.histories

    @property
    def ground(self) -> Ground:
        return self.users.ground


def root() -> Path:
    """Return the data folder: STEELYARD_DATA, or ../shared/data."""
    return Path(os.environ.get("STEELYARD_DATA", "../shared/data"))


@cache
def kept(name: str) -> Interactions:
    """Read a data set: one row per pair, users with 20 or more."""
    source = SOURCES[name]
    path = root() / source.files[0] if len(source.files) == 1 else _joined(name, source.files)
    return filters.keep(read(path), min_user=20)


@cache
def load(name: str, use: str) -> Data:
    """Return a data set for "validation" or "test", or "newest" (leave-one-out); the same users and items in all."""
    source, data = SOURCES[name], kept(name)
    split = splits.newest(data) if use == "newest" else splits.split(data, source.split, share=0.2, seed=42)
    if use == "validation":
        split = splits.validation(split.train, VALIDATION, 42)
    ground = Ground.of(split)
    if source.categories is not None:
        ground = ground.with_categories(data.items.tolist(), _members(data, source.categories))
    histories = Histories.of(split.train)
    return Data(split, Users(histories, ground, np.ones(histories.users), histories.items.astype(np.int64)))


def _members(data: Interactions, categories: str) -> list[tuple[str, str]]:
    if categories in data.columns:
        # An item has the type of its first row, and types are put together to the nine groups of the thesis.
        first = dict(zip(data.item[::-1].tolist(), data.columns[categories][::-1].tolist(), strict=True))
        return [(str(data.items[item]), group_of(kind)) for item, kind in first.items()]
    found = read_columns(root() / categories, {"item": 1, "category": 3})
    return memberships(found["item"], found["category"])


def _joined(name: str, files: Iterable[str]) -> Path:
    """Write several files with one header as one, beside the compiled code; return where."""
    path = scratch() / f"{name}.tsv"
    if not path.exists():
        tables = [gzip.decompress((root() / file).read_bytes()).decode().splitlines() for file in files]
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text("\n".join([tables[0][0], *(line for table in tables for line in table[1:])]) + "\n")
        part.replace(path)
    return path


def scratch() -> Path:
    """Return the folder for files that the tables need on the way."""
    folder = Path(os.environ.get("STEELYARD_SCRATCH", "/tmp/steelyard-tables"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
