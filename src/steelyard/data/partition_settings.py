"""The `[partition]` section of an experiment: how the samples are shared out among clients."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from steelyard.base.settings import Section
from steelyard.data.source_settings import Count, refuse_misplaced

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
        refuse_misplaced(self, "scheme", only)
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
        refuse_misplaced(self, "server", {"server_fraction": ("fraction",), "server_balance": ("fraction",)})
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
