"""How samples are shared out among clients: the `[partition]` section, and the schemes that it names.

A scheme is a pure function that cuts a pool of rows into one set of rows per client; it draws from the generator it is
given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from steelyard.base.errors import UserError
from steelyard.base.settings import Section
from steelyard.data.sources.source import Count, DataSettings, without_classes

if TYPE_CHECKING:
    # Only for annotations: settings are read without torch.
    from steelyard.data.dataset import Rows

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_ATTEMPTS = 300


def _refuse_misplaced(section: Section, choice: str, only: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse a field that was set although the section's source or scheme has no use for it."""
    chosen = getattr(section, choice)
    for name, allowed in only.items():
        value = getattr(section, name)
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        if chosen not in allowed and value != default:
            raise ValueError(f"{name}: got {value!r} with {choice} '{chosen}'; allowed with: {', '.join(allowed)}")


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


def lognormal_shares(count: int, spread: float, chance: np.random.Generator) -> Floats:
    """Return one positive share per client, lognormal with this deviation of the logarithm; all 1 for spread 0."""
    return np.exp(spread * chance.standard_normal(count)) if spread else np.ones(count)


def iid(
    pool: Rows, clients: int, samples: int | None, spread: float, minimum: int, chance: np.random.Generator
) -> list[Rows]:
    """Deal the rows at random: `samples` to each client, or all of them in equal or lognormal parts."""
    if samples is None:
        sizes = spread_sizes(len(pool), lognormal_shares(clients, spread, chance), minimum)
    else:
        _enough(len(pool), clients, samples, "samples")
        sizes = np.full(clients, samples)
    return _cut(chance.permutation(pool), sizes)


def shards(
    pool: Rows,
    labels: NDArray[np.generic],
    clients: int,
    per_client: int,
    size: int | None,
    spread: float,
    minimum: int,
    chance: np.random.Generator,
) -> list[Rows]:
    """Sort the rows by label, cut them into shards and deal `per_client` shards to each client (McMahan et al. 2017).

    Rows of one label are in random order. Shards have `size` rows, or share all rows equally; with a spread, the
    shards of a client grow with its lognormal share. For a regression the rows are sorted by their target.
    """
    count = clients * per_client
    holders = chance.permutation(np.repeat(np.arange(clients), per_client))
    mixed = chance.permutation(len(pool))
    if size is None:
        shares = lognormal_shares(clients, spread, chance)[holders]
        sizes = spread_sizes(len(pool), shares, -(-minimum // per_client))
    else:
        _enough(len(pool), count, size, "shard_size", "shards")
        if size * per_client < minimum:
            raise UserError(
                f"partition.shard_size: got {size}; allowed: at least {-(-minimum // per_client)} (minimum = {minimum})"
            )
        sizes = np.full(count, size)
        mixed = mixed[: size * count]
    ordered = mixed[np.argsort(labels[mixed], kind="stable")]
    pieces = _cut(pool[ordered], sizes)
    return [np.concatenate([pieces[i] for i in np.flatnonzero(holders == client)]) for client in range(clients)]


def dirichlet(
    pool: Rows,
    labels: Ints,
    classes: int,
    clients: int,
    alpha: float,
    spread: float,
    minimum: int,
    chance: np.random.Generator,
    *,
    balancing: bool = False,
) -> list[Rows]:
    """Share out the rows of each class by a draw from Dirichlet(alpha) over the clients (Yurochkin et al. 2019).

    With a spread, a client's part of every class also grows with its lognormal share. `balancing` gives no more rows
    to a client that has its equal part of all. Drawn again until every client has `minimum` rows.
    """
    if len(pool) < clients * minimum:
        spread_sizes(len(pool), np.ones(clients), minimum)
    by_class = [chance.permutation(pool[labels == label]) for label in range(classes)]
    growth = lognormal_shares(clients, spread, chance)
    smallest = 0
    for _ in range(_ATTEMPTS):
        parts = chance.dirichlet(np.full(clients, alpha), size=classes) * growth
        # A concentration near 0 can round every part that counts to 0; such a draw is no draw.
        if not (parts.sum(axis=1) > 0).all():
            continue
        counts = _dealt(parts, [len(rows) for rows in by_class], len(pool) / clients if balancing else None)
        smallest = max(smallest, int(counts.sum(axis=0).min()))
        if counts.sum(axis=0).min() >= minimum:
            cuts = [_cut(rows, sizes) for rows, sizes in zip(by_class, counts, strict=True)]
            return [np.concatenate([cut[client] for cut in cuts]) for client in range(clients)]
    raise UserError(
        f"partition.minimum: got {minimum}, not met in {_ATTEMPTS} draws with alpha {alpha} (best: {smallest}); "
        "allowed: a smaller minimum, a larger alpha, fewer clients, or samples for a fixed size"
    )


def _dealt(parts: Floats, sizes: Sequence[int], most: float | None) -> Ints:
    """Return how many rows of each class every client gets; who has `most` rows or more gets none of later classes."""
    counts: list[Ints] = []
    for part, size in zip(parts, sizes, strict=True):
        open_to = np.ones(len(part), dtype=np.bool_) if most is None or not counts else np.sum(counts, axis=0) < most
        share = np.where(open_to, part, 0.0)
        # Where the draw left nothing to those who still take rows, they share alike.
        counts.append(apportion(share if share.sum() > 0 else open_to.astype(np.float64), size))
    return np.stack(counts)


def by_labels(
    pool: Rows, labels: Ints, classes: int, clients: int, each: int, minimum: int, chance: np.random.Generator
) -> list[Rows]:
    """Give each client rows of `each` labels; the clients of a label share its rows equally (Li et al. 2022, #C).

    Client i has label i modulo the number of classes, and others drawn at random.
    """
    if each > classes:
        raise UserError(f"partition.labels_per_client: got {each}; allowed: at most {classes}, the number of classes")
    has = np.zeros((clients, classes), dtype=np.bool_)
    for client in range(clients):
        own = client % classes
        others = chance.permutation(np.delete(np.arange(classes), own))[: each - 1]
        has[client, [own, *others.tolist()]] = True
    parts: list[list[Rows]] = [[] for _ in range(clients)]
    for label in range(classes):
        holders = np.flatnonzero(has[:, label])
        if not len(holders):
            continue
        rows = chance.permutation(pool[labels == label])
        for client, part in zip(holders.tolist(), np.array_split(rows, len(holders)), strict=True):
            parts[client].append(part)
    found = [np.concatenate(part) for part in parts]
    if (least := min(len(part) for part in found)) < minimum:
        raise UserError(
            f"partition.minimum: got {minimum}, and a client with {each} labels has {least} rows; allowed: at most "
            f"{least}, or fewer clients"
        )
    return found


def by_quantity(pool: Rows, clients: int, alpha: float, minimum: int, chance: np.random.Generator) -> list[Rows]:
    """Deal the rows at random, in parts whose sizes are one draw from Dirichlet(alpha) (Li et al. 2022)."""
    # The least share keeps a draw that rounds to nothing usable; what is above the minimum is in proportion.
    shares = np.maximum(chance.dirichlet(np.full(clients, alpha)), 1e-300)
    return _cut(chance.permutation(pool), spread_sizes(len(pool), shares, minimum))


def dirichlet_sized(
    pool: Rows, labels: Ints, classes: int, clients: int, samples: int, alpha: float, chance: np.random.Generator
) -> list[Rows]:
    """Give each client `samples` rows whose class shares are its own draw from Dirichlet(alpha) (Hsu et al. 2019).

    Once a class is used up, the clients that follow draw from the classes that are left.
    """
    _enough(len(pool), clients, samples, "samples")
    by_class = [chance.permutation(pool[labels == label]) for label in range(classes)]
    left = np.array([len(rows) for rows in by_class])
    taken = np.zeros(classes, dtype=np.int64)
    parts: list[Rows] = []
    for _ in range(clients):
        mixture = chance.dirichlet(np.full(classes, alpha))
        counts = np.zeros(classes, dtype=np.int64)
        while (missing := samples - int(counts.sum())) > 0:
            spare = left - counts
            wish = np.where(spare > 0, mixture, 0.0)
            wish = wish if wish.sum() > 1e-12 else spare.astype(np.float64)
            counts += np.minimum(chance.multinomial(missing, wish / wish.sum()), spare)
        parts.append(np.concatenate([rows[at : at + n] for rows, at, n in zip(by_class, taken, counts, strict=True)]))
        taken += counts
        left -= counts
    return parts


def table(
    pool: Rows, labels: Ints, lines: Sequence[Sequence[int]], overlap: bool, chance: np.random.Generator
) -> tuple[list[Rows], list[str]]:
    """Give each client exactly as many rows of each class as its line says (AdaFed); also return notes on overlap.

    Each class's rows are in random order and dealt one after another; where they run out, `overlap` starts over.
    """
    parts: list[list[Rows]] = [[] for _ in lines]
    notes: list[str] = []
    for label in range(len(lines[0])):
        rows = chance.permutation(pool[labels == label])
        wanted = [line[label] for line in lines]
        short = sum(wanted) - len(rows)
        if max(wanted) > len(rows):
            client = wanted.index(max(wanted))
            raise UserError(
                f"partition.table: line {client} asks for {wanted[client]} rows of class {label}; "
                f"allowed: at most {len(rows)}, all there are"
            )
        if short > 0 and not overlap:
            raise UserError(
                f"partition.table: asks for {sum(wanted)} rows of class {label}; allowed: at most {len(rows)} in all, "
                "or overlap = true to let clients share rows"
            )
        if short > 0:
            notes.append(f"class {label}: {sum(wanted)} rows asked for, {len(rows)} there: {short} drawn with overlap")
        for part, dealt in zip(parts, deal(rows, wanted), strict=True):
            part.append(dealt)
    return [np.concatenate(part) for part in parts], notes


def deal(rows: Rows, counts: Sequence[int]) -> list[Rows]:
    """Deal rows one after another, starting over when they run out; nobody has a row twice if no count exceeds them."""
    ends = np.cumsum([0, *counts])
    return [rows[np.arange(ends[i], ends[i + 1]) % max(1, len(rows))] for i in range(len(counts))]


def _cut(rows: Rows, sizes: Ints) -> list[Rows]:
    ends = np.cumsum(sizes)
    return [rows[end - size : end] for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)]


def _enough(rows: int, count: int, size: int, field: str, word: str = "clients") -> None:
    if rows < count * size:
        raise UserError(
            f"partition.{field}: got {size} for each of {count} {word}; allowed: at most {rows // count} "
            f"(the source has {rows} rows to share out)"
        )


Scheme = Literal["iid", "shard", "labels", "dirichlet", "quantity", "natural", "table", "given"]
Fraction = Annotated[float, Field(gt=0, lt=1)]

MOST_CLIENTS = 1_000_000
"""More clients than this are a slip of the keyboard, and their names alone would fill the memory."""
COUNTED = ("iid", "shard", "labels", "dirichlet", "quantity")
"""Schemes that need the number of clients."""
NUMBERED: frozenset[str] = frozenset({*COUNTED, "table"})
"""Schemes whose clients are counted and so have names known before any data is read."""

# What users of flwr-datasets and of NIID-Bench call the same things.
_OTHER_FIELDS = {
    "num_partitions": "clients",
    "n_parties": "clients",
    "num_shards_per_partition": "shards_per_client",
    "num_classes_per_partition": "labels_per_client",
    "min_partition_size": "minimum",
    "beta": "alpha",
}
_OTHER_SCHEMES = {
    "IidPartitioner": "iid",
    "ShardPartitioner": "shard",
    "PathologicalPartitioner": "labels",
    "DirichletPartitioner": "dirichlet",
    "NaturalIdPartitioner": "natural",
    "natural_id": "natural",
    "natural-id": "natural",
    "homo": "iid",
    "noniid-labeldir": "dirichlet",
    "iid-diff-quantity": "quantity",
}
_LABELS = re.compile(r"(?:noniid-#label|#C=)([0-9]+)")
"""#C = k: each client has rows of k labels, as NIID-Bench and its readers write it."""


def client_name(number: int, count: int) -> str:
    """Return the id of client `number` (counted from 0) of `count`: zero-padded, so that names sort as numbers do."""
    return f"client-{number:0{max(3, len(str(count - 1)))}d}"


class PartitionSettings(Section):
    """How the samples are shared out among clients; use one `[partition]` section per experiment.

    Fields and schemes also go by the names of flwr-datasets and of NIID-Bench: num_partitions (clients),
    num_shards_per_partition (shards_per_client), num_classes_per_partition (labels_per_client), min_partition_size
    (minimum), beta (alpha); DirichletPartitioner, PathologicalPartitioner and so on; homo, noniid-#label2 or #C=2,
    noniid-labeldir (which is self-balancing), iid-diff-quantity, noise.

        >>> PartitionSettings(scheme="dirichlet", clients=20, alpha=0.3).alpha
        0.3

    Raises:
        UserError: a field is unknown or does not fit the scheme.
    """

    scheme: Scheme = "iid"
    """iid: at random; shard: sorted by label and cut into shards (McMahan); labels: rows of labels_per_client labels
    each, which clients of one label share equally (NIID-Bench's #C); dirichlet: label shares drawn from a Dirichlet
    distribution; quantity: at random, with sizes drawn from one; natural: one client per writer or user; table: an
    explicit number of rows per class and client; given: as the source itself splits users and their train and test rows
    (LEAF)."""
    clients: Annotated[int, Field(ge=1, le=MOST_CLIENTS)] | None = None
    """Number of clients. Needed for iid, shard, labels, dirichlet and quantity. natural and given: this many people,
    drawn at random (default: all)."""
    samples: Count | None = None
    """Rows per client (natural and given: at most) before a local test set is split off. Default: all rows are shared
    out."""
    rows: Literal["train", "all"] = "train"
    """Which rows clients get: those of the source's training part, or all of the source."""
    shards_per_client: Count = 2
    """shard: how many shards each client gets; bounds how many labels it sees."""
    shard_size: Count | None = None
    """shard: rows per shard; rows beyond clients × shards_per_client × shard_size stay unused. Default: all rows."""
    labels_per_client: Count = 2
    """labels: how many labels each client has. Client i has label i (of more clients than labels, beginning anew), the
    others are drawn at random."""
    alpha: Annotated[float, Field(gt=0)] = 0.5
    """dirichlet and quantity: concentration; small values give each client few labels, or very unequal sizes; large
    ones approach iid."""
    self_balancing: bool = False
    """dirichlet: a client that has its equal part of all rows gets no rows of the labels that follow, as in NIID-Bench
    (the field's name in flwr-datasets)."""
    size_spread: Annotated[float, Field(ge=0, le=5)] = 0.0
    """iid, shard and dirichlet: how unequal the clients are: standard deviation of the logarithm of their sizes (a
    lognormal). 0: as equal as possible; 0.5: the biggest of 30 is some eight times the smallest."""
    noise: Annotated[float, Field(gt=0, le=100)] | None = None
    """Feature noise that grows with the client, as in NIID-Bench: the i-th of N clients, by id, trains on rows with
    Gaussian noise of variance `noise` · i / N, in units of the brightest pixel, or of a column's standard deviation.
    Pixels stay in their range. Test rows have none. Goes with any scheme; the name of NIID-Bench's own option."""
    minimum: Count = 2
    """Least number of rows of a client, its local test rows included. natural and given drop people with fewer and say
    so; the other schemes keep to it or refuse."""
    table: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...] | None = None
    """table: one line per client, in it the number of rows of class 0, 1, 2, ..."""
    overlap: bool = False
    """table: where a class has too few rows, let clients share rows (no client holds a row twice) and say so."""
    test: Literal["local", "held-out", "none"] = "local"
    """Local test sets. local: test_fraction of each client's rows; held-out: test_samples rows of the source's test
    part for each client (given: the user's own test rows); none: clients have no test rows."""
    test_fraction: Fraction = 0.2
    """test = local: share of each client's rows that it tests on: rounded, at least one row, never all."""
    test_samples: Count | None = None
    """test = held-out: rows per client. Default: the test part is dealt out evenly."""
    test_labels: Literal["client", "all"] = "client"
    """test = held-out: client: in proportion to the labels that the client trains on (what it will meet); all: at
    random from all classes. With iid, always at random."""
    test_order: Literal["mixed", "stored"] = "mixed"
    """test = held-out, with iid or test_labels = all: mixed: rows at random; stored: client after client gets the next
    test_samples rows of the test part as it is stored, each row at most once (how papers 000 and 004 cut MNIST)."""
    test_clients: Count | None = None
    """How many clients test the models, drawn once for a run by its seed; what they find has an interval for that.
    Default: all of up to 20,000 clients with test rows, 10,000 of more."""
    server: Literal["none", "held-out", "fraction"] = "none"
    """Rows the server holds for its own test set: none; the source's test part; or server_fraction of the rows, taken
    away before clients get theirs. Never a row that a client trains on."""
    server_fraction: Fraction = 0.1
    """server = fraction: share of the rows that the server keeps."""
    server_balance: Literal["none", "owners", "classes"] = "none"
    """server = fraction: none: rows at random; owners or classes: as many rows of each owner or of each class, as long
    as they last, also in either half of server_report = apart."""
    server_report: Literal["none", "apart", "same"] = "none"
    """Whether the server also reports on its rows. none: only local test sets report; apart: half of the server's rows
    weigh clients and adapt the loss, the other half (and held-out local test sets, dealt from it) only report; same:
    the rows that weigh also report, as AdaFed's authors do."""
    server_weighs: Count | None = None
    """server_report = apart: so many of the server's rows weigh, all others only report. Default: half."""
    validation: Fraction | None = None
    """Share of each client's training rows, of every class alike, to be tested on in place of the test set, which is
    then not used at all, at the server neither: for choosing settings. Default: train on all of them and use the test
    set."""
    seed: int | None = None
    """Seed of the partition; default: the run's seed."""

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        fields: dict[str, Any] = dict(cast("Mapping[str, Any]", given))
        for other, own in _OTHER_FIELDS.items():
            if other in fields:
                if own in fields:
                    raise ValueError(f"{own}: got it twice, also as '{other}'; allowed: one of the two")
                fields[own] = fields.pop(other)
        if isinstance(scheme := fields.get("scheme"), str):
            if scheme == "noniid-labeldir":
                fields.setdefault("self_balancing", True)
            if found := _LABELS.fullmatch(scheme):
                fields["scheme"] = "labels"
                fields.setdefault("labels_per_client", int(found[1]))
            else:
                fields["scheme"] = _OTHER_SCHEMES.get(scheme, scheme)
        return fields

    @property
    def client_count(self) -> int | None:
        """Number of clients, where it is known before any data is read."""
        return len(self.table) if self.scheme == "table" and self.table is not None else self.clients

    @property
    def _slices(self) -> bool:
        """Whether local test sets may be cut from the test part without a look at the client's labels."""
        return self.test == "held-out" and (
            self.scheme == "iid" or (self.test_labels == "all" and self.scheme != "given")
        )

    @model_validator(mode="after")
    def _fits_scheme(self) -> Self:
        # Only what would mislead is refused: alpha or shard_size beside another scheme are read by nobody.
        only: dict[str, tuple[str, ...]] = {
            "table": ("table",),
            "overlap": ("table",),
            "self_balancing": ("dirichlet",),
            "samples": ("iid", "dirichlet", "natural", "given"),
        }
        _refuse_misplaced(self, "scheme", only)
        if self.scheme == "table" and self.table and self.clients not in (None, len(self.table)):
            raise ValueError(f"clients: got {self.clients}; allowed: {len(self.table)}, the lines of the table")
        if self.scheme in COUNTED and self.clients is None:
            raise ValueError(f"clients: got nothing; needed with scheme '{self.scheme}': a whole number from 1")
        if self.scheme in ("labels", "quantity") and self.size_spread:
            raise ValueError(f"size_spread: got {self.size_spread} with scheme '{self.scheme}'; allowed: 0")
        if self.self_balancing and (self.size_spread or self.samples is not None):
            raise ValueError("self_balancing: got true with size_spread or samples; allowed: one of them")
        fixed = {"iid": "samples", "dirichlet": "samples", "shard": "shard_size"}.get(self.scheme)
        if self.size_spread and fixed and getattr(self, fixed) is not None:
            raise ValueError(
                f"size_spread: got {self.size_spread} with {fixed}, which fixes the size; allowed: one of the two"
            )
        if self.samples is not None and self.samples < self.minimum:
            raise ValueError(f"samples: got {self.samples}; allowed: at least minimum = {self.minimum}")
        self._check_table()
        self._check_tests()
        return self

    def _check_table(self) -> None:
        if self.scheme != "table":
            return
        if not self.table or not self.table[0]:
            raise ValueError("table: got nothing; needed with scheme 'table': one list of class counts per client")
        width = len(self.table[0])
        for number, line in enumerate(self.table):
            if len(line) != width:
                raise ValueError(f"table: line {number} has {len(line)} counts; allowed: {width}, as in line 0")
            if sum(line) < self.minimum:
                raise ValueError(
                    f"table: line {number} sums to {sum(line)}; allowed: at least minimum = {self.minimum}"
                )

    def _check_tests(self) -> None:
        if self.test == "none" and self.test_clients is not None:
            raise ValueError(f"test_clients: got {self.test_clients} with test 'none'; allowed: test = local, held-out")
        if self.test == "local" and self.minimum < 2:
            raise ValueError("minimum: got 1 with test 'local', which takes one row to test; allowed: 2 or more")
        if self.scheme == "given" and self.test == "local":
            raise ValueError(
                "test: got 'local' with scheme 'given'; allowed: held-out (the user's own test rows), none"
            )
        if self.rows == "all" and "held-out" in (self.test, self.server):
            name = "test" if self.test == "held-out" else "server"
            raise ValueError(
                f"rows: got 'all' with {name} 'held-out', so that test rows would be trained on; allowed: train"
            )
        if self.overlap and self.test == "local":
            raise ValueError(
                "overlap: got true with test 'local': one client could train on what another tests on; "
                "allowed: test = held-out or none"
            )
        _refuse_misplaced(self, "server", {"server_fraction": ("fraction",), "server_balance": ("fraction",)})
        if self.server_weighs is not None and self.server_report != "apart":
            raise ValueError(
                f"server_weighs: got {self.server_weighs} with server_report '{self.server_report}'; allowed with: "
                "apart"
            )
        if self.server == "none" and self.server_report != "none":
            raise ValueError(
                f"server_report: got '{self.server_report}' with server 'none'; allowed with: held-out, fraction"
            )
        if self.test != "held-out" and self.test_samples is not None:
            raise ValueError(f"test_samples: got {self.test_samples} with test '{self.test}'; allowed with: held-out")
        if self.test_order == "stored" and not self._slices:
            raise ValueError(
                "test_order: got 'stored' for test rows that follow the clients' labels or are their own; allowed "
                "with: test = held-out and (scheme = iid or test_labels = all)"
            )
        if self.scheme == "given" and self.test_samples is not None:
            raise ValueError(
                f"test_samples: got {self.test_samples} with scheme 'given', whose clients have their own test rows; "
                "allowed: leave it out"
            )


def check_together(data: DataSettings, partition: PartitionSettings) -> None:
    """Refuse a partition that this source can never give; call it before any data is read."""

    def refuse(field: str, value: object, allowed: str) -> None:
        raise UserError(f"partition.{field}: got {value!r} with data.source '{data.source}'; allowed: {allowed}")

    known = data.capabilities()
    for field in ("test", "server"):
        value = getattr(partition, field)
        if value == "held-out" and not known.held_out:
            hint = "local, none" if field == "test" else "fraction, none"
            refuse(field, value, f"{hint} (the source has no test part of its own)")
    if partition.scheme == "given" and not known.splits_owners:
        refuse(
            "scheme",
            partition.scheme,
            "iid, shard, labels, dirichlet, quantity, natural, table (the source does not split its users' rows)",
        )
    if partition.scheme == "natural" and not known.owners:
        refuse(
            "scheme",
            partition.scheme,
            "iid, shard, labels, dirichlet, quantity, table (the source does not know whose rows they are)",
        )
    if known.task not in (None, "classes") and partition.scheme in without_classes(known.task):
        kept = "iid, quantity" if "shard" in without_classes(known.task) else "iid, shard, quantity"
        why = "or natural where the source knows people (this data has no classes)"
        refuse("scheme", partition.scheme, f"{kept}, {why}")
    if known.classes and partition.table and len(partition.table[0]) != known.classes:
        refuse("table", f"lines of {len(partition.table[0])} counts", f"lines of {known.classes} counts")
