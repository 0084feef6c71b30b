"""One node of a federation across machines: its configuration, and the clients that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from steelyard.base.errors import UserError, listed, nearest
from steelyard.clients.protocol import Clients

FILES = ("data", "catalogue", "items", "attributes", "identities")
"""Keys that name a file or folder of the node's own which an experiment may read."""
_CLIENTS = ("client", "clients", "partition-id", "num-partitions")
KEYS = (*_CLIENTS, *FILES, "partition", "min-rows", "state", "key", "allow", "kind", "require", "epsilon", "tests")
MEMORY = "memory"
"""A key that a node's own process adds to what its owner wrote; no file has it."""
MIN_ROWS = 10
"""The rows that an answer must rest on, where the owner of a node says nothing else."""
EVERYTHING = "*"
"""`allow="*"`: run and read whatever the experiment names; for a federation of one's own on one machine."""
GUARANTEES = ("aggregation", "local")
"""What a node can require of every experiment."""
PREFIXES = ("device-", "user-")


@dataclass(frozen=True)
class NodeConfig:
    """What the owner of a node configured; make it with `NodeConfig.read` on the node.

    Either names (`client="alice"`, `clients="alice,bob"`) or a share of all clients (`partition-id=0
    num-partitions=4`). With names, `data` is a file that holds these clients' own samples and nothing else; with a
    share, it is the whole data set, of which the node uses its part.
    """

    names: tuple[str, ...] = ()
    part: tuple[int, int] | None = None
    data: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """All files of the node's own that an experiment may read, by key: `data` and others of `FILES`."""
    reading: Mapping[str, object] = field(default_factory=dict[str, object])
    """How the file is read: the fields of an experiment's `[data]` (a recommender's `[interactions]`) without its path.
    An experiment that reads it in another way is refused."""
    partition: Mapping[str, object] = field(default_factory=dict[str, object])
    """How its rows are split: fields of an experiment's `[partition]`, which stand above the experiment's own."""
    min_rows: int = MIN_ROWS
    """An answer that would rest on fewer rows is not given."""
    allow: tuple[str, ...] = ()
    """Code beyond what is built in that experiments may name on this node: models, losses and files of criteria."""
    kind: str = "learning"
    """The kind of experiment that this node takes part in."""
    require: tuple[str, ...] = ()
    """What an experiment must guarantee, or this node takes no part: "aggregation" (the server sees no single update),
    "local" (what leaves this node carries noise)."""
    epsilon: float | None = None
    """With "local": the most that this node's answers may cost a client in all, whoever asks, at δ = 1e-5."""
    tests: bool = True
    """Whether this node's clients test models; False: no score, loss or count of test rows leaves it."""
    state: Path | None = None
    """Folder in which the node keeps what its clients keep to themselves, so that it outlives the process; with "local"
    also the ledger of its answers."""
    memory: Path | None = None
    """Where a node without `state` remembers which hidden sums it has opened, while it runs; it makes it itself."""
    key: Path | None = None
    """The node's private key, as in its file: it signs what its clients send. None: nothing is signed."""
    device: Mapping[str, float] = field(default_factory=dict[str, float])
    """Facts about the device for criteria: device-battery=0.7."""
    user: Mapping[str, float] = field(default_factory=dict[str, float])
    """Facts about the user for criteria: user-trust=1."""

    @classmethod
    def read(cls, config: Mapping[str, object]) -> NodeConfig:
        """Read a node's configuration; a key or value that makes no sense is named."""
        for key in config:
            if key not in (*KEYS, MEMORY) and not key.startswith(PREFIXES):
                known = [*KEYS, "device-*", "user-*"]
                raise UserError(f"node config {key}: unknown{nearest(key, KEYS)}; allowed: {listed(known)}")
        _refuse_idle(config)
        names = _names(config)
        part = _part(config)
        if bool(names) == (part is not None):
            got = "both names and a partition" if names else "no clients"
            raise UserError(
                f'node config: got {got}; allowed: client="NAME", clients="A,B", or partition-id=I num-partitions=N'
            )
        return cls(
            names=names,
            part=part,
            data=_data(config),
            files={key: path for key in FILES if (path := _data(config) if key == "data" else _path(config, key))},
            reading={key: value for key, value in _table(config, "data").items() if key != "path"},
            partition=_table(config, "partition"),
            min_rows=_min_rows(config),
            allow=_list(config, "allow"),
            kind=str(config.get("kind", "learning")),
            require=_required(config),
            epsilon=_epsilon(config),
            tests=_tests(config),
            state=_path(config, "state"),
            memory=_path(config, MEMORY),
            key=_path(config, "key"),
            device=_facts(config, "device-"),
            user=_facts(config, "user-"),
        )

    @property
    def trusts(self) -> bool:
        """Whether the node runs and reads whatever an experiment names."""
        return EVERYTHING in self.allow

    @property
    def guards_rows(self) -> bool:
        """Whether this node reads a file of its owner's for somebody else, so that the owner's rules on rows hold."""
        return self.data is not None and not self.trusts

    @property
    def own_data(self) -> bool:
        """Whether `data` holds this node's samples only, so that nothing is to be shared out."""
        return self.data is not None and bool(self.names)

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

    def facts(self, clients: Sequence[str]) -> dict[str, dict[str, Mapping[str, float]]]:
        """Return the facts about device and user for each client that lives here."""
        return {client: {"device": self.device, "user": self.user} for client in clients}


@dataclass(frozen=True, eq=False)
class NodeClients:
    """The clients of one node, ready to train; what an experiment builds from a `NodeConfig`."""

    clients: Clients
    names: tuple[str, ...]
    about: Mapping[str, int | list[int]] = field(default_factory=dict[str, "int | list[int]"])
    """What a server without data must know to make the first model, such as the shape of a sample."""
    notes: tuple[str, ...] = ()
    """What the owner of the node should know, one line each."""


def _names(config: Mapping[str, object]) -> tuple[str, ...]:
    single, several = config.get("client"), config.get("clients")
    if single is not None and several is not None:
        raise UserError("node config: got both client and clients; allowed: one of the two")
    # A name that looks like a number arrives as one; it is a name all the same.
    return (str(single),) if single is not None else _list(config, "clients")


def _list(config: Mapping[str, object], key: str) -> tuple[str, ...]:
    """Return the words of a key: "a, b" as Flower's node config has it, or a list as TOML has it."""
    value = config.get(key)
    words = [str(word) for word in value] if isinstance(value, list) else str(value or "").split(",")
    return tuple(dict.fromkeys(word.strip() for word in words if word.strip()))


def _required(config: Mapping[str, object]) -> tuple[str, ...]:
    words = _list(config, "require")
    for word in words:
        if word not in GUARANTEES:
            raise UserError(
                f"node config require: got '{word}'{nearest(word, GUARANTEES)}; allowed: {listed(GUARANTEES)}"
            )
    return words


def _epsilon(config: Mapping[str, object]) -> float | None:
    value = config.get("epsilon")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise UserError(f"node config epsilon: got {value!r}; allowed: a number above 0, up to 1e6")
    if "local" not in _required(config):
        raise UserError('node config epsilon: given without require="local"; allowed: both together')
    if config.get("state") is None:
        raise UserError(
            'node config epsilon: given without state, the folder of the ledger; allowed: both, as in state="state"'
        )
    return float(value)


def _tests(config: Mapping[str, object]) -> bool:
    value = config.get("tests", True)
    if not isinstance(value, bool):
        raise UserError(f"node config tests: got {value!r}; allowed: true, or false (the node then tests no models)")
    return value


def _part(config: Mapping[str, object]) -> tuple[int, int] | None:
    number, count = config.get("partition-id"), config.get("num-partitions")
    if number is None and count is None:
        return None
    if not isinstance(number, int) or not isinstance(count, int) or not 0 <= number < count:
        raise UserError(
            f"node config partition-id: got {number!r} of num-partitions {count!r}; allowed: whole numbers, 0 <= id < n"
        )
    return number, count


def _path(config: Mapping[str, object], key: str) -> Path | None:
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise UserError(f'node config {key}: got {value!r}; allowed: a path in quotes, such as {key}="/srv/{key}"')
    return Path(value)


def _data(config: Mapping[str, object]) -> Path | None:
    """Return the file that `data` names: its path alone, or a table with the path in it."""
    table = _table(config, "data")
    if not table:
        return _path(config, "data")
    if "path" not in table:
        raise UserError("node config data.path: missing; allowed: the path of this node's own file or folder")
    return _path({"data.path": table["path"]}, "data.path")


def _table(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = config.get(key, {})
    if isinstance(value, Mapping):
        return cast("Mapping[str, object]", value)
    if key == "data":  # A path alone.
        return {}
    raise UserError(f"node config {key}: got {value!r}; allowed: a table [{key}] of fields, as in an experiment")


def _refuse_idle(config: Mapping[str, object]) -> None:
    """Refuse rules on rows that would not hold."""
    given = [key for key in ("min-rows", "partition") if key in config]
    if len(_table(config, "data")) > 1:
        given.append("data")
    if not given:
        return
    if EVERYTHING in _list(config, "allow"):
        raise UserError(
            f'node config {given[0]}: given with allow="*", under which it would have no effect; allowed: one of the '
            "two"
        )
    if "data" not in config:
        raise UserError(
            f"node config {given[0]}: given without data, the file that it applies to; allowed: both together"
        )


def _min_rows(config: Mapping[str, object]) -> int:
    value = config.get("min-rows", MIN_ROWS)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"node config min-rows: got {value!r}; allowed: a whole number from 1")
    return value


def _facts(config: Mapping[str, object], prefix: str) -> dict[str, float]:
    facts: dict[str, float] = {}
    for key, value in config.items():
        if key.startswith(prefix):
            if not isinstance(value, int | float):
                raise UserError(f"node config {key}: got {value!r}; allowed: a number")
            facts[key.removeprefix(prefix)] = float(value)
    return facts
