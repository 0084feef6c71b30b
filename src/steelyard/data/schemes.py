"""How samples are shared out among clients: a class for each scheme that `[partition]` names.

A scheme cuts a pool of rows into one set of rows per client; it draws from the generator that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from steelyard.base.errors import UserError, listed
from steelyard.data.partition_settings import PartitionSettings, Parts, client_name
from steelyard.data.sources.source import Count, DataSettings, SourceCapabilities, TaskKind

if TYPE_CHECKING:
    # Only for annotations: settings are read without torch.
    from steelyard.data.dataset import Dataset, Rows

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Line = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
Concentration = Annotated[float, Field(gt=0)]
_ATTEMPTS = 300
_NO_CLASSES: frozenset[TaskKind] = frozenset({"regression", "survival", "segmentation", "multi-label"})
"""Tasks whose rows are of no class, so that nothing can be shared out by class."""


def apportion(shares: Floats | Ints, total: int) -> Ints:
    """Cut `total` into whole numbers in proportion to the shares, by largest remainder (ties: the earlier first)."""
    exact = np.asarray(shares, dtype=np.float64) / float(np.sum(shares)) * total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def spread_sizes(total: int, shares: Floats, minimum: int) -> Ints:
    """Return sizes that sum to `total`, each at least `minimum`, what is above it in proportion to the shares."""
    if total < minimum * len(shares):
        raise UserError(
            f"partition.clients: got {len(shares)} with at least {minimum} rows each; "
            f"allowed: at most {total // minimum} (the source has {total} rows to share out)"
        )
    return minimum + apportion(shares, total - minimum * len(shares))


def deal(rows: Rows, counts: Sequence[int]) -> list[Rows]:
    """Deal rows one after another, starting over when they run out; nobody has a row twice if no count exceeds them."""
    ends = np.cumsum([0, *counts])
    return [rows[np.arange(ends[i], ends[i + 1]) % max(1, len(rows))] for i in range(len(counts))]


def _cut(rows: Rows, sizes: Ints) -> list[Rows]:
    ends = np.cumsum(sizes)
    return [rows[end - size : end] for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)]


@dataclass(frozen=True)
class Pool:
    """Rows to share out, their labels, and the draws that share them out."""

    rows: Rows
    labels: NDArray[Any]
    classes: int
    chance: np.random.Generator

    def of_class(self, label: int) -> Rows:
        """Return the rows of a class in random order."""
        return self.chance.permutation(self.rows[self.labels == label])


class Sized(PartitionSettings):
    """Schemes whose clients may get so many rows each."""

    samples: Count | None = None
    """Rows per client (natural and given: at most) before a local test set is split off. Default: all rows are shared
    out."""

    @model_validator(mode="after")
    def _enough_each(self) -> Self:
        if self.samples is not None and self.samples < self.minimum:
            raise ValueError(f"samples: got {self.samples}; allowed: at least minimum = {self.minimum}")
        return self


class Numbered(PartitionSettings):
    """Schemes whose clients are made here, however many are asked for."""

    counted: ClassVar[bool] = True

    @model_validator(mode="after")
    def _has_clients(self) -> Self:
        if self.client_count is None:
            raise ValueError(f"clients: got nothing; needed with scheme '{self.scheme}': a whole number from 1")
        return self

    def parts(self, dataset: Dataset, pool: Rows, chance: np.random.Generator) -> Parts:
        rows = self.cut(Pool(pool, dataset.labels.numpy()[pool], dataset.classes, chance))
        unused = len(pool) - len(np.unique(np.concatenate(rows)))
        notes = [f"{unused:,} of {len(pool):,} rows go to no client"] if unused > 0 else []
        return Parts([client_name(number, len(rows)) for number in range(len(rows))], rows, notes)

    def cut(self, pool: Pool) -> list[Rows]:
        """Return the rows of each client."""
        raise NotImplementedError

    def _enough(self, rows: int, count: int, size: int, field: str, word: str = "clients") -> None:
        if rows < count * size:
            raise UserError(
                f"partition.{field}: got {size} for each of {count} {word}; allowed: at most {rows // count} "
                f"(the source has {rows} rows to share out)"
            )


class Spread(Numbered):
    """Schemes whose clients may be of unequal sizes."""

    size_spread: Annotated[float, Field(ge=0, le=5)] = 0.0
    """How unequal the clients are: standard deviation of the logarithm of their sizes (a lognormal). 0: as equal as
    possible; 0.5: the biggest of 30 is some eight times the smallest."""
    sized_by: ClassVar[str] = "samples"
    """The field that fixes the size instead."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.size_spread and getattr(self, self.sized_by) is not None:
            raise ValueError(
                f"size_spread: got {self.size_spread} with {self.sized_by}, which fixes the size; allowed: one of the "
                "two"
            )
        return self

    def growth(self, count: int, chance: np.random.Generator) -> Floats:
        """Return one positive share per client, lognormal; all 1 without a spread."""
        return np.exp(self.size_spread * chance.standard_normal(count)) if self.size_spread else np.ones(count)


class Iid(Spread, Sized, named="iid"):
    """The rows are dealt at random: `samples` to each client, or all of them in equal or lognormal parts."""

    def cut(self, pool: Pool) -> list[Rows]:
        count = self.clients or 0
        if self.samples is None:
            sizes = spread_sizes(len(pool.rows), self.growth(count, pool.chance), self.minimum)
        else:
            self._enough(len(pool.rows), count, self.samples, "samples")
            sizes = np.full(count, self.samples)
        return _cut(pool.chance.permutation(pool.rows), sizes)


class Shard(Spread, named="shard"):
    """The rows are sorted by label and cut into shards, of which each client gets some (McMahan et al. 2017).

    Rows of one label are in random order. Shards have `shard_size` rows, or share all rows equally; with a spread, the
    shards of a client grow with its lognormal share. For a regression the rows are sorted by their target.
    """

    without: ClassVar[frozenset[TaskKind]] = frozenset({"segmentation", "multi-label"})
    sized_by: ClassVar[str] = "shard_size"
    shards_per_client: Count = 2
    """How many shards each client gets; bounds how many labels it sees."""
    shard_size: Count | None = None
    """Rows per shard; rows beyond clients × shards_per_client × shard_size stay unused. Default: all rows."""

    def cut(self, pool: Pool) -> list[Rows]:
        clients, each, size = self.clients or 0, self.shards_per_client, self.shard_size
        holders = pool.chance.permutation(np.repeat(np.arange(clients), each))
        mixed = pool.chance.permutation(len(pool.rows))
        least = -(-self.minimum // each)
        if size is None:
            sizes = spread_sizes(len(pool.rows), self.growth(clients, pool.chance)[holders], least)
        else:
            self._enough(len(pool.rows), clients * each, size, "shard_size", "shards")
            if size * each < self.minimum:
                raise UserError(
                    f"partition.shard_size: got {size}; allowed: at least {least} (minimum = {self.minimum})"
                )
            sizes = np.full(clients * each, size)
            mixed = mixed[: size * clients * each]
        ordered = mixed[np.argsort(pool.labels[mixed], kind="stable")]
        pieces = _cut(pool.rows[ordered], sizes)
        return [np.concatenate([pieces[i] for i in np.flatnonzero(holders == client)]) for client in range(clients)]


class Labels(Numbered, named="labels"):
    """Each client gets rows of some labels; the clients of a label share its rows equally (Li et al. 2022, #C).

    Client i has label i modulo the number of classes, and others drawn at random.
    """

    unread: ClassVar[frozenset[str]] = PartitionSettings.unread - {"size_spread"}
    without: ClassVar[frozenset[TaskKind]] = _NO_CLASSES
    labels_per_client: Count = 2
    """How many labels each client has. Client i has label i (of more clients than labels, beginning anew), the others
    are drawn at random."""

    def cut(self, pool: Pool) -> list[Rows]:
        clients, each = self.clients or 0, self.labels_per_client
        if each > pool.classes:
            raise UserError(
                f"partition.labels_per_client: got {each}; allowed: at most {pool.classes}, the number of classes"
            )
        has = np.zeros((clients, pool.classes), dtype=np.bool_)
        for client in range(clients):
            own = client % pool.classes
            others = pool.chance.permutation(np.delete(np.arange(pool.classes), own))[: each - 1]
            has[client, [own, *others.tolist()]] = True
        parts: list[list[Rows]] = [[] for _ in range(clients)]
        for label in range(pool.classes):
            holders = np.flatnonzero(has[:, label])
            if not len(holders):
                continue
            rows = pool.of_class(label)
            for client, part in zip(holders.tolist(), np.array_split(rows, len(holders)), strict=True):
                parts[client].append(part)
        found = [np.concatenate(part) for part in parts]
        if (least := min(len(part) for part in found)) < self.minimum:
            raise UserError(
                f"partition.minimum: got {self.minimum}, and a client with {each} labels has {least} rows; allowed: at "
                f"most {least}, or fewer clients"
            )
        return found


class Dirichlet(Spread, Sized, named="dirichlet"):
    """The rows of each class are shared out by a draw from Dirichlet(alpha) over the clients (Yurochkin et al. 2019).

    With a spread, a client's part of every class also grows with its lognormal share. Drawn again until every client
    has `minimum` rows. With `samples`, each client's class shares are its own draw (Hsu et al. 2019).
    """

    without: ClassVar[frozenset[TaskKind]] = _NO_CLASSES
    alpha: Concentration = 0.5
    """Concentration; small values give each client few labels, large ones approach iid."""
    self_balancing: bool = False
    """A client that has its equal part of all rows gets no rows of the labels that follow, as in NIID-Bench (the
    field's name in flwr-datasets)."""

    @model_validator(mode="after")
    def _balances_alone(self) -> Self:
        if self.self_balancing and (self.size_spread or self.samples is not None):
            raise ValueError("self_balancing: got true with size_spread or samples; allowed: one of them")
        return self

    def cut(self, pool: Pool) -> list[Rows]:
        count, minimum = self.clients or 0, self.minimum
        if self.samples is not None:
            return self._of_size(pool, self.samples)
        if len(pool.rows) < count * minimum:
            spread_sizes(len(pool.rows), np.ones(count), minimum)
        by_class = [pool.of_class(label) for label in range(pool.classes)]
        growth = self.growth(count, pool.chance)
        smallest = 0
        for _ in range(_ATTEMPTS):
            parts = pool.chance.dirichlet(np.full(count, self.alpha), size=pool.classes) * growth
            # A concentration near 0 can round every part that counts to 0; such a draw is no draw.
            if not (parts.sum(axis=1) > 0).all():
                continue
            counts = self._dealt(parts, [len(rows) for rows in by_class])
            smallest = max(smallest, int(counts.sum(axis=0).min()))
            if counts.sum(axis=0).min() >= minimum:
                cuts = [_cut(rows, sizes) for rows, sizes in zip(by_class, counts, strict=True)]
                return [np.concatenate([cut[client] for cut in cuts]) for client in range(count)]
        raise UserError(
            f"partition.minimum: got {minimum}, not met in {_ATTEMPTS} draws with alpha {self.alpha} (best: "
            f"{smallest}); allowed: a smaller minimum, a larger alpha, fewer clients, or samples for a fixed size"
        )

    def _dealt(self, parts: Floats, sizes: Sequence[int]) -> Ints:
        """Return how many rows of each class every client gets, balanced or not."""
        counts: list[Ints] = []
        for part, size in zip(parts, sizes, strict=True):
            open_to = np.ones(len(part), dtype=np.bool_)
            if self.self_balancing and counts:
                open_to = np.sum(counts, axis=0) < sum(sizes) / len(part)
            share = np.where(open_to, part, 0.0)
            # Where the draw left nothing to those who still take rows, they share alike.
            counts.append(apportion(share if share.sum() > 0 else open_to.astype(np.float64), size))
        return np.stack(counts)

    def _of_size(self, pool: Pool, samples: int) -> list[Rows]:
        """Give each client `samples` rows; once a class is used up, the clients that follow draw from what is left."""
        clients = self.clients or 0
        self._enough(len(pool.rows), clients, samples, "samples")
        by_class = [pool.of_class(label) for label in range(pool.classes)]
        left = np.array([len(rows) for rows in by_class])
        taken = np.zeros(pool.classes, dtype=np.int64)
        parts: list[Rows] = []
        for _ in range(clients):
            mixture = pool.chance.dirichlet(np.full(pool.classes, self.alpha))
            counts = np.zeros(pool.classes, dtype=np.int64)
            while (missing := samples - int(counts.sum())) > 0:
                spare = left - counts
                wish = np.where(spare > 0, mixture, 0.0)
                wish = wish if wish.sum() > 1e-12 else spare.astype(np.float64)
                counts += np.minimum(pool.chance.multinomial(missing, wish / wish.sum()), spare)
            dealt = zip(by_class, taken, counts, strict=True)
            parts.append(np.concatenate([rows[at : at + number] for rows, at, number in dealt]))
            taken += counts
            left -= counts
        return parts


class Quantity(Numbered, named="quantity"):
    """The rows are dealt at random, in parts whose sizes are one draw from Dirichlet(alpha) (Li et al. 2022)."""

    unread: ClassVar[frozenset[str]] = PartitionSettings.unread - {"size_spread"}
    alpha: Concentration = 0.5
    """Concentration; small values give very unequal sizes, large ones approach iid."""

    def cut(self, pool: Pool) -> list[Rows]:
        # The least share keeps a draw that rounds to nothing usable; what is above the minimum is in proportion.
        shares = np.maximum(pool.chance.dirichlet(np.full(self.clients or 0, self.alpha)), 1e-300)
        return _cut(pool.chance.permutation(pool.rows), spread_sizes(len(pool.rows), shares, self.minimum))


class Natural(Sized, named="natural"):
    """One client per owner; those with too few rows are dropped, and `clients` of the rest drawn."""

    needs_owners: ClassVar[bool] = True

    def parts(self, dataset: Dataset, pool: Rows, chance: np.random.Generator) -> Parts:
        assert dataset.owners is not None
        people, index, sizes = np.unique(dataset.owners[pool], return_inverse=True, return_counts=True)
        tests, notes = self.tested(dataset, people)
        sizes = sizes + tests
        enough = np.flatnonzero(sizes >= self.minimum)
        if len(enough) < len(people):
            few = len(people) - len(enough)
            notes.append(f"people with fewer than {self.minimum} rows, left out: {few} of {len(people)}")
        if self.clients is not None:
            if self.clients > len(enough):
                raise UserError(
                    f"partition.clients: got {self.clients}; allowed: at most {len(enough)} "
                    f"(people of {dataset.name} with at least {self.minimum} rows)"
                )
            enough = np.sort(chance.choice(enough, size=self.clients, replace=False))
        if not len(enough):
            raise UserError(
                f"partition.minimum: got {self.minimum}; allowed: at most {int(sizes.max(initial=0))}, "
                "the most rows of any person"
            )
        order = np.argsort(index.reshape(-1), kind="stable")
        pieces = np.split(pool[order], np.cumsum(np.bincount(index.reshape(-1), minlength=len(people)))[:-1])
        rows = [pieces[person] for person in enough]
        if self.samples is not None:
            rows = [chance.permutation(part)[: self.samples] for part in rows]
        return Parts([str(people[person]) for person in enough], rows, notes)

    def tested(self, dataset: Dataset, people: NDArray[np.str_]) -> tuple[Ints, list[str]]:
        """Return how many test rows of their own people have, and what to note about them."""
        return np.zeros(len(people), dtype=np.int64), []


class Table(Numbered, named="table"):
    """Each client gets exactly as many rows of each class as its line says (AdaFed).

    Each class's rows are in random order and dealt one after another; where they run out, `overlap` starts over.
    """

    without: ClassVar[frozenset[TaskKind]] = _NO_CLASSES
    table: Annotated[tuple[Line, ...], Field(min_length=1)]
    """One line per client, in it the number of rows of class 0, 1, 2, ..."""
    overlap: bool = False
    """Where a class has too few rows, let clients share rows (no client holds a row twice) and say so."""

    @property
    def client_count(self) -> int:
        return len(self.table)

    @model_validator(mode="after")
    def _check_table(self) -> Self:
        if self.clients not in (None, len(self.table)):
            raise ValueError(f"clients: got {self.clients}; allowed: {len(self.table)}, the lines of the table")
        width = len(self.table[0])
        for number, line in enumerate(self.table):
            if len(line) != width:
                raise ValueError(f"table: line {number} has {len(line)} counts; allowed: {width}, as in line 0")
            if sum(line) < self.minimum:
                raise ValueError(
                    f"table: line {number} sums to {sum(line)}; allowed: at least minimum = {self.minimum}"
                )
        if self.overlap and self.test == "local":
            raise ValueError(
                "overlap: got true with test 'local': one client could train on what another tests on; "
                "allowed: test = held-out or none"
            )
        return self

    def parts(self, dataset: Dataset, pool: Rows, chance: np.random.Generator) -> Parts:
        parts = super().parts(dataset, pool, chance)
        there = np.bincount(dataset.labels.numpy()[pool], minlength=dataset.classes).tolist()
        asked = np.sum(self.table, axis=0).tolist()
        notes = [
            f"class {label}: {wanted} rows asked for, {rows} there: {wanted - rows} drawn with overlap"
            for label, (wanted, rows) in enumerate(zip(asked, there, strict=True))
            if wanted > rows
        ]
        return replace(parts, notes=[*notes, *parts.notes])

    def cut(self, pool: Pool) -> list[Rows]:
        parts: list[list[Rows]] = [[] for _ in self.table]
        for label in range(pool.classes):
            rows = pool.of_class(label)
            wanted = [line[label] for line in self.table]
            if max(wanted) > len(rows):
                client = wanted.index(max(wanted))
                raise UserError(
                    f"partition.table: line {client} asks for {wanted[client]} rows of class {label}; "
                    f"allowed: at most {len(rows)}, all there are"
                )
            if sum(wanted) > len(rows) and not self.overlap:
                raise UserError(
                    f"partition.table: asks for {sum(wanted)} rows of class {label}; allowed: at most {len(rows)} in "
                    "all, or overlap = true to let clients share rows"
                )
            for part, dealt in zip(parts, deal(rows, wanted), strict=True):
                part.append(dealt)
        return [np.concatenate(part) for part in parts]


class Given(Natural, named="given"):
    """One client per user, with the rows to train and to test on that the source itself gives to the user (LEAF)."""

    needs_own_tests: ClassVar[bool] = True

    @property
    def _slices(self) -> bool:
        return False

    @model_validator(mode="after")
    def _own_tests(self) -> Self:
        if self.test == "local":
            raise ValueError(
                "test: got 'local' with scheme 'given'; allowed: held-out (the user's own test rows), none"
            )
        if self.test_samples is not None:
            raise ValueError(
                f"test_samples: got {self.test_samples} with scheme 'given', whose clients have their own test rows; "
                "allowed: leave it out"
            )
        return self

    def tested(self, dataset: Dataset, people: NDArray[np.str_]) -> tuple[Ints, list[str]]:
        assert dataset.owners is not None
        testers, tests = np.unique(dataset.owners[dataset.held_out], return_counts=True)
        of_user = dict(zip(testers.tolist(), tests.tolist(), strict=True))
        idle = len(np.setdiff1d(testers, people))
        notes = [f"users without rows to train on, left out: {idle}"] if idle else []
        return np.array([of_user.get(person, 0) for person in people.tolist()]), notes


def check_together(data: DataSettings, partition: PartitionSettings) -> None:
    """Refuse a partition that this source can never give; call it before any data is read."""
    check_fits(data.capabilities(), f"data.source '{data.source}'", partition)


def check_fits(known: SourceCapabilities, source: str, partition: PartitionSettings) -> None:
    """Refuse a partition that data cannot give which have what is `known`; use it before they are read, and after."""

    def refuse(field: str, value: object, allowed: str) -> None:
        raise UserError(f"partition.{field}: got {value!r} with {source}; allowed: {allowed}")

    for field, others in (("test", "local, none"), ("server", "fraction, none")):
        if getattr(partition, field) == "held-out" and not known.held_out:
            refuse(field, "held-out", f"{others} (the source has no test part of its own)")
    kinds = cast("Mapping[str, type[PartitionSettings]]", PartitionSettings.kinds)
    fitting = listed(
        name
        for name, kind in kinds.items()
        if (known.task or "classes") not in kind.without
        and known.owners >= kind.needs_owners
        and known.splits_owners >= kind.needs_own_tests
    )
    if partition.needs_own_tests and not known.splits_owners:
        refuse("scheme", partition.scheme, f"{fitting} (the source does not split its users' rows)")
    if partition.needs_owners and not known.owners:
        refuse("scheme", partition.scheme, f"{fitting} (the source does not know whose rows they are)")
    if known.task in partition.without:
        refuse("scheme", partition.scheme, f"{fitting} (this data has no classes)")
    if known.classes and isinstance(partition, Table) and len(partition.table[0]) != known.classes:
        refuse("table", f"lines of {len(partition.table[0])} counts", f"lines of {known.classes} counts")
