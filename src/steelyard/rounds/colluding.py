"""Colluders that know the rule: each round they try the rule itself on every candidate and send the worst.

They see all updates and all claims of their cohort. In place of the server's rows they have rows of their own, as many
as one client has (insiders know the server's), and have to guess the server's chance. A candidate is worst where the
model that the rule makes of it is right on the fewest of these rows, and of equal ones where it loses most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base import randomness
from steelyard.base.errors import UserError, in_words
from steelyard.base.logs import doing, logger
from steelyard.clients.protocol import Server
from steelyard.defence.colluding import Candidates, Directions, around, candidates
from steelyard.messages.payloads import DenseModels, ServerTest, blocks
from steelyard.messages.updates import Counts, Floats, Task, Updates
from steelyard.rounds.state import Federation, Plan, RoundState
from steelyard.rounds.weigh import fit_to_server, weigh_soundly
from steelyard.weighing.cohort import MOST_TESTED

_log = logger(__name__)

MOST_BIASES = 10
"""So many classes at most have a candidate that pushes their bias."""
MOST_ASIDE = 8
"""So many random directions at most are drawn in a round for colluders to stand apart in."""


def with_colluders(
    federation: Federation,
    state: RoundState,
    task: Task,
    updates: Updates,
    families: Mapping[str, str],
    server: Server,
    plan: Plan,
) -> Updates:
    """Return the updates with those of colluders (`Clients.colluders`) replaced by what harms this rule most."""
    if updates.payload.dense is None:
        return updates
    groups: dict[str, list[int]] = {}
    for row, name in enumerate(updates.clients):
        if name in families and name not in updates.late:
            groups.setdefault(families[name], []).append(row)
    with doing("trying what colluders send"):
        for family, rows in sorted(groups.items()):
            imagined = server.imagined(task.seed, families, insider=family == "insider")
            if imagined is None:
                return updates
            updates = _worst(_Trial(federation, state, task, updates, imagined, plan, rows), family)
    return updates


class _Trial:
    """One cohort whose colluders try candidates: who sends what, and what the rule makes of it."""

    def __init__(
        self,
        federation: Federation,
        state: RoundState,
        task: Task,
        updates: Updates,
        server: Server,
        plan: Plan,
        rows: list[int],
    ) -> None:
        # The server's chance is its own, and colluders have to guess it.
        guess = randomness.stream_key(task.seed, task.round, purpose="attack/guess")
        self.federation, self.task = replace(federation, seed=guess), task
        self.state, self.updates, self.server, self.plan, self.rows = state, updates, server, plan, rows
        self.seed = task.seed
        assert updates.payload.dense is not None
        self.payload = updates.payload.dense
        self.models = self.payload.models
        self.start = task.parameters.to(self.models.device)

    def directions(self) -> Directions:
        """Return what candidates are sums of; nothing that is not trained is in them."""
        seed = self.seed
        honest = [row for row in range(len(self.models)) if row not in self.rows] or self.rows
        theirs = self.models[honest] - self.start
        chance = randomness.generator(seed, purpose="attack/lasting")
        lasting = torch.from_numpy(chance.standard_normal(len(self.start), dtype=np.float32))
        more = {"lasting": lasting.to(theirs.device)}
        climb = self.server.gradients([seed], (self.start + theirs.mean(dim=0))[None])
        if climb is not None:
            more["climb"] = climb[0]
        root = self.server.train(self.federation.seed, self.task.round, self.start)
        if root is not None:
            more["root"] = root.to(theirs.device) - self.start
        for number in range(min(len(self.rows), MOST_ASIDE)):
            chance = randomness.generator(seed, self.task.round, purpose=f"attack/aside/{number}")
            drawn = chance.standard_normal(len(self.start), dtype=np.float32)
            more[f"aside {number}"] = torch.from_numpy(drawn).to(theirs.device)
        for number, places in enumerate(self._biases()):
            more[f"bias {number}"] = torch.zeros_like(theirs[0])
            more[f"bias {number}"][places] = 1.0
        found = Directions(theirs, self.models[self.rows] - self.start, more)
        for begin, end in self.payload.frozen:
            found.rows[:, begin:end] = 0.0
        return found

    def _biases(self) -> list[int]:
        try:
            layer = self.server.output_layer(self.seed)
        except UserError:  # a network without such a layer
            layer = None
        if layer is None:
            return []
        places = layer[:, -1].tolist()
        drawn = randomness.generator(self.seed, self.task.round, purpose="attack/biases").permutation(len(places))
        return [places[place] for place in sorted(drawn[:MOST_BIASES].tolist())]

    def harm(self, tried: Candidates) -> NDArray[np.float64]:
        """Return [candidates, 2]: the share of rows that each new model has wrong, and its loss; −∞ without a model."""
        bank = _Bank(torch.cat([self.models, self.start + tried.vectors]), self.start, self.payload.frozen)
        found = np.full((len(tried.names), 2), -np.inf)
        for block in blocks(len(found), len(self.start), MOST_TESTED):
            made = {at: self._made(bank, tried.sent[at]) for at in range(block.start, block.stop)}
            models = {at: model for at, model in made.items() if model is not None}
            if models:
                test = self.server.test(self.federation.seed, torch.stack(list(models.values())))
                wrong = 1.0 - test.accuracy if test.f1.shape[1] else np.zeros(len(models))
                found[list(models)] = np.stack([wrong, np.nan_to_num(test.losses, nan=np.inf)], axis=1)
        return found

    def _made(self, bank: _Bank, sent: Counts) -> torch.Tensor | None:
        """Return the model that the rule makes where colluders send these vectors; None where it makes none."""
        rows = np.arange(len(self.models))
        rows[self.rows] = len(self.models) + sent
        updates = replace(self.updates, payload=_Picked(bank, rows))
        try:
            draft = weigh_soundly(self.federation, self.state, self.task, updates, self.server, self.plan)
            if draft.federation.rule.settings.fit is not None:
                fit_to_server([draft], self.server)
        except UserError:  # it would end the federation, which keeps its last good model
            return None
        return draft.model

    def sending(self, tried: Candidates, best: int) -> Updates:
        """Return the updates where colluders send this candidate."""
        models = self.models.clone()
        models[self.rows] = self.start + tried.vectors[torch.from_numpy(tried.sent[best]).to(models.device)]
        return replace(self.updates, payload=DenseModels(models, self.payload.frozen))


def _worst(trial: _Trial, family: str) -> Updates:
    """Return the updates with the worst of a family's candidates, and of the best one made longer and shorter."""
    directions = trial.directions()
    named = candidates(directions, family, randomness.generator(trial.seed, trial.task.round, purpose="attack/drawn"))
    first = Candidates.of(directions, named)
    harm = trial.harm(first)
    place = _most(harm)
    again = Candidates.of(directions, around(directions, named[place]))
    more = trial.harm(again)
    closer = _most(more)
    better = tuple(more[closer]) > tuple(harm[place])
    tried, best = (again, closer) if better else (first, place)
    _log.debug(f"round {trial.task.round} of {in_words(trial.federation.name)}: colluders send {tried.names[best]}")
    return trial.sending(tried, best)


def _most(harm: Floats) -> int:
    """Return the candidate with the most rows wrong, of equal ones with the greatest loss, of equal ones the first."""
    return int(np.lexsort((-harm[:, 1], -harm[:, 0]))[0])


class _Bank:
    """All models that a cohort could hold, [models, parameters]: what the rule asks of them is computed once."""

    def __init__(self, models: torch.Tensor, start: torch.Tensor, frozen: tuple[tuple[int, int], ...]) -> None:
        self.models, self.start = DenseModels(models, frozen), start
        self._test: ServerTest | None = None

    @cached_property
    def gram(self) -> Floats:
        return self.models.gram(self.start)

    @cached_property
    def divergence(self) -> Floats:
        return self.models.divergence(self.start)

    @cached_property
    def finite(self) -> NDArray[np.bool_]:
        return self.models.finite()

    def tested(self, test: Callable[[torch.Tensor], ServerTest]) -> ServerTest:
        """Return the test of all models; colluders have one set of rows to test on."""
        if self._test is None:
            self._test = self.models.tested(test)
        return self._test


class _Picked(DenseModels):
    """The models of one candidate: some of the bank's, as a cohort."""

    def __init__(self, bank: _Bank, rows: Counts) -> None:
        self.bank, self.rows = bank, rows
        object.__setattr__(self, "frozen", bank.models.frozen)

    @cached_property
    def models(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The models themselves, copied when a rule looks at more than the bank can tell."""
        return self.bank.models.models[torch.from_numpy(self.rows).to(self.bank.start.device)]

    def gram(self, parameters: torch.Tensor) -> Floats:
        return self.bank.gram[np.ix_(self.rows, self.rows)]

    def divergence(self, parameters: torch.Tensor) -> Floats:
        return self.bank.divergence[self.rows]

    def finite(self) -> NDArray[np.bool_]:
        return self.bank.finite[self.rows]

    def tested(self, test: Callable[[torch.Tensor], ServerTest]) -> ServerTest:
        return ServerTest.joined([self.bank.tested(test)], self.rows)

    def select(self, keep: Sequence[int]) -> DenseModels:
        return _Picked(self.bank, self.rows[list(keep)])
