"""The users of a recommender: all of them simulated, those of one node, and the server without interactions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steelyard.base.errors import UserError
from steelyard.clients.node import NodeClients, NodeConfig
from steelyard.experiment.enough_rows import EnoughRows
from steelyard.experiment.node_rows import own_seed, refuse_few
from steelyard.recommend.clients import LocalRound, RecommendClients, RecommendServer
from steelyard.recommend.evaluate import RankingSettings, Sampled
from steelyard.recommend.fpl import FplSettings
from steelyard.recommend.kgflex.clients import KgflexClients, KgflexParts, KgflexServer
from steelyard.recommend.kgflex.selection import KgflexSettings
from steelyard.recommend.knowledge.loading import KnowledgeSettings, load_features
from steelyard.recommend.run_data import (
    InteractionSettings,
    ItemSettings,
    RunData,
    assemble,
    filtered_interactions,
    load_run_data,
    split_interactions,
)
from steelyard.weighing.criterion import Criterion

_MOST_ROWS = 10**8


@dataclass(frozen=True)
class ModelSettings:
    """What is trained, FPL's items or with [kgflex] the features that [knowledge] gives them; how, and how tested."""

    fpl: FplSettings
    kgflex: KgflexSettings | None
    knowledge: KnowledgeSettings | None
    ranking: RankingSettings
    local_round: LocalRound

    def server(self, rows: int) -> RecommendServer:
        """Return the server of a table with so many rows."""
        kind = RecommendServer if self.kgflex is None else KgflexServer
        return kind(rows, self.fpl.factors, self.fpl.bias_spread)


def simulate(
    run_data: RunData, model: ModelSettings, criteria: Sequence[Criterion]
) -> tuple[RecommendClients, RecommendServer]:
    """Build all users of the data of a run in this process, and their server."""
    clients = users_of(run_data, model, criteria)
    return clients, model.server(clients.shared_rows)


def users_of(run_data: RunData, model: ModelSettings, criteria: Sequence[Criterion]) -> RecommendClients:
    """Build the users of the data of a run: all of them in a simulation, a node's own across machines."""
    known, ranking = (run_data.users, run_data.learning, model.local_round), model.ranking
    options: dict[str, Any] = {
        "cutoff": ranking.cutoff,
        "score": ranking.score,
        "sampled": Sampled(ranking.negatives, run_data.split_seed) if ranking.protocol == "sampled" else None,
        "criteria": criteria,
        "threads": model.fpl.threads,
    }
    if model.kgflex is None or model.knowledge is None:
        return RecommendClients(*known, **options)
    features = load_features(model.knowledge, run_data.data.items)
    if not features.matrix.shape[1]:
        raise UserError(
            f"knowledge: no feature is left for the {len(run_data.data.items)} items; allowed: sources that describe "
            "them (`steelyard recommend features` shows what was read and dropped)"
        )
    return KgflexClients(*known, KgflexParts(features, model.kgflex), **options)


def host(
    interactions: InteractionSettings,
    items: ItemSettings | None,
    model: ModelSettings,
    criteria: Sequence[Criterion],
    *,
    seed: int,
    node: NodeConfig,
) -> NodeClients:
    """Build the users that live on a node: their histories and vectors, and nobody else's."""
    _refuse_sequential(model)
    if node.own_data:
        run_data = _own(interactions, items, model, node)
    else:
        if node.data is not None:
            interactions = interactions.model_copy(update={"path": node.data})
        run_data = load_run_data(interactions, items, model.fpl, model.ranking)
    clients = users_of(run_data, model, criteria)
    names = node.choose(clients.names(seed))
    about = {"items": clients.users.histories.catalogue, "rows": clients.shared_rows}
    if node.guards_rows:
        return _guarded(clients, names, about, node)
    return NodeClients(_restricted(clients, names, node), names, about)


def _guarded(
    clients: RecommendClients, names: Sequence[str], about: Mapping[str, int | list[int]], node: NodeConfig
) -> NodeClients:
    """Build the users of a node that reads its owner's file: a row is an interaction of a user with an item."""
    few = "fpl.triples: a round visits fewer interactions of each user"
    refuse_few(few, clients.local_round.triples, node, f"{node.min_rows} or more")
    histories, truth = clients.users.histories, clients.users.truth
    trained = dict(zip(histories.names, histories.sizes.tolist(), strict=True))
    tested = dict(zip(histories.names, truth.relevant.tolist(), strict=True))
    kept = tuple(name for name in names if trained[name] >= node.min_rows)
    refuse_few("min-rows: no user here has as many training items", len(kept) * node.min_rows, node, "other nodes")
    notes = (f"{name} takes no part: {trained[name]} training items" for name in names if name not in kept)
    guarded = EnoughRows(_restricted(clients, kept, node), node.min_rows, own_seed(node), tested)
    return NodeClients(guarded, kept, about, tuple(notes))


def _own(
    interactions: InteractionSettings, items: ItemSettings | None, model: ModelSettings, node: NodeConfig
) -> RunData:
    """Prepare a node's own file: its users' rows and nobody else's, with items numbered by a public catalogue."""
    if interactions.core or interactions.min_item or interactions.catalogue is None or node.data is None:
        raise UserError(
            "node config data: a node with only its own users' rows knows neither others' items nor how often they are "
            "taken; allowed: interactions.catalogue = a file of all items, and core and min_item 0"
        )
    data = filtered_interactions(node.data, interactions)
    return assemble(data, split_interactions(data, interactions), interactions, items, model.fpl, model.ranking)


def serve(model: ModelSettings, about: Mapping[str, int | list[int]]) -> RecommendServer:
    """Build the server from what the nodes say; it needs the interactions only to count triples and epochs."""
    _refuse_sequential(model)
    rows = about.get("rows")
    if not isinstance(rows, int) or not 0 < rows <= _MOST_ROWS:
        raise UserError(f"federate: the nodes do not give the number of shared rows, but {dict(about)}")
    return model.server(rows)


def _refuse_sequential(model: ModelSettings) -> None:
    if model.kgflex is not None and model.kgflex.batch is not None:
        raise UserError(
            f"kgflex.batch: got {model.kgflex.batch}, which trains with all data in one place; allowed across "
            "machines: none"
        )
    if model.local_round.sequential is not None:
        raise UserError(
            f"fpl.mode: '{model.fpl.mode}' takes one-user rounds by the epoch, in one process; allowed across "
            "machines: pFPL, pFPL+, or custom (fraction and triples as you like)"
        )


def _restricted(clients: RecommendClients, names: Sequence[str], node: NodeConfig) -> RecommendClients:
    facts = {name: {**node.device, **node.user} for name in names}
    users = replace(clients.users.keep(names), facts=facts)
    return clients.with_users(users)
