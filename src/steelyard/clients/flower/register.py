"""Who may take part: the register of a server, which clients each node may hold, and for whom a run waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field, TypeAdapter, ValidationError

from steelyard.base import files
from steelyard.base.errors import UserError, brief, told_as
from steelyard.base.logs import logger
from steelyard.base.settings import Section

_log = logger(__name__)

FILE = "register.json"
"""Name of the register in a server's folder."""
REGISTER = "STEELYARD_REGISTER"
"""Environment variable that names the register which the ServerApp reads."""


@dataclass(frozen=True)
class Entry:
    """One node key of the register."""

    name: str
    key: str
    """The public key, one line as in its .pub file, without a comment."""
    clients: tuple[str, ...] = ()
    """The clients that this node may hold, by name; empty: any that no other key has, as many as `most`."""
    most: int = 1
    """How many clients it may hold where `clients` names none."""

    def refusal(self, claimed: tuple[str, ...]) -> str | None:
        """Say why a node of this key may not hold these clients, or None where it may."""
        strangers = sorted(set(claimed) - set(self.clients)) if self.clients else []
        if strangers:
            return f"clients: got {', '.join(strangers[:5])}; its entry allows {', '.join(self.clients[:20])}"
        if not self.clients and len(claimed) > self.most:
            return f"clients: {len(claimed)} names; its entry allows {self.most}"
        return None


_NODES = TypeAdapter(dict[Literal["nodes"], list[Entry]])


@dataclass(frozen=True)
class Register:
    """All entries by public key; read it with `read_register`, change it with `enter`."""

    entries: Mapping[str, Entry] = field(default_factory=dict[str, Entry])

    def owner(self, client: str) -> str | None:
        """Return the key whose entry names a client; None where no entry does."""
        return next((entry.key for entry in self.entries.values() if client in entry.clients), None)


def bare(key: str) -> str:
    """Return a public key without its comment, so that the same key is always the same text."""
    return " ".join(key.split()[:2])


def read_register(file: Path) -> Register:
    """Return the register in a file; one that is not there is empty."""
    try:
        entries = _NODES.validate_json(file.read_bytes())["nodes"]
    except FileNotFoundError:
        return Register()
    except (OSError, KeyError, ValidationError) as error:
        raise UserError(f"{file}: not a register of node keys ({type(error).__name__}); allowed: what "
                        "`steelyard federate register` writes") from error  # fmt: skip
    return Register({entry.key: entry for entry in entries})


class RegisterFile:
    """A register as it is now: its file is read again when it changes. Whoever asks holds one and calls `now`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: tuple[int, int] | None = None
        self._register = Register()

    def now(self) -> Register:
        """Return the register; while it cannot be read, it has no entries and nobody is let in."""
        try:
            found = self._file.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
        except OSError:
            return Register()
        if stamp != self._seen:
            try:
                self._register = read_register(self._file)
            except UserError as error:
                _log.error(error)
                self._register = Register()
            self._seen = stamp
        return self._register


def enter(file: Path, entry: Entry) -> Register:
    """Add a key to the register, or change its entry; a client that another key has is refused."""
    register = read_register(file)
    for option, names in (("--name", (entry.name,)), ("--client", entry.clients)):
        for name in names:
            if not name.strip() or name != name.strip() or not name.isprintable() or len(name) > 200:
                raise UserError(
                    f"{option}: got {brief(name)}; allowed: 1 to 200 printable characters, no blanks around"
                )
            if option == "--name" and (name in (".", "..") or "/" in name or "\\" in name):
                raise UserError(f"--name: got {brief(name)}; allowed: a name, no path")
    if len(set(entry.clients)) < len(entry.clients):
        raise UserError(f"--client: got {', '.join(entry.clients)}; allowed: each client once")
    other = next((one for one in register.entries.values() if one.name == entry.name and one.key != entry.key), None)
    if other is not None:
        raise UserError(
            f"--name: '{entry.name}' is another key's; allowed: another name, or `--remove {entry.name}` first"
        )
    for client in entry.clients:
        owner = register.owner(client)
        if owner not in (None, entry.key):
            assert owner is not None
            raise UserError(f"--client: '{client}' belongs to {register.entries[owner].name}; allowed: another name")
    return _write(file, {**register.entries, entry.key: entry})


def remove(file: Path, name: str) -> Register:
    """Take the node of this name out of the register; its key lets nobody in any longer."""
    register = read_register(file)
    left = {key: entry for key, entry in register.entries.items() if entry.name != name}
    if len(left) == len(register.entries):
        known = ", ".join(sorted(entry.name for entry in register.entries.values())) or "none"
        raise UserError(f"--remove: no node '{name}' in {file}; there are: {known}")
    return _write(file, left)


def _write(file: Path, entries: Mapping[str, Entry]) -> Register:
    with told_as(f"{file}: cannot be written", "a writable folder"), files.owners_only(file.parent):
        files.write(file, _NODES.dump_json({"nodes": list(entries.values())}, indent=1))
    return Register(entries)


class FederateSettings(Section):
    """How a run across machines waits for its nodes; a simulation ignores it."""

    nodes: int = Field(default=1, ge=1, le=1_000_000)
    """Number of nodes to wait for before the first round; give all of them for reproducible cohorts."""
    start_timeout: float = Field(default=300.0, gt=0)
    """Seconds to wait for that many nodes to connect and say which clients live on them."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds that a node has to answer one task or question; who has not answered by then is left out of the round."""
    most_clients: int = Field(default=10_000, ge=1)
    """Clients that one node may hold, where the server's register says nothing else of its key."""
    nodes_keep_model: bool = True
    """Whether nodes whose owners want it keep the global model that they receive (`keep-model` in the node's file)."""
    test_bound: float = Field(default=3.0, ge=1, allow_inf_nan=False)
    """Of a client's test samples at most this many times the median client's count in the accuracy: nobody can check
    how many it has, and a client that claims a hundred times as many would decide the accuracy alone."""
