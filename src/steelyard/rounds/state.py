"""A federation, its state and the record of its rounds: the nouns of the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from steelyard.base import randomness
from steelyard.base.errors import UserError
from steelyard.base.tallies import Leading
from steelyard.clients.protocol import Server
from steelyard.learning.settings import no_part
from steelyard.messages.algorithm import FACTORS, Algorithm, Vectors
from steelyard.messages.updates import Evaluations, Floats, LossState, Updates
from steelyard.rounds.plan import SELECT, ContributionSettings, RoundValues, SelectSettings, cohort_size
from steelyard.weighing.cohort import Memory
from steelyard.weighing.order import FixedOrder, Order, OrderState, OrderStrategy
from steelyard.weighing.rule import Rule
from steelyard.weighing.weights import Weighing

CLOCK = "rounds/clock"
"""Under this name a federation remembers how many seconds its rounds have taken on the devices' clock."""


@dataclass(frozen=True, eq=False)
class Best:
    """The best round of a federation so far, by rows that choose."""

    round: int
    score: float
    """What it was chosen by; more is better."""
    parameters: torch.Tensor
    """Its model; empty where the run does not keep it."""


@dataclass(frozen=True, eq=False)
class RoundState:
    """All of one federation that survives a round."""

    round: int
    parameters: torch.Tensor
    loss: LossState
    orders: OrderState
    finished: bool = False
    """True once the federation rests: at an early stop, at the end of its budget, or because its model exploded."""
    memory: Mapping[str, Memory] = field(default_factory=dict[str, "Memory"])
    """What criteria remembered for the rounds to come, by name: plain JSON values."""
    ended: str = ""
    """Why the round after this one gave no sound model, so that the federation ended here; empty for all others."""
    tensors: Vectors = field(default_factory=dict[str, torch.Tensor])
    """What the algorithm's server keeps, by name: control variates, moments."""
    best: Best | None = None
    """The best round so far, where rows choose one."""

    @property
    def models(self) -> list[tuple[int, torch.Tensor]]:
        """The models that are kept, each with the round that ended with it: the last, and the best where it is kept."""
        found = [(self.round, self.parameters)]
        found += [] if self.best is None else [(self.best.round, self.best.parameters)]
        return [(round, model) for round, model in found if model.numel()]


States = Mapping[str, RoundState]
"""The states of all federations by their names."""
Snapshot = Callable[[], Mapping[str, torch.Tensor]]
"""Gives what the clients keep between rounds; called only where it is to be written down."""


@dataclass(frozen=True, eq=False)
class Federation:
    """One algorithm with one rule and one seed: what is compared when several run side by side."""

    name: str
    rule_name: str
    seed: int
    rule: Rule
    strategy: OrderStrategy = field(default_factory=FixedOrder)
    loss: LossState = field(default_factory=LossState)
    """The loss of the first round."""
    algorithm: Algorithm = field(default_factory=Algorithm)
    momentum: float = 0.0
    """The clients' momentum, which some algorithms' servers must know."""
    learning_rate: float = 0.0
    """The clients' learning rate, which some policies must know; 0 where nobody knows."""
    members: frozenset[str] | None = None
    """The only clients that take part, for federations of some of the clients; None: all of them."""

    def start(self, server: Server) -> RoundState:
        """Return the state before the first round; the accuracy of the first model is filled in by the loop."""
        model, orders = server.initial(self.seed), OrderState(self.rule.start_order, 0.0)
        tensors = self.algorithm.start(model)
        if self.algorithm.factored:
            rows = server.adapters(self.seed)
            if rows is None or not len(rows):
                raise UserError(no_part(self.algorithm.name, "adapters"))
            tensors = {**tensors, FACTORS: torch.as_tensor(rows)}
        return RoundState(0, model, self.loss, orders, tensors=tensors)


@dataclass(frozen=True, eq=False)
class RoundRecord:
    """What happened in one round of one federation; the store writes it."""

    federation: str
    round: int
    seconds: float
    updates: Updates | None = None
    weighing: Weighing | None = None
    order: Order = ()
    kept_old: bool = False
    """True when the old model was kept, because no update or no score could be used."""
    tried: tuple[tuple[Order, float], ...] = ()
    """Orders tested this round with their accuracy, the one the round started with first."""
    tests: int = 0
    evaluations: Evaluations | None = None
    accuracy: float | None = None
    loss: LossState | None = None
    vectors: Vectors = field(default_factory=dict[str, torch.Tensor])
    """What the clients were sent beside the model, by name."""
    server_accuracy: float | None = None
    server_macro_f1: float | None = None
    server_metrics: Mapping[str, float | list[float]] = field(default_factory=dict[str, "float | list[float]"])
    """Further figures of the server's test of the new model: F1 of each class, errors of a regression."""
    simulated: float | None = None
    """Seconds that the round took on the devices' clock; None without one."""
    epsilon: float | None = None
    """What the rounds so far have cost any one client, as ε at the budget's δ; None without a budget."""
    contributions: tuple[RoundValues, ...] = ()
    """What each client added, where it is measured."""
    bytes_each: int | None = None
    """Size of what each client that was asked is sent: the model and the algorithm's vectors; None: unknown."""
    cpu: float | None = None
    """Seconds of this process's processors, shared evenly by the federations of the round; None: not measured."""
    gpu: float | None = None
    """Seconds that the round held a GPU, shared likewise."""


class Combine(Protocol):
    """From weights of one cohort to new models, and to what the algorithm's server keeps with one of them."""

    def models(self, weights: Floats) -> torch.Tensor:
        """Return the new model for weights [clients], or one row per candidate for [candidates, clients]."""
        ...

    def step(self, weights: Floats) -> tuple[torch.Tensor, Vectors]:
        """Return the new model for weights [clients], and what the server keeps with it."""
        ...


@dataclass(eq=False)
class Draft:
    """A round of one federation on its way: filled in step by step."""

    federation: Federation
    before: RoundState
    updates: Updates
    weighing: Weighing | None
    model: torch.Tensor
    order: Order
    memory: Mapping[str, Memory]
    """What criteria remember for the next round."""
    kept_old: bool = False
    answer: Evaluations | None = None
    tried: tuple[tuple[Order, float], ...] = ()
    tests: int = 0
    orders: OrderState | None = None
    partial: bool = False
    """True while the answer lacks what only the first candidate of a question gets."""
    combine: Combine | None = None
    """From weights of this cohort to a model; None where nobody was asked or nobody answered."""
    tensors: Vectors = field(default_factory=dict[str, torch.Tensor])
    """What the algorithm's server keeps after this round."""


class Recorder(Protocol):
    """Takes whole rounds; `commit` makes a round durable as a whole or not at all."""

    def commit(
        self, round: int, records: Sequence[RoundRecord], states: States, snapshot: Snapshot, *, last: bool
    ) -> None: ...


@dataclass(frozen=True)
class Plan:
    """The settings of the loop, resolved."""

    rounds: int
    fraction: float
    min_clients: int = 1
    evaluate_every: int = 1
    stop_at: tuple[float, float, bool] | None = None
    """(target accuracy, share of clients, above): stop a federation once this share reaches the target, or is above."""
    detailed: bool = False
    """Record right or wrong for every test sample in the last round."""
    rate: Callable[[int], float] = lambda round: 1.0
    """From a round to what the clients' learning rate is multiplied by in it."""
    poisson: bool = False
    """Each client takes part with probability `fraction`, by itself, in place of cohorts of a fixed size."""
    measure: Leading | None = None
    """By what models are measured; None: by the task's own score."""
    report: bool = False
    """Test each new model on the server's reporting rows."""
    select: SelectSettings = field(default_factory=SelectSettings)
    """Who is asked, where not everybody alike."""
    clocked: bool = False
    """Whether devices have a clock, so that availability is given in its seconds and not in rounds."""
    contributions: ContributionSettings | None = None
    """How to measure what each client added to each new model; None: not at all."""
    valued: frozenset[str] | None = None
    """The only federations of which that is measured; None: all of them."""
    chosen_by: Literal["server", "clients"] | None = None
    """Whose rows choose the best round: the server's, or those of some clients; None: nobody chooses."""
    keeps_best: bool = False
    """Keep the model of that round."""
    patience: int | None = None
    """End a federation once so many rounds bring nothing better; None: never."""
    part: bool = False
    """Others of this comparison run elsewhere: that all models here exploded is an end like any other."""

    @property
    def choosing(self) -> str:
        """The field by which rows choose a round, as an error names it."""
        return "rounds.keep: got 'best'" if self.keeps_best else f"rounds.patience: got {self.patience}"

    def cohort(
        self, seed: int, round: int, names: Sequence[str], memory: Mapping[str, Memory] | None = None
    ) -> tuple[str, ...]:
        """Return who takes part in a round, ascending by client id: drawn from seed and round, and from what the
        federation remembers of clients where they are chosen by that.

        With Poisson sampling, a cohort that falls short of `min_clients` is drawn again with just as many.
        """
        size = cohort_size(len(names), self.fraction, self.min_clients)
        if self.select.available:
            names = self.select.there(names, sum(self.time(round, names, memory)))
        if not self.poisson:
            known = (memory or {}).get(SELECT, {})
            return tuple(self.select.chosen(seed, round, names, size, known))
        ordered = sorted(names)
        drawn = randomness.uniforms(randomness.stream_keys(seed, round, ordered, "cohort"), 1)[:, 0]
        found = tuple(name for row, name in enumerate(ordered) if drawn[row] < self.fraction)
        least = min(len(names), max(1, self.min_clients))
        return found if len(found) >= least else tuple(randomness.choose(seed, round, names, least))

    def time(self, round: int, names: Sequence[str], memory: Mapping[str, Memory] | None = None) -> tuple[float, float]:
        """Return the time on the devices' clock at which a round may begin, and how long it then waits for somebody.

        Without a clock the time is the number of the round, and nobody waits.
        """
        if not self.clocked:
            return float(round), 0.0
        now = float((memory or {}).get(CLOCK, 0.0))
        comes = None if self.select.there(names, now) else self.select.next_time(names, now)
        return now, 0.0 if comes is None else comes - now


def first_like(federation: Federation, federations: Sequence[Federation], states: States) -> Federation:
    """Return the first federation of the same seed that starts from the same model."""
    model = states[federation.name].parameters
    return next(f for f in federations if f.seed == federation.seed and torch.equal(states[f.name].parameters, model))
