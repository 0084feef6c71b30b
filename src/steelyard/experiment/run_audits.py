"""Auditing whole runs: canaries go through cohorts, weights, caps, clipping, noise, ledger and resume of the product.

A federation of digits gets clients that an auditor plants. Each claims as much data as brings it the largest weight,
and sends an update that is longer than clipping allows, in a direction that no other client moves in that round; or
what the guarantee's other case says: zeros, or the opposite where a client is exchanged for another. Every run is
stopped once, after a round was released and before it was written down, and goes on: the round is run again, and the
ledger has to know both. What the attacker finds in all released models is held against the ε that the run itself
states.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.errors import Stopped, UserError
from steelyard.base.settings import validated
from steelyard.clients.protocol import Clients, Server, WrappedClients
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.parts import federations_of, plan_of
from steelyard.experiment.recommend import RecommendDescription
from steelyard.experiment.running import resume, run
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Evaluations, Floats, Question, Task, Updates
from steelyard.privacy.accounting import lower_bound
from steelyard.privacy.clipping import DeviceNoise
from steelyard.recommend.audit import CuriousServer, Guess, judge
from steelyard.recommend.clients import RecommendClients
from steelyard.recommend.sparse import PairRows, SparseRows
from steelyard.rounds.loop import one_round
from steelyard.runs.facts import Promise
from steelyard.runs.history import History

OTHERS = 10
"""Clients with data beside the canaries."""
CLIP, SHARES, SIZE = 1.0, 2.0, 150.0
"""Longest update; largest weight, in equal shares; a typical client's samples."""
EXCESS = 100.0
"""How many times what is allowed canaries send and claim, so that a missing clip or cap shows."""
SEED = 0


@dataclass(frozen=True)
class CanaryResult:
    """What an audit by canaries found."""

    noise: float
    rate: float
    sampled: str
    rounds: int
    """Rounds of a run; one of them was run twice."""
    runs: int
    canaries: int
    """Canaries in all runs together."""
    lower: float
    """ε is at least this, with the stated confidence."""
    accounted: float
    """ε that the runs themselves state, at most."""
    delta: float
    confidence: float
    neighbours: str
    """The two neighbouring cases of the guarantee, as the runs state them."""


class Auditor:
    """Who plants canaries in one run and sees its models: knows both cases and scores each canary."""

    def __init__(self, canaries: int, noise: float, rate: float, opposite: bool, seed: int | None = None) -> None:
        generator = np.random.default_rng(seed)
        self.names = tuple(f"canary-{number:05}" for number in range(canaries))
        self.inside: NDArray[np.bool_] = generator.random(canaries) < 0.5
        self.scores: Floats = np.zeros(canaries)
        self._noise, self._rate, self._opposite = noise, rate, opposite
        # The largest weight from the definition, not from the code that is audited: 2 of m equal shares.
        self._moved = CLIP * SHARES / max(1.0, rate * (canaries + OTHERS))
        self._generator = generator
        self._before: tuple[torch.Tensor, torch.Tensor] | None = None

    def updates(self, parameters: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return what each canary would send this round: [canaries, parameters], across all that `others` send."""
        random = torch.from_numpy(self._generator.normal(size=(len(parameters), len(self.names))))
        basis, _ = torch.linalg.qr(torch.cat([others.T, random], dim=1))
        directions = basis[:, len(others) :].T
        self._before = (parameters.to(torch.float64), directions)
        signs = np.where(self.inside, 1.0, -1.0 if self._opposite else 0.0)
        return EXCESS * CLIP * torch.from_numpy(signs)[:, None] * directions

    def look(self, released: torch.Tensor) -> None:
        """Score the canaries by one more released model: the log likelihood ratio of "in" against "out"."""
        if self._before is None:
            return
        parameters, directions = self._before
        along = (directions @ (released.to(torch.float64) - parameters)).numpy() / self._moved
        self.scores += self._likely(along)
        if self._opposite:
            self.scores -= self._likely(-along)

    def _likely(self, along: Floats) -> Floats:
        exponent = np.minimum(500.0, (along - 0.5) / self._noise**2)
        return np.log1p(self._rate * np.expm1(exponent)) if self._rate < 1 else exponent


class CanaryClients(WrappedClients):
    """Clients with an auditor's canaries among them; stopped once, in round `stop`, after its model was released."""

    def __init__(self, clients: Clients, auditor: Auditor, stop: int | None) -> None:
        super().__init__(clients)
        self.auditor, self.stop = auditor, stop

    def names(self, seed: int) -> Sequence[str]:
        return sorted([*self.clients.names(seed), *self.auditor.names])

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        return [self._train(task) for task in tasks]

    def _train(self, task: Task) -> Updates:
        planted = [number for number, name in enumerate(self.auditor.names) if name in set(task.clients)]
        real = tuple(name for name in task.clients if name not in set(self.auditor.names))
        answers = self.clients.train([replace(task, clients=real)]) if real else []
        models = [dense.models for answer in answers if (dense := answer.payload.dense) is not None]
        empty = torch.zeros((0, len(task.parameters)), dtype=torch.float64)
        others = torch.cat([empty, *(found.to("cpu", torch.float64) - task.parameters for found in models)])
        mine = self.auditor.updates(task.parameters, others)[planted] + task.parameters
        found = [(name, int(answers[0].samples[row]), models[0][row]) for row, name in enumerate(real)]
        found += [
            (self.auditor.names[n], int(EXCESS * SIZE), row.to(task.parameters.dtype))
            for n, row in zip(planted, mine, strict=True)
        ]
        found.sort(key=lambda each: each[0])
        samples = np.array([size for _, size, _ in found], dtype=np.int64)
        stacked = torch.stack([row for *_, row in found]) if found else empty.to(task.parameters.dtype)
        names = tuple(name for name, *_ in found)
        sizes = {"DS": samples.astype(np.float64)}
        return Updates(task.federation, task.round, names, samples, sizes, np.zeros(len(found)), DenseModels(stacked))

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        answers = self.clients.evaluate(questions)
        for question in questions:
            self.auditor.look(question.models[0].to("cpu"))
            if question.round == self.stop:
                raise KeyboardInterrupt
        return answers


def described(
    noise: float, rate: float, rounds: int, sampled: Literal["poisson", "fixed"], delta: float
) -> LearningDescription:
    """Return the experiment that canaries are planted in."""
    document: dict[str, Any] = {
        "name": "audit",
        "seed": SEED,
        "data": {"source": "digits"},
        "partition": {"scheme": "iid", "clients": OTHERS},
        "model": {"name": "logistic"},
        "training": {"learning_rate": 0.2, "epochs": 1, "batch_size": 50},
        "rounds": {"count": rounds, "fraction": rate, "sampling": sampled},
        "weighing": {"criteria": ["DS"], "max_shares": SHARES},
        "privacy": {"central": {"clip": CLIP, "noise": noise, "references": {"DS": SIZE}}, "budget": {"delta": delta}},
        "compute": {"engine": "loop"},
    }
    return validated(LearningDescription, document, "audit")


def audit_runs(
    noise: float = 1.0,
    rate: float = 1.0,
    rounds: int = 1,
    *,
    sampled: Literal["poisson", "fixed"] = "poisson",
    runs: int = 1,
    canaries: int = 300,
    delta: float = 1e-5,
    confidence: float = 0.95,
    seed: int | None = None,
) -> CanaryResult:
    """Run whole experiments with canaries in them and hold what is found against the ε that they state.

    `seed` draws which canaries are in, for tests; noise and cohorts are the product's, and are never the same again.
    """
    experiment = described(noise, rate, rounds, sampled, delta)
    auditors, promises = list[Auditor](), list[Promise]()
    for number in range(runs):
        drawn = None if seed is None else seed + number
        auditor = Auditor(canaries, noise, rate, sampled == "fixed", drawn)
        promises.append(_play(experiment, auditor, 1 + rounds // 2))
        auditors.append(auditor)
    inside = np.concatenate([auditor.inside for auditor in auditors])
    scores = np.concatenate([auditor.scores for auditor in auditors])
    lower = lower_bound(inside, scores, delta, confidence)
    accounted, neighbours = max(promise.together for promise in promises), promises[0].neighbours
    return CanaryResult(
        noise, rate, sampled, rounds, runs, len(inside), lower, accounted, delta, confidence, neighbours
    )


def _play(experiment: LearningDescription, auditor: Auditor, stop: int) -> Promise:
    """Run an experiment with canaries, stop it after that round was released, go on, and return what it states."""

    def assembled(at: int | None) -> tuple[Clients, Server]:
        clients, server = experiment.assemble()
        return CanaryClients(clients, auditor, at), server

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        try:
            run(experiment, out=folder, assemble=lambda: assembled(stop))
        except Stopped:
            resume(folder, assemble=lambda: assembled(None))
        promise = History(folder).facts.privacy
    assert promise is not None
    return promise


# The curious server of a recommender: what it reads of users' items, round by round.


@dataclass(frozen=True)
class GuessedRound:
    """What the server has read after a round, in each of three ways."""

    round: int
    sign: Guess
    absence: Guess
    sum: Guess


@dataclass(frozen=True)
class AuditedProtection:
    """One protection, the fields that it changes, and what the server reads under it."""

    protection: str
    settings: Mapping[str, Any]
    rounds: Sequence[GuessedRound]


class _Watched(RecommendClients):
    """Users whose updates a curious server looks at on the way."""

    curious: CuriousServer
    noise: DeviceNoise | None = None

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        answers = super().train(tasks)
        if self.noise is not None:
            answers = [self.noise.applied(task, answer) for task, answer in zip(tasks, answers, strict=True)]
        for answer in answers:
            senders = np.array([self.index_of[name] for name in answer.clients], dtype=np.int64)
            if isinstance(answer.payload, PairRows | SparseRows):
                rows = answer.payload.sparse() if isinstance(answer.payload, PairRows) else answer.payload
                self.curious.see(senders, rows)
        return answers


def watch(experiment: RecommendDescription, rounds: Sequence[int]) -> list[GuessedRound]:
    """Run an experiment's rounds and report, after each of the named ones, what the server has read."""
    if experiment.kgflex is not None:
        raise UserError(
            "kgflex: given, and its users send rows of features, not of items; allowed for an audit: experiments "
            "without [kgflex]"
        )
    if experiment.one_by_one:
        raise UserError(
            f"fpl.mode: got '{experiment.fpl.mode}'; allowed for an audit: pFPL, pFPL+ or custom (with one user a "
            "round the server sees the same rows, only fewer at a time)"
        )
    run_data = experiment.run_data()
    histories = run_data.histories
    clients = _Watched(*(run_data.users, run_data.learning, experiment.local_round()), threads=experiment.fpl.threads)
    clients.curious = CuriousServer(histories.users, histories.catalogue)
    clients.noise = experiment.device_noise()
    _, server = experiment.assemble()
    federation = federations_of(experiment)[0]
    states = {federation.name: federation.start(server)}
    # The loop tests the model in rounds that evaluate_every names and in its last: here it shall do neither.
    plan = replace(plan_of(experiment), rounds=1 << 30, evaluate_every=1 << 30)
    found: list[GuessedRound] = []
    for round in range(1, max(rounds) + 1):
        one_round([federation], states, clients, server, plan, round)
        if round in rounds:
            curious = clients.curious
            claims = (curious.by_sign(), curious.by_absence(), curious.by_sum(histories.sizes))
            found.append(GuessedRound(round, *(judge(claimed, histories) for claimed in claims)))
    return found


def chance(experiment: RecommendDescription) -> float:
    """Return the precision of a server that claims as many items of each user as it has, at random: Σs²/(I·Σs)."""
    histories = experiment.run_data().histories
    sizes = histories.sizes.astype(np.float64)
    return float((sizes**2).sum() / (histories.catalogue * sizes.sum()))


def variants(share: float, decoys: float) -> dict[str, Mapping[str, Any]]:
    """Return the protections that are compared, as changes of an experiment's [fpl] section."""
    persistent, words = f"π = {share:g} persistent", "decoy" if decoys == 1 else "decoys"
    protections = {
        "everything sent": (1.0, "round", 0.0),
        f"π = {share:g} drawn each round": (share, "round", 0.0),
        persistent: (share, "persistent", 0.0),
        f"{persistent}, {decoys:g} {words} per item": (share, "persistent", decoys),
        "π = 0": (0.0, "round", 0.0),
    }
    return {
        name: {"fpl.pi": pi, "fpl.mask": mask, "fpl.decoys": count} for name, (pi, mask, count) in protections.items()
    }


def audit(
    experiment: RecommendDescription,
    rounds: Sequence[int],
    share: float = 0.5,
    decoys: float = 1.0,
    epsilons: Sequence[float] = (),
    clip: float = 0.5,
) -> list[AuditedProtection]:
    """Play the curious server against every protection; one entry per protection with its guesses over rounds.

    `epsilons` adds noise on the devices for each of these budgets, over all rounds that are looked at.
    """
    protections, last = variants(share, decoys), max(rounds)
    for epsilon in epsilons:
        noise = {"privacy.local.clip": clip, "privacy.budget.epsilon": epsilon, "rounds.count": last}
        protections[f"noise, ε = {epsilon:g} over {last} rounds"] = {**protections["everything sent"], **noise}
    return [
        AuditedProtection(name, changes, watch(experiment.changed(changes), rounds))
        for name, changes in protections.items()
    ]
