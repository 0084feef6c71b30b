"""Experiments of kind "recommend": a federation whose clients are the users of a recommender.

What is imported inside methods waits there for speed of start: a description is often only shown or checked, and a
simulation needs no Flower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

from pydantic import model_validator

from steelyard.base.errors import UserError
from steelyard.base.usercode import NotAllowed
from steelyard.experiment.description import Description
from steelyard.experiment.node_rows import own_reading, refuse_other
from steelyard.messages.payloads import Codec
from steelyard.recommend.evaluate import RankingSettings
from steelyard.recommend.fpl import USER_CAPABILITIES, EpochSettings, FplSettings, Schedule
from steelyard.recommend.kgflex.selection import KGFLEX_CAPABILITIES, KgflexSettings
from steelyard.recommend.knowledge.loading import KnowledgeSettings
from steelyard.recommend.run_data import InteractionSettings, ItemSettings
from steelyard.weighing import criterion as registry
from steelyard.weighing.criterion import Capabilities, unmet
from steelyard.weighing.rule import WeighingSettings

if TYPE_CHECKING:
    from steelyard.clients.node import NodeClients, NodeConfig
    from steelyard.clients.protocol import Clients
    from steelyard.data.dataset import Dataset, DatasetOrSeeded
    from steelyard.experiment.node import ModelSettings
    from steelyard.privacy.clipping import DeviceNoise
    from steelyard.privacy.settings import PrivacySettings
    from steelyard.recommend.clients import LocalRound, RecommendClients, RecommendServer
    from steelyard.recommend.run_data import RunData


class RecommendDescription(Description):
    """One description of an FPL run: interactions, split, mode, π, rounds or epochs, and the rule that weighs users.

    Use it for FPL, and with a section [kgflex] for KGFlex; both run through the same loop as every other kind.
    """

    form_fields: ClassVar[tuple[str, ...]] = (
        *("seed", "rounds.count", "rounds.epochs", "rounds.fraction", "fpl.factors", "fpl.learning_rate"),
    )
    kind: Literal["recommend"] = "recommend"
    """What is trained: "recommend" is FPL on interactions."""
    interactions: InteractionSettings
    items: ItemSettings | None = None
    knowledge: KnowledgeSettings | None = None
    kgflex: KgflexSettings | None = None
    fpl: FplSettings = FplSettings()
    ranking: RankingSettings = RankingSettings()
    rounds: EpochSettings = EpochSettings(target=0.1)  # pyright: ignore[reportIncompatibleVariableOverride]
    weighing: WeighingSettings = WeighingSettings(criteria=("EQ",))

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.fpl.flags is None) != (self.fpl.triples is not None):
            raise UserError(
                f"fpl.triples: got {self.fpl.triples} with mode = '{self.fpl.mode}'; allowed: a number with mode = "
                "'custom', none with the others"
            )
        if self.fpl.flags is None and self.fpl.epoch == "tables":
            raise UserError("fpl.epoch: got 'tables' with mode = 'custom'; allowed: formula, or one of the four modes")
        if self.bundled and (self.beside or self.weighing.criteria != ("EQ",)):
            alone = f"mode = '{self.fpl.mode}' has one user in each round"
            raise UserError(
                f"weighing: {'central training has no clients' if self.central else alone}, so nothing is weighed; "
                "allowed: criteria = ['EQ'] and no rules beside, or another mode"
            )
        self._check_kgflex()
        if self.rounds.keep == "best":
            raise UserError(
                "rounds.keep: got 'best', and users keep their vectors of the last round alone; allowed: last "
                "(patience works)"
            )
        return self

    def _check_kgflex(self) -> None:
        if self.kgflex is not None and self.knowledge is None:
            raise UserError("kgflex: given without features of items; allowed: with a section [knowledge]")
        if self.kgflex is not None and self.kgflex.biases == "off" and self.fpl.bias_spread:
            raise UserError(
                "kgflex.biases: got 'off' with fpl.bias_spread, which gives biases; allowed: one of the two"
            )
        if self.central and (self.fpl.decoys or self.fpl.pi < 1 or self.interactions.pi_column is not None):
            raise UserError(
                "kgflex.batch: given with fpl.pi or decoys, but with all data in one place nothing is sent; allowed: "
                "pi = 1 and no decoys, or no batch"
            )

    def check_criterion(self, criterion: registry.Criterion) -> None:
        """Refuse criteria that users of a recommender cannot have."""
        if unmet(criterion.needs, self.capabilities(), {}) is not None:
            raise UserError(
                f"weighing.criteria: {criterion.name} has no meaning for users of a recommender; allowed: EQ, DS, LD "
                "(distinct categories or items), MD, EX with [kgflex] by information gain, or criteria of your own "
                "about data or user"
            )

    def capabilities(self) -> Capabilities:
        """Return what users of a recommender can give to criteria."""
        known = self.kgflex is not None and self.kgflex.criterion == "information"
        return KGFLEX_CAPABILITIES if known else USER_CAPABILITIES

    def check_rule(self, rule: WeighingSettings) -> None:
        """Refuse orders that adapt to every round where not every round is tested."""
        super().check_rule(rule)
        if self.privacy is not None:
            self._check_noise(self.privacy)
        mode = self.fpl.flags
        every_round = mode is not None and mode.one_round_per_epoch(self.fpl.epoch)
        if rule.adjust is not None and self.rounds.by_epochs and not every_round:
            raise UserError(
                f"weighing.adjust: compares each round with the last, and '{self.fpl.mode}' tests once an epoch; "
                "allowed: mode = 'pFPL+' with epoch = 'formula', or rounds.count in place of epochs"
            )

    def _check_noise(self, privacy: PrivacySettings) -> None:
        if privacy.aggregation is not None:
            raise UserError(
                "privacy.aggregation: given, but users send rows of single items, and the choice of rows would "
                "show what the masks hide; allowed: privacy.local, which adds noise to every row"
            )
        if privacy.records is not None:
            raise UserError(
                "privacy.records: given, but users of a recommender send rows of items, not what steps over samples "
                "make of a model; allowed: privacy.local, which adds noise to every row"
            )
        if privacy.central is not None:
            raise UserError(
                "privacy.central: given, but the server sees which rows each single user sends; allowed: "
                "privacy.local, which adds noise to every row"
            )
        if privacy.local is not None and (self.one_by_one or self.kgflex is not None):
            raise UserError(
                "privacy.local: given with one user in each round or with [kgflex], which it does not support; "
                "allowed: "
                "mode = 'pFPL', 'pFPL+' or 'custom' of FPL"
            )

    def device_noise(self) -> DeviceNoise | None:
        """Return what users' devices add to what they send; None where they add nothing."""
        from steelyard.experiment.guarantees import noise_of_devices

        if self.privacy is None or self.privacy.local is None:
            return None
        return noise_of_devices(self.privacy, self.criteria(), None, self.resolved().rounds.count)

    @property
    def lists(self) -> bool:
        """Users are tested by their lists."""
        return True

    @classmethod
    def check_node(cls, node: NodeConfig) -> None:
        """Refuse a table `[partition]`, and a share of a file whose users have no name."""
        found = own_reading(InteractionSettings, node)
        if node.partition:
            raise UserError(f"node config partition: given with kind '{node.kind}'; allowed with: learning")
        if node.part is not None and "user" not in found.columns:
            raise UserError(
                'node config data.columns: missing beside partition-id; allowed: columns = { user = "NAME" }, whose '
                "values become the names of clients that the server gets"
            )

    def check_own_rows(self, node: NodeConfig) -> None:
        """Refuse another way to read the file, and ratings below which a row does not count."""
        refuse_other("interactions", self.interactions, own_reading(InteractionSettings, node))
        if self.ranking.threshold is not None:
            raise NotAllowed(
                "ranking.threshold: given, but a server may not choose among the rows of this node's own file; "
                "allowed: leave it out"
            )

    @property
    def measures(self) -> Mapping[str, str]:
        """Every metric that the loop records of a user's list, at the list's length."""
        names = get_args(RankingSettings.model_fields["score"].annotation)
        return {name: f"{name}@{self.ranking.cutoff}" for name in names}

    @property
    def one_by_one(self) -> bool:
        """Whether each round has a single user; an epoch of such rounds is one round of the loop."""
        return not self.central and self.fpl.flags is not None and self.fpl.flags.one_user

    @property
    def central(self) -> bool:
        """Whether KGFlex trains with all data in one place, an epoch to a round of the loop."""
        return self.kgflex is not None and self.kgflex.batch is not None

    @property
    def bundled(self) -> bool:
        """Whether an epoch of small steps is one round of the loop."""
        return self.central or self.one_by_one

    def run_data(self) -> RunData:
        """Read, filter and split the data; done once for equal settings."""
        from steelyard.recommend.run_data import load_run_data

        return load_run_data(self.interactions, self.items, self.fpl, self.ranking)

    def triples(self) -> int:
        """Return T; where it is given, no data need be read, so that a node with its own rows alone can tell."""
        return self.schedule().triples if self.fpl.triples is None else self.fpl.triples

    def schedule(self) -> Schedule:
        """Return how many users and triples make a round, and how many rounds an epoch."""
        histories = self.run_data().histories
        if self.fpl.flags is not None:
            return self.fpl.flags.schedule(histories.users, histories.total, self.fpl.epoch)
        users = min(histories.users, max(1, int(self.rounds.fraction * histories.users + 0.5)))
        return Schedule.over(histories.total, users, self.fpl.triples or 1)

    def resolved(self) -> Self:
        """Turn epochs into rounds of the loop; one-user rounds are bundled, an epoch to a round."""
        whole = self.fpl.flags is not None or self.central
        rounds = self.rounds.model_copy(update={"fraction": 1.0} if whole else {})
        if not self.rounds.by_epochs:
            return self.model_copy(update={"rounds": rounds})
        each = 1 if self.bundled else self.schedule().rounds_per_epoch
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

    def local_round(self) -> LocalRound:
        """Return what a user does in a round."""
        from steelyard.recommend.clients import LocalRound

        sequential = self.schedule().rounds_per_epoch if self.one_by_one else 0 if self.central else None
        return LocalRound(self.triples(), self.fpl.mask, self.fpl.decoys, sequential)

    def assemble(
        self, dataset: DatasetOrSeeded | None = None, read: Dataset | None = None
    ) -> tuple[Clients, RecommendServer]:
        """Read the data and build the simulated users and their server."""
        from steelyard.clients.protocol import Noise, SendingClients

        if dataset is not None:
            raise UserError("dataset: an experiment of kind 'recommend' reads interactions.path; allowed: no dataset")
        clients, server = self.simulated()
        noise = self.device_noise()
        return clients if noise is None else SendingClients(clients, [Noise(noise)]), server

    def simulated(self) -> tuple[RecommendClients, RecommendServer]:
        """Build the simulated users themselves, without the noise that they may add to what they send."""
        from steelyard.experiment.node import simulate

        return simulate(self.run_data(), self._model(), self.criteria())

    def _model(self) -> ModelSettings:
        from steelyard.experiment.node import ModelSettings

        return ModelSettings(self.fpl, self.kgflex, self.knowledge, self.ranking, self.local_round())

    def on_node(self, node: NodeConfig) -> NodeClients:
        """Build the users that live on one node; each user's vector stays in the node's state."""
        from steelyard.experiment.node import host_users

        if self.device_noise() is not None:
            raise UserError(
                "privacy.local: given, but a row of every item from every user does not fit into a message; "
                "allowed across machines: no [privacy.local]; or `steelyard run`, on one machine"
            )
        return host_users(self.interactions, self.items, self._model(), self.criteria(), seed=self.seed, node=node)

    def at_server(self, about: Mapping[str, int | list[int]]) -> RecommendServer:
        """Build the server; it makes the first shared rows and sees sums of sparse rows."""
        from steelyard.experiment.node import serve

        return serve(self._model(), about)

    def codec(self) -> Codec:
        """Return how sparse rows of the shared table travel; α, the width of a row and T are the experiment's own."""
        from steelyard.recommend.wire import SparseCodec

        # A user of FPL sends two items a triple at most, one of KGFlex the features that she keeps.
        most = 2 * self.triples() if self.kgflex is None else sum(self.kgflex.limits)
        return SparseCodec(self.fpl.learning_rate, self.fpl.factors + 1, most)

    @property
    def score_name(self) -> str:
        """The ranking metric that judges a user's list, and among what."""
        among = f" among {self.ranking.negatives} sampled negatives" if self.ranking.protocol == "sampled" else ""
        return f"{self.ranking.score}@{self.ranking.cutoff}{among}"

    @property
    def score_range(self) -> tuple[float, float]:
        """All scores of a list lie between 0 and 1."""
        return 0.0, 1.0
