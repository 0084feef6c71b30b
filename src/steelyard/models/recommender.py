"""A recommender that left its run: the shared table, and of users nothing, or the own part of one who asked for it.

What a user keeps for herself, her vectors and her items, makes her lists. So a folder lists for the one user whose
part it holds, or for a newcomer whose items are given: her vectors are then trained here, as her device would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from steelyard.base.documents import Document
from steelyard.base.errors import UserError, first_names, path_of, printable
from steelyard.base.logs import logger
from steelyard.messages.updates import Task
from steelyard.models.card import card
from steelyard.models.document import Figure, Group, Origin, RecommenderDocument, Tested
from steelyard.models.folder import DOCUMENT, WEIGHTS, held_of, read_as, read_contents, write_folder
from steelyard.recommend.clients import LocalRound, RecommendClients
from steelyard.recommend.histories import Histories, Users
from steelyard.recommend.interactions import Codes, Interactions, at_least, numbered, read
from steelyard.recommend.interactions import Split as Sides
from steelyard.recommend.kgflex.clients import KgflexClients, KgflexParts
from steelyard.recommend.knowledge.features import build
from steelyard.recommend.metrics import GroundTruth
from steelyard.recommend.run_data import RunData, number_of, titles_of
from steelyard.report.recommender import Explained, Finished, Listing
from steelyard.report.verification import Record

TABLE, OWN = "table", "own"
PAIRS = ("pairs.items", "pairs.features")
"""Which item has which feature, of KGFlex."""
MOST_REASONS = 3
MOST_VISITS = 1_000_000
_log = logger(__name__)


class Recommended(Document):
    """One item of a user's list."""

    rank: int
    item: str
    title: str
    score: float
    taken_later: bool = False
    """Whether the user took it later: it is in her test set of the run."""
    reasons: list[str]
    """Of KGFlex the features that made most of the score, in words; other recommenders have none."""


class RecommendedList(Document):
    """The answer of `steelyard recommend list`."""

    user: str
    items: list[Recommended]


def listed(listing: Listing, user: str, cutoff: int) -> RecommendedList:
    """Return one user's list, of a run or of a saved recommender, with titles, scores and reasons."""
    number = number_of(listing.run_data, user)
    lists, scores = listing.lists(cutoff)
    mine, truth = lists[number][lists[number] >= 0], listing.run_data.users.truth
    later = set(truth.test_item[truth.test_user == number].tolist())
    explained = Explained(listing, listing.clients) if isinstance(listing.clients, KgflexClients) else None
    found: list[Recommended] = []
    for rank, (item, title) in enumerate(zip(mine.tolist(), titles_of(listing.run_data, mine), strict=True), 1):
        name, score = str(listing.run_data.data.items[item]), float(scores[number, rank - 1])
        why = [] if explained is None else explained.why(user, name)["reasons"][:MOST_REASONS]
        reasons = [reason["feature"] for reason in why if reason["part"] > 0]
        made = Recommended(rank=rank, item=name, title=title, score=score, taken_later=item in later, reasons=reasons)
        found.append(made)
    return RecommendedList(user=user, items=found)


@dataclass(frozen=True, eq=False, repr=False)
class Recommender:
    """A recommender that was taken from a run; it makes lists, is tested, and is saved.

    >>> experiment = steelyard.RecommendExperiment(interactions={"path": "ratings.tsv"}, rounds={"epochs": 3})
    >>> recommender = experiment.run("runs/shop").recommender(user="u0")
    >>> recommender.list().items[0].title

    Raises:
        UserError: a user's own part is neither in the folder nor given, or a folder holds no whole recommender.
    """

    document: RecommenderDocument
    tensors: Mapping[str, torch.Tensor]
    """The shared table, and what else the document says of."""
    card: str
    """Where it is from and what it holds, in Markdown."""

    def list(self, user: str = "", cutoff: int = 10, *, rows: Path | str | None = None) -> RecommendedList:
        """Return a user's list of items that she does not have; `rows` is a file with the items that she has.

        Without it the folder must hold her own part.
        """
        user, listing = self._listing(user, rows)
        return listed(listing, user, cutoff)

    def test(self, held: Path | str, user: str = "", *, rows: Path | str | None = None) -> Tested:
        """Return every metric of a user's list on items that she took later, such as ndcg@10; the run's own first."""
        user, listing = self._listing(user, rows, held)
        judge = listing.clients.judge
        if not len(judge.tested):
            raise UserError(f"{held}: holds no item of {user} that the model knows; expected some that she took later")
        found = judge.measure(lambda users: listing.clients.scores("", listing.seed, listing.model, users))
        names = [judge.score, *(name for name in found if name != judge.score)]
        figures = [Figure.of(f"{name}@{judge.cutoff}", float(found[name][0]), 0) for name in names]
        later = len(listing.run_data.users.truth.test_item)
        return Tested(by=None, groups=[Group(name=user, rows=later, figures=figures)], notes=[])

    @property
    def use(self) -> str:
        """The command that uses the recommender in a folder."""
        return "steelyard recommend list {}" + ("" if self.document.user else " --user USER --rows FILE")

    def save(self, out: Path | str) -> Path:
        """Write it into a folder of its own, which must not hold anything yet, and return it."""
        return write_folder(out, self.document, self.tensors, self.card, {})

    @classmethod
    def load(cls, folder: Path | str) -> Recommender:
        """Return the recommender of a folder; nothing in it is run."""
        folder = path_of(folder, "Recommender.load", "the folder of a recommender")
        document = read_as(folder, RecommenderDocument, "no recommender: `steelyard predict` takes it")
        tensors, card = read_contents(folder, document)
        _check(folder, document, tensors)
        return cls(document, tensors, card)

    def _listing(self, user: str, rows: Path | str | None, held: Path | str | None = None) -> tuple[str, Listing]:
        """Return whose list it is, and what makes it: from the folder's own part, or trained on rows."""
        document = self.document
        if rows is None and not (document.user and user in ("", document.user)):
            whose = f"the part of '{document.user}' alone" if document.user else "no user's own part"
            raise UserError(
                f"--user: got '{user}', and this folder holds {whose}; allowed: --rows FILE with her items, or the "
                "folder of `steelyard model RUN --client`"
            )
        if rows is None:
            user, taken = document.user, np.array(document.taken, dtype=np.int64)
        else:
            user, taken = self._rows(Path(rows), user)
        later = np.zeros(0, dtype=np.int64) if held is None else self._rows(Path(held), user)[1]
        listing = self._built(user, taken, later)
        if rows is None:
            listing.clients.restore({"vectors/": self.tensors[OWN]})
        else:
            answer = listing.clients.train([Task("", listing.seed, 1, (user,), listing.model)])[0]
            if answer.failures:
                raise UserError(f"--rows: {rows}: {answer.failures[0].reason}; allowed: some items, not all of them")
        return user, listing

    def _rows(self, path: Path, user: str) -> tuple[str, Codes]:
        """Return the items of a user in a file, by number; items that the model does not know are named."""
        if not path.exists():
            raise UserError(f"{path}: no such file; expected a table of users and items")
        table, document = read(path), self.document
        if document.threshold is not None:
            table = at_least(table, document.threshold)
        user = user or (str(table.users[0]) if len(table.users) == 1 else "")
        mine = np.flatnonzero(table.users[table.user] == user)
        if not len(mine):
            raise UserError(f"--user: got '{user}'; allowed: one of {path}: {first_names(table.users.tolist())}")
        names = table.items[table.item[mine]]
        found = numbered(names.astype(object), document.items)
        if unknown := names[found < 0].tolist():
            _log.warning(f"items that the model does not know, left out: {first_names(unknown)}")
        return user, np.unique(found[found >= 0])

    def _built(self, user: str, taken: Codes, later: Codes) -> Listing:
        """Return what makes the lists of one user, her vectors as at first."""
        document, items = self.document, np.array(self.document.items, dtype=np.str_)

        def side(mine: Codes) -> Interactions:
            none = np.zeros(len(mine), dtype=np.int64)
            return Interactions(np.array([user]), items, none, mine, np.ones(len(mine)))

        train, test = side(taken), side(later)
        histories = Histories.of(train)
        users = Users(histories, GroundTruth.between(train, test), np.ones(1), histories.items.astype(np.int64))
        given = (users, document.learning, LocalRound(document.visits))
        if document.kgflex is None:
            clients = RecommendClients(*given, cutoff=document.cutoff, score=document.score)
        else:
            of_item, feature = (self.tensors[name].numpy() for name in PAIRS)
            features = build(of_item, feature, len(items), document.features, document.hops)
            parts = KgflexParts(features, document.kgflex)
            clients = KgflexClients(*given, parts, cutoff=document.cutoff, score=document.score)
        titles = dict(zip(document.items, document.titles, strict=True))
        run_data = RunData(train, Sides(train, test), users, document.learning, titles)
        return Listing(run_data, clients, "", document.origin.seed, self.tensors[TABLE].reshape(-1))

    def __repr__(self) -> str:
        """Where it is from, in one line."""
        origin = self.document.origin
        return printable(f"Recommender(of {origin.run}: {origin.rule}, seed {origin.seed}, round {origin.round})")


def of_run(finished: Finished, origin: Origin, found: Record, client: str | None) -> Recommender:
    """Return the recommender of an opened run; `client`: with the own part of this user."""
    run_data, clients, experiment = finished.run_data, finished.clients, finished.experiment
    histories, ids = run_data.histories, run_data.data.items
    tensors = {TABLE: finished.model.reshape(-1, run_data.learning.factors + 1)}
    features = clients.parts.features if isinstance(clients, KgflexClients) else None
    if features is not None:
        pairs = features.matrix.tocoo().coords
        tensors |= {name: torch.from_numpy(pair.astype(np.int64)) for name, pair in zip(PAIRS, pairs, strict=True)}
    taken: list[int] = []
    if client is not None:
        number = number_of(run_data, client)
        taken, mine = histories.own(number).tolist(), slice(number, number + 1)
        if isinstance(clients, KgflexClients):
            mine = clients.knowledge(finished.seed).selection.entries(number)
        tensors[OWN] = clients.snapshot()[f"vectors/{finished.federation}"][mine]
    schedule = experiment.schedule()
    each = histories.total if experiment.bundled else schedule.users * schedule.triples
    document = RecommenderDocument(
        origin=origin,
        items=ids.tolist(),
        titles=titles_of(run_data, np.arange(len(ids))),
        learning=run_data.learning,
        visits=min(MOST_VISITS, max(1, round(finished.round * each / histories.users))),
        threshold=experiment.interactions.threshold,
        cutoff=experiment.ranking.cutoff,
        score=experiment.ranking.score,
        kgflex=experiment.kgflex,
        features=[] if features is None else list(features.names),
        hops=[] if features is None else features.hops.tolist(),
        user=client or "",
        taken=taken,
        weights=held_of(b""),
        card=held_of(b""),
    )
    return Recommender(document, tensors, _card(document, found))


def _card(document: RecommenderDocument, found: Record) -> str:
    rows = f"{len(document.items):,} items"
    rows = rows if document.kgflex is None else f"{len(document.features):,} features of {rows}"
    own = f"the vectors and the {len(document.taken):,} items of user {document.user}: hand it to that user alone"
    holds = (
        f"A vector of {document.learning.factors} numbers and a bias for each of {rows}.",
        f"It also holds {own}." if document.user else "Of users it holds nothing: no vector, no item, no name.",
    )
    return card(document.origin, found, "Recommender", ["## What it holds", holds], sites=False)


def _check(folder: Path, document: RecommenderDocument, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that do not go with their document."""
    items, features, width = len(document.items), len(document.features), document.learning.factors
    named = {TABLE, *(() if document.kgflex is None else PAIRS), *((OWN,) if document.user else ())}
    table = tensors.get(TABLE)
    sound = (
        set(tensors) == named
        and len(document.titles) == items == len(set(document.items))
        and len(document.hops) == features
        and table is not None
        and table.shape == (items if document.kgflex is None else features, width + 1)
        and all(tensor.isfinite().all() for tensor in tensors.values())
        and all(tensors[name].dtype == torch.float32 for name in named - {*PAIRS})
        and all(number < items for number in document.taken)
    )
    if sound and document.kgflex is not None:
        pairs = [tensors[name] for name in PAIRS]
        ends = zip(pairs, (items, features), strict=True)
        sound = pairs[0].shape == pairs[1].shape and all(
            pair.dtype == torch.int64 and pair.dim() == 1 and not ((pair < 0) | (pair >= end)).any()
            for pair, end in ends
        )
    if not sound:
        raise UserError(f"{folder / WEIGHTS}: does not go with {DOCUMENT}; expected the files as they were written")
