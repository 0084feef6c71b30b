"""The users of KGFlex as clients of the round loop: FPL's protocol with features in place of items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from steelyard.data.files import digest
from steelyard.messages.payloads import Payload
from steelyard.messages.updates import Task
from steelyard.recommend.clients import LocalRound, RecommendClients, RecommendServer
from steelyard.recommend.compiled import draw_triples
from steelyard.recommend.fpl import Learning
from steelyard.recommend.histories import Floats32, Histories, Triples, Users, round_keys
from steelyard.recommend.interactions import Codes
from steelyard.recommend.kgflex.model import Knowledge, initial_features, initial_views
from steelyard.recommend.kgflex.model import scores as kgflex_scores
from steelyard.recommend.kgflex.selection import expertise, select
from steelyard.recommend.kgflex.training import central_epoch, local_pass
from steelyard.recommend.knowledge.features import ItemFeatures
from steelyard.recommend.ranking import Floats
from steelyard.recommend.settings import KgflexSettings
from steelyard.recommend.sparse import SparseRows, TableChange
from steelyard.weighing.criterion import LocalData


@dataclass(frozen=True, eq=False)
class KgflexParts:
    """What KGFlex needs beside the users: features of all items, and the settings of the selection."""

    features: ItemFeatures
    settings: KgflexSettings


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
            self._vectors[federation] = initial_views(seed, names, selection, self.learning.factors)
        return self._vectors[federation]

    def _in_parallel(
        self, task: Task, cohort: Codes, histories: Histories, table: Floats32, vectors: Floats32
    ) -> tuple[Payload, Floats, Codes]:
        keys = round_keys(self._user_keys(task.seed, "triples")[cohort], task.round)
        triples = draw_triples(histories, cohort, keys, self.local_round.triples)
        changes, losses = self._turn(task.seed, task.round, cohort, triples, table, vectors)
        rows = np.bincount(changes.owners, minlength=len(cohort))
        return changes, losses.mean(axis=1, dtype=np.float64), rows

    def _turn(
        self, seed: int, round: int, users: Codes, triples: Triples, table: Floats32, vectors: Floats32
    ) -> tuple[SparseRows, Floats32]:
        """Do the local passes of some users on one table; their views are moved, what they send is returned."""
        sent = self._sent(seed, round, users, triples)
        known = self.knowledge(seed)
        own_rate = self.parts.settings.own_rate
        done = local_pass(table, vectors, known, users, triples, sent, self.learning, self.threads, own_rate)
        # A pass that ran away is refused by the server; the device goes back to the views it had.
        good = np.isfinite(done.vectors).all(axis=1)
        vectors[done.entries[good]] = done.vectors[good]
        return done.changes, done.losses

    def _in_sequence(
        self, task: Task, cohort: Codes, histories: Histories, table: Floats32, vectors: Floats32
    ) -> tuple[Payload, Floats, Codes]:
        if self.parts.settings.batch is not None:
            return self._centrally(task, cohort, histories, table, vectors)
        # Users share too many features for two turns not to touch each other: they are done one after the other.
        users, rounds = self._turns(task, cohort)
        after = torch.from_numpy(table.copy().reshape(-1))
        losses, rows = np.zeros(histories.users), np.zeros(histories.users, dtype=np.int64)
        one = np.ones(1)
        for user, round in zip(users.tolist(), rounds.tolist(), strict=True):
            mine = np.array([user])
            keys = round_keys(self._user_keys(task.seed, "triples")[mine], round)
            triples = draw_triples(histories, mine, keys, self.local_round.triples)
            changes, lost = self._turn(task.seed, round, mine, triples, after.numpy().reshape(table.shape), vectors)
            after = changes.combine(after, one)
            losses[user] += lost.mean()
            rows[user] += len(changes.rows)
        visits = np.maximum(np.bincount(users, minlength=histories.users), 1)
        payload = TableChange(len(cohort), after - torch.from_numpy(table.reshape(-1)))
        return payload, (losses / visits)[cohort], rows[cohort]

    def _centrally(
        self, task: Task, cohort: Codes, histories: Histories, table: Floats32, vectors: Floats32
    ) -> tuple[Payload, Floats, Codes]:
        """Do an epoch with all data in one place; nothing travels."""
        after, losses = central_epoch(
            *(table, vectors, self.knowledge(task.seed), histories, cohort, self.learning),
            batch=self.parts.settings.batch or 1,
            own_rate=self.parts.settings.own_rate,
            seed=task.seed,
            epoch=task.round,
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
