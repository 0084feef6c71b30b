"""How a model is judged in the loop: by every user's list of unseen items, or by test items among sampled negatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from steelyard.messages.updates import Evaluations, Question
from steelyard.recommend import metrics, sampled
from steelyard.recommend.histories import Users
from steelyard.recommend.interactions import Codes
from steelyard.recommend.lists import Scores, best_unseen
from steelyard.recommend.metrics import PerUser
from steelyard.recommend.ranking import Floats
from steelyard.recommend.sampled import Sampled
from steelyard.recommend.sparse import Floats32

if TYPE_CHECKING:
    import torch

SCORES: Mapping[str, PerUser] = {
    metric.name: metric
    for metric in (metrics.NDCG(), metrics.Precision(), metrics.Recall(), metrics.HitRate(), metrics.UserF1())
}
"""The metrics that can score a user's list in the loop."""

ModelScores = Callable[["torch.Tensor", Codes], Floats32]
"""Gives a model's scores of all items for some users, [users, items]."""


@dataclass(frozen=True, eq=False)
class Judge:
    """Judges any model that scores all items for a user; use it in the clients of a recommender."""

    users: Users
    cutoff: int = 10
    score: str = "ndcg"
    """The name of the score among the metrics."""
    sampled: Sampled | None = None
    """Rank each test item among so many sampled negatives; None: the full ranking."""

    @cached_property
    def tested(self) -> Codes:
        """Users with a relevant test item, in the order of their names."""
        names = self.users.histories.names
        order = np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.int64)
        return order[self.users.truth.relevant[order] > 0]

    @cached_property
    def _negatives(self) -> Codes:
        assert self.sampled is not None
        return sampled.draw_negatives(self.users.truth, self.users.histories.names, self.sampled)

    def lists(self, scores: Scores, cutoff: int) -> tuple[Codes, Floats]:
        """Return every user's list of unseen items, best first, and their scores; users in the order of histories."""
        return best_unseen(self.users.histories, scores, cutoff, cells=1 << 23)

    def measure(self, scores: Scores) -> dict[str, Floats]:
        """Return each metric by name, one value per user of `tested`."""
        if self.sampled is not None:
            ranks = sampled.ranks(self.users.truth, self._negatives, scores)
            found = sampled.per_user(self.users.truth, ranks, self.cutoff)
            return {name: values[self.tested] for name, values in found.items()}
        view = self.users.truth.view(self.lists(scores, self.cutoff)[0], self.cutoff)
        return {name: metric.per_user(view)[self.tested] for name, metric in SCORES.items()}

    def answer(self, question: Question, scores: ModelScores) -> Evaluations:
        """Return the score of every candidate model, and all metrics of the first."""
        found = [self.measure(lambda users, model=model: scores(model, users)) for model in question.models]
        own = np.stack([each[self.score] for each in found])
        prefix = "" if self.sampled is None else "sampled_"
        return Evaluations(
            federation=question.federation,
            round=question.round,
            clients=tuple(self.users.histories.names[user] for user in self.tested.tolist()),
            # Every user counts once, so that the overall score is the metric's mean over users.
            samples=np.ones(len(self.tested), dtype=np.int64),
            scores=own,
            losses=1.0 - own,
            metrics={f"{prefix}{name}@{self.cutoff}": values for name, values in found[0].items()},
        )
