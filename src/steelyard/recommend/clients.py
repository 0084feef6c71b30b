"""The users of a recommender as clients of the round loop, simulated in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.base.randomness import generator
from steelyard.base.tallies import Leading
from steelyard.clients.protocol import Clients, Server
from steelyard.data.files import digest
from steelyard.messages.payloads import Payload, ServerTest
from steelyard.messages.updates import Evaluations, Failure, Question, Task, Updates
from steelyard.recommend.evaluate import Judge, Sampled
from steelyard.recommend.fpl import Learning, initial_table, initial_vector
from steelyard.recommend.histories import Floats32, Histories, MaskKind, Triples, Users, round_keys, user_keys
from steelyard.recommend.interactions import Codes, Flags
from steelyard.recommend.metrics import Floats
from steelyard.recommend.sparse import PairRows, TableChange
from steelyard.weighing.criterion import Criterion, LocalData

ID_BYTES = 4
NUMBER_BYTES = 4


def _loops() -> Any:
    """Return the loops that numba compiles: in an extra, without which nodes still learn."""
    from steelyard.recommend import compiled

    return compiled


def row_bytes(factors: int) -> int:
    """Return the size of one row as sent: an item's 32-bit number, its factors and its bias as 32-bit floats."""
    return ID_BYTES + NUMBER_BYTES * (factors + 1)


@dataclass(frozen=True)
class Traffic:
    """What has travelled: rows of the shared table down to users and up from them, and their bytes."""

    down_vectors: int = 0
    up_vectors: int = 0
    down_bytes: int = 0
    up_bytes: int = 0

    def plus(self, *, down: int, up: int, width: int) -> Traffic:
        """Add a round; the table goes down whole and in order, so its rows need no numbers."""
        return Traffic(
            self.down_vectors + down,
            self.up_vectors + up,
            self.down_bytes + down * (width - ID_BYTES),
            self.up_bytes + up * width,
        )

    def numbers(self) -> tuple[int, int, int, int]:
        """Return the four counts, for a checkpoint."""
        return self.down_vectors, self.up_vectors, self.down_bytes, self.up_bytes

    @property
    def vectors(self) -> int:
        """All vectors both ways: what TCC estimates."""
        return self.down_vectors + self.up_vectors

    def __str__(self) -> str:
        return (
            f"{self.vectors:,} vectors ({self.down_vectors:,} down, {self.up_vectors:,} up), "
            f"{self.down_bytes + self.up_bytes:,} bytes"
        )


@dataclass(frozen=True)
class RecommendServer(Server):
    """The server of FPL: it holds the shared table and no data of its own; derive from it for other tables."""

    rows: int
    factors: int
    bias_spread: float = 0.0
    """Standard deviation of the first biases."""

    def initial(self, seed: int) -> torch.Tensor:
        return torch.from_numpy(self._first(seed).reshape(-1))

    def _first(self, seed: int) -> Floats32:
        return initial_table(seed, self.rows, self.factors, bias_spread=self.bias_spread)

    def test(self, seed: int, models: torch.Tensor, measure: Leading | None = None) -> ServerTest:
        raise UserError(
            "criterion VP: the server of a recommender has no test set and sees no whole model; allowed: other criteria"
        )


@dataclass(frozen=True, eq=False)
class Turns:
    """Local passes of users, one after another; a user may come up several times."""

    seed: int
    users: Codes
    triples: Triples
    sent: Flags
    """Which positives are sent."""

    def __getitem__(self, part: slice) -> Turns:
        return Turns(self.seed, self.users[part], self.triples.select(part), self.sent[part])


ResultT = TypeVar("ResultT")
_TRIPLES_AT_ONCE = 1_000_000
"""Triples of one-user rounds that are drawn together; a bound of memory, not of the result."""


def ahead(work: Callable[[int], ResultT], items: Iterable[int], threads: int) -> Iterator[ResultT]:
    """Yield `work` of each item in order; with two threads or more the next one is done meanwhile."""
    if threads < 2:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(1) as pool:
        following: Future[ResultT] | None = None
        for item in items:
            ready, following = following, pool.submit(work, item)
            if ready is not None:
                yield ready.result()
        if following is not None:
            yield following.result()


@dataclass(frozen=True)
class LocalRound:
    """What a user does in a round: how many triples she visits, which positives she sends, with which decoys."""

    triples: int
    """T"""
    mask: MaskKind = "round"
    decoys: float = 0.0
    sequential: int | None = None
    """None: all users of the cohort at once. A number: so many rounds of one random user each, one after the other."""


class RecommendClients(Clients):
    """All users of a simulated FPL federation; use it through an experiment of kind "recommend".

    Private vectors live here, one matrix per federation, and leave only into checkpoints of the simulation.
    """

    def __init__(
        self,
        users: Users,
        learning: Learning,
        local_round: LocalRound,
        *,
        cutoff: int = 10,
        score: str = "ndcg",
        sampled: Sampled | None = None,
        criteria: Iterable[Criterion] = (),
        threads: int | None = None,
    ) -> None:
        self.users, self.learning, self.local_round = users, learning, local_round
        self.judge = Judge(users, cutoff, score, sampled)
        self.criteria = [criterion for criterion in criteria if criterion.measured_by == "client"]
        self.threads = threads or min(2, os.cpu_count() or 1)
        self._names = sorted(users.histories.names)
        self.index_of = {name: index for index, name in enumerate(users.histories.names)}
        self._everyone = np.array([self.index_of[name] for name in self._names], dtype=np.int64)
        self._vectors: dict[str, Floats32] = {}
        self._traffic: dict[str, Traffic] = {}
        self._histories: dict[int, Histories] = {}
        self._keys: dict[tuple[int, str], np.ndarray] = {}
        self._measured: dict[tuple[int, str], Floats] = {}
        self._refused: dict[tuple[int, str], dict[int, str]] = {}
        """By seed and criterion: why users cannot be weighed by it."""

    @property
    def shared_rows(self) -> int:
        """Number of rows of the shared table."""
        return self.users.histories.catalogue

    def with_users(self, users: Users) -> RecommendClients:
        """Return clients of the same kind over other users; use it on a node that holds some of them."""
        return RecommendClients(*(users, self.learning, self.local_round), **self._options())

    def _options(self) -> dict[str, Any]:
        judge = self.judge
        measures = {"cutoff": judge.cutoff, "score": judge.score, "sampled": judge.sampled}
        return {**measures, "criteria": self.criteria, "threads": self.threads}

    def names(self, seed: int) -> Sequence[str]:
        return self._names

    def fingerprint(self, seed: int) -> Mapping[str, str]:
        histories, truth = self.users.histories, self.users.truth
        return {
            "users": digest([str(histories.names)]),
            "items": str(histories.catalogue),
            "interactions": digest([histories.starts, histories.items, self.users.kinds, self.users.shares]),
            "tests": digest([truth.test_user, truth.test_item]),
        }

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        return [self._train(task) for task in tasks]

    def _train(self, task: Task) -> Updates:
        cohort, failures = self._cohort(task)
        histories = self._claimed(task.seed)
        table = task.parameters.detach().cpu().numpy().reshape(-1, self.learning.factors + 1)
        vectors = self._own(task.federation, task.seed)
        work = self._in_parallel if self.local_round.sequential is None else self._in_sequence
        payload, losses, rows = work(task, cohort, histories, table, vectors)
        width = row_bytes(self.learning.factors)
        asked = len(cohort) if self.local_round.sequential is None else self.local_round.sequential
        self._traffic[task.federation] = self._traffic.get(task.federation, Traffic()).plus(
            down=asked * self.shared_rows, up=int(rows.sum()), width=width
        )
        updates = Updates(
            federation=task.federation,
            round=task.round,
            clients=tuple(histories.names[user] for user in cohort.tolist()),
            samples=histories.sizes[cohort],
            criteria={criterion.name: self._measure(criterion, task.seed)[cohort] for criterion in self.criteria},
            losses=losses,
            payload=payload,
            failures=tuple(failures),
            bytes_sent=rows * width,
        )
        if not self._refused:
            return updates
        measured = [each for (seed, _), each in self._refused.items() if seed == task.seed]
        refused = {user: why for each in measured for user, why in each.items()}
        wrong = [Failure(histories.names[user], refused[user]) for user in cohort.tolist() if user in refused]
        keep = [index for index, user in enumerate(cohort.tolist()) if user not in refused]
        return updates.select(keep, wrong) if wrong else updates

    def _cohort(self, task: Task) -> tuple[Codes, list[Failure]]:
        """Return the numbers of the asked users who can train, and why the others cannot."""
        histories = self._claimed(task.seed)
        known = [name for name in task.clients if name in self.index_of]
        failures = [Failure(name, "not registered") for name in task.clients if name not in self.index_of]
        whole = len(known) == len(self._names)
        users = self._everyone if whole else np.array([self.index_of[name] for name in known], dtype=np.int64)
        empty, full = histories.drawn_from[users] == 0, histories.drawn_from[users] == histories.catalogue
        failures += [Failure(histories.names[user], "no training items") for user in users[empty].tolist()]
        failures += [
            Failure(histories.names[user], "has every item: none is left as a negative")
            for user in users[full].tolist()
        ]
        return users[~(empty | full)], failures

    def _in_parallel(
        self, task: Task, cohort: Codes, histories: Histories, table: Floats32, vectors: Floats32
    ) -> tuple[Payload, Floats, Codes]:
        """Do one round of the whole cohort; return payload, losses and the number of rows each user sends."""
        turns = self._drawn(task.seed, task.round, cohort, histories)
        triples, sent = turns.triples, turns.sent
        done = _loops().local_pass(table, vectors[cohort], triples, self.learning, self.threads)
        # A pass that ran away is refused by the server; the device goes back to the vector it had.
        good = np.isfinite(done.vectors).all(axis=1)
        vectors[cohort[good]] = done.vectors[good]
        payload = PairRows(triples, sent, done.gradients, table, self.learning)
        return payload, done.losses.mean(axis=1, dtype=np.float64), _loops().distinct_rows(triples, sent)

    def _in_sequence(
        self, task: Task, cohort: Codes, histories: Histories, table: Floats32, vectors: Floats32
    ) -> tuple[Payload, Floats, Codes]:
        """Do many rounds of one random user each; return payload, mean losses and rows sent, by user of the cohort."""
        users, rounds = self._turns(task.seed, task.round, cohort)
        after, losses, rows = table.copy(), np.zeros(histories.users), np.zeros(histories.users)
        # Some rounds at a time: the triples of a long epoch do not fit the memory together.
        step = max(1, _TRIPLES_AT_ONCE // self.local_round.triples)

        def drawn(begin: int) -> tuple[Turns, Codes]:
            turns = self._drawn(task.seed, rounds[begin : begin + step], users[begin : begin + step], histories)
            return turns, _loops().distinct_rows(turns.triples, turns.sent)

        # Draws do not depend on the model: the next ones are made while these are visited.
        for turns, items in ahead(drawn, range(0, len(users), step), self.threads):
            found, told = self._visit(turns, items, after, vectors)
            losses += np.bincount(turns.users, found, histories.users)
            rows += np.bincount(turns.users, told, histories.users)
        mean_losses = losses / np.maximum(np.bincount(users, minlength=histories.users), 1)
        payload = TableChange(len(cohort), torch.from_numpy((after - table).reshape(-1)))
        return payload, mean_losses[cohort], rows[cohort].astype(np.int64)

    def _visit(
        self, turns: Turns, items: Codes, table: Floats32, vectors: Floats32
    ) -> tuple[NDArray[np.floating], Codes]:
        """Do one-user rounds, each on the table that the one before left; return losses and rows sent of each.

        `items` is how many distinct items each user sends: her rows, where a row is an item's.
        """
        given = (turns.users, turns.triples, turns.sent, self.learning)
        return _loops().sequential_rounds(table, vectors, *given), items

    def _turns(self, seed: int, round: int, cohort: Codes) -> tuple[Codes, Codes]:
        """Return the user of each one-user round, and the round's number, counted through the whole run."""
        count = self.local_round.sequential or 0
        source = generator(seed, round, "", "fpl turns")
        users = cohort[source.integers(len(cohort), size=count)] if len(cohort) else cohort
        return users, (round - 1) * count + 1 + np.arange(len(users))

    def changes_sent(self, seed: int, rounds: int) -> Codes:
        """Return how many changes of each item all users send in so many rounds; what is drawn needs no model."""
        histories, counts = self._claimed(seed), np.zeros(self.users.histories.catalogue, dtype=np.int64)
        able = (histories.drawn_from > 0) & (histories.drawn_from < histories.catalogue)
        everyone = self._everyone[able[self._everyone]]
        step = max(1, _TRIPLES_AT_ONCE // self.local_round.triples)
        for round in range(1, rounds + 1):
            users, numbers = everyone, np.full(len(everyone), round)
            if self.local_round.sequential is not None:
                users, numbers = self._turns(seed, round, everyone)
            for begin in range(0, len(users), step):
                part = slice(begin, begin + step)
                turns = self._drawn(seed, numbers[part], users[part], histories)
                for items in (turns.triples.positives[turns.sent], turns.triples.negatives):
                    counts += np.bincount(items.reshape(-1), minlength=len(counts))
        return counts

    def _drawn(self, seed: int, round: int | Codes, users: Codes, histories: Histories) -> Turns:
        """Return the triples that users visit in a round, or in one round each."""
        keys, masks = (self._user_keys(seed, purpose)[users] for purpose in ("triples", "mask"))
        triples = _loops().draw_triples(histories, users, round_keys(keys, round), self.local_round.triples)
        masks = masks if self.local_round.mask == "persistent" else round_keys(masks, round)
        drawn = triples.positives
        if self.local_round.mask == "triple":
            drawn = np.tile(np.arange(drawn.shape[1], dtype=drawn.dtype), (len(drawn), 1))
        return Turns(seed, users, triples, _loops().sent_positives(masks, self.users.shares[users], drawn))

    def _user_keys(self, seed: int, purpose: str) -> np.ndarray:
        if (seed, purpose) not in self._keys:
            self._keys[seed, purpose] = user_keys(seed, self.users.histories.names, purpose)
        return self._keys[seed, purpose]

    def _claimed(self, seed: int) -> Histories:
        """The histories that users draw from: their own, with decoys where the round wants some."""
        if not self.local_round.decoys:
            return self.users.histories
        if seed not in self._histories:
            self._histories[seed] = self.users.histories.with_decoys(self.local_round.decoys, seed)
        return self._histories[seed]

    def _own(self, federation: str, seed: int) -> Floats32:
        if federation not in self._vectors:
            drawn = [initial_vector(seed, name, self.learning.factors) for name in self.users.histories.names]
            self._vectors[federation] = np.stack(drawn)
        return self._vectors[federation]

    def _measure(self, criterion: Criterion, seed: int) -> Floats:
        """Take a criterion of every user once: what it looks at does not change between rounds."""
        key = (seed, criterion.name)
        if key not in self._measured:
            if criterion.about == "model":
                raise UserError(
                    f"criterion {criterion.name}: is about the client's model, which a user of FPL does not show; "
                    "allowed: criteria about data, user or device, or measured by the server"
                )
            each = [criterion.taken(self._local(user, seed)) for user in range(self.users.histories.users)]
            self._measured[key] = np.array([value for value, _ in each])
            self._refused[key] = {user: why for user, (_, why) in enumerate(each) if why is not None}
        return self._measured[key]

    def _local(self, user: int, seed: int) -> LocalData:
        """Return what a user's own device can look at; `seed` names what was drawn there, where something was."""
        histories = self.users.histories
        name = histories.names[user]
        entries = slice(int(histories.starts[user]), int(histories.starts[user + 1]))
        facts = {"pi": float(self.users.shares[user]), **self.users.facts.get(name, {})}
        labels = torch.from_numpy(self.users.kinds[entries].copy())  # criteria of users may write into it
        return LocalData(name, labels, int(self.users.kinds.max(initial=0)) + 1, user=facts)

    def scores(self, federation: str, seed: int, model: torch.Tensor, users: Codes) -> Floats32:
        """Return b_i + q_i·p_u of all items for these users."""
        table = model.detach().cpu().numpy().reshape(-1, self.learning.factors + 1)
        with np.errstate(over="ignore", invalid="ignore"):
            found = self._own(federation, seed)[users] @ table[:, :-1].T
            found += table[:, -1]
        return found

    def lists(self, federation: str, seed: int, model: torch.Tensor, cutoff: int) -> tuple[Codes, Floats]:
        """Return every user's list of unseen items, best first, and their scores; users in the order of histories."""
        return self.judge.lists(lambda users: self.scores(federation, seed, model, users), cutoff)

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        return [self.judge.answer(asked, partial(self.scores, asked.federation, asked.seed)) for asked in questions]

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
        facts = {
            "clients": f"{len(self._names)} users, simulated",
            "triples_per_user": str(self.local_round.triples),
            "threads": str(self.threads),
        }
        return facts | {f"traffic {name}": str(kept) for name, kept in self._traffic.items()}
