"""The sections of an experiment of kind "recommend"."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from steelyard.base.errors import UserError
from steelyard.base.settings import Section
from steelyard.recommend.fpl import MODES, EpochKind, Mode
from steelyard.recommend.histories import MaskKind
from steelyard.recommend.interactions import Duplicates, SplitKind
from steelyard.rounds.plan import RoundSettings, Share
from steelyard.weighing.criterion import Capabilities

ModeName = Literal["sFPL", "sFPL+", "pFPL", "pFPL+", "custom"]
Probability = Annotated[float, Field(ge=0, le=1)]
Limit = Annotated[int, Field(ge=0, le=1_000_000)]


class InteractionSettings(Section):
    """[interactions]: the data, what is kept of it, and how each user's part is split."""

    path: Path
    """File of interactions in any known form; relative paths are looked for here, in STEELYARD_DATA, ../shared/data."""
    catalogue: Path | None = None
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
    split: SplitKind | Literal["fixed"] = "temporal"
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


class ItemSettings(Section):
    """[items]: what is known of items: titles for people, categories for label diversity and bias disparity."""

    path: Path
    """Table of items, such as MovieLens' movies.dat or u.item."""
    item: str | int = "item"
    """Column of the item's id: a header name, or a number from 1."""
    title: str | int | None = None
    """Column of the title."""
    category: str | int | None = None
    """Column of the category; several are joined by `|` in the cell."""


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
    engine: Literal["auto", "numpy", "compiled"] = "auto"
    """What computes: NumPy, or loops compiled by numba, many times as fast; "auto" takes these where numba is installed
    and an epoch has 100,000 triples or more. The two draw the same and agree up to the rounding of sums."""

    @property
    def flags(self) -> Mode | None:
        """Which of the thesis' four modes this is; None for "custom"."""
        return MODES.get(self.mode)


class RankingSettings(Section):
    """[ranking]: how each user's list is judged."""

    cutoff: int = Field(default=10, ge=1, le=10_000)
    """k: length of the list."""
    score: Literal["ndcg", "precision", "recall", "hit_rate", "f1_per_user"] = "ndcg"
    """The score of a user in the loop; the others are recorded beside it."""
    threshold: float | None = None
    """A test item is relevant from this rating on; default: every test item is."""
    protocol: Literal["full", "sampled"] = "full"
    """full: rank all items that the user did not train on. sampled: rank each relevant test item among a few drawn ones
    (with split = "newest": leave-one-out of the NCF papers); its figures compare with nothing but their like."""
    negatives: int = Field(default=99, ge=1, le=1_000_000)
    """For protocol = "sampled": how many items that she never took are drawn for each user, by `split_seed`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.protocol == "sampled" and self.score not in ("ndcg", "hit_rate"):
            raise UserError(f"score: got '{self.score}' with protocol = 'sampled'; allowed with it: ndcg, hit_rate")
        return self


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
