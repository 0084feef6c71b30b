"""The curious server: how much of users' histories can be read from the updates they send?

The server follows the protocol and keeps what it sees. Two ways to read it:

- *sign*: the change of an item's bias is +s for a positive and −s for a negative, s > 0, and is not regularised. An
item
  whose bias a user ever pushed up is one she took. Fresh draws of what is sent (π per round) only delay this: over
  rounds every item is sent some time. A persistent choice bounds recall by π for good; decoys bound precision.
- *absence*: negatives are drawn evenly from what she did not take and are always sent. An item that never comes up as a
  negative, round after round, is likely hers. π does not help at all here; only decoys do, since they are left out too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.errors import UserError
from steelyard.experiment.running import federations_of, plan_of
from steelyard.messages import Task, Updates
from steelyard.recommend.clients import RecommendClients
from steelyard.recommend.experiment import RecommendExperiment
from steelyard.recommend.sampling import Histories
from steelyard.recommend.sparse import PairRows, SparseRows
from steelyard.rounds import one_round

Evidence = NDArray[np.bool_]


@dataclass(frozen=True)
class Guess:
    """What one way of reading claims about all users together."""

    claims: int
    precision: float | None
    """Share of the claimed (user, item) pairs that are true; None before the first claim."""
    recall: float
    """Share of all users' items that are claimed."""


class CuriousServer:
    """Keeps what it can see of each user's rows, and guesses; it knows the catalogue and no one's history."""

    def __init__(self, users: int, items: int) -> None:
        self.pushed_up: Evidence = np.zeros((users, items), dtype=np.bool_)
        self.pushed_down: Evidence = np.zeros((users, items), dtype=np.bool_)

    def see(self, senders: NDArray[np.int64], rows: SparseRows) -> None:
        """Take in a round's rows; `senders` are the users that the rows' owners stand for."""
        user, change = senders[rows.owners], rows.values[:, -1]
        self.pushed_up[user[change > 0], rows.rows[change > 0]] = True
        self.pushed_down[user[change < 0], rows.rows[change < 0]] = True

    def by_sign(self) -> Evidence:
        """Claim every item whose bias the user has pushed up."""
        return self.pushed_up

    def by_absence(self) -> Evidence:
        """Claim every item that the user has never pushed down, once she has sent anything at all."""
        return ~self.pushed_down & self.pushed_down.any(axis=1, keepdims=True)


def judge(claimed: Evidence, histories: Histories) -> Guess:
    """Compare claims with the true histories."""
    truth = histories.seen(np.arange(histories.users))
    right, claims = int((claimed & truth).sum()), int(claimed.sum())
    return Guess(claims, right / claims if claims else None, right / max(histories.total, 1))


class _Watched(RecommendClients):
    """Users whose updates a curious server looks at on the way."""

    curious: CuriousServer

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        answers = super().train(tasks)
        for answer in answers:
            if isinstance(answer.payload, PairRows):
                senders = np.array([self._place[name] for name in answer.clients], dtype=np.int64)
                self.curious.see(senders, answer.payload.sparse())
        return answers


def watch(experiment: RecommendExperiment, rounds: Sequence[int]) -> list[dict[str, Any]]:
    """Run an experiment's rounds and report, after each of the named ones, what the server has read."""
    if experiment.one_by_one:
        raise UserError(
            f"fpl.mode: got '{experiment.fpl.mode}'; allowed for an audit: pFPL, pFPL+ or custom (with one user a "
            "round the server sees the same rows, only fewer at a time)"
        )
    prepared = experiment.prepare()
    histories = prepared.histories
    clients = _Watched(prepared.users, prepared.learning, experiment.protocol(), threads=experiment.fpl.threads)
    clients.curious = CuriousServer(histories.users, histories.catalogue)
    _, server = experiment.assemble()
    federation = federations_of(experiment)[0]
    states = {federation.name: federation.start(server)}
    # The loop tests the model in rounds that evaluate_every names and in its last: here it shall do neither.
    plan = replace(plan_of(experiment), rounds=1 << 30, evaluate_every=1 << 30)
    found: list[dict[str, Any]] = []
    for round in range(1, max(rounds) + 1):
        one_round([federation], states, clients, server, plan, round)
        if round in rounds:
            guesses = {"sign": clients.curious.by_sign(), "absence": clients.curious.by_absence()}
            found.append({"round": round, **{name: vars(judge(g, histories)) for name, g in guesses.items()}})
    return found


def variants(share: float, decoys: float) -> dict[str, Mapping[str, Any]]:
    """Return the protections that are compared, as changes of an experiment's [fpl] section."""
    return {
        "everything sent": {"fpl.pi": 1.0, "fpl.mask": "round", "fpl.decoys": 0.0},
        f"π = {share:g} drawn each round": {"fpl.pi": share, "fpl.mask": "round", "fpl.decoys": 0.0},
        f"π = {share:g} persistent": {"fpl.pi": share, "fpl.mask": "persistent", "fpl.decoys": 0.0},
        f"π = {share:g} persistent, {decoys:g} decoys per item": {
            "fpl.pi": share,
            "fpl.mask": "persistent",
            "fpl.decoys": decoys,
        },
        "π = 0": {"fpl.pi": 0.0, "fpl.mask": "round", "fpl.decoys": 0.0},
    }


def audit(
    experiment: RecommendExperiment, rounds: Sequence[int], share: float = 0.5, decoys: float = 1.0
) -> list[dict[str, Any]]:
    """Play the curious server against every protection; one entry per protection with its guesses over rounds."""
    found: list[dict[str, Any]] = []
    for name, changes in variants(share, decoys).items():
        changed = experiment.changed(changes)
        assert isinstance(changed, RecommendExperiment)
        settings = {key.removeprefix("fpl."): value for key, value in changes.items()}
        found.append({"protection": name, **settings, "rounds": watch(changed, rounds)})
    return found
