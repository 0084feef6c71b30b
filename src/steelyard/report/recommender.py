"""Looking into a run of a recommender: its lists, its figures, what it sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NotRequired, cast

import numpy as np
import torch
from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.base.errors import UserError, brief, listed
from steelyard.experiment.loading import read_experiment
from steelyard.experiment.parts import federations_of
from steelyard.experiment.recommend import RecommendDescription
from steelyard.recommend.baselines import baseline, recommend
from steelyard.recommend.clients import RecommendClients
from steelyard.recommend.evaluate import Case, figures
from steelyard.recommend.interactions import Codes, numbered
from steelyard.recommend.kgflex import model
from steelyard.recommend.kgflex.clients import KgflexClients
from steelyard.recommend.kgflex.model import Knowledge
from steelyard.recommend.kgflex.selection import Selection
from steelyard.recommend.metrics import Floats
from steelyard.recommend.run_data import RunData, number_of, titles_of
from steelyard.runs.history import History
from steelyard.weighing.rule import WeighingSettings

Metrics = dict[str, dict[str, object]]
"""Metrics of lists by cutoff and by name, as `recommend.evaluate.figures` returns them; each metric names itself."""


@dataclass(frozen=True, eq=False)
class Listing:
    """A shared table and users with their vectors, of a run or of a saved model: what makes lists."""

    run_data: RunData
    clients: RecommendClients
    federation: str
    seed: int
    model: torch.Tensor

    def lists(self, cutoff: int) -> tuple[Codes, Floats]:
        """Return every user's list, best first, and the scores of its items."""
        return self.clients.lists(self.federation, self.seed, self.model, cutoff)


@dataclass(frozen=True, eq=False)
class Finished(Listing):
    """One rule of a run as of its last checkpoint, with the simulated users."""

    experiment: RecommendDescription
    round: int

    def report(self, cutoffs: list[int]) -> RecommenderReport:
        """Return all metrics by cutoff, as `evaluate` prints them, with the cost by formula and as sent."""
        lists, _ = self.lists(max(cutoffs))
        data = self.run_data.data
        case = Case(self.run_data.users.truth, tuple(data.users), tuple(data.items), lists, None, ())
        found: RecommenderReport = {
            "metrics": figures(case, cutoffs),
            "communication": self.communication(),
            "data": data.report(),
        }
        if self.clients.judge.sampled is not None:
            found["sampled"] = self.among_sampled()
        return found

    def among_sampled(self) -> dict[str, float]:
        """Return the mean of each metric by the protocol of sampled negatives, where the experiment has it."""
        scores = partial(self.clients.scores, self.federation, self.seed, self.model)
        means = {name: float(values.mean()) for name, values in self.clients.judge.measure(scores).items()}
        return {f"{name}@{self.clients.judge.cutoff}": mean for name, mean in means.items()}

    def communication(self) -> Communication:
        """Return CCE and TCC of the thesis' formula, which counts items' vectors, and what was really sent."""
        schedule = self.experiment.schedule()
        each = schedule.rounds_per_epoch
        rounds = self.round * each if self.experiment.one_by_one else self.round
        cost = schedule.cost_per_epoch(self.run_data.histories.catalogue, float(self.run_data.users.shares.mean()))
        sent = self.clients.traffic(self.federation)
        found: Communication = {
            "users_per_round": schedule.users,
            "triples": schedule.triples,
            "rounds_per_epoch": each,
            "rounds": rounds,
            "sent_vectors": sent.vectors,
            "sent_vectors_down": sent.down_vectors,
            "sent_vectors_up": sent.up_vectors,
            "sent_bytes_down": sent.down_bytes,
            "sent_bytes_up": sent.up_bytes,
        }
        if self.experiment.kgflex is None:
            found["cce_vectors"], found["tcc_vectors"] = cost, cost * rounds / each
        return found


def open_run(folder: Path, rule: str | None = None, seed: int | None = None) -> Finished:
    """Open a run's last checkpoint; the main rule unless another is named."""
    experiment = read_experiment(folder)
    if not isinstance(experiment, RecommendDescription):
        raise UserError(f"{folder}: a run of kind '{experiment.kind_name()}'; allowed: kind 'recommend'")
    seeds = History(folder).facts.seeds
    known = federations_of(experiment, seeds or None)
    chosen = [f for f in known if rule in (None, f.rule_name) and seed in (None, f.seed)]
    if not chosen:
        names = listed(f"{f.rule_name} (seed {f.seed})" for f in known)
        raise UserError(f"--rule: got '{rule}'; allowed: {names}")
    states, kept = History(folder).last_checkpoint()
    if not states:
        raise UserError(f"{folder}: no checkpoint yet; allowed: a run with at least one finished round")
    federation = chosen[0]
    if f"vectors/{federation.name}" not in kept:
        raise UserError(
            f"{folder}: no users' vectors in the checkpoint, as in a federation across machines: they stay on their "
            "nodes; allowed: a run of `steelyard run` with at least one round"
        )
    # Lists need no weighing, and reading a run must not load the criteria that its folder names.
    plain = experiment.model_copy(update={"weighing": WeighingSettings(criteria=("EQ",)), "beside": {}})
    clients, _ = plain.simulated()
    clients.restore(kept)
    state = states[federation.name]
    of_run = (experiment.run_data(), clients, federation.name, federation.seed, state.parameters)
    return Finished(*of_run, experiment, state.round)


def beside_simple(folder: Path, rules: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return the metrics of the lists of a run's rules, and of two systems that learn nothing, for the same users.

    Empty where a run has no lists: across machines vectors stay on their nodes, and sampled negatives make no lists.
    """
    try:
        opened = {rule: open_run(folder, rule) for rule in rules}
    except UserError:
        return {}
    first = next(iter(opened.values()))
    cutoff, split = first.clients.judge.cutoff, first.run_data.split
    if first.clients.judge.sampled is not None:
        return {}
    lists = {rule: each.lists(cutoff)[0] for rule, each in opened.items()}
    for kind in ("popular", "random"):
        lists[f"most {kind}" if kind == "popular" else kind] = recommend(
            baseline(kind), split.train, cutoff, first.seed
        )[0]
    users, items = tuple(split.train.users), tuple(split.train.items)
    truth = first.run_data.users.truth
    return {
        name: figures(Case(truth, users, items, found, None, ()), [cutoff])[str(cutoff)]
        for name, found in lists.items()
    }


# The documents of `steelyard recommend ... --format json`.


class Communication(TypedDict):
    """What a recommender sent, and the thesis' formula where it applies."""

    users_per_round: int
    triples: int
    rounds_per_epoch: int
    rounds: int
    cce_vectors: NotRequired[float]
    tcc_vectors: NotRequired[float]
    sent_vectors: int
    sent_vectors_down: int
    sent_vectors_up: int
    sent_bytes_down: int
    sent_bytes_up: int


class RecommenderReport(TypedDict):
    """All metrics of a recommender's lists by cutoff, its data, and what it sent."""

    metrics: Metrics
    communication: Communication
    data: list[str]
    sampled: NotRequired[dict[str, float]]


class FeatureReason(TypedDict):
    """A feature that made part of an item's score: part = gain x (personal + common)."""

    feature: str
    hops: int
    share: float
    part: float
    gain: float
    personal: float
    common: float


class Explanation(TypedDict):
    """Why an item has its score for a user."""

    user: str
    item: str
    title: str
    score: float
    features_of_user: int
    features_of_item: int
    reasons: list[FeatureReason]


class KeptFeatures(TypedDict):
    """Quartiles over users of the share of their features that their lists keep, by reading and number of features."""

    cutoff: int
    kept: dict[str, dict[str, list[float | None]]]
    prominent: int
    prominent_after: int
    prominent_kept: float | None


class CloudWord(TypedDict):
    """A prominent feature before or after recommendation."""

    when: str
    rank: int
    feature: str
    weight: float


# Runs of KGFlex: why an item is in a list, what lists keep of users' features, feature clouds.


TOPS = (None, 100, 50, 10, 5)
"""The thesis' columns of Table 6.2; None for all of a user's features."""


@dataclass(frozen=True, eq=False)
class Explained:
    """Users of KGFlex, with what their features say."""

    finished: Listing
    clients: KgflexClients

    @property
    def knowledge(self) -> Knowledge:
        """The features of items, and of users with their information gains."""
        return self.clients.knowledge(self.finished.seed)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Each feature in words."""
        return self.clients.parts.features.names

    def why(self, user: str, item: str) -> Explanation:
        """Return the score of an item for a user and the features that made it, those that say most first."""
        finished = self.finished
        number, wanted = number_of(finished.run_data, user), self._item(item)
        table = self.clients.table(finished.model)
        views = self.clients.views(finished.federation, finished.seed)
        found = model.reasons(table, views, self.knowledge, number, wanted)
        hops = self.clients.parts.features.hops
        return {
            "user": user,
            "item": item,
            "title": titles_of(finished.run_data, np.array([wanted]))[0],
            "score": sum(each.part for each in found),
            "features_of_user": int(self.knowledge.selection.sizes[number]),
            "features_of_item": len(self.clients.parts.features.of(wanted)),
            "reasons": [_reason(self.names[each.feature], int(hops[each.feature]), each) for each in found],
        }

    def _item(self, item: str) -> int:
        """Return the number of an item, or say which there are."""
        items = self.finished.run_data.data.items
        number = int(numbered(np.array([item], dtype=object), items)[0])
        if number < 0:
            some = listed(items[:5].tolist())
            raise UserError(f"--item: got {brief(item)}; allowed: one of {len(items)} items, such as {some}")
        return number

    def after(self, lists: Codes) -> Selection:
        """Return the features that users' lists would select if they were their items."""
        names, seed = self.clients.users.histories.names, self.finished.seed
        return model.after_lists(self.knowledge, lists, names, seed, self.clients.parts.settings)

    def kept(self, cutoff: int) -> KeptFeatures:
        """Return the quartiles over users of the share of her features that her list keeps (Table 6.2).

        Two readings: a feature is kept if an item of the list has it (`shown`), or if the list, taken as her items,
        would select it again (`informative`).
        """
        lists, _ = self.finished.lists(cutoff)
        after, selection = self.after(lists), self.knowledge.selection
        flags = {
            "shown": model.shown(self.knowledge, lists),
            "informative": model.informative_again(self.knowledge, after),
        }
        shares = {
            name: {"all" if top is None else str(top): _quartiles(model.kept(selection, flag, top)) for top in TOPS}
            for name, flag in flags.items()
        }
        # Fewer than a hundred where fewer are selected by anyone.
        before, then = (set(_prominent(each, 100)) for each in (selection, after))
        return {
            "cutoff": cutoff,
            "kept": shares,
            "prominent": len(before),
            "prominent_after": len(then),
            "prominent_kept": len(before & then) / len(before) if before else None,
        }

    def clouds(self, cutoff: int, top: int) -> list[CloudWord]:
        """Return the most prominent features before and after: in what users took, and in what they are shown."""
        lists, _ = self.finished.lists(cutoff)
        rows: list[CloudWord] = []
        for when, selection in (("before", self.knowledge.selection), ("after", self.after(lists))):
            weights = model.cloud(selection)
            for rank, feature in enumerate(_prominent(selection, top), 1):
                rows.append(
                    {"when": when, "rank": rank, "feature": self.names[feature], "weight": float(weights[feature])}
                )
        return rows


def open_explained(folder: Path, rule: str | None = None) -> Explained:
    """Open a run of KGFlex; the main rule unless another is named."""
    finished = open_run(folder, rule)
    if not isinstance(finished.clients, KgflexClients):
        raise UserError(f"{folder}: a run without [kgflex], whose scores no features make; allowed: a run of KGFlex")
    return Explained(finished, finished.clients)


def _reason(feature: str, hops: int, reason: model.Reason) -> FeatureReason:
    return cast(FeatureReason, {**asdict(reason), "feature": feature, "hops": hops})


def _quartiles(shares: np.ndarray) -> list[float | None]:
    known = shares[~np.isnan(shares)]
    return [float(each) for each in np.percentile(known, (25, 50, 75))] if len(known) else [None] * 3


def _prominent(selection: Selection, top: int) -> Sequence[int]:
    """Return the features with the largest sums of gains, best first, ties by ascending number."""
    weights = model.cloud(selection)
    return [feature for feature in np.argsort(-weights, kind="stable")[:top].tolist() if weights[feature] > 0]
