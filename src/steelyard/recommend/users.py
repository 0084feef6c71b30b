"""What lies on the devices of a recommender's users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from steelyard.recommend.interactions import Codes
from steelyard.recommend.ranking import Floats, GroundTruth
from steelyard.recommend.sampling import Histories


@dataclass(frozen=True, eq=False)
class Users:
    """Histories, tests, and each user's own settings; `histories`, `truth` and `shares` number users alike."""

    histories: Histories
    truth: GroundTruth
    shares: Floats
    """π of each user."""
    kinds: Codes
    """A label per entry of `histories.items`: the item's category, or the item itself; LD counts distinct ones."""
    facts: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """Further facts about users, for criteria of your own."""

    def keep(self, names: Iterable[str]) -> Users:
        """Return only these users, in the order they have here; the numbering of items stays.

        Use it on a node that holds some of the users and must hold nothing of the others.
        """
        histories, truth = self.histories, self.truth
        wanted = set(names)
        kept = np.array([index for index, name in enumerate(histories.names) if name in wanted], dtype=np.int64)
        renumbered = np.full(histories.users, -1, dtype=np.int64)
        renumbered[kept] = np.arange(len(kept))
        entries = np.repeat(renumbered, histories.drawn_from) >= 0
        trained, tested = renumbered[truth.train_user], renumbered[truth.test_user]
        return Users(
            histories=Histories(
                names=tuple(histories.names[index] for index in kept.tolist()),
                catalogue=histories.catalogue,
                starts=np.concatenate([[0], np.cumsum(histories.drawn_from[kept])]).astype(np.int64),
                items=histories.items[entries],
                fakes=histories.fakes[kept],
            ),
            truth=replace(
                truth,
                users=len(kept),
                train_user=trained[trained >= 0],
                train_item=truth.train_item[trained >= 0],
                test_user=tested[tested >= 0],
                test_item=truth.test_item[tested >= 0],
                liked=None if truth.liked is None else truth.liked[trained >= 0],
            ),
            shares=self.shares[kept],
            kinds=self.kinds[entries],
            facts={name: facts for name, facts in self.facts.items() if name in wanted},
        )
