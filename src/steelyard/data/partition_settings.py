"""The `[partition]` section: what any scheme is told about clients, their test sets and the server's rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from steelyard.base.errors import UserError
from steelyard.base.settings import Kinds
from steelyard.data.sources.source import Count, TaskKind

if TYPE_CHECKING:
    # Only for annotations: settings are read without torch.
    from steelyard.data.dataset import Dataset, Rows

Fraction = Annotated[float, Field(gt=0, lt=1)]
MOST_CLIENTS = 1_000_000
"""More clients than this are a slip of the keyboard, and their names alone would fill the memory."""

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


@dataclass(frozen=True)
class Parts:
    """The rows of each client before test sets are split off."""

    names: list[str]
    rows: list[Rows]
    notes: list[str]


class PartitionSettings(Kinds):
    """How the samples are shared out among clients; use one `[partition]` section per experiment.

    A scheme is a class below this one, with its fields, what it needs, and how it shares rows out. Fields and schemes
    also go by the names of flwr-datasets and of NIID-Bench: num_partitions (clients),
    num_shards_per_partition (shards_per_client), num_classes_per_partition (labels_per_client), min_partition_size
    (minimum), beta (alpha); DirichletPartitioner, PathologicalPartitioner and so on; homo, noniid-#label2 or #C=2,
    noniid-labeldir (which is self-balancing), iid-diff-quantity, noise.

        >>> PartitionSettings(scheme="dirichlet", clients=20, alpha=0.3).alpha
        0.3

    Raises:
        UserError: a field is unknown or does not fit the scheme.
    """

    told_by: ClassVar[str] = "scheme"
    usual: ClassVar[str | None] = "iid"
    # Beside another scheme these say nothing: a sweep or a change then names the scheme alone.
    unread: ClassVar[frozenset[str]] = frozenset(
        {"alpha", "shards_per_client", "shard_size", "labels_per_client", "size_spread"}
    )
    without: ClassVar[frozenset[TaskKind]] = frozenset()
    """Tasks whose rows it cannot share out."""
    needs_owners: ClassVar[bool] = False
    needs_own_tests: ClassVar[bool] = False
    """Whether the source must split each owner's rows into train and test."""
    counted: ClassVar[bool] = False
    """Whether clients are counted, and so have names that are known before any data is read."""
    scheme: str = ""
    """iid: at random; shard: sorted by label and cut into shards (McMahan); labels: rows of labels_per_client labels
    each, which clients of one label share equally (NIID-Bench's #C); dirichlet: label shares drawn from a Dirichlet
    distribution; quantity: at random, with sizes drawn from one; natural: one client per writer or user; table: an
    explicit number of rows per class and client; given: as the source itself splits users and their train and test rows
    (LEAF)."""
    clients: Annotated[int, Field(ge=1, le=MOST_CLIENTS)] | None = None
    """Number of clients. Needed for iid, shard, labels, dirichlet and quantity. natural and given: this many people,
    drawn at random (default: all)."""
    rows: Literal["train", "all"] = "train"
    """Which rows clients get: those of the source's training part, or all of the source."""
    noise: Annotated[float, Field(gt=0, le=100)] | None = None
    """Feature noise that grows with the client, as in NIID-Bench: the i-th of N clients, by id, trains on rows with
    Gaussian noise of variance `noise` · i / N, in units of the brightest pixel, or of a column's standard deviation.
    Pixels stay in their range. Test rows have none. Goes with any scheme; the name of NIID-Bench's own option."""
    minimum: Count = 2
    """Least number of rows of a client, its local test rows included. natural and given drop people with fewer and say
    so; the other schemes keep to it or refuse."""
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

    @classmethod
    def in_own_words(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        fields = dict(given)
        if "split_column" in fields:
            raise UserError(
                f"split_column: is a column of the table; allowed: [data] held_out = '{fields['split_column']}' (and "
                "held_out_is, where it has the numbers of folds), with test = 'held-out' here"
            )
        for other, own in _OTHER_FIELDS.items():
            if other in fields:
                if own in fields:
                    raise UserError(f"{own}: got it twice, also as '{other}'; allowed: one of the two")
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
        return self.clients

    @property
    def _slices(self) -> bool:
        """Whether local test sets may be cut from the test part without a look at the client's labels."""
        return self.test == "held-out" and (self.scheme == "iid" or self.test_labels == "all")

    @model_validator(mode="after")
    def _check_tests(self) -> Self:
        if self.test == "none" and self.test_clients is not None:
            raise ValueError(f"test_clients: got {self.test_clients} with test 'none'; allowed: test = local, held-out")
        if self.test == "local" and self.minimum < 2:
            raise ValueError("minimum: got 1 with test 'local', which takes one row to test; allowed: 2 or more")
        if self.rows == "all" and "held-out" in (self.test, self.server):
            name = "test" if self.test == "held-out" else "server"
            raise ValueError(
                f"rows: got 'all' with {name} 'held-out', so that test rows would be trained on; allowed: train"
            )
        for field in ("server_fraction", "server_balance"):
            value = getattr(self, field)
            if self.server != "fraction" and value != PartitionSettings.model_fields[field].default:
                raise ValueError(f"{field}: got {value!r} with server '{self.server}'; allowed with: fraction")
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
        return self

    def parts(self, dataset: Dataset, pool: Rows, chance: np.random.Generator) -> Parts:
        """Share out the rows of the pool."""
        raise NotImplementedError
