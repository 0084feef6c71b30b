"""The users of KGFlex as clients of the round loop, and their local passes: FPL with features in place of items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np
import torch

from steelyard.base.randomness import generator, words_at
from steelyard.data.files import digest
from steelyard.messages.payloads import Payload
from steelyard.messages.updates import Task
from steelyard.recommend.clients import LocalRound, RecommendClients, RecommendServer, Turns
from steelyard.recommend.compiled import descent, draw_triples, in_pieces, loop, own_triples
from steelyard.recommend.fpl import Learning
from steelyard.recommend.histories import Floats32, Histories, Triples, Users, round_keys, stretches, user_keys
from steelyard.recommend.interactions import Codes, Flags
from steelyard.recommend.kgflex.model import Knowledge, initial_features, initial_views
from steelyard.recommend.kgflex.model import scores as kgflex_scores
from steelyard.recommend.kgflex.selection import KgflexSettings, expertise, select
from steelyard.recommend.knowledge.features import ItemFeatures
from steelyard.recommend.metrics import Floats
from steelyard.recommend.sparse import SparseRows, TableChange
from steelyard.weighing.criterion import LocalData

_PIECE = 10_000
"""Triples that are one piece of work for a thread; pieces do not change the result."""
_SCALE, _ALONG, _ON_VIEW, _ON_SHARED, _ON_BIAS, _DECAY, _PRODUCT, _NORM, _MET, _SENT = _COLUMNS = range(10)
"""What a pass keeps of each feature of a user: p_f = scale p_f⁰ + along g_f; what is sent of its vector is on_view p_f⁰
+ (on_shared − decay) g_f, and on_bias of its bias; p_f · g_f and g_f · g_f; whether it was met, and is sent."""
_ALONE, _BOTH = 1, 2
"""A feature of one item of a triple, with the sign of c_f; one of both."""


@dataclass(frozen=True, eq=False)
class FeaturePass:
    """What a local pass leaves: new private vectors, what is sent, and the loss of each triple."""

    entries: Codes
    """The entries of the selection that were met, ascending for each user."""
    vectors: Floats32
    """[entries, factors]"""
    changes: SparseRows
    losses: Floats32
    """[users, T]: −ln σ(x̂) of each triple when it was visited."""


@loop
def _begin(view: Any, shared: Any, kept: Any) -> None:
    """Begin with a feature that is met for the first time."""
    kept[_SCALE] = kept[_MET] = 1
    for f in range(len(view)):
        kept[_PRODUCT] += view[f] * shared[f]
        kept[_NORM] += shared[f] * shared[f]


@loop
def _meet(items: Any, item: Any, where: Any, first: Any, side: Any, met: Any, liked: bool, count: int) -> int:
    """Mark the entries of the user that an item has; return how many of them the triple's items have so far."""
    starts, features = items
    for feature in features[starts[item] : starts[item + 1]]:
        entry = where[feature]
        if entry < 0:
            continue
        if side[entry - first] == 0:
            met[count] = entry
            count += 1
            side[entry - first] = _ALONE if liked else -_ALONE
        else:
            side[entry - first] = _BOTH
    return count


@loop
def _pass(items: Any, selection: Any, table: Any, views: Any, turns: Any, constants: Any, state: Any, out: Any) -> None:
    """Let one user after the other visit her triples in order; of vectors only `_begin` reads some."""
    starts, features, gains = selection
    users, begins, positives, negatives, real, sent = turns
    own_rate, shrinkage, positive, negative, one = constants
    where = np.full(len(table), -1, np.int64)
    for row in range(len(users)):
        first, last = starts[users[row]], starts[users[row] + 1]
        mine = state[begins[row] : begins[row] + last - first]
        side, met = np.zeros(last - first, np.int8), np.empty(last - first, np.int64)
        where[features[first:last]] = np.arange(first, last)
        for step in range(positives.shape[1]):
            count = _meet(items, positives[row, step], where, first, side, met, True, 0)
            count = _meet(items, negatives[row, step], where, first, side, met, False, count)
            margin = 0.0
            for entry in met[:count]:
                kept, sign = mine[entry - first], side[entry - first]
                shared = table[features[entry]]
                if kept[_MET] == 0:
                    _begin(views[entry], shared, kept)
                if sign != _BOTH:
                    margin += sign * gains[entry] * (kept[_PRODUCT] + shared[-1])
            weight, tail = descent(one * np.float32(margin), one)
            out[row, step] = np.log1p(tail) - min(np.float32(margin), one - one)  # ln(1 + exp −x̂)
            for entry in met[:count]:
                kept, sign = mine[entry - first], side[entry - first]
                side[entry - first] = 0
                # Where the positive item's part is not sent, c_f is −1 for all of i⁻ and 0 for the others.
                shown = (0 if sign == _BOTH else sign) if sent[row, step] else (0 if sign == _ALONE else -_ALONE)
                if shown != 0:
                    change = weight * gains[entry] * np.float32(shown)
                    kept[_ON_VIEW] += change * kept[_SCALE]
                    kept[_ON_SHARED] += change * kept[_ALONG]
                    kept[_ON_BIAS] += change
                    kept[_DECAY] += positive if shown > 0 else negative
                    kept[_SENT] = one
                if sign != _BOTH and real[row, step]:
                    change = own_rate * weight * gains[entry] * np.float32(sign)
                    kept[_PRODUCT] = shrinkage * kept[_PRODUCT] + change * kept[_NORM]
                    kept[_SCALE] *= shrinkage
                    kept[_ALONG] = shrinkage * kept[_ALONG] + change
        where[features[first:last]] = -1


def local_pass(
    table: Floats32,
    views: Floats32,
    knowledge: Knowledge,
    users: Codes,
    triples: Triples,
    sent: Flags,
    learning: Learning,
    threads: int = 1,
    own_rate: float | None = None,
    biases: bool = True,
) -> FeaturePass:
    """Let each user visit her triples in order; a user who stands there twice begins anew each time.

    `own_rate` is the step of users' own vectors, the shared rate unless it is given. Without `biases` no change of them
    is sent.
    """
    selection, matrix = knowledge.selection, knowledge.items.matrix
    user, positive, negative = learning.decays
    rate = learning.rate if own_rate is None else own_rate
    constants = np.array([rate, 1 - rate * user, positive, negative, 1], dtype=np.float32)
    sizes = selection.sizes[users]
    state = np.zeros((int(sizes.sum()), len(_COLUMNS)), dtype=np.float32)
    losses = np.empty(triples.positives.shape, dtype=np.float32)
    turns = (users, np.cumsum(sizes) - sizes, triples.positives, triples.negatives, own_triples(triples), sent)
    known = (matrix.indptr, matrix.indices), (selection.starts, selection.features, selection.weights)

    def part(rows: slice) -> None:
        _pass(*known, table, views, tuple(each[rows] for each in turns), constants, state, losses[rows])

    in_pieces(part, len(users), max(1, _PIECE // triples.positives.shape[1]), threads)
    met = np.flatnonzero(state[:, _MET])
    entries = stretches(selection.starts[users], sizes)[met]
    owners = np.repeat(np.arange(len(users), dtype=np.int32), sizes)[met]
    kept, hers, shared = state[met], views[entries], table[selection.features[entries]]
    with np.errstate(over="ignore", invalid="ignore"):
        vectors = np.asarray(kept[:, _SCALE, None] * hers + kept[:, _ALONG, None] * shared[:, :-1], dtype=np.float32)
        values = np.empty_like(shared)
        values[:, :-1] = kept[:, _ON_VIEW, None] * hers
        values[:, :-1] += (kept[:, _ON_SHARED] - kept[:, _DECAY])[:, None] * shared[:, :-1]
        values[:, -1] = kept[:, _ON_BIAS] * biases
    told = kept[:, _SENT] > 0
    changes = SparseRows(len(users), owners[told], selection.features[entries[told]], values[told], learning.rate)
    return FeaturePass(entries, vectors, changes, losses)


@loop
def _add(table: Any, rows: Any, changes: Any) -> None:
    """Add changes to rows, one after the other: `np.add.at` takes several times as long."""
    for index in range(len(rows)):
        for f in range(table.shape[1]):
            table[rows[index], f] += changes[index, f]


def central_epoch(
    table: Floats32,
    views: Floats32,
    knowledge: Knowledge,
    histories: Histories,
    users: Codes,
    learning: Learning,
    *,
    batch: int,
    seed: int,
    epoch: int,
    own_rate: float | None = None,
    biases: bool = True,
) -> tuple[Floats32, Floats]:
    """Visit as many triples as there are positives; `views` are moved, the new table and users' mean losses returned.

    A triple's user is drawn by her number of items, so that every interaction counts the same; the steps of a batch
    are taken together, all from the parameters before it.
    """
    table = table.copy()
    count = int(histories.drawn_from[users].sum())
    weights = histories.drawn_from[users] / max(count, 1)
    drawn = users[generator(seed, epoch, "", "kgflex central").choice(len(users), size=count, p=weights)]
    keys = round_keys(user_keys(seed, histories.names, "kgflex central")[drawn], epoch)
    # A user who comes up several times in an epoch draws from another position of her stream each time.
    keys = words_at(keys, np.arange(count, dtype=np.uint64))
    triples = draw_triples(histories, drawn, keys, 1)
    everything = np.ones((count, 1), dtype=np.bool_)
    losses = np.zeros(histories.users)
    for begin in range(0, count, batch):
        part = slice(begin, begin + batch)
        turns = (drawn[part], triples.select(part), everything[part])
        done = local_pass(table, views, knowledge, *turns, learning, own_rate=own_rate, biases=biases)
        with np.errstate(over="ignore", invalid="ignore"):
            _add(views, done.entries, done.vectors - views[done.entries])
            _add(table, done.changes.rows, np.float32(learning.rate) * done.changes.values)
        losses += np.bincount(drawn[part], done.losses[:, 0], histories.users)
    return table, losses / np.maximum(np.bincount(drawn, minlength=histories.users), 1)


# The clients of the round loop.


class Steps(TypedDict):
    """Which of a model's parts move in a pass, and how far."""

    own_rate: float | None
    biases: bool


@dataclass(frozen=True, eq=False)
class KgflexParts:
    """What KGFlex needs beside the users: features of all items, and the settings of the selection."""

    features: ItemFeatures
    settings: KgflexSettings

    @property
    def ablated(self) -> Steps:
        """How views and biases move: without views they have no step, without biases nothing is sent of them."""
        own_rate = self.settings.own_rate if self.settings.views == "on" else 0.0
        return {"own_rate": own_rate, "biases": self.settings.biases == "on"}


class KgflexClients(RecommendClients):
    """All users of a simulated KGFlex federation; use it through an experiment with a section [kgflex].

    Private views of features live here, one matrix per federation with a row per user and feature of hers, and leave
    only into checkpoints of the simulation. Which features those are follows from data and seed.
    """

    def __init__(
        self,
        users: Users,
        learning: Learning,
        local_round: LocalRound,
        parts: KgflexParts,
        **options: Any,
    ) -> None:
        """Take what `RecommendClients` takes, and the features."""
        super().__init__(users, learning, local_round, **options)
        self.parts = parts
        self._known: dict[int, Knowledge] = {}
        self._expertise: dict[int, Floats] = {}

    def with_users(self, users: Users) -> KgflexClients:
        return KgflexClients(users, self.learning, self.local_round, self.parts, **self._options())

    @property
    def shared_rows(self) -> int:
        return self.parts.features.features

    def fingerprint(self, seed: int) -> Mapping[str, str]:
        matrix = self.parts.features.matrix
        features = digest([str(self.parts.features.names), matrix.indptr, matrix.indices, self.parts.features.hops])
        return {**super().fingerprint(seed), "features": features}

    def knowledge(self, seed: int) -> Knowledge:
        """Return the features of items and, for this seed, of users with their information gains."""
        if seed not in self._known:
            settings = self.parts.settings
            how = (settings.limits, settings.others, settings.criterion)
            found = select(self.users.histories, self.parts.features, seed, *how)
            self._known[seed] = Knowledge(self.parts.features, found)
        return self._known[seed]

    def views(self, federation: str, seed: int) -> Floats32:
        """Return the users' private p^u_f, one row per entry of the selection."""
        return self._own(federation, seed)

    def _own(self, federation: str, seed: int) -> Floats32:
        if federation not in self._vectors:
            names, selection = self.users.histories.names, self.knowledge(seed).selection
            drawn = initial_views(seed, names, selection, self.learning.factors)
            self._vectors[federation] = drawn if self.parts.settings.views == "on" else np.zeros_like(drawn)
        return self._vectors[federation]

    def _in_parallel(
        self, task: Task, cohort: Codes, histories: Histories, table: Floats32, vectors: Floats32
    ) -> tuple[Payload, Floats, Codes]:
        turns = self._drawn(task.seed, task.round, cohort, histories)
        changes, losses = self._turn(turns, table, vectors)
        rows = np.bincount(changes.owners, minlength=len(cohort))
        return changes, losses.mean(axis=1, dtype=np.float64), rows

    def _turn(self, turns: Turns, table: Floats32, vectors: Floats32) -> tuple[SparseRows, Floats32]:
        """Do the local passes of some users on one table; their views are moved, what they send is returned."""
        given = (turns.users, turns.triples, turns.sent, self.learning, self.threads)
        done = local_pass(table, vectors, self.knowledge(turns.seed), *given, **self.parts.ablated)
        # A pass that ran away is refused by the server; the device goes back to the views it had.
        good = np.isfinite(done.vectors).all(axis=1)
        vectors[done.entries[good]] = done.vectors[good]
        return done.changes, done.losses

    def _in_sequence(
        self, task: Task, cohort: Codes, histories: Histories, table: Floats32, vectors: Floats32
    ) -> tuple[Payload, Floats, Codes]:
        work = super()._in_sequence if self.parts.settings.batch is None else self._centrally
        return work(task, cohort, histories, table, vectors)

    def _visit(self, turns: Turns, items: Codes, table: Floats32, vectors: Floats32) -> tuple[Floats, Codes]:
        # Users share too many features for two turns not to touch each other: they are done one after the other.
        count = len(turns.users)
        losses, rows = np.zeros(count), np.zeros(count, dtype=np.int64)
        for turn in range(count):
            changes, lost = self._turn(turns[turn : turn + 1], table, vectors)
            table[changes.rows] += np.float32(self.learning.rate) * changes.values
            losses[turn], rows[turn] = lost.mean(), len(changes.rows)
        return losses, rows

    def _centrally(
        self, task: Task, cohort: Codes, histories: Histories, table: Floats32, vectors: Floats32
    ) -> tuple[Payload, Floats, Codes]:
        """Do an epoch with all data in one place; nothing travels."""
        after, losses = central_epoch(
            *(table, vectors, self.knowledge(task.seed), histories, cohort, self.learning),
            batch=self.parts.settings.batch or 1,
            seed=task.seed,
            epoch=task.round,
            **self.parts.ablated,
        )
        payload = TableChange(len(cohort), torch.from_numpy((after - table).reshape(-1)))
        return payload, losses[cohort], np.zeros(len(cohort), dtype=np.int64)

    def _local(self, user: int, seed: int) -> LocalData:
        if self.parts.settings.criterion != "information":
            return super()._local(user, seed)  # the statistic of EX is one of information gains
        if seed not in self._expertise:
            self._expertise[seed] = expertise(
                self.knowledge(seed).selection, self.users.histories, self.parts.settings.others
            )
        local = super()._local(user, seed)
        return replace(local, user={"expertise": float(self._expertise[seed][user]), **local.user})

    def scores(self, federation: str, seed: int, model: torch.Tensor, users: Codes) -> Floats32:
        """Return r̂_ui of all items for these users (Eq. 6.12)."""
        return kgflex_scores(self.table(model), self._own(federation, seed), self.knowledge(seed), users)

    def table(self, model: torch.Tensor) -> Floats32:
        """Return the shared rows (g_f, b_f) of a flat model."""
        return model.detach().cpu().numpy().reshape(-1, self.learning.factors + 1)

    def describe(self) -> Mapping[str, str]:
        facts = {"features": str(self.parts.features)}
        for seed, known in self._known.items():
            facts[f"features per user, seed {seed}"] = f"{known.selection.sizes.mean():.1f}"
        return {**super().describe(), **facts}


class KgflexServer(RecommendServer):
    """The server of KGFlex: it holds a row per feature."""

    def _first(self, seed: int) -> Floats32:
        return initial_features(seed, self.rows, self.factors, bias_spread=self.bias_spread)
