"""What a kind of experiment says of itself and can build, with the answers of one that says nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from steelyard.base.errors import UserError
from steelyard.base.settings import Section
from steelyard.rounds.contributions import ContributionSettings
from steelyard.weighing.criterion import Capabilities
from steelyard.weighing.rule import WeighingSettings

if TYPE_CHECKING:
    from steelyard.clients.flower.wire import Codec
    from steelyard.clients.node import NodeClients, NodeConfig
    from steelyard.clients.protocol import Clients, Server
    from steelyard.data.dataset import DatasetOrSeeded


class Kind(Section):
    """Where kinds of experiments differ: clients and server, what criteria are given, scores; without fields.

    `Description` derives from it; a kind overrides what is different there.
    """

    @property
    def optimiser(self) -> str | None:
        """How clients take their steps; None where they do not train whole models."""
        return None

    @property
    def momentum(self) -> float:
        """The clients' momentum."""
        return 0.0

    @property
    def learning_rate(self) -> float:
        """The clients' learning rate in the first round; 0 where they have none."""
        return 0.0

    def rate(self, round: int) -> float:
        """Return what the clients' learning rate is multiplied by in a round."""
        return 1.0

    @property
    def all_clients(self) -> int | None:
        """How many clients there are; None where that is known from the data alone."""
        return None

    def capabilities(self) -> Capabilities:
        """Return what this experiment can give to criteria; each kind says what it knows before any data is read."""
        return Capabilities(f"kind = '{type(self).__name__}'")

    def check_rule(self, rule: WeighingSettings) -> None:
        """Refuse a rule that this kind of experiment cannot follow; called for each before any data is read."""
        if rule.defence is not None:
            raise UserError(
                "weighing.defence: given, but clients of this kind do not send whole models; allowed: no "
                "[weighing.defence] (weighing.bound and max_weight work)"
            )
        if rule.fit is not None or rule.trained_by != "clients":
            field = "fit" if rule.fit is not None else "trained_by"
            raise UserError(
                f"weighing.{field}: given, but this kind of server has no rows to learn from; allowed: leave it out"
            )
        if rule.loss is not None:
            raise UserError(
                "weighing.loss: given, but the loss of this kind of experiment is fixed; allowed: leave it out"
            )

    @property
    def clients_evaluate(self) -> bool:
        """Whether clients test the new models."""
        return True

    @property
    def measures(self) -> Mapping[str, str]:
        """Further figures of each client's test by which settings can be chosen: name and the name in the records."""
        return {}

    def resolved(self) -> Self:
        """Return the experiment with what is known from the data alone filled in, such as rounds counted in epochs."""
        return self

    def assemble(self, dataset: DatasetOrSeeded | None = None) -> tuple[Clients, Server]:
        """Read the data and build the clients and the server that the loop talks to; every kind says how."""
        raise NotImplementedError(type(self).__name__)

    def on_node(self, node: NodeConfig) -> NodeClients:
        """Build those clients that live on one node of a federation across machines, from the node's own data."""
        raise UserError(f"kind: '{type(self).__name__}' cannot run across machines yet; allowed: steelyard run")

    def check_runs_here(self, where: str) -> None:
        """Refuse a run that another program carries on; called before a run goes on."""

    @property
    def shared_out(self) -> bool:
        """Whether several processes can train the clients of one run."""
        return False

    @property
    def clocked(self) -> bool:
        """Whether simulated devices have a clock."""
        return False

    def check_contributions(self, settings: ContributionSettings, *, own_code: bool = False) -> None:
        """Refuse to measure what clients add where this kind of experiment, its rows or [privacy] do not allow it."""
        raise UserError(
            "contributions: experiments of this kind do not measure what their clients add; allowed: kind = 'learning'"
        )

    def check_federated(self) -> None:
        """Refuse what works in a simulation only; called on the server and on every node, before anything is sent."""

    def about_data(self) -> Mapping[str, int | list[int]]:
        """Return what this experiment itself says of the data that nodes hold; what it leaves open, most nodes say."""
        return {}

    def at_server(self, about: Mapping[str, int | list[int]]) -> Server:
        """Build the server of a federation across machines; `about` is what the nodes say of their data."""
        return self.assemble()[1]

    def codec(self) -> Codec:
        """Return how the updates of this kind of experiment travel between machines; whole models unless it says so."""
        # For speed of start; and a simulation needs no Flower.
        from steelyard.clients.flower.wire import DENSE

        return DENSE

    def with_engine(self, choice: str) -> Self:
        """Return the experiment with the engine that an earlier run recorded; kinds without engines ignore it."""
        return self

    def with_dataset(self, dataset: DatasetOrSeeded | None, seed: int) -> tuple[Self, DatasetOrSeeded | None]:
        """Return the experiment with what is known of data that are handed over from Python, and these."""
        return self, dataset

    @property
    def local_loss(self) -> str:
        """The loss that clients train with; "auto" is the one that fits."""
        return "auto"

    @property
    def regression(self) -> bool:
        """Whether a number is learnt, not a class."""
        return False

    @property
    def worth(self) -> str:
        """The criterion by which a model does well on the server's rows."""
        return "VP"

    @property
    def server_figure(self) -> str:
        """The figure of the server's tests by which rules are recommended."""
        return "accuracy"

    @property
    def reports_on_server(self) -> bool:
        """Whether the server has rows that report on each new model."""
        return False

    @property
    def score_name(self) -> str:
        """What the clients' local scores are, for headings."""
        return "accuracy"

    @property
    def score_range(self) -> tuple[float, float] | None:
        """The range that a client's local score can have, where there is one; a score beyond it is refused."""
        return None
