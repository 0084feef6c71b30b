"""Looking into a run of a recommender: its lists, its figures, what it sent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from steelyard.base.errors import UserError, listed
from steelyard.experiment.loading import read_experiment
from steelyard.experiment.parts import federations_of
from steelyard.experiment.recommend import RecommendDescription
from steelyard.recommend.clients import RecommendClients
from steelyard.recommend.evaluate import Case, figures
from steelyard.recommend.interactions import Codes
from steelyard.recommend.metrics import Floats
from steelyard.recommend.run_data import RunData, number_of, titles_of
from steelyard.report.documents.recommenders import Communication, ListedItem, RecommenderReport
from steelyard.runs.history import History
from steelyard.weighing.rule import WeighingSettings


@dataclass(frozen=True, eq=False)
class Finished:
    """One rule of a run as of its last checkpoint: the shared table and the simulated users with their vectors."""

    experiment: RecommendDescription
    run_data: RunData
    clients: RecommendClients
    federation: str
    seed: int
    round: int
    model: torch.Tensor

    def lists(self, cutoff: int) -> tuple[Codes, Floats]:
        """Return every user's list, best first, and the scores of its items."""
        return self.clients.lists(self.federation, self.seed, self.model, cutoff)

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

    def top(self, user: str, cutoff: int) -> list[ListedItem]:
        """Return one user's list with titles and scores."""
        number = number_of(self.run_data, user)
        lists, scores = self.lists(cutoff)
        mine = lists[number][lists[number] >= 0]
        hers = set(self.run_data.users.truth.test_item[self.run_data.users.truth.test_user == number].tolist())
        titles = titles_of(self.run_data, mine)
        return [
            {
                "rank": rank,
                "item": str(self.run_data.data.items[item]),
                "title": title,
                "score": float(scores[number, rank - 1]),
                "in_test": int(item) in hers,
            }
            for rank, (item, title) in enumerate(zip(mine.tolist(), titles, strict=True), 1)
        ]


def open_run(folder: Path, rule: str | None = None, seed: int | None = None) -> Finished:
    """Open a run's last checkpoint; the main rule unless another is named."""
    experiment = read_experiment(folder)
    if not isinstance(experiment, RecommendDescription):
        raise UserError(f"{folder}: a run of kind '{experiment.model_dump()['kind']}'; allowed: kind 'recommend'")
    seeds: list[int] = json.loads(History(folder).info.get("seeds", "[]"))
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
    return Finished(
        *(experiment, experiment.run_data(), clients, federation.name, federation.seed, state.round, state.parameters)
    )
