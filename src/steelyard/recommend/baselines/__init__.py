"""Systems to stand beside FPL: each sees all training data at once, but for FCF, which is federated too."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, ClassVar

from pydantic import Field

from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.settings import Section, validated
from steelyard.recommend.evaluate import best_unseen
from steelyard.recommend.histories import Histories
from steelyard.recommend.interactions import Codes, Interactions
from steelyard.recommend.knowledge.features import ItemFeatures
from steelyard.recommend.metrics import Floats, Scores

Count = Annotated[int, Field(ge=1, le=100_000)]
Width = Annotated[int, Field(ge=1, le=10_000)]
"""Length of vectors, or units of a layer."""
Rate = Annotated[float, Field(gt=0, le=1e6)]
Weight = Annotated[float, Field(ge=0, le=1e6)]

BASELINES: Mapping[str, str] = {
    **dict.fromkeys(("random", "popular", "user-knn", "item-knn", "vsm"), "neighbours"),
    **dict.fromkeys(("svd", "mf", "bpr-mf", "bpr", "kahfm", "fcf"), "factors"),
    **dict.fromkeys(("neumf", "vae"), "networks"),
}
"""The baselines by name, each with its file in this folder, which is read when one of its baselines is asked for."""


class Baseline(Section):
    """A baseline and its settings; derive from it under a name of `BASELINES`."""

    named: ClassVar[str] = ""
    known: ClassVar[dict[str, type[Baseline]]] = {}
    """The baselines by name, of the files that have been read."""
    of_features: ClassVar[bool] = False
    """Whether it looks at what is known of items."""

    def __init_subclass__(cls, named: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.named = named
        if named:
            cls.known[named] = cls

    @abstractmethod
    def scores(self, train: Interactions, seed: int, features: ItemFeatures | None = None) -> Scores:
        """Train and return what scores all items for some users; `features` are those of the items of `train`."""

    def needed(self, features: ItemFeatures | None) -> ItemFeatures:
        """Return the features of items, or say that this baseline needs them."""
        if features is None:
            raise UserError(f"baseline: {self.named} needs features of items; allowed: with --knowledge EXPERIMENT")
        return features


def baseline(kind: str, settings: Mapping[str, object] | None = None) -> Baseline:
    """Return the baseline of that name with some settings, or say which there are."""
    if kind not in BASELINES:
        raise UserError(f"baseline: got '{kind}'{nearest(kind, BASELINES)}; allowed: {listed(BASELINES)}")
    import_module(f"{__name__}.{BASELINES[kind]}")
    return validated(Baseline.known[kind], settings or {}, f"baseline {kind}")


def recommend(
    chosen: Baseline, train: Interactions, cutoff: int, seed: int = 1, features: ItemFeatures | None = None
) -> tuple[Codes, Floats]:
    """Train a baseline and return each user's k best items that she did not train on, with their scores."""
    return best_unseen(Histories.of(train), chosen.scores(train, seed, features), cutoff)
