"""The users of a recommender: all of them simulated, those of one node, and the server without interactions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from steelyard.clients.node import NodeClients, NodeConfig
from steelyard.errors import UserError
from steelyard.recommend.clients import LocalRound, RecommendClients
from steelyard.recommend.prepared import Prepared, cut, kept, prepare, put_together
from steelyard.recommend.sampled import Sampled
from steelyard.recommend.server import RecommendServer
from steelyard.recommend.settings import FplSettings, InteractionSettings, ItemSettings, RankingSettings
from steelyard.weighing.criteria import Criterion

_MOST_ITEMS = 10**8


def simulate(
    prepared: Prepared,
    fpl: FplSettings,
    ranking: RankingSettings,
    local_round: LocalRound,
    criteria: Sequence[Criterion],
) -> tuple[RecommendClients, RecommendServer]:
    """Build all users of some prepared data in this process, and their server."""
    clients = users_of(prepared, fpl, ranking, local_round, criteria)
    return clients, RecommendServer(prepared.histories.catalogue, fpl.factors, fpl.bias_spread)


def users_of(
    prepared: Prepared,
    fpl: FplSettings,
    ranking: RankingSettings,
    local_round: LocalRound,
    criteria: Sequence[Criterion],
) -> RecommendClients:
    """Build the users of some prepared data: all of them in a simulation, a node's own across machines."""
    return RecommendClients(
        *(prepared.users, prepared.learning, local_round),
        cutoff=ranking.cutoff,
        score=ranking.score,
        sampled=Sampled(ranking.negatives, prepared.split_seed) if ranking.protocol == "sampled" else None,
        criteria=criteria,
        threads=fpl.threads,
    )


def host(
    interactions: InteractionSettings,
    items: ItemSettings | None,
    fpl: FplSettings,
    ranking: RankingSettings,
    local_round: LocalRound,
    criteria: Sequence[Criterion],
    *,
    seed: int,
    node: NodeConfig,
) -> NodeClients:
    """Build the users that live on a node: their histories and vectors, and nobody else's."""
    _refuse_sequential(fpl, local_round)
    if node.own_data:
        prepared = _own(interactions, items, fpl, ranking, node)
    else:
        if node.data is not None:
            interactions = interactions.model_copy(update={"path": node.data})
        prepared = prepare(interactions, items, fpl, ranking)
    clients = users_of(prepared, fpl, ranking, local_round, criteria)
    names = node.choose(clients.names(seed))
    return NodeClients(_restricted(clients, names, node), names, {"items": clients.users.histories.catalogue})


def _own(
    interactions: InteractionSettings,
    items: ItemSettings | None,
    fpl: FplSettings,
    ranking: RankingSettings,
    node: NodeConfig,
) -> Prepared:
    """Prepare a node's own file: its users' rows and nobody else's, with items numbered by a public catalogue."""
    if interactions.core or interactions.min_item or interactions.catalogue is None or node.data is None:
        raise UserError(
            "node config data: a node with only its own users' rows knows neither others' items nor how often they are "
            "taken; allowed: interactions.catalogue = a file of all items, and core and min_item 0"
        )
    data = kept(node.data, interactions)
    return put_together(data, cut(data, interactions), interactions, items, fpl, ranking)


def serve(fpl: FplSettings, local_round: LocalRound, about: Mapping[str, int | list[int]]) -> RecommendServer:
    """Build the server from what the nodes say; it needs the interactions only to count triples and epochs."""
    _refuse_sequential(fpl, local_round)
    items = about.get("items")
    if not isinstance(items, int) or not 0 < items <= _MOST_ITEMS:
        raise UserError(f"federate: the nodes do not say how many items there are, but {dict(about)}")
    return RecommendServer(items, fpl.factors, fpl.bias_spread)


def _refuse_sequential(fpl: FplSettings, local_round: LocalRound) -> None:
    if local_round.sequential is not None:
        raise UserError(
            f"fpl.mode: '{fpl.mode}' takes one-user rounds by the epoch, in one process; allowed across "
            "machines: pFPL, pFPL+, or custom (fraction and triples as you like)"
        )


def _restricted(clients: RecommendClients, names: Sequence[str], node: NodeConfig) -> RecommendClients:
    facts = {name: {**node.device, **node.user} for name in names}
    users = replace(clients.users.keep(names), facts=facts)
    return clients.with_users(users)
