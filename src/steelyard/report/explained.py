"""Looking into a run of KGFlex: why an item is in a list, what lists keep of users' features, feature clouds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np

from steelyard.base.errors import UserError, brief, listed
from steelyard.recommend.interactions import Codes, numbered
from steelyard.recommend.kgflex import model
from steelyard.recommend.kgflex.clients import KgflexClients
from steelyard.recommend.kgflex.model import Knowledge
from steelyard.recommend.kgflex.selection import Selection
from steelyard.recommend.run_data import number_of, titles_of
from steelyard.report.documents.recommenders import CloudWord, Explanation, FeatureReason, KeptFeatures
from steelyard.report.recommender import Finished, open_run

TOPS = (None, 100, 50, 10, 5)
"""The thesis' columns of Table 6.2; None for all of a user's features."""


@dataclass(frozen=True, eq=False)
class Explained:
    """A run of KGFlex as of its last checkpoint, with what its users' features say."""

    finished: Finished
    clients: KgflexClients

    @property
    def knowledge(self) -> Knowledge:
        """The features of items, and of users with their information gains."""
        return self.clients.knowledge(self.finished.seed)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Each feature in words."""
        return self.clients.parts.features.names

    def why(self, user: str, item: str) -> Explanation:
        """Return the score of an item for a user and the features that made it, those that say most first."""
        finished = self.finished
        number, wanted = number_of(finished.run_data, user), self._item(item)
        table = self.clients.table(finished.model)
        views = self.clients.views(finished.federation, finished.seed)
        found = model.reasons(table, views, self.knowledge, number, wanted)
        hops = self.clients.parts.features.hops
        return {
            "user": user,
            "item": item,
            "title": titles_of(finished.run_data, np.array([wanted]))[0],
            "score": sum(each.part for each in found),
            "features_of_user": int(self.knowledge.selection.sizes[number]),
            "features_of_item": len(self.clients.parts.features.of(wanted)),
            "reasons": [_reason(self.names[each.feature], int(hops[each.feature]), each) for each in found],
        }

    def _item(self, item: str) -> int:
        """Return the number of an item, or say which there are."""
        items = self.finished.run_data.data.items
        number = int(numbered(np.array([item], dtype=object), items)[0])
        if number < 0:
            some = listed(items[:5].tolist())
            raise UserError(f"--item: got {brief(item)}; allowed: one of {len(items)} items, such as {some}")
        return number

    def after(self, lists: Codes) -> Selection:
        """Return the features that users' lists would select if they were their items."""
        names, seed = self.clients.users.histories.names, self.finished.seed
        return model.after_lists(self.knowledge, lists, names, seed, self.clients.parts.settings)

    def kept(self, cutoff: int) -> KeptFeatures:
        """Return the quartiles over users of the share of her features that her list keeps (Table 6.2).

        Two readings: a feature is kept if an item of the list has it (`shown`), or if the list, taken as her items,
        would select it again (`informative`).
        """
        lists, _ = self.finished.lists(cutoff)
        after, selection = self.after(lists), self.knowledge.selection
        flags = {
            "shown": model.shown(self.knowledge, lists),
            "informative": model.informative_again(self.knowledge, after),
        }
        shares = {
            name: {"all" if top is None else str(top): _quartiles(model.kept(selection, flag, top)) for top in TOPS}
            for name, flag in flags.items()
        }
        # Fewer than a hundred where fewer are selected by anyone.
        before, then = (set(_prominent(each, 100)) for each in (selection, after))
        return {
            "cutoff": cutoff,
            "kept": shares,
            "prominent": len(before),
            "prominent_after": len(then),
            "prominent_kept": len(before & then) / len(before) if before else None,
        }

    def clouds(self, cutoff: int, top: int) -> list[CloudWord]:
        """Return the most prominent features before and after: in what users took, and in what they are shown."""
        lists, _ = self.finished.lists(cutoff)
        rows: list[CloudWord] = []
        for when, selection in (("before", self.knowledge.selection), ("after", self.after(lists))):
            weights = model.cloud(selection)
            for rank, feature in enumerate(_prominent(selection, top), 1):
                rows.append(
                    {"when": when, "rank": rank, "feature": self.names[feature], "weight": float(weights[feature])}
                )
        return rows


def open_explained(folder: Path, rule: str | None = None) -> Explained:
    """Open a run of KGFlex; the main rule unless another is named."""
    finished = open_run(folder, rule)
    if not isinstance(finished.clients, KgflexClients):
        raise UserError(f"{folder}: a run without [kgflex], whose scores no features make; allowed: a run of KGFlex")
    return Explained(finished, finished.clients)


def _reason(feature: str, hops: int, reason: model.Reason) -> FeatureReason:
    return cast(FeatureReason, {**asdict(reason), "feature": feature, "hops": hops})


def _quartiles(shares: np.ndarray) -> list[float | None]:
    known = shares[~np.isnan(shares)]
    return [float(each) for each in np.percentile(known, (25, 50, 75))] if len(known) else [None] * 3


def _prominent(selection: Selection, top: int) -> Sequence[int]:
    """Return the features with the largest sums of gains, best first, ties by ascending number."""
    weights = model.cloud(selection)
    return [feature for feature in np.argsort(-weights, kind="stable")[:top].tolist() if weights[feature] > 0]
