"""FPL, federated pair-wise learning: a ranking model of which each user keeps her own part and her history.

A. Ferrara, *Pursuing Privacy and Personalization in Recommender Systems: The Role of Federated Learning*, Politecnico
di Bari, 2022, chapter 4. The server holds a row (q_i, b_i) per item; each device holds its user's vector p_u and the
items she took. The score of an item is x̂_ui = b_i + q_i·p_u (Eq. 4.1).

A round (§4.3):

1. The server sends all rows to m users.
2. Each user draws T triples (u, i⁺, i⁻): i⁺ from her items, i⁻ from those that she did not take (`histories`).
3. She visits them one after the other. With x̂ = x̂_ui⁺ − x̂_ui⁻ (Eq. 4.5) and s = σ(−x̂), the derivative of ln σ(x̂) (the
   thesis prints σ(x̂) in Eq. 4.11, a slip), her own vector moves at once, p ← p + α (s (q⁺ − q⁻) − λ p), while the items
   stay as they came; what they should change by is collected with p as it was before the move:
   s (p, 1) − λ⁺ (q⁺, 0) for i⁺ and −s (p, 1) − λ⁻ (q⁻, 0) for i⁻. Biases are not regularised.
4. She sends the change of every negative item, and that of each positive item with probability π (Eq. 4.8): her choice
   of how much of her positive feedback the server may see.
5. The server adds what it gets: Θ ← Θ + α Σ_u Δ_u (Eq. 4.10; `SparseRows.combine`).

How many users and triples make a round is the `Mode`. `compiled` has the steps, for whole populations and for long
chains of one-user rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from steelyard.base.randomness import generator
from steelyard.base.settings import Section
from steelyard.recommend.histories import Floats32, MaskKind
from steelyard.rounds.plan import RoundSettings, Share
from steelyard.weighing.criterion import Capabilities

EpochKind = Literal["formula", "tables"]
"""How an epoch's rounds are counted: by m · T · rpe = R⁺ (§4.5.2), or as many for the + modes as for the plain ones, R⁺
of one user or R⁺/|U| of all, which is what the communication totals of the thesis' Table 4.4 say."""


@dataclass(frozen=True)
class Mode:
    """One of the four configurations (§4.5.2): how many users compute in a round, and how many triples each visits."""

    one_user: bool
    """One random user per round (s for sequential), or all users (p for parallel)."""
    one_triple: bool
    """One triple per user and round, or R⁺/|U| of them (+)."""

    def one_round_per_epoch(self, counted: EpochKind = "formula") -> bool:
        """Whether all users visit R⁺/|U| triples each in a round, so that one round is an epoch."""
        return not (self.one_user or self.one_triple) and counted == "formula"

    def schedule(self, users: int, interactions: int, counted: EpochKind = "formula") -> Schedule:
        """Return an epoch of R⁺ = `interactions` positives in whole rounds and triples."""
        cohort = 1 if self.one_user else users
        triples = 1 if self.one_triple else max(1, round(interactions / users))
        if counted == "tables":
            return Schedule(cohort, triples, Schedule.over(interactions, cohort, 1).rounds_per_epoch)
        return Schedule.over(interactions, cohort, triples)

    def cost_per_epoch(
        self, users: int, items: int, interactions: int, share: float, counted: EpochKind = "formula"
    ) -> float:
        """Return CCE with T = R⁺/|U| and the rounds per epoch unrounded, as in the thesis' Table 4.4.

        Then rpe · |U⁻| is R⁺/T by the formula, and R⁺ as the tables were made, whether one user comes after the other
        or all at once: sFPL costs what pFPL does.
        """
        triples = 1.0 if self.one_triple else interactions / users
        asked = interactions / (triples if counted == "formula" else 1.0)
        return cost_per_epoch(asked, 1, items, triples, share)


MODES: Mapping[str, Mode] = {
    "sFPL": Mode(one_user=True, one_triple=True),
    "sFPL+": Mode(one_user=True, one_triple=False),
    "pFPL": Mode(one_user=False, one_triple=True),
    "pFPL+": Mode(one_user=False, one_triple=False),
}
"""The thesis' four modes by name."""


@dataclass(frozen=True)
class Schedule:
    """How an epoch is cut into rounds; by the formula it visits about as many triples as there are positives."""

    users: int
    """m = |U⁻|: users per round."""
    triples: int
    """T: triples per user and round."""
    rounds_per_epoch: int

    @classmethod
    def over(cls, interactions: int, users: int, triples: int) -> Schedule:
        """Return the schedule with rpe so that m · T · rpe ≈ R⁺ (§4.5.2), at least 1."""
        return cls(users, triples, max(1, round(interactions / (users * triples))))

    def cost_per_epoch(self, items: int, share: float) -> float:
        """Return CCE of these rounds."""
        return cost_per_epoch(self.rounds_per_epoch, self.users, items, self.triples, share)


def cost_per_epoch(rounds: float, users: float, items: int, triples: float, share: float) -> float:
    """Return CCE = rpe · |U⁻| · (|I| + T (1 + π)), in vectors both ways (§4.6.4); TCC is that times the epochs."""
    return rounds * users * (items + triples * (1 + share))


@dataclass(frozen=True)
class Learning:
    """The numbers of FPL's steps; the weights of the regularisation follow from the learning rate (§4.5.3)."""

    rate: float
    """α, on the device and on the server."""
    factors: int
    user_decay: float | None = None
    """λ of the user's vector; None for α/20."""
    positive_decay: float | None = None
    """λ of positive items; None for α/20."""
    negative_decay: float | None = None
    """λ of negative items; None for α/200."""

    @property
    def decays(self) -> tuple[float, float, float]:
        """λ of user, positive item and negative item."""
        given = (self.user_decay, self.positive_decay, self.negative_decay)
        usual = (self.rate / 20, self.rate / 20, self.rate / 200)
        user, positive, negative = (u if g is None else g for g, u in zip(given, usual, strict=True))
        return user, positive, negative


SPREAD = 0.1
"""Standard deviation of the first factors."""


def initial_table(seed: int, items: int, factors: int, bias_spread: float = 0.0) -> Floats32:
    """Return the first (q_i, b_i), [items, factors + 1]: factors from N(0, 0.1²), biases 0 or normal too."""
    table = np.zeros((items, factors + 1), dtype=np.float32)
    table[:, :factors] = generator(seed, 0, "", "fpl items").normal(0.0, SPREAD, (items, factors))
    if bias_spread:
        table[:, factors] = generator(seed, 0, "", "fpl biases").normal(0.0, bias_spread, items)
    return table


def initial_vector(seed: int, user: str, factors: int) -> Floats32:
    """Return a user's first vector from N(0, 0.1²), drawn on her device."""
    return generator(seed, 0, user, "fpl vector").normal(0.0, SPREAD, factors).astype(np.float32)


# The sections of an experiment of kind "recommend".

ModeName = Literal["sFPL", "sFPL+", "pFPL", "pFPL+", "custom"]
Probability = Annotated[float, Field(ge=0, le=1)]


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
    """Draw which positive items are sent anew each round, as in the thesis, once for all ("persistent"), which rounds
    cannot undo, or for each triple, as the authors' program does: an item that comes up twice may be sent once."""
    decoys: float = Field(default=0.0, ge=0, le=100)
    """Decoys: items that are not hers which a user claims as positives, per item that is; 1 doubles her history."""
    threads: int = Field(default=2, ge=1, le=1024)
    """Threads of the simulation; they do not change the result."""

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
