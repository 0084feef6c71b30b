"""A file of lines that only grows: a ledger, receipts, heads. What `append` has written is on the disk when it returns.

Whoever is killed while it writes leaves a torn line. What that line says has not happened, since nothing is done before
`append` returns: readers leave it out, and the next line is written over it. A mark says how far a file had come, for
those who check it later.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from steelyard.base import files
from steelyard.base.errors import UserError, printable

LineT = TypeVar("LineT")
BLOCK = 1 << 16
"""Bytes that are read at once where a file is read from its end; the receipt of a thousand clients has 130,000."""


@dataclass(frozen=True)
class Mark:
    """How far a journal had come, and what stood in it: its first bytes, and their SHA-256 in hexadecimal digits."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> Mark:
        """Return the mark behind these bytes."""
        return cls(len(content), hashlib.sha256(content).hexdigest())


class DamagedLine(UserError):
    """A line of a journal is not as it was written; `why` names it."""

    def __init__(self, path: Path, number: int, reason: str) -> None:
        self.why = f"line {number}: {printable(reason)}"
        super().__init__(f"{path}, {self.why}; allowed: the file as it was written")


@dataclass(frozen=True)
class Journal:
    """One such file; it need not be there yet. `private`: only its owner may read it and its folder."""

    path: Path
    private: bool = False

    def append(self, lines: Sequence[str]) -> None:
        """Add lines; when this returns they are on the disk, and where it raises none of them is in the file."""
        if not lines:
            return
        content = "".join(f"{line}\n" for line in lines).encode()
        with files.owners_only(self.path.parent) if self.private else nullcontext():
            if not files.is_file(self.path):
                os.stat(self.path.parent)  # A folder that is gone is not made again.
                files.write(self.path, content)
                return
            with files.open_to_append(self.path) as file:
                size = file.seek(0, os.SEEK_END)
                if (whole := self._whole(size)) < size:
                    file.truncate(whole)
                try:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(whole)
                    raise

    def content(self) -> bytes:
        """Return all whole lines; nothing where there is no file."""
        content = files.read_bytes(self.path) if files.is_file(self.path, alone=True) else b""
        return content[: content.rfind(b"\n") + 1]

    def read(self, parse: Callable[[bytes], LineT], content: bytes | None = None) -> Iterator[LineT]:
        """Yield what the lines say, all of them or those of `content`; one that `parse` refuses is damaged."""
        whole = self.content() if content is None else content
        for number, line in enumerate(whole.split(b"\n")[:-1], 1):
            try:
                yield parse(line)
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                reason = ": ".join([*map(str, first["loc"]), first["msg"]])
                raise DamagedLine(self.path, number, reason) from None
            except ValueError as error:
                raise DamagedLine(self.path, number, str(error)) from None

    def backwards(self, farthest: int) -> Iterator[bytes]:
        """Yield the lines, the last one first, from so many bytes before the end on; no more is read than is asked."""
        if not files.is_file(self.path):
            return
        at = self._whole(self.path.stat().st_size)
        first, begun = max(0, at - farthest), b""
        while at > first:
            start = max(first, at - BLOCK)
            begun, *lines = (self._part(start, at) + begun).split(b"\n")
            yield from reversed(lines)
            at = start
        yield begun

    def first_difference(self, marks: Sequence[Mark]) -> tuple[int, str] | None:
        """Return the place of the first mark that the file does not bear out, and how; None where it bears out all.

        Marks come in the order of their bytes. What follows the last is not looked at: a file is ahead of what was
        marked, never behind it.
        """
        try:
            content = files.read_bytes(self.path)
        except FileNotFoundError:
            content = None
        except OSError as error:
            return 0, f"cannot be read ({error.strerror}), and could be"
        hashed, done = hashlib.sha256(), 0
        for place, mark in enumerate(marks):
            if mark.bytes and content is None:
                return place, "is gone, and was there"
            held = content or b""
            if len(held) < mark.bytes:
                return place, f"has {len(held):,} bytes, and had {mark.bytes:,}"
            hashed.update(held[done : mark.bytes])
            done = mark.bytes
            if hashed.hexdigest() != mark.sha256:
                return place, "no longer holds the lines that it held"
        return None

    def _whole(self, size: int) -> int:
        """Return where the last whole line of so many bytes ends; only their end is read."""
        while size:
            start = max(0, size - BLOCK)
            if (found := self._part(start, size).rfind(b"\n")) >= 0:
                return start + found + 1
            size = start
        return 0

    def _part(self, start: int, end: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(end - start)
