"""A table of things by name that packages and users can add to: criteria and algorithms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from steelyard.errors import UserError, listed, nearest
from steelyard.usercode import load_code, load_entry_points

T = TypeVar("T")


class Registry(Generic[T]):
    """What is built in, what installed packages declare under an entry point, and what plugins define, by name.

    Two experiments of one process may give one name to two things; whoever looks up last names its plugins.
    """

    def __init__(self, what: str, group: str, origin: Callable[[T], str]) -> None:
        self.what, self.group = what, group
        self._origin = origin
        """From an entry to the name of its code: the same code may be registered again, other code may not."""
        self._entries: dict[str, T] = {}
        self._plugged: dict[str, dict[str, T]] = {}

    def add(self, name: str, entry: T) -> None:
        """Put an entry into the table; a name that is taken by other code is refused."""
        known = self._entries.get(name)
        if known is not None and self._origin(known) != self._origin(entry):
            raise UserError(
                f"{self.what} {name}: registered twice, by {self._origin(known)} and {self._origin(entry)}; "
                "give one of them another name"
            )
        self._entries[name] = entry

    def load(self, sources: Sequence[str]) -> None:
        """Make what these scripts or modules define known, and no longer what other plugins define."""
        for source, defined in self._plugged.items():
            if source not in sources:
                for name, entry in defined.items():
                    if self._entries.get(name) is entry:
                        del self._entries[name]
        for source in sources:
            if source in self._plugged:
                for name, entry in self._plugged[source].items():
                    self.add(name, entry)
            else:
                before = dict(self._entries)
                load_code(source, "plugin", self.group)
                changed = {name: entry for name, entry in self._entries.items() if before.get(name) is not entry}
                self._plugged[source] = changed

    def known(self) -> dict[str, T]:
        """Return all entries by name."""
        load_entry_points(self.group)
        return dict(self._entries)

    def get(self, name: str) -> T:
        """Return the entry of that name, or say which names there are."""
        table = self.known()
        if name not in table:
            raise UserError(f"{self.what} '{name}' is not known{nearest(name, table)}; known: {listed(table)}")
        return table[name]
