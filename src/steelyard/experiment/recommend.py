"""Experiments of kind "recommend": a federation whose clients are the users of a recommender."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from steelyard.errors import UserError
from steelyard.experiment.description import Description
from steelyard.recommend.communication import rounds_per_epoch
from steelyard.recommend.settings import (
    EpochSettings,
    FplSettings,
    InteractionSettings,
    ItemSettings,
    RankingSettings,
)
from steelyard.weighing import criteria as registry
from steelyard.weighing.rule import WeighingSettings

if TYPE_CHECKING:
    from steelyard.clients.flower.payloads import Codec
    from steelyard.clients.node import NodeClients, NodeConfig
    from steelyard.data.dataset import Dataset
    from steelyard.recommend.clients import Protocol, RecommendClients, RecommendServer
    from steelyard.recommend.prepared import Prepared


class RecommendDescription(Description):
    """One description of an FPL run: interactions, split, mode, π, rounds or epochs, and the rule that weighs users.

    Use it for FPL; it runs through the same loop as every other kind.
    """

    kind: Literal["recommend"] = "recommend"
    """What is trained: "recommend" is FPL on interactions."""
    interactions: InteractionSettings
    items: ItemSettings | None = None
    fpl: FplSettings = FplSettings()
    ranking: RankingSettings = RankingSettings()
    rounds: EpochSettings = EpochSettings(target=0.1)  # pyright: ignore[reportIncompatibleVariableOverride]
    weighing: WeighingSettings = WeighingSettings(criteria=("EQ",))

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.fpl.mode == "custom") != (self.fpl.triples is not None):
            raise UserError(
                f"fpl.triples: got {self.fpl.triples} with mode = '{self.fpl.mode}'; allowed: a number with mode = "
                "'custom', none with the others"
            )
        if self.one_by_one and (self.beside or self.weighing.criteria != ("EQ",)):
            raise UserError(
                f"weighing: mode = '{self.fpl.mode}' has one user in each round, so nothing is weighed; allowed: "
                "criteria = ['EQ'] and no rules beside, or another mode"
            )
        return self

    def check_criterion(self, criterion: registry.Criterion) -> None:
        """Refuse criteria that users of a recommender cannot have."""
        if criterion.name in ("CB", "IS") or criterion.name.startswith("V"):
            raise UserError(
                f"weighing.criteria: {criterion.name} has no meaning for users of a recommender; allowed: EQ, DS, LD "
                "(distinct categories or items), MD, or criteria of your own about data or user"
            )

    def check_rule(self, rule: WeighingSettings) -> None:
        """Refuse orders that adapt to every round where not every round is tested."""
        super().check_rule(rule)
        if rule.adjust is not None and self.rounds.by_epochs and self.fpl.mode != "pFPL+":
            raise UserError(
                f"weighing.adjust: compares each round with the last, and '{self.fpl.mode}' tests once an epoch; "
                "allowed: mode = 'pFPL+', or rounds.count in place of epochs"
            )

    @property
    def one_by_one(self) -> bool:
        """Whether each round has a single user; an epoch of such rounds is one round of the loop."""
        return self.fpl.mode in ("sFPL", "sFPL+")

    def prepare(self) -> Prepared:
        """Read, filter and split the data; done once for equal settings."""
        # For speed of start: a description is often only shown or checked, and reading data needs more libraries.
        from steelyard.recommend.prepared import prepare

        return prepare(self.interactions, self.items, self.fpl, self.ranking)

    def triples(self) -> int:
        """Return T: given, 1, or R⁺/|U| rounded."""
        if self.fpl.triples is not None:
            return self.fpl.triples
        histories = self.prepare().histories
        return max(1, round(histories.total / histories.users)) if self.fpl.mode.endswith("+") else 1

    def users_per_round(self) -> int:
        """Return m."""
        users = self.prepare().histories.users
        if self.fpl.mode == "custom":
            return min(users, max(1, int(self.rounds.fraction * users + 0.5)))
        return 1 if self.one_by_one else users

    def rounds_per_epoch(self) -> int:
        """Return rpe, so that m · T · rpe is about R⁺."""
        return rounds_per_epoch(self.prepare().histories.total, self.users_per_round(), self.triples())

    def resolved(self) -> Self:
        """Turn epochs into rounds of the loop; one-user rounds are bundled, an epoch to a round."""
        whole = self.fpl.mode != "custom"
        rounds = self.rounds.model_copy(update={"fraction": 1.0} if whole else {})
        if not self.rounds.by_epochs:
            return self.model_copy(update={"rounds": rounds})
        each = 1 if self.one_by_one else self.rounds_per_epoch()
        rounds = rounds.model_copy(
            update={"count": self.rounds.epochs * each, "evaluate_every": self.rounds.evaluate_every * each}
        )
        store = self.store.model_copy(
            update={
                "checkpoint_every": self.store.checkpoint_every * each,
                "clients_every": self.store.clients_every * each,
            }
        )
        return self.model_copy(update={"rounds": rounds, "store": store})

    def protocol(self) -> Protocol:
        """Return how a round goes for the users."""
        # For speed of start, as in `prepare`.
        from steelyard.recommend.clients import Protocol

        turns = self.rounds_per_epoch() if self.one_by_one else None
        return Protocol(self.triples(), self.fpl.mask, self.fpl.decoys, turns)

    def assemble(self, dataset: Dataset | None = None) -> tuple[RecommendClients, RecommendServer]:
        """Read the data and build the simulated users and their server."""
        # For speed of start, as in `prepare`.
        from steelyard.experiment.recommend_node import simulate

        if dataset is not None:
            raise UserError("dataset: an experiment of kind 'recommend' reads interactions.path; allowed: no dataset")
        return simulate(self.prepare(), self.fpl, self.ranking, self.protocol(), self.criteria())

    def on_node(self, node: NodeConfig) -> NodeClients:
        """Build the users that live on one node; each user's vector stays in the node's state."""
        # For speed of start, as in `prepare`.
        from steelyard.experiment.recommend_node import host

        return host(
            *(self.interactions, self.items, self.fpl, self.ranking, self.protocol(), self.criteria()),
            seed=self.seed,
            node=node,
        )

    def at_server(self, about: Mapping[str, int | list[int]]) -> RecommendServer:
        """Build the server; it makes the first item factors and sees sums of sparse rows."""
        # For speed of start, as in `prepare`.
        from steelyard.experiment.recommend_node import serve

        return serve(self.fpl, self.protocol(), about)

    def codec(self) -> Codec:
        """Return how sparse rows of the item table travel; α, the width of a row and T are the experiment's own."""
        # For speed of start, as in `prepare`; and a simulation needs no Flower.
        from steelyard.recommend.wire import sparse_codec

        return sparse_codec(self.fpl.learning_rate, self.fpl.factors + 1, self.triples())

    @property
    def score_name(self) -> str:
        """The ranking metric that judges a user's list."""
        return f"{self.ranking.score}@{self.ranking.cutoff}"

    @property
    def score_range(self) -> tuple[float, float]:
        """All scores of a list lie between 0 and 1."""
        return 0.0, 1.0
