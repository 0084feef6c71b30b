"""One node of a federation across machines: its configuration, and the clients that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, ValidationError, model_validator

from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.settings import Section, explain
from steelyard.clients.protocol import Clients
from steelyard.data.facts import as_number, told_fact
from steelyard.privacy.settings import FEWEST
from steelyard.proof.signing import SERVER, Keys

if TYPE_CHECKING:
    # Only for annotations, for speed of start.
    from steelyard.data.site_sums import SiteColumns
    from steelyard.learning.records import RecordNoise

FILES = ("data", "catalogue", "items", "attributes", "identities")
"""Keys that name a file or folder of the node's own which an experiment may read."""
MEMORY = "memory"
"""A key that a node's own process adds to what its owner wrote; no file has it."""
MIN_ROWS = 10
"""The rows that an answer must rest on, where the owner of a node says nothing else."""
EVERYTHING = "*"
"""`allow="*"`: run and read whatever the experiment names; for a federation of one's own on one machine."""
DEVICE, USER = "device-", "user-"
"""How keys begin that are facts for criteria."""


def _words(given: object) -> object:
    """Return the words of a key: "a, b" as Flower's node config has it, or a list as TOML has it."""
    words = given.split(",") if isinstance(given, str) else given
    if not isinstance(words, list | tuple):
        return words
    return tuple(dict.fromkeys(word for one in cast("Sequence[object]", words) if (word := str(one).strip())))


def _some_path(given: object) -> object:
    if given == "":
        raise ValueError('got ""; allowed: a path in quotes, such as "/srv/data"')
    return given


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
OwnPath = Annotated[Path, BeforeValidator(_some_path)]
"""A file or folder of a node's own."""


class NodeData(Section):
    """`data` of a node: its file or folder, and how it is read.

    Fields beside the path are those of an experiment's `[data]` (a recommender's `[interactions]`); an experiment that
    reads it in another way is refused.
    """

    model_config = ConfigDict(extra="allow")

    path: OwnPath
    """The file or folder."""


class Terms(Section):
    """What the owner of a node limits, whatever a server asks; None: nothing. Its server hears of it before round 1."""

    least_cohort: int | None = Field(default=None, ge=FEWEST)
    """With "aggregation": the fewest clients of a sum, the node's own counted as one and others where a node of `peers`
    vouches for them and they have more than half an equal share. Default 3."""
    largest_weight: float | None = Field(default=None, ge=1)
    """With "aggregation": the most weight of a client here, in equal shares of those that count. Default 2."""
    bound: float | None = Field(default=None, gt=0, le=1e6)
    """With "aggregation": an update that changes a parameter by more is not sent. Default: the experiment's own."""
    rounds_per_day: int | None = Field(default=None, ge=1)
    """How often clients here train within 24 hours, whoever asks; `state` remembers it."""
    questions_per_day: int | None = Field(default=None, ge=1)
    """How many models are tested here within 24 hours."""
    statistics: Literal["no", "sums", "findings"] | None = None
    """What a server may know of the columns before round 1. "no", the default: nothing; "sums": how many cells and
    words of each column, in bins, and where scales are to be agreed on mean and deviation; "findings": also what seems
    wrong here beside the others, by name, column and a coarse factor."""


class NodeConfig(Terms):
    """What the owner of a node configured; make it with `NodeConfig.read` on the node.

    Either names (`client="alice"`, `clients="alice,bob"`) or a share of all clients (`partition-id=0
    num-partitions=4`). With names, `data` is a file that holds these clients' own samples and nothing else; with a
    share, it is the whole data set, of which the node uses its part.
    """

    model_config = ConfigDict(
        extra="allow", alias_generator=lambda name: name.replace("_", "-"), coerce_numbers_to_str=True
    )
    __pydantic_extra__: dict[str, float]  # pyright: ignore[reportIncompatibleVariableOverride]

    client: str | None = None
    """The one client that lives here."""
    clients: Words = ()
    """The clients that live here, where there are several."""
    partition_id: int | None = None
    """With num-partitions: which part of all clients lives here, from 0 on."""
    num_partitions: int | None = None
    """How many parts all clients are in."""
    own: NodeData | None = Field(default=None, alias="data")
    """The node's own file or folder: its path, or a table of its path and how it is read."""
    catalogue: OwnPath | None = None
    """A file that an experiment may read under this name, as the next three."""
    items: OwnPath | None = None
    """Names of items."""
    attributes: OwnPath | None = None
    """Attributes of items."""
    identities: OwnPath | None = None
    """Which things in knowledge are which items."""
    partition: dict[str, Any] = Field(default_factory=dict)
    """How its rows are split: fields of an experiment's `[partition]`, which stand above the experiment's own."""
    min_rows: int = Field(default=MIN_ROWS, ge=1)
    """An answer that would rest on fewer rows is not given."""
    allow: Words = ()
    """Code beyond what is built in that experiments may name on this node: models, losses and files of criteria."""
    kind: str = "learning"
    """The kind of experiment that this node takes part in."""
    require: Annotated[tuple[Literal["aggregation", "local", "records"], ...], BeforeValidator(_words)] = ()
    """What an experiment must guarantee, or this node takes no part: "aggregation" (the server sees no single update),
    "local" (what leaves this node carries noise), "records" (what leaves it tells little of any one row)."""
    tell: Words = ()
    """With "aggregation": facts about users by which experiments may still weigh clients here, such as "age"."""
    peers: OwnPath | None = None
    """With "aggregation", which needs it: a folder with the public keys (.pub) of the other nodes. Clients of nodes
    that it does not hold hide nobody: a server may have invented them."""
    epsilon: float | None = Field(default=None, gt=0, le=1e6)
    """With "local" or "records": the most that this node's answers may cost a client, or with "records" any one of its
    rows, in all, whoever asks, at δ = 1e-5. With "records" the node adds as much noise as that takes."""
    tests: StrictBool = True
    """Whether this node's clients test models; False: no score, loss or count of test rows leaves it."""
    keep_model: StrictBool = False
    """Whether the node keeps, in `state`, the last global model that it received, for `steelyard federate model`; of
    several rules that of the first."""
    state: OwnPath | None = None
    """Folder in which the node keeps what its clients keep to themselves, so that it outlives the process; with "local"
    also the ledger of its answers."""
    key: OwnPath | None = None
    """The node's private key, as in its file: it signs what its clients send. None: nothing is signed."""
    memory: OwnPath | None = None
    """Where a node without `state` remembers which hidden sums it has opened, while it runs; it makes it itself."""

    @classmethod
    def read(cls, config: Mapping[str, object], where: str = "node config ") -> Self:
        """Read a node's configuration; a key or value that makes no sense is named, in a line that begins so."""
        try:
            return cls.model_validate(dict(config))
        except ValidationError as error:
            raise UserError(where + explain(error, cls)) from None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: dict[str, Any]) -> dict[str, Any]:
        keys = [field.alias or "" for field in cls.model_fields.values()]
        found: dict[str, Any] = {}
        for key, value in given.items():
            if key in keys:
                found[key] = value
            elif key.startswith((DEVICE, USER)):
                kind = key.partition("-")[0]
                found |= [as_number(key, told_fact(value, key, kind))] if isinstance(value, str) else {key: value}
            else:
                known = [key for key in keys if key != MEMORY]
                raise ValueError(
                    f"{key}: unknown{nearest(key, known)}; allowed: {listed([*known, f'{DEVICE}*', f'{USER}*'])}"
                )
        data = found.get("data")
        return {**found, "data": {"path": data}} if isinstance(data, str | Path) else found

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.client is not None and self.clients:
            raise ValueError("client: got both client and clients; allowed: one of the two")
        if twice := [name for name in self.clients if self.clients.count(name) > 1]:
            raise ValueError(f"clients: got {twice[0]} twice; allowed: each client once")
        if (self.partition_id, self.num_partitions) != (None, None) and self.part is None:
            raise ValueError(
                f"partition-id: got {self.partition_id} of num-partitions {self.num_partitions}; allowed: whole "
                "numbers, 0 <= id < n"
            )
        if bool(self.names) == (self.part is not None):
            got = "both names and a partition" if self.names else "no clients"
            raise ValueError(
                f'client: got {got}; allowed: client="NAME", clients="A,B", or partition-id=I num-partitions=N'
            )
        self._check_terms()
        noisy = next((each for each in self.require if each != "aggregation"), None)
        if (self.epsilon is None) == (noisy is not None):
            raise ValueError(
                f'epsilon: missing beside require="{noisy}", so that any noise would do; allowed: the most that all '
                'answers may tell, as in epsilon=8 with state="state"'
                if self.epsilon is None
                else 'epsilon: given without require="local" or "records"; allowed: both together'
            )
        if {"local", "records"} <= set(self.require):
            raise ValueError('require: got "local" and "records", of which an experiment has one; allowed: one of them')
        if self.epsilon is not None and self.state is None:
            raise ValueError(
                'epsilon: given without state, the folder of the ledger; allowed: both, as in state="state"'
            )
        if noisy is not None and self.statistics not in (None, "no"):
            got = f"got '{self.statistics}' with require = \"{noisy}\", whose noise does not cover them"
            raise ValueError(f'statistics: {got}; allowed: "no"')
        if self.keep_model and self.state is None:
            raise ValueError('keep-model: given without state, where it is kept; allowed: both, as in state="state"')
        self._refuse_idle()
        return self

    def _check_terms(self) -> None:
        """Refuse a promise of sums that a server could empty, and limits that nothing would hold."""
        if self.hides and (self.peers is None or self.key is None):
            raise ValueError(
                'peers: missing, or key, beside require="aggregation", so that a server could invent all others; '
                'allowed: both, as in peers="peers", a folder of the other nodes\' .pub files'
            )
        for name in ("tell", "peers", "least_cohort", "largest_weight", "bound"):
            if not self.hides and getattr(self, name) not in (None, ()):
                key = name.replace("_", "-")
                raise ValueError(f'{key}: given without require="aggregation"; allowed: both together')
        if self.state is None and (self.rounds_per_day or self.questions_per_day):
            key = "rounds-per-day" if self.rounds_per_day else "questions-per-day"
            raise ValueError(f'{key}: given without state, where it is counted; allowed: both, as in state="state"')

    def _refuse_idle(self) -> None:
        """Refuse rules on rows that would not hold."""
        given = [key for key in ("min_rows", "partition") if key in self.model_fields_set]
        for key in [*given, *(["data"] if self.reading else [])]:
            key = key.replace("_", "-")
            if self.trusts:
                raise ValueError(
                    f'{key}: given with allow="*", under which it would have no effect; allowed: one of the two'
                )
            if self.own is None:
                raise ValueError(f"{key}: given without data, the file that it applies to; allowed: both together")

    @property
    def hides(self) -> bool:
        """Whether this node takes part only where its updates are hidden in a sum."""
        return "aggregation" in self.require

    @property
    def terms(self) -> Terms:
        """The owner's limits, with the defaults of those that a promise needs."""
        own = {name: value for name in Terms.model_fields if (value := getattr(self, name)) is not None}
        usual: dict[str, Any] = {"least_cohort": FEWEST, "largest_weight": 2.0} if self.hides else {}
        if self.trusts:
            usual["statistics"] = "findings"
        return Terms.model_validate(usual | own)

    def peer_keys(self) -> set[str]:
        """Return the public keys of the nodes that vouch for clients; the server's is none of them."""
        found = {} if self.peers is None else Keys.read(self.peers, "node config peers").named
        return {line for name, line in found.items() if name != SERVER}

    @property
    def names(self) -> tuple[str, ...]:
        """The clients that live here by name; empty where a part of all does."""
        return self.clients if self.client is None else (self.client,)

    @property
    def part(self) -> tuple[int, int] | None:
        """Which part of all clients lives here, and of how many; None where clients are named."""
        number, count = self.partition_id, self.num_partitions
        return None if number is None or count is None or not 0 <= number < count else (number, count)

    @property
    def data(self) -> Path | None:
        """The node's own file or folder."""
        return None if self.own is None else self.own.path

    @property
    def reading(self) -> Mapping[str, object]:
        """How it is read: the fields of an experiment's `[data]` without its path."""
        return (None if self.own is None else self.own.model_extra) or {}

    @property
    def files(self) -> dict[str, Path]:
        """All files of the node's own that an experiment may read, by key."""
        return {key: path for key in FILES if (path := getattr(self, key)) is not None}

    @property
    def device(self) -> dict[str, float]:
        """Facts about the device for criteria: device-battery=0.7."""
        return self._facts(DEVICE)

    @property
    def user(self) -> dict[str, float]:
        """Facts about the user for criteria: user-trust=1."""
        return self._facts(USER)

    def _facts(self, prefix: str) -> dict[str, float]:
        told = self.__pydantic_extra__.items()
        return {key.removeprefix(prefix): value for key, value in told if key.startswith(prefix)}

    @property
    def trusts(self) -> bool:
        """Whether the node runs and reads whatever an experiment names."""
        return EVERYTHING in self.allow

    @property
    def guards_rows(self) -> bool:
        """Whether this node reads a file of its owner's for somebody else, so that the owner's rules on rows hold."""
        return self.own is not None and not self.trusts

    @property
    def own_data(self) -> bool:
        """Whether `data` holds this node's samples only, so that nothing is to be shared out."""
        return self.own is not None and bool(self.names)

    def choose(self, everyone: Sequence[str]) -> tuple[str, ...]:
        """Return which of all clients live here, ascending; a name that does not exist is refused."""
        ordered = sorted(everyone)
        if self.part is not None:
            number, count = self.part
            if count > len(ordered):
                raise UserError(f"node config num-partitions: got {count}; allowed: at most {len(ordered)} clients")
            return tuple(ordered[number::count])
        for name in self.names:
            if name not in ordered:
                raise UserError(f"node config client: this experiment has no client '{name}'{nearest(name, ordered)}")
        return tuple(sorted(self.names))


@dataclass(frozen=True, eq=False)
class NodeClients:
    """The clients of one node, ready to train; what an experiment builds from a `NodeConfig`."""

    clients: Clients
    names: tuple[str, ...]
    about: Mapping[str, int | list[int]] = field(default_factory=dict[str, "int | list[int]"])
    """What a server without data must know to make the first model, such as the shape of a sample."""
    notes: tuple[str, ...] = ()
    """What the owner of the node should know, one line each."""
    columns: SiteColumns | None = None
    """What its training rows hold, as far as somebody may ask; None of data that are no table."""
    records: RecordNoise | None = None
    """What the clients do to the gradients of their samples; None where they do nothing."""
