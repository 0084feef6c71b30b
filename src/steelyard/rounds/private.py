"""Rounds under a guarantee: cohorts, weights and noise by [privacy], charged to the ledger before they are drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from steelyard.base.errors import UserError, in_words
from steelyard.learning.records import RecordNoise
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Floats, Task, Updates
from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.clipping import noised, noisy_sum, without_losses
from steelyard.privacy.ledger import Account, Charge, Ledger
from steelyard.privacy.noise import Source, SystemSource, chosen, each_with
from steelyard.privacy.planning import criteria_release, device_noise, noise_for, plain_noise
from steelyard.privacy.settings import PrivacySettings, check_delta
from steelyard.rounds.plan import cohort_size
from steelyard.rounds.state import Federation, Plan
from steelyard.weighing.cohort import Memory
from steelyard.weighing.rule import own_cap, weigh_alone
from steelyard.weighing.weights import Weighing, cap_of

CRITERIA, UPDATE, RECORDS = "criteria", "update", "records"


class Guarantee:
    """What a run guarantees of its clients' privacy: this one nothing; `PrivateRounds` is one that does."""

    @property
    def central(self) -> bool:
        """Whether the server adds the noise."""
        return False

    @property
    def secret(self) -> bool:
        """Whether nobody but the server learns who is in a cohort."""
        return False

    def cohort(
        self, plan: Plan, federation: Federation, round: int, names: Sequence[str], memory: Mapping[str, Memory]
    ) -> tuple[str, ...]:
        """Return who takes part in a round."""
        return plan.cohort(federation.seed, round, names, memory)

    def require(self, federation: Federation, round: int) -> None:
        """Refuse a round that would pass the budget, before anybody is asked or anything is charged."""

    def affords(self, federation: Federation, rounds: Sequence[int]) -> bool:
        """Whether these rounds, and all that is charged already, stay within the budget."""
        return True

    def before_training(self, federation: Federation, task: Task) -> None:
        """Charge what the devices themselves will release; call it before any of them is asked."""

    def released(self, updates: Updates) -> Updates:
        """Return of an answer what is released with the guarantee."""
        return updates

    def weigh(self, federation: Federation, task: Task, raw: Floats, order: Sequence[int]) -> Weighing:
        """Weigh a cohort for a sum with the server's noise: each client by itself, or by criteria that are released."""
        raise NotImplementedError

    def combine(self, federation: Federation, task: Task, updates: Updates, weighing: Weighing) -> torch.Tensor:
        """Return the new model, with the server's noise on it; the round was charged when it was weighed."""
        raise NotImplementedError

    def epsilon(self, federation: str, *, coarse: bool = False) -> float | None:
        """Return what a federation's rounds so far have cost any one client, as ε; None where nobody counts."""
        return None


NO_GUARANTEE = Guarantee()


class PrivateRounds(Guarantee):
    """The privacy guarantee of one run; make it once, hand it to the loop, and ask it what was spent.

    `bounds` are the largest values of criteria, `device_criteria` how many of them devices send with noise. `records`
    is what clients do to the gradients of their samples, `samples` how many each has. `source` is the operating
    system's unless a test hands over another.
    """

    def __init__(
        self,
        settings: PrivacySettings,
        plan: Plan,
        *,
        bounds: Mapping[str, float] | None = None,
        device_criteria: int = 0,
        records: RecordNoise | None = None,
        samples: Callable[[int], Mapping[str, int]] = lambda seed: {},
        source: Source | None = None,
    ) -> None:
        self.settings = settings
        self.plan = plan
        self.ledger = Ledger()
        """In memory until whoever runs the rounds puts the ledger of the run's folder in its place."""
        self.source = source or SystemSource()
        self._limits = dict(bounds or {})
        self._device_criteria = device_criteria
        self.records, self._samples = records, samples
        self._noise: dict[str, float] = {}
        self._names: dict[int, tuple[str, ...]] = {}

    # ------------------------------------------------------------------ what a round costs

    @property
    def delta(self) -> float:
        """δ of the guarantee."""
        return self.settings.budget.delta

    @property
    def neighbours(self) -> str:
        """The two neighbouring cases that the guarantee is about."""
        if self.records is not None:
            return "with one sample of a client, or with one that adds nothing in its place"
        if not self.central:
            return "any two sets of data on one device"
        if not self.secret:
            return "with one client's updates, or with zeros in their place"
        return "with or without one client" if self.plan.poisson else "with one client, or with another in its place"

    @property
    def central(self) -> bool:
        return self.settings.central is not None

    @property
    def secret(self) -> bool:
        return self.settings.central is not None and self.settings.central.cohorts == "secret"

    def prepare(self, federations: Sequence[Federation], names: Mapping[int, Sequence[str]]) -> None:
        """Find each federation's noise, given the clients of each seed; refuse a δ that guarantees nothing."""
        self._names = {seed: tuple(sorted(found)) for seed, found in names.items()}
        if not self.settings.accept_large_delta:
            most, unit = max(map(len, self._names.values())), "client"
            if self.records is not None:
                most, unit = max((max(self._samples(seed).values(), default=1) for seed in names), default=1), "sample"
            check_delta("privacy.budget.delta", self.delta, most, "privacy.accept_large_delta = true", unit)
        for federation in federations:
            if federation.rule.settings.trained_by == "clients":
                self._noise[federation.name] = self._found_noise(federation)

    def check_first_round(self, federations: Sequence[Federation]) -> None:
        """Refuse a budget that allows no round at all; call it before the folder of a new run is made."""
        limit = self.settings.budget.epsilon
        for federation in federations:
            if limit is None or federation.name not in self._noise:
                continue
            first = Account().plus(self.charges(federation, 1))
            if not self._within(first, limit):
                cost = first.epsilon(self.delta)
                raise UserError(
                    f"privacy.budget.epsilon: got {limit:g}, and the first round of '{in_words(federation.name)}' "
                    f"alone costs {cost:.4g}; allowed: a larger budget, or more noise"
                )

    def noise(self, federation: str) -> float:
        """Return a federation's noise multiplier z; of records the largest of its clients."""
        return self._noise[federation]

    def charges(self, federation: Federation, round: int, cohort: Sequence[str] | None = None) -> list[Charge]:
        """Return what a round of a federation will be charged; `cohort` where it is known already."""
        name, criteria = federation.name, self._charged_criteria(federation)
        if self.secret:
            return [Charge(name, round, UPDATE, self._release(federation, self._noise[name]))]
        seed = federation.seed
        who = tuple(cohort) if cohort is not None else self.plan.cohort(seed, round, self._names[seed])
        if self.records is not None:
            found = [Charge(name, round, RECORDS, *each) for each in self._of_records(self.records, seed, who)]
        else:
            found = [Charge(name, round, UPDATE, Release(self._noise[name]), who)]
        if criteria:
            released = criteria_release(self.settings, self._criteria_noise(name))
            found.append(Charge(name, round, CRITERIA, released, who, criteria))
        return found

    def _of_records(
        self, records: RecordNoise, seed: int, clients: Sequence[str]
    ) -> Iterator[tuple[Release, tuple[str, ...], int]]:
        """Yield what the steps of a round release of samples: of which clients, and how many there are."""
        sizes, alike = self._samples(seed), dict[tuple[Release, int], list[str]]()
        for client in clients:
            if client in sizes:
                alike.setdefault(records.release(sizes[client]), []).append(client)
        for (release, steps), mine in alike.items():
            yield release, tuple(mine), steps

    def _charged_criteria(self, federation: Federation) -> int:
        """Return how many numbers beside its update are released of each client: criteria that are charged."""
        if self.settings.criteria != "charged":
            return 0
        if not self.central:
            return self._device_criteria
        return sum(criterion.name != "EQ" for criterion in federation.rule.criteria)

    def _criteria_noise(self, federation: str) -> float:
        return self.settings.criteria_noise or self._noise[federation]

    def _release(self, federation: Federation, noise: float) -> Release:
        """Return what one round of a secret cohort releases."""
        if self.plan.poisson:
            return Release(noise, "poisson", self.plan.fraction)
        count = len(self._names[federation.seed])
        return Release(noise, "fixed", self._size(count) / max(count, 1))

    def _found_noise(self, federation: Federation) -> float:
        """Return the noise that is given, or the least that keeps all planned rounds within the budget."""
        central = self.settings.central
        if self.records is not None:
            sizes = set(self._samples(federation.seed).values())
            return max(map(self.records.noise, sizes), default=0.0)
        if central is None:
            return device_noise(self.settings, self.plan.rounds, self._device_criteria)
        if central.noise is not None:
            return central.noise
        limit = self.settings.budget.epsilon
        assert limit is not None, "settings without noise and budget are refused"
        if self.secret:
            releases = [(self._release(federation, 1.0), self.plan.rounds)]
            return noise_for(limit, self.delta, releases)
        return plain_noise(self.settings, self._most_rounds(federation.seed), self._charged_criteria(federation))

    def _most_rounds(self, seed: int) -> int:
        """Return in how many rounds the client takes part that takes part most often."""
        counts: Counter[str] = Counter()
        for round in range(1, self.plan.rounds + 1):
            counts.update(self.plan.cohort(seed, round, self._names[seed]))
        return max(counts.values(), default=1)

    # ------------------------------------------------------------------ what is left

    def epsilon(self, federation: str, *, coarse: bool = False) -> float:
        return self.ledger.account(federation).epsilon(self.delta, coarse=coarse)

    def by_client(self, federation: str) -> dict[str, float]:
        """Return the ε that each client's data have lost in a federation, where releases name their clients."""
        account = self.ledger.account(federation)
        return {name: spent(account.of(name), self.delta) for name in sorted(account.single)}

    def affords(self, federation: Federation, rounds: Sequence[int]) -> bool:
        limit = self.settings.budget.epsilon
        if limit is None or federation.name not in self._noise:
            return True
        more = [charge for round in rounds for charge in self.charges(federation, round)]
        return self._within(self.ledger.account(federation.name).plus(more), limit)

    def require(self, federation: Federation, round: int) -> None:
        # The round before looked ahead; but a round that is run again after a resume was charged twice, and other
        # clients may have come.
        if not self.affords(federation, (round,)):
            raise UserError(
                f"privacy.budget.epsilon: got {self.settings.budget.epsilon:g}, and round {round} of "
                f"'{in_words(federation.name)}' would exceed it; a round that is run again is charged again, and new "
                "clients may have come; the finished rounds are kept; allowed: a new run with a larger budget"
            )

    def _within(self, account: Account, limit: float) -> bool:
        # The coarse count is never too low: where it is within, so is the fine one.
        if account.epsilon(self.delta, coarse=True) <= limit:
            return True
        return account.epsilon(self.delta) <= limit

    # ------------------------------------------------------------------ one round

    def cohort(
        self, plan: Plan, federation: Federation, round: int, names: Sequence[str], memory: Mapping[str, Memory]
    ) -> tuple[str, ...]:
        """Return a round's cohort; a secret one is drawn from the source and depends on no seed.

        Of records nobody is asked of whom it is not known how many samples it has.
        """
        if self.records is not None:
            sizes = self._samples(federation.seed)
            names = [name for name in names if name in sizes]
        self._names[federation.seed] = tuple(sorted(names))
        if not self.secret:
            return plan.cohort(federation.seed, round, names)
        ordered = sorted(names)
        if self.plan.poisson:
            return tuple(each_with(self.source, ordered, self.plan.fraction))
        return tuple(chosen(self.source, ordered, self._size(len(ordered))))

    def before_training(self, federation: Federation, task: Task) -> None:
        if not self.central:
            self.ledger.charge(self.charges(federation, task.round, task.clients))

    def released(self, updates: Updates) -> Updates:
        if self.central:
            return updates
        records = self.records
        noise = None if records is None else np.array([*map(records.deviation, updates.samples.tolist())], np.float64)
        return replace(without_losses(updates), noise=noise)

    def weigh(self, federation: Federation, task: Task, raw: Floats, order: Sequence[int]) -> Weighing:
        central, rule = self.settings.central, federation.rule
        assert central is not None
        self.ledger.charge(self.charges(federation, task.round, task.clients))
        if central.weights == "own":
            references = np.array([central.references.get(name, 1.0) for name in rule.names])
            return weigh_alone(rule, raw, references, self._expected(federation), order)
        if self.settings.criteria == "charged":
            free = np.array([criterion.name == "EQ" for criterion in rule.criteria])
            bounds = self._bounds(federation)
            noise = self._criteria_noise(federation.name)
            raw = np.where(free, raw, noised(raw, bounds, noise, self.source, self.settings))
        return rule.weigh(raw, order)

    def combine(self, federation: Federation, task: Task, updates: Updates, weighing: Weighing) -> torch.Tensor:
        central, payload = self.settings.central, updates.payload.dense
        assert central is not None
        if payload is None:
            raise UserError(
                "privacy.central: the server sees no single models in this run; allowed: no [privacy.central]"
            )
        deviation = self._noise[federation.name] * central.clip * self.largest_weight(federation, len(weighing.weights))
        return noisy_sum(
            payload.models, task.parameters, weighing.weights, central.clip, deviation, self.source, payload.frozen
        )

    def largest_weight(self, federation: Federation, answered: int) -> float:
        """Return w_max: what no weight of this round can pass, whatever a client's data are."""
        central, settings = self.settings.central, federation.rule.settings
        assert central is not None
        if central.weights == "own":
            return own_cap(federation.rule, self._expected(federation))
        # A cap that cannot hold all weight makes weights equal: 1/n is then the largest.
        return max(cap_of(answered, settings.max_weight, settings.max_shares), 1.0 / max(answered, 1))

    def _expected(self, federation: Federation) -> float:
        count = len(self._names[federation.seed])
        return max(1.0, self.plan.fraction * count) if self.plan.poisson else float(self._size(count))

    def _size(self, clients: int) -> int:
        return cohort_size(clients, self.plan.fraction, self.plan.min_clients)

    def _bounds(self, federation: Federation) -> Floats:
        return np.array([self._limits.get(name, np.inf) for name in federation.rule.names])


def nobody(federation: str, round: int, parameters: torch.Tensor) -> Updates:
    """Return the updates of an empty cohort."""
    return Updates(federation, round, (), np.zeros(0, np.int64), {}, np.zeros(0), DenseModels(parameters[None][:0]))
