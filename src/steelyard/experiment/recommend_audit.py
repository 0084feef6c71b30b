"""Playing the curious server against an experiment: what it reads of users' items, round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NotRequired, TypedDict

import numpy as np

from steelyard.base.errors import UserError
from steelyard.experiment.parts import federations_of, plan_of
from steelyard.experiment.recommend import RecommendDescription
from steelyard.messages.updates import Task, Updates
from steelyard.privacy.clipping import DeviceNoise
from steelyard.recommend.audit import CuriousServer, Evidence, judge
from steelyard.recommend.clients import RecommendClients
from steelyard.recommend.histories import Histories
from steelyard.recommend.sparse import PairRows, SparseRows
from steelyard.rounds.loop import one_round


class GuessJson(TypedDict):
    """What a curious server claims, and how much of it is right."""

    claims: int
    precision: float | None
    recall: float


class GuessedRound(TypedDict):
    """What the server has read after a round, in each of three ways."""

    round: int
    sign: GuessJson
    absence: GuessJson
    sum: GuessJson


class AuditedProtection(TypedDict):
    """One protection, its settings, and what the server reads under it."""

    protection: str
    rounds: list[GuessedRound]
    pi: NotRequired[float]
    mask: NotRequired[str]
    decoys: NotRequired[float]
    epsilon: NotRequired[float]
    clip: NotRequired[float]


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
            found.append(
                {
                    "round": round,
                    "sign": _judged(curious.by_sign(), histories),
                    "absence": _judged(curious.by_absence(), histories),
                    "sum": _judged(curious.by_sum(histories.sizes), histories),
                }
            )
    return found


def _judged(claimed: Evidence, histories: Histories) -> GuessJson:
    found = judge(claimed, histories)
    return {"claims": found.claims, "precision": found.precision, "recall": found.recall}


def chance(experiment: RecommendDescription) -> float:
    """Return the precision of a server that claims as many items of each user as it has, at random: Σs²/(I·Σs)."""
    histories = experiment.run_data().histories
    sizes = histories.sizes.astype(np.float64)
    return float((sizes**2).sum() / (histories.catalogue * sizes.sum()))


def variants(share: float, decoys: float) -> dict[str, Mapping[str, Any]]:
    """Return the protections that are compared, as changes of an experiment's [fpl] section."""
    return {
        "everything sent": {"fpl.pi": 1.0, "fpl.mask": "round", "fpl.decoys": 0.0},
        f"π = {share:g} drawn each round": {"fpl.pi": share, "fpl.mask": "round", "fpl.decoys": 0.0},
        f"π = {share:g} persistent": {"fpl.pi": share, "fpl.mask": "persistent", "fpl.decoys": 0.0},
        f"π = {share:g} persistent, {decoys:g} {'decoy' if decoys == 1 else 'decoys'} per item": {
            "fpl.pi": share,
            "fpl.mask": "persistent",
            "fpl.decoys": decoys,
        },
        "π = 0": {"fpl.pi": 0.0, "fpl.mask": "round", "fpl.decoys": 0.0},
    }


def noisy(epsilon: float, rounds: int, clip: float) -> dict[str, Any]:
    """Return the protection by noise on the device: all rounds together cost ε."""
    return {"privacy.local.clip": clip, "privacy.budget.epsilon": epsilon, "rounds.count": rounds}


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
    found: list[AuditedProtection] = []
    for name, changes in variants(share, decoys).items():
        changed = experiment.changed(changes)
        pi, mask, count = changes["fpl.pi"], changes["fpl.mask"], changes["fpl.decoys"]
        found.append({"protection": name, "pi": pi, "mask": mask, "decoys": count, "rounds": watch(changed, rounds)})
    for epsilon in epsilons:
        changed = experiment.changed(
            {**variants(share, decoys)["everything sent"], **noisy(epsilon, max(rounds), clip)}
        )
        name = f"noise, ε = {epsilon:g} over {max(rounds)} rounds"
        found.append({"protection": name, "epsilon": epsilon, "clip": clip, "rounds": watch(changed, rounds)})
    return found
