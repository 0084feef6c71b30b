"""The sections of an experiment of kind "recommend"."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from steelyard.base.settings import Section
from steelyard.recommend.fpl import MODES, EpochKind, Mode
from steelyard.recommend.histories import MaskKind
from steelyard.rounds.plan import RoundSettings, Share
from steelyard.weighing.criterion import Capabilities

ModeName = Literal["sFPL", "sFPL+", "pFPL", "pFPL+", "custom"]
Probability = Annotated[float, Field(ge=0, le=1)]
Limit = Annotated[int, Field(ge=0, le=1_000_000)]


class FplSettings(Section):
    """[fpl]: the federated pair-wise learning itself."""

    mode: ModeName = "pFPL+"
    """sFPL: one user, one triple a round; sFPL+: one user, R⁺/|U| triples; pFPL and pFPL+: all users at once."""
    factors: int = Field(default=20, ge=1, le=10_000)
    """Length of the vectors of items and users."""
    learning_rate: float = Field(default=0.05, gt=0)
    """α, on the device and on the server."""
    user_decay: float | None = Field(default=None, ge=0)
    """λ of users' vectors; default: learning_rate / 20."""
    positive_decay: float | None = Field(default=None, ge=0)
    """λ of positive items; default: learning_rate / 20."""
    negative_decay: float | None = Field(default=None, ge=0)
    """λ of negative items; default: learning_rate / 200."""
    epoch: EpochKind = "formula"
    """formula: an epoch visits R⁺ triples. tables: sFPL+ and pFPL+ have as many rounds as sFPL and pFPL, and so R⁺/|U|
    times as many triples, as the thesis' tables were made."""
    bias_spread: float = Field(default=0.0, ge=0, le=1000)
    """Standard deviation of the items' first biases: 0, or 0.1 as the factors have."""
    triples: int | None = Field(default=None, ge=1, le=1_000_000)
    """T for mode = "custom": triples of each user and round; rounds.fraction says how many users."""
    pi: Probability = 1.0
    """π: the probability with which a positive item's update is sent; `interactions.pi_column` gives each user hers."""
    mask: MaskKind = "round"
    """Draw what is sent anew each round, as in the thesis, or once for all ("persistent"), which rounds cannot undo."""
    decoys: float = Field(default=0.0, ge=0, le=100)
    """Decoys: items that are not hers which a user claims as positives, per item that is; 1 doubles her history."""
    threads: int = Field(default=2, ge=1, le=1024)
    """Threads of the simulation; they do not change the result."""

    @model_validator(mode="before")
    @classmethod
    def _of_older_versions(cls, given: object) -> object:
        """Read runs of versions that had a choice of engines; they differ in the rounding of sums."""
        return {name: value for name, value in given.items() if name != "engine"} if isinstance(given, dict) else given

    @property
    def flags(self) -> Mode | None:
        """Which of the thesis' four modes this is; None for "custom"."""
        return MODES.get(self.mode)


class EpochSettings(RoundSettings):
    """[rounds] of a recommender: counted in epochs, each of as many triples as there are positives, or in rounds."""

    count: int = Field(default=0, ge=0, le=1_000_000_000)
    """Number of rounds, in place of `epochs`; 0: as many as the epochs make."""
    fraction: Share = 0.1  # pyright: ignore[reportIncompatibleVariableOverride]
    """Share of the users in each round with fpl.mode = "custom", at least one user; the other modes have their own."""
    epochs: int = Field(default=20, ge=1, le=1_000_000)
    """Number of epochs, unless `count` is given; evaluate_every and the store's fields then count epochs too."""

    @property
    def by_epochs(self) -> bool:
        """Whether the run is counted in epochs."""
        return self.count == 0


class KgflexSettings(Section):
    """[kgflex]: score items by the features that a user and an item share; [knowledge] says where features come from.

    With it, `fpl.factors` is the length of a feature's vectors, and the rest of [fpl] is the protocol that trains them.
    """

    limits: tuple[Limit, ...] = Field(default=(100, 100), min_length=1, max_length=4)
    """How many features of one hop a user keeps at most, of two hops, and so on: those with the most information."""

    @field_validator("limits")
    @classmethod
    def _keeps_some(cls, limits: tuple[int, ...]) -> tuple[int, ...]:
        if not any(limits):
            raise PydanticCustomError("plain", "at least one number above 0, or no feature is kept")
        return limits

    others: float = Field(default=1.0, gt=0, le=1000)
    """Items of others per item of hers that gains are measured on: 1 in the thesis; more make small gains surer."""
    criterion: Literal["information", "ratio", "gini"] = "information"
    """How k_uf says what a feature tells: information gain (the thesis'), the same over the feature's own entropy
    (C4.5's gain ratio, which favours rare ones), or the fall of Gini's impurity (the authors' later branch)."""
    own_rate: float | None = Field(default=None, gt=0)
    """Step of users' own vectors, which no server sums over users; default: fpl.learning_rate, as in the thesis."""
    batch: int | None = Field(default=None, ge=1, le=1_000_000)
    """Train centrally, in batches of so many triples with all data in one place; default: the rounds of FPL."""


USER_CAPABILITIES = Capabilities(
    "a recommender",
    task="ranking",
    classes=0,
    marks=frozenset(),
    lacks_test_set="and the server of a recommender holds no interactions; allowed: criteria without a test set",
    label_counts=False,
    first_losses=False,
    slopes=False,
    layers=False,
    client_tests=False,
)
"""Labels are the items or categories that a user took; single updates are seen, but there are no classes or marks."""
KGFLEX_CAPABILITIES = replace(USER_CAPABILITIES, name="KGFlex", expertise=True)
"""Users of KGFlex also know how many features tell their items from others."""
