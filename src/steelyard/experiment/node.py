"""Clients that live on one node, from its owner's own rows or a share of them: of samples or of a recommender."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch

from steelyard.base.errors import UserError
from steelyard.base.randomness import stream_key
from steelyard.base.tallies import least_class, merged
from steelyard.clients.local import ComputeSettings, Simulation
from steelyard.clients.node import NodeClients, NodeConfig
from steelyard.clients.protocol import Clients, WrappedClients
from steelyard.data import DataSettings, PartitionSettings, load
from steelyard.data.columns import by_name
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.data.site_sums import SiteColumns
from steelyard.data.sources.csv import Csv
from steelyard.experiment.node_rows import own_partition, own_seed, refuse_few, with_enough
from steelyard.experiment.simulation import LearningSections
from steelyard.messages.updates import Evaluations, Failure, Floats, LossState, Question, Task, Updates
from steelyard.recommend.clients import LocalRound, RecommendClients, RecommendServer
from steelyard.recommend.evaluate import RankingSettings, Sampled
from steelyard.recommend.fpl import FplSettings
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

ValueT = TypeVar("ValueT")


def host_learning(
    sections: LearningSections, *, seed: int, node: NodeConfig, rows_behind: Callable[[int, int], float]
) -> NodeClients:
    """Build the clients that live on a node; nothing of other clients is kept.

    `rows_behind` says, of a client's rows, how many of so many are behind an update, for the owner's min-rows. Flaws
    are of simulated clients: a node with data of its own has the clients it has.
    """
    if sections.flaws and node.own_data:
        raise UserError(
            f"flaws: got {len(sections.flaws)} on a node with data of its own ({node.data}); allowed: no flaws, or a "
            "node that takes its part of a shared data set (partition-id)"
        )
    dataset = _dataset(sections.data, node)
    outputs = dataset.targets or dataset.classes
    about: dict[str, int | list[int]] = {"features": list(dataset.features.shape[1:]), "classes": outputs}
    about |= {"pixels": 1} if dataset.task == "segmentation" else {}
    if node.guards_rows:
        guarded, names, notes, columns = _guarded_rows(sections, dataset, seed, node, rows_behind)
        return NodeClients(sections.sending(guarded), names, about, notes, columns, sections.records)
    if node.own_data:
        sections = replace(sections, partition=_own_rows(sections.partition))
    first = _hosted(sections, _population(sections, dataset, seed, node))
    clients = Simulation(
        lambda wanted: first if wanted == seed else _population(sections, dataset, wanted, node),
        *(sections.model, sections.training, _compute(sections.compute), sections.criteria),
        records=sections.records,
    )
    columns = _columns(sections, dataset, seed, first.names, node)
    return NodeClients(
        sections.sending(clients), tuple(sorted(first.names)), about, _of_facts(first), columns, sections.records
    )


def _hosted(sections: LearningSections, population: Population) -> Population:
    """Tell what protects samples how many the clients here have; returns the population."""
    if sections.records is not None:
        sections.records.hosted = [len(rows.train) for rows in population.clients]
    return population


def _columns(
    sections: LearningSections, dataset: Dataset, seed: int, names: Sequence[str], node: NodeConfig
) -> SiteColumns | None:
    """Return what may be told of the rows that the clients here train on; None where nobody may ask, or of no table."""
    if dataset.raw is None or node.terms.statistics in (None, "no"):
        return None
    shared = sections.population(dataset, seed, everyone=not node.own_data)
    train = np.unique(np.concatenate([shared.by_name[name].train for name in names]))
    site = ", ".join(node.names) or "this node"
    return SiteColumns.of(site, dataset, train, node.min_rows if node.guards_rows else 1)


def _guarded_rows(
    sections: LearningSections, dataset: Dataset, seed: int, node: NodeConfig, rows_behind: Callable[[int, int], float]
) -> tuple[Clients, tuple[str, ...], tuple[str, ...], SiteColumns | None]:
    """Build the clients of a node that reads its owner's file: its rows are fixed by that file, whatever is asked.

    Returns the clients, their names, what the owner should know, and what may be told of the columns.
    """
    secret = own_seed(node)
    held_out = dataset.held_out is not None and bool(dataset.held_out.any())
    partition = own_partition(node, held_out=held_out, seed=secret)
    fixed = _population(replace(sections, partition=partition, flaws=()), dataset, seed, node)
    fixed, notes = with_enough(fixed, rows_behind, node)
    if isinstance(sections.data, Csv) and sections.data.agreed:
        fixed = replace(fixed, dataset=_without_rare(fixed, node.min_rows))
    _hosted(sections, fixed)
    _check_introduction(dataset, sections.data, node)
    clients = Simulation(
        lambda _: fixed,
        *(sections.model, sections.training, _compute(sections.compute), sections.criteria),
        records=sections.records,
    )
    tested = {rows.client: len(rows.test) for rows in fixed.clients}
    labelled = fixed.label_counts() if dataset.classes else {}
    behind = {name: [rows_behind(sum(counts), count) for count in counts] for name, counts in labelled.items()}
    counting = any(criterion.needs.label_counts for criterion in sections.criteria)
    guarded = EnoughRows(clients, node.min_rows, secret, tested, labelled, behind, counts_labels=counting)
    columns = _columns(replace(sections, partition=partition, flaws=()), dataset, seed, fixed.names, node)
    return guarded, tuple(sorted(fixed.names)), (*notes, *_of_facts(fixed)), columns


def _of_facts(population: Population) -> tuple[str, ...]:
    """Return the notes on facts that are not known; other notes are those of anybody who reads the data."""
    return tuple(note for note in population.notes if note.startswith("fact("))


def _without_rare(population: Population, least: int) -> Dataset:
    """Return the rows with every word that too few train on as if it were empty.

    The server names the words that sites agreed on: one that it guessed must not get a column that shows a single row.
    """
    dataset, described = population.dataset, population.dataset.described
    train = torch.from_numpy(np.unique(np.concatenate([rows.train for rows in population.clients])))
    begin = len(described.numbers)
    counts = dataset.features[train, begin : begin + sum(len(column.levels) for column in described.columns)].sum(dim=0)
    features = dataset.features.clone()
    features[:, begin + torch.nonzero((counts > 0) & (counts < least)).flatten()] = 0
    return replace(dataset, features=features)


def _check_introduction(dataset: Dataset, data: DataSettings, node: NodeConfig) -> None:
    """Refuse to give a number of classes that rests on the few rows of one of them."""
    if data.capabilities().classes is None and dataset.classes:
        counts = torch.bincount(dataset.labels.long())
        what = "data.classes: missing, and a class here has few rows"
        refuse_few(what, int(counts[counts > 0].min()), node, "the number of classes, or a smaller min-rows here")


def _dataset(data: DataSettings, node: NodeConfig) -> Dataset:
    if node.data is None:
        return load(data)
    if data.source in ("digits", "diabetes"):
        raise UserError(f"node config data: got {node.data}, but data.source = '{data.source}' comes with the package")
    dataset = load(data.model_copy(update={"path": node.data} | ({"files": ()} if isinstance(data, Csv) else {})))
    if not node.own_data:
        return dataset
    dataset = by_name(dataset)
    if len(node.names) == 1:
        return replace(dataset, owners=np.full(len(dataset), node.names[0]))
    if dataset.owners is None:
        raise UserError(f"node config clients: {node.data} has no column of owners; allowed: one client")
    return dataset


def _own_rows(partition: PartitionSettings) -> PartitionSettings:
    """Return the partition for a file of a node's own rows: each owner is a client, tests are split as asked."""
    scheme = "given" if partition.test == "held-out" else "natural"
    changes = {"scheme": scheme, "clients": None, "server": "none", "server_report": "none"}
    kind = cast("type[PartitionSettings]", PartitionSettings.kinds[scheme])
    return kind.model_construct(None, **partition.model_dump() | changes)


def _population(sections: LearningSections, dataset: Dataset, seed: int, node: NodeConfig) -> Population:
    """Return a population of only those clients that live on the node, with only their rows of the data set."""
    population = sections.population(dataset, seed, everyone=not node.own_data)
    chosen = [population.by_name[name] for name in node.choose(population.names)]
    triggers = {} if population.backdoor is None else _of(chosen, population.backdoor.rows)
    parts = [part for rows in chosen for part in (rows.train, rows.test)] + list(triggers.values())
    used = np.unique(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.int64)
    moved = [
        replace(rows, train=np.searchsorted(used, rows.train), test=np.searchsorted(used, rows.test)) for rows in chosen
    ]
    facts = {rows.client: population.facts.get(rows.client, {}) for rows in chosen}
    told = {"device": node.device, "user": node.user}  # what the owner says counts in place of what [facts] says
    own = replace(
        population,
        facts={name: {kind: {**given.get(kind, {}), **told[kind]} for kind in told} for name, given in facts.items()},
        dataset=population.dataset.take(used),
        clients=tuple(moved),
        server=np.zeros(0, dtype=np.int64),
        report=np.zeros(0, dtype=np.int64),
        behaviours=_of(chosen, population.behaviours),
        flaws=_of(chosen, population.flaws),
        backdoor=population.backdoor
        and replace(population.backdoor, rows={name: np.searchsorted(used, rows) for name, rows in triggers.items()}),
    )
    return sections.noted(own, everyone=False)


def _of(chosen: Sequence[ClientRows], facts: Mapping[str, ValueT]) -> dict[str, ValueT]:
    return {rows.client: facts[rows.client] for rows in chosen if rows.client in facts}


def _compute(compute: ComputeSettings) -> ComputeSettings:
    # A process that trains a few clients once has no time for trials; the engines agree within float tolerance.
    return compute.model_copy(update={"engine": "loop"}) if compute.engine == "auto" else compute


# Users of a recommender.


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
        if self.kgflex is None:
            return RecommendServer(rows, self.fpl.factors, self.fpl.bias_spread)
        from steelyard.recommend.kgflex.clients import KgflexServer  # In an extra.

        return KgflexServer(rows, self.fpl.factors, self.fpl.bias_spread)


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
    from steelyard.recommend.kgflex.clients import KgflexClients, KgflexParts  # In an extra.

    return KgflexClients(*known, KgflexParts(features, model.kgflex), **options)


def host_users(
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
        return _guarded_users(clients, names, about, node)
    return NodeClients(_restricted(clients, names, node), names, about)


def _guarded_users(
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


# No answer rests on too few rows of a client.


class EnoughRows(WrappedClients):
    """Clients of a node with a file of its owner's; wrap them where they are built, before anything is sent.

    `tested` is the number of test rows of each client, `labelled` its number of training rows of each class, and
    `behind` how many of these are at least behind an update; left out: all. `secret` is a number that follows from the
    file, which the server does not have: the order of rows, masks and decoys are drawn with it, so that no server can
    show which rows are behind which part of an answer.
    """

    def __init__(
        self,
        clients: Clients,
        min_rows: int,
        secret: int,
        tested: Mapping[str, int],
        labelled: Mapping[str, Sequence[int]] | None = None,
        behind: Mapping[str, Sequence[float]] | None = None,
        *,
        counts_labels: bool = False,
    ) -> None:
        super().__init__(clients)
        self._min_rows, self._secret = min_rows, secret
        self._tested, self._labelled, self._counts_labels = tested, labelled or {}, counts_labels
        self._behind = self._labelled if behind is None else behind

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        few = [{name: why for name in task.clients if (why := self._few(name, task.loss))} for task in tasks]
        asked = [
            replace(task, seed=self._seed(task.seed), clients=tuple(name for name in task.clients if name not in left))
            for task, left in zip(tasks, few, strict=True)
        ]
        return [
            replace(answer, failures=(*answer.failures, *(Failure(name, why) for name, why in left.items())))
            for answer, left in zip(self.clients.train(asked), few, strict=True)
        ]

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        asked = [
            replace(question, seed=self._seed(question.seed), detailed=question.detailed and self._min_rows == 1)
            for question in questions
        ]
        answers = self.clients.evaluate(asked)
        return [self._allowed(question, answer) for question, answer in zip(questions, answers, strict=True)]

    def _allowed(self, question: Question, answer: Evaluations) -> Evaluations:
        """Return an answer without clients whose tests have too few rows, and never right or wrong of a single one."""
        single = question.detailed and self._min_rows > 1
        least = self._min_rows
        if answer.tallies is not None and least > 1:
            answer = self._merged(answer, answer.tallies)
        keep = [row for row, name in enumerate(answer.clients) if not single and self._tested.get(name, 0) >= least]
        if len(keep) == len(answer.clients):
            return answer
        what = "right or wrong of each row rests on one" if single else "the test set has fewer"
        why = f"tests: {what}, and this node answers with {self._min_rows} rows or more"
        left = [Failure(name, why) for row, name in enumerate(answer.clients) if row not in keep]
        right = np.zeros(0, dtype=np.bool_) if question.detailed else None
        return replace(answer.without([each.client for each in left]), right=right, failures=(*answer.failures, *left))

    def _merged(self, answer: Evaluations, tallies: Floats) -> Evaluations:
        """Return an answer without clients of which a class has too few test rows, and no bin of scores with fewer."""
        few = [name for row, name in enumerate(answer.clients) if least_class(tallies[:, row]) < self._min_rows]
        kept = answer.without(few)
        why = f"tests: a class has fewer than {self._min_rows} rows, and its figures are not told"
        return replace(
            kept,
            tallies=None if kept.tallies is None else merged(kept.tallies, self._min_rows),
            failures=(*kept.failures, *(Failure(name, why) for name in few)),
        )

    def _few(self, client: str, loss: LossState) -> str:
        """Say what sets apart a class of which this client has some rows, but too few; empty where nothing does.

        Its counts of labels would disclose how many, and two answers with other class weights how they differ.
        """
        counts, least = self._labelled.get(client, ()), self._min_rows
        if self._counts_labels and any(0 < count < least for count in counts):
            return f"label counts: a class has fewer than {least} rows, and its number is not told"
        weights = {weight for weight, count in zip(loss.class_weights or (), counts, strict=False) if count}
        behind = self._behind.get(client, counts)
        if len(weights) < 2 or all(rows >= least for count, rows in zip(counts, behind, strict=True) if count):
            return ""
        return f"loss: under its class weights, fewer than {least} rows of a class are behind an update"

    def _seed(self, seed: int) -> int:
        return stream_key(self._secret, client=str(seed), purpose="node")
