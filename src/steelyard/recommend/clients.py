"""The users of a recommender as clients of the round loop, simulated in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from steelyard.errors import UserError
from steelyard.messages import Evaluations, Failure, Payload, Question, ServerTest, Task, Updates
from steelyard.randomness import generator
from steelyard.recommend import metrics
from steelyard.recommend.communication import Traffic, row_bytes
from steelyard.recommend.fpl import Floats32, Learning, blockwise, first_table, first_vector
from steelyard.recommend.interactions import Codes, Flags
from steelyard.recommend.metrics import PerUser
from steelyard.recommend.ranking import Floats, Ground, top
from steelyard.recommend.sampling import Histories, MaskKind, Triples, draw_triples, round_keys, sends, user_keys
from steelyard.recommend.sparse import PairRows, distinct_rows
from steelyard.recommend.turns import Moved, take_turns
from steelyard.weighing.criteria import Criterion, LocalData

SCORES: Mapping[str, PerUser] = {
    metric.name: metric
    for metric in (metrics.NDCG(), metrics.Precision(), metrics.Recall(), metrics.HitRate(), metrics.UserF1())
}
"""What a user's list can be scored by in the loop."""


@dataclass(frozen=True, eq=False)
class Users:
    """What lies on the devices: histories, tests, and each user's own settings."""

    histories: Histories
    ground: Ground
    shares: Floats
    """π of each user."""
    kinds: Codes
    """A label per entry of `histories.items`: the item's category, or the item itself; LD counts distinct ones."""
    facts: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """Further facts about users, for criteria of your own."""


@dataclass(frozen=True)
class Protocol:
    """How a round goes: triples per user, which positives are sent, decoys, turns."""

    triples: int
    """T"""
    mask: MaskKind = "round"
    decoys: float = 0.0
    turns: int | None = None
    """None: all users of the cohort at once. A number: so many rounds of one random user each, one after the other."""


class RecommendClients:
    """All users of a simulated FPL federation; use it through an experiment of kind "recommend".

    Private vectors live here, one matrix per federation, and leave only into checkpoints of the simulation.
    """

    def __init__(
        self,
        users: Users,
        learning: Learning,
        protocol: Protocol,
        *,
        cutoff: int = 10,
        score: str = "ndcg",
        criteria: Iterable[Criterion] = (),
        threads: int | None = None,
    ) -> None:
        self.users, self.learning, self.protocol = users, learning, protocol
        self.cutoff, self.score = cutoff, score
        self.criteria = [criterion for criterion in criteria if criterion.measured_by == "client"]
        self.threads = threads or min(2, os.cpu_count() or 1)
        self._names = sorted(users.histories.names)
        self._place = {name: place for place, name in enumerate(users.histories.names)}
        self._everyone = np.array([self._place[name] for name in self._names], dtype=np.int64)
        self._vectors: dict[str, Floats32] = {}
        self._traffic: dict[str, Traffic] = {}
        self._histories: dict[int, Histories] = {}
        self._keys: dict[tuple[int, str], np.ndarray] = {}
        self._measured: dict[str, Floats] = {}

    def names(self, seed: int) -> Sequence[str]:
        return self._names

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        return [self._train(task) for task in tasks]

    def _train(self, task: Task) -> Updates:
        places, failures = self._cohort(task)
        histories = self._claimed(task.seed)
        table = task.parameters.detach().cpu().numpy().reshape(-1, self.learning.factors + 1)
        vectors = self._own(task.federation, task.seed)
        work = self._all_at_once if self.protocol.turns is None else self._in_turns
        payload, losses, rows = work(task, places, histories, table, vectors)
        width = row_bytes(self.learning.factors)
        asked = len(places) if self.protocol.turns is None else self.protocol.turns
        self._traffic[task.federation] = self._traffic.get(task.federation, Traffic()).plus(
            down=asked * histories.catalogue, up=int(rows.sum()), width=width
        )
        return Updates(
            federation=task.federation,
            round=task.round,
            clients=tuple(histories.names[place] for place in places.tolist()),
            samples=histories.sizes[places],
            criteria={criterion.name: self._measure(criterion)[places] for criterion in self.criteria},
            losses=losses,
            payload=payload,
            failures=tuple(failures),
            bytes_sent=rows * width,
        )

    def _cohort(self, task: Task) -> tuple[Codes, list[Failure]]:
        """Return the places of the asked users who can train, and why the others cannot."""
        histories = self._claimed(task.seed)
        known = [name for name in task.clients if name in self._place]
        failures = [Failure(name, "not registered") for name in task.clients if name not in self._place]
        whole = len(known) == len(self._names)
        places = self._everyone if whole else np.array([self._place[name] for name in known], dtype=np.int64)
        empty, full = histories.drawn_from[places] == 0, histories.drawn_from[places] == histories.catalogue
        failures += [Failure(histories.names[p], "no training items") for p in places[empty].tolist()]
        failures += [
            Failure(histories.names[p], "has every item: none is left as a negative") for p in places[full].tolist()
        ]
        return places[~(empty | full)], failures

    def _all_at_once(
        self, task: Task, places: Codes, histories: Histories, table: Floats32, vectors: Floats32
    ) -> tuple[Payload, Floats, Codes]:
        keys = round_keys(self._user_keys(task.seed, "triples")[places], task.round)
        triples = draw_triples(histories, places, keys, self.protocol.triples)
        sent = self._sent(task.seed, task.round, places, triples)
        done = blockwise(table, vectors[places], triples, self.learning, self.threads)
        # A pass that ran away is refused by the server; the device goes back to the vector it had.
        good = np.isfinite(done.vectors).all(axis=1)
        vectors[places[good]] = done.vectors[good]
        rows = distinct_rows(triples.positives, sent, triples.negatives)
        payload = PairRows(triples.positives, sent, triples.negatives, done.push, table, self.learning)
        return payload, done.losses.mean(axis=1, dtype=np.float64), rows

    def _in_turns(
        self, task: Task, places: Codes, histories: Histories, table: Floats32, vectors: Floats32
    ) -> tuple[Payload, Floats, Codes]:
        turns = self.protocol.turns or 0
        source = generator(task.seed, task.round, "", "fpl turns")
        visitors = places[source.integers(len(places), size=turns)] if len(places) else places
        # Every one-user round has a number of its own, counted through the whole run.
        numbers = (task.round - 1) * turns + 1 + np.arange(len(visitors))
        keys = round_keys(self._user_keys(task.seed, "triples")[visitors], numbers)
        triples = draw_triples(histories, visitors, keys, self.protocol.triples)
        sent = self._sent(task.seed, numbers, visitors, triples)
        moved = table.copy()
        lost = take_turns(moved, vectors, visitors, triples, sent, self.learning)
        rows = np.bincount(visitors, distinct_rows(triples.positives, sent, triples.negatives), histories.users)
        visits = np.bincount(visitors, minlength=histories.users)
        losses = np.bincount(visitors, lost, histories.users) / np.maximum(visits, 1)
        payload = Moved(len(places), torch.from_numpy((moved - table).reshape(-1)))
        return payload, losses[places], rows[places].astype(np.int64)

    def _sent(self, seed: int, round: int | Codes, places: Codes, triples: Triples) -> Flags:
        keys = self._user_keys(seed, "mask")[places]
        fresh = round_keys(keys, round) if self.protocol.mask == "round" else keys
        return sends(fresh, self.users.shares[places], triples.positives)

    def _user_keys(self, seed: int, purpose: str) -> np.ndarray:
        if (seed, purpose) not in self._keys:
            self._keys[seed, purpose] = user_keys(seed, self.users.histories.names, purpose)
        return self._keys[seed, purpose]

    def _claimed(self, seed: int) -> Histories:
        """The histories that users draw from: their own, with decoys where the protocol wants some."""
        if not self.protocol.decoys:
            return self.users.histories
        if seed not in self._histories:
            self._histories[seed] = self.users.histories.with_decoys(self.protocol.decoys, seed)
        return self._histories[seed]

    def _own(self, federation: str, seed: int) -> Floats32:
        if federation not in self._vectors:
            drawn = [first_vector(seed, name, self.learning.factors) for name in self.users.histories.names]
            self._vectors[federation] = np.stack(drawn)
        return self._vectors[federation]

    def _measure(self, criterion: Criterion) -> Floats:
        """Take a criterion of every user once: what it looks at does not change between rounds."""
        if criterion.name not in self._measured:
            if criterion.about == "model":
                raise UserError(
                    f"criterion {criterion.name}: is about the client's model, which a user of FPL does not show; "
                    "allowed: criteria about data, user or device, or measured by the server"
                )
            each = [criterion.on_client(self._local(place)) for place in range(self.users.histories.users)]
            self._measured[criterion.name] = np.array(each)
        return self._measured[criterion.name]

    def _local(self, place: int) -> LocalData:
        histories = self.users.histories
        name = histories.names[place]
        stretch = slice(int(histories.starts[place]), int(histories.starts[place + 1]))
        facts = {"pi": float(self.users.shares[place]), **self.users.facts.get(name, {})}
        labels = torch.from_numpy(self.users.kinds[stretch])
        return LocalData(name, labels, int(self.users.kinds.max(initial=0)) + 1, user=facts)

    def scores_of(self, federation: str, seed: int, model: torch.Tensor, places: Codes) -> Floats32:
        """Return b_i + q_i·p_u of all items for these users."""
        table = model.detach().cpu().numpy().reshape(-1, self.learning.factors + 1)
        with np.errstate(over="ignore", invalid="ignore"):
            found = self._own(federation, seed)[places] @ table[:, :-1].T
            found += table[:, -1]
        return found

    def lists(self, federation: str, seed: int, model: torch.Tensor, cutoff: int) -> Codes:
        """Return every user's list of unseen items, best first; users in the order of the histories."""
        return self._by_block(
            lambda block: top(self.scores_of(federation, seed, model, block), self.users.histories.seen(block), cutoff)
        )

    def _by_block(self, work: Callable[[Codes], Codes], cells: int = 1 << 23) -> Codes:
        count = self.users.histories.users
        step = max(1, cells // max(self.users.histories.catalogue, 1))
        return np.concatenate([work(np.arange(start, min(start + step, count))) for start in range(0, count, step)])

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        return [self._evaluate(question) for question in questions]

    def _evaluate(self, question: Question) -> Evaluations:
        tested = self._everyone[self.users.ground.relevant[self._everyone] > 0]
        rows: list[Floats] = []
        further: dict[str, Floats] = {}
        for number, model in enumerate(question.models):
            lists = self.lists(question.federation, question.seed, model, self.cutoff)
            view = self.users.ground.view(lists, self.cutoff)
            rows.append(SCORES[self.score].per_user(view)[tested])
            if number == 0:
                others = {f"{name}@{self.cutoff}": metric for name, metric in SCORES.items()}
                further = {name: metric.per_user(view)[tested] for name, metric in others.items()}
        scores = np.stack(rows)
        return Evaluations(
            federation=question.federation,
            round=question.round,
            clients=tuple(self.users.histories.names[place] for place in tested.tolist()),
            # Every user counts once, so that the overall score is the metric's mean over users.
            samples=np.ones(len(tested), dtype=np.int64),
            scores=scores,
            losses=1.0 - scores,
            metrics=further,
        )

    def traffic(self, federation: str) -> Traffic:
        """Return what has travelled so far between the server and this federation's users."""
        return self._traffic.get(federation, Traffic())

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        vectors = {f"vectors/{name}": torch.from_numpy(kept) for name, kept in self._vectors.items()}
        counts = {f"traffic/{name}": torch.tensor(kept.numbers()) for name, kept in self._traffic.items()}
        return vectors | counts

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        # What is put back stands for everything: a device that served another run must not go on from there.
        self._vectors.clear()
        self._traffic.clear()
        for key, tensor in state.items():
            kind, _, federation = key.partition("/")
            if kind == "vectors":
                self._vectors[federation] = tensor.cpu().numpy().copy()
            elif kind == "traffic":
                self._traffic[federation] = Traffic(*tensor.tolist())

    def describe(self) -> Mapping[str, str]:
        said = {
            "clients": f"{len(self._names)} users, simulated",
            "triples_per_user": str(self.protocol.triples),
            "threads": str(self.threads),
        }
        return said | {f"traffic {name}": str(kept) for name, kept in self._traffic.items()}

    def close(self) -> None:
        self._keys.clear()


@dataclass(frozen=True)
class RecommendServer:
    """The server of FPL: it holds the shared table and no data of its own."""

    items: int
    factors: int

    def initial(self, seed: int) -> torch.Tensor:
        return torch.from_numpy(first_table(seed, self.items, self.factors).reshape(-1))

    def test(self, seed: int, models: torch.Tensor) -> ServerTest:
        raise UserError(
            "criterion VP: the server of a recommender has no test set and sees no whole model; allowed: other criteria"
        )
