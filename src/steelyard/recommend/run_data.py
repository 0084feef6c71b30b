"""From an experiment's sections to users on their devices: read, filter, split, and what is known of items."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from steelyard.base.errors import UserError, listed
from steelyard.base.marks import DataFile
from steelyard.base.settings import Section
from steelyard.data.files import State, find, states_of
from steelyard.recommend.evaluate import RankingSettings
from steelyard.recommend.fpl import FplSettings, Learning
from steelyard.recommend.histories import Histories, Users
from steelyard.recommend.interactions import (
    SECOND_FILE,
    Duplicates,
    Interactions,
    Split,
    ascending,
    at_least,
    by_flag,
    core,
    joined,
    newest,
    numbered,
    random,
    read,
    read_columns,
    shuffled,
    single,
    temporal,
)
from steelyard.recommend.metrics import Floats, GroundTruth, memberships


class InteractionSettings(Section):
    """[interactions]: the data, what is kept of it, and how each user's part is split."""

    path: Annotated[Path, DataFile("data")]
    """File of interactions in any known form, or a folder of such tables; relative paths are looked for here, in
    STEELYARD_DATA, ../shared/data."""
    catalogue: Annotated[Path, DataFile("catalogue")] | None = None
    """File of all item ids, also those nobody took; devices that hold only their own rows need it to number items."""
    columns: dict[Literal["user", "item", "rating", "time"], str] = Field(default_factory=dict)
    """The header's own names for user, item, rating and time, where they are not the usual ones."""
    duplicates: Duplicates = "first"
    """What stays of a repeated pair: its first row, its last, the first with the mean rating, or all ("keep")."""
    threshold: float | None = None
    """Keep rows rated at least this, as likes; default: keep all."""
    core: int = Field(default=0, ge=0)
    """Keep the k-core: users and items with at least k rows, until both hold."""
    min_user: int = Field(default=0, ge=0)
    """Keep users with at least this many rows."""
    min_item: int = Field(default=0, ge=0)
    """Keep items with at least this many rows; with min_user, again and again until both hold."""
    test: Path | None = None
    """A second file whose rows follow those of `path` before anything is dropped; split = "fixed" tests on them."""
    split: Literal["temporal", "random", "shuffled", "newest", "fixed"] = "temporal"
    """How each user's rows are cut: her newest, her own random draw, one shuffle for all, leave-the-newest-out, or
    "fixed": the rows of the file `test`."""
    share: float = Field(default=0.2, gt=0, lt=1)
    """Share of each user's rows that is tested on."""
    count: int = Field(default=1, ge=1)
    """For split = "newest": how many rows of each user are tested on."""
    validation: float | None = Field(default=None, gt=0, lt=1)
    """Share of each user's training part to be tested on in place of the test set, which is then not touched: for
    choosing settings. Her latest rows, or drawn where the split is random or shuffled. Default: use the test set."""
    split_seed: int = Field(default=42, ge=0)
    """Seed of the random and shuffled splits; kept apart from the experiment's seed, so that seeds share a split."""
    category_column: str | None = None
    """A column of the interactions that holds the item's category (Foursquare: "type")."""
    pi_column: str | None = None
    """A column of the interactions that holds the user's own π; her first row counts."""

    @model_validator(mode="after")
    def _test_file(self) -> Self:
        if self.split == "fixed" and self.test is None:
            raise UserError("split: got 'fixed' without a file of test rows; allowed: with interactions.test")
        return self

    def keep(self, data: Interactions) -> Interactions:
        """Apply all filters in their order: repeated pairs, ratings below the threshold, users and items with few."""
        data = single(data, self.duplicates)
        if self.threshold is not None:
            data = at_least(data, self.threshold)
        return core(data, max(self.core, self.min_user), max(self.core, self.min_item))

    def cut(self, data: Interactions) -> Split:
        """Cut off the test set; use `cut_again` on its training part where settings are to be chosen."""
        match self.split:
            case "temporal":
                return temporal(data, self.share)
            case "random":
                return random(data, self.share, self.split_seed)
            case "shuffled":
                return shuffled(data, self.share, self.split_seed)
            case "newest":
                return newest(data, self.count)
            case "fixed":
                return by_flag(data, data.columns[SECOND_FILE] == "yes")

    def cut_again(self, train: Interactions, share: float) -> Split:
        """Cut a training part: int(share · n) rows of each user are what settings are chosen on.

        They are her newest; without times, and where the test rows themselves were drawn, they are drawn from her own
        stream: to foretell what a user takes later is another task than to fill gaps, so settings chosen on one need
        not suit the other.
        """
        if train.time is None or self.split in ("random", "shuffled"):
            return random(train, share, self.split_seed, "validation")
        return temporal(train, share)


class ItemSettings(Section):
    """[items]: what is known of items: titles for people, categories for label diversity and bias disparity."""

    path: Annotated[Path, DataFile("items")]
    """Table of items, such as MovieLens' movies.dat or u.item."""
    item: str | int = "item"
    """Column of the item's id: a header name, or a number from 1."""
    title: str | int | None = None
    """Column of the title."""
    category: str | int | None = None
    """Column of the category; several are joined by `|` in the cell."""


@dataclass(frozen=True, eq=False)
class RunData:
    """The data of a run, ready: interactions as kept, their split, the users, titles of items."""

    data: Interactions
    split: Split
    users: Users
    learning: Learning
    titles: Mapping[str, str]
    split_seed: int = 42
    """Seed of what is drawn for the tests: kept apart from the experiment's, so that seeds share them."""

    @property
    def histories(self) -> Histories:
        return self.users.histories


@lru_cache(maxsize=4)
def _loaded(described: str, states: tuple[State, ...]) -> RunData:
    """Read what the sections describe; `states` are of the files that they name, so that edited ones are read again."""
    given = json.loads(described)
    interactions = InteractionSettings.model_validate(given["interactions"])
    items = None if given["items"] is None else ItemSettings.model_validate(given["items"])
    fpl, ranking = FplSettings.model_validate(given["fpl"]), RankingSettings.model_validate(given["ranking"])
    path = find(interactions.path, "a table of interactions", field="path (interactions.path)")
    data = filtered_interactions(path, interactions)
    found = assemble(data, split_interactions(data, interactions), interactions, items, fpl, ranking)
    if not found.users.truth.relevant.any():
        tested, share = ("test", "share") if interactions.validation is None else ("validation", "validation share")
        raise UserError(
            f"interactions: no user has a relevant {tested} item ({data}); allowed: more data, a larger {share}, or a "
            "lower ranking.threshold"
        )
    return found


def load_run_data(
    interactions: InteractionSettings, items: ItemSettings | None, fpl: FplSettings, ranking: RankingSettings
) -> RunData:
    """Read, filter and split, once for equal settings and files; `data.report()` has each step that drops something."""
    sections = {"interactions": interactions, "items": items, "fpl": fpl, "ranking": ranking}
    described = {name: None if part is None else part.model_dump(mode="json") for name, part in sections.items()}
    files = [interactions.path, interactions.catalogue, interactions.test, None if items is None else items.path]
    return _loaded(json.dumps(described), states_of(files))


def assemble(
    data: Interactions,
    split: Split,
    interactions: InteractionSettings,
    items: ItemSettings | None,
    fpl: FplSettings,
    ranking: RankingSettings,
) -> RunData:
    """Put split data onto the devices; `data` and both sides of the split share one numbering."""
    titles, pairs = _about_items(data, interactions, items)
    truth = GroundTruth.of(split, ranking.threshold)
    if pairs:
        truth = truth.with_categories(data.items.tolist(), pairs)
    histories = Histories.of(split.train)
    users = Users(histories, truth, _shares(data, interactions.pi_column, fpl.pi), _kinds(histories, truth))
    learning = Learning(fpl.learning_rate, fpl.factors, fpl.user_decay, fpl.positive_decay, fpl.negative_decay)
    return RunData(data, split, users, learning, titles, interactions.split_seed)


def filtered_interactions(path: Path, settings: InteractionSettings) -> Interactions:
    """Read a file and keep what the settings ask for."""
    columns = {str(key): name for key, name in settings.columns.items()}
    data = read(path, columns)
    if settings.test is not None:
        further = find(settings.test, "a table of interactions", field="test (interactions.test)")
        data = joined(data, read(further, columns))
    data = settings.keep(data)
    if not len(data):
        raise UserError(
            f"interactions: nothing is left of {path} ({'; '.join(data.report())}); allowed: looser filters"
        )
    return data if settings.catalogue is None else _numbered_by(data, settings.catalogue)


def _numbered_by(data: Interactions, catalogue: Path) -> Interactions:
    """Number the items by a public catalogue, so that devices that know only their own items agree on numbers."""
    path = find(catalogue, "a list of items", field="catalogue (interactions.catalogue)")
    items = ascending(read_columns(path, {"item": "item"})["item"])
    number = numbered(data.items.astype(object), items)
    if (number < 0).any():
        missing = str(data.items[int(np.flatnonzero(number < 0)[0])])
        raise UserError(f"interactions.catalogue: {path} lacks item '{missing}'; allowed: a list of every item")
    return replace(data, items=np.array(items, dtype=np.str_), item=number[data.item])


def split_interactions(data: Interactions, settings: InteractionSettings) -> Split:
    """Split as the settings say; with a validation share, the test side is a part of each user's training rows."""
    whole = settings.cut(data)
    return whole if settings.validation is None else settings.cut_again(whole.train, settings.validation)


def _about_items(
    data: Interactions, interactions: InteractionSettings, items: ItemSettings | None
) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return titles by item, and (item, category) pairs, from a table of items or a column of the interactions."""
    titles: dict[str, str] = {}
    pairs: list[tuple[str, str]] = []
    if items is not None:
        wanted = {"item": items.item, "title": items.title, "category": items.category}
        path = find(items.path, "a table of items", field="path (items.path)")
        found = read_columns(path, {name: column for name, column in wanted.items() if column is not None})
        if "title" in found:
            titles = dict(zip(found["item"], found["title"], strict=True))
        if "category" in found:
            pairs = memberships(found["item"], found["category"])
    if interactions.category_column is not None:
        labels = _column(data, interactions.category_column, "interactions.category_column")
        # An item has the category of its first row: a venue may be renamed, but must not count twice.
        items_seen, first = np.unique(data.item, return_index=True)
        pairs += memberships(data.items[items_seen].tolist(), labels[first].tolist())
    return titles, pairs


def _column(data: Interactions, name: str, field: str) -> np.ndarray:
    if name not in data.columns:
        raise UserError(
            f"{field}: got '{name}'; allowed: a further column of the data: {listed(data.columns) or 'none'}"
        )
    return data.columns[name]


def _kinds(histories: Histories, truth: GroundTruth) -> np.ndarray:
    """Return a label per training item: its first category where there are categories, else the item itself."""
    if not truth.categories:
        return histories.items.astype(np.int64)
    label = np.full(histories.catalogue, len(truth.categories), dtype=np.int64)
    label[truth.member_item[::-1]] = truth.member_category[::-1]
    return label[histories.items]


def _shares(data: Interactions, column: str | None, usual: float) -> Floats:
    """Return π of each user, in the order of the histories, which is that of the data."""
    if column is None:
        return np.full(len(data.users), usual)
    texts = _column(data, column, "interactions.pi_column")
    users, first = np.unique(data.user, return_index=True)
    shares = np.empty(len(data.users))
    for user, row in zip(users.tolist(), first.tolist(), strict=True):
        try:
            share = float(texts[row])
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise UserError(
                f"interactions.pi_column: '{column}' is {str(texts[row])!r} for {data.users[user]}; allowed: 0 to 1"
            )
        shares[user] = share
    return shares


def titles_of(run_data: RunData, items: np.ndarray) -> list[str]:
    """Return the titles of items by their numbers; an item without one goes by its id."""
    return [run_data.titles.get(str(name), str(name)) for name in run_data.data.items[items]]


def number_of(run_data: RunData, user: str) -> int:
    """Return the number of a user, or say who there is."""
    number = int(numbered(np.array([user], dtype=object), run_data.data.users)[0])
    if number < 0:
        some = listed(run_data.data.users[:5].tolist())
        raise UserError(f"--user: got '{user}'; allowed: one of {len(run_data.data.users)} users, such as {some}")
    return number
