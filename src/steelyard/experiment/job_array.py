"""One part of several runs that together are a comparison or a sweep; for job arrays."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from steelyard.base.errors import UserError, brief, listed

PART = "part"
"""A run that is a part of a comparison notes which one under this name; a sweep's file has a field of it."""
MOST = 10_000

_ItemT = TypeVar("_ItemT")


@dataclass(frozen=True, order=True)
class Part:
    """The third of eight parts, written 3/8."""

    number: int
    of: int

    @classmethod
    def read(cls, text: str, where: str = "--part") -> Self:
        """Read a part as it is written; `where` names the option or the file in an error."""
        found = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text.strip())
        number, of = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= of <= MOST:
            raise UserError(f"{where}: got {brief(text)}; allowed: NUMBER/OF, such as 3/8, at most {MOST:,} parts")
        return cls(number, of)

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def share(self, items: Sequence[_ItemT], what: str) -> list[_ItemT]:
        """Return every so manyth item, so that parts take about as long; none may be left without one."""
        if self.of > len(items):
            raise UserError(f"--part: got {self}, but there are {len(items)} {what}; allowed: at most {len(items)}")
        return list(items[self.number - 1 :: self.of])


def in_order(found: Mapping[Path, Part | None]) -> list[Path]:
    """Return the folders of all parts by their numbers; parts that are missing, doubled or of others are named."""
    parts = {folder: part for folder, part in found.items() if part is not None}
    if not parts or len(parts) < len(found):
        whole = next(iter(found.keys() - parts.keys()), None)
        raise UserError(f"{whole}: is not a part; allowed: folders that were made with --part")
    sizes = {part.of: folder for folder, part in parts.items()}
    if len(sizes) > 1:
        (one, first), (other, second) = list(sizes.items())[:2]
        raise UserError(f"{second}: is one of {other} parts, {first} one of {one}; allowed: parts of one whole")
    of = next(iter(sizes))
    by_number: dict[int, list[Path]] = {number: [] for number in range(1, of + 1)}
    for folder, part in parts.items():
        by_number[part.number].append(folder)
    missing = [f"{number}/{of}" for number, folders in by_number.items() if not folders]
    doubled = [f"{n}/{of} ({listed(map(str, each))})" for n, each in by_number.items() if len(each) > 1]
    if missing or doubled:
        faults = [f"missing: {', '.join(missing)}"] if missing else []
        faults += [f"doubled: {', '.join(doubled)}"] if doubled else []
        raise UserError(f"join: {'; '.join(faults)}; allowed: each of the {of} parts once")
    return [folders[0] for folders in by_number.values()]
