"""Finding and opening files of data, with one clear line where something is missing or broken."""

from __future__ import annotations

import glob
import gzip
import os
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from steelyard.base.errors import MachineError, UserError, brief


def search_folders() -> list[Path]:
    """Return the folders in which a relative data path is looked for, in order."""
    named = os.environ.get("STEELYARD_DATA")
    return [Path(), *([Path(named)] if named else []), Path("../shared/data")]


def find(path: Path | None, expected: str, default: str = "", field: str = "path") -> Path:
    """Return where `path` exists; `expected` says what it should be and where a user gets it, for the error line.

    Without a path, `default` is the name to look for. It is not looked for in the working folder itself, where a
    folder of that name is more likely a run than data.
    """
    if path is None:
        candidates = [folder / default for folder in (*search_folders()[1:], Path("data"))]
        path = Path(default)
    else:
        path = path.expanduser()
        candidates = [path] if path.is_absolute() else [folder / path for folder in search_folders()]
    for candidate in candidates:
        try:
            if candidate.exists():
                return candidate
        except (OSError, ValueError) as problem:
            reason = getattr(problem, "strerror", None) or str(problem)
            raise UserError(f"data.{field}: got {brief(str(path))} ({reason}); expected {expected}") from None
    looked = ", ".join(str(candidate) for candidate in candidates)
    raise MachineError(f"data.{field}: found no '{path}' (looked at {looked}); expected {expected}")


State = tuple[str, int, int, int]
"""A file's place, and what the system changes with every write: its inode, its size, the time of the write."""


def states_of(paths: Iterable[Path | None]) -> tuple[State, ...]:
    """Return the state of files, and of those beside them with the same stem, which readers may also take.

    Use it in the key of what is kept of files in memory: another folder or an edited file is another key.
    """
    found: list[State] = []
    for path in paths:
        with suppress(UserError, OSError):  # one that is missing is refused by its reader
            if path is not None:
                whole = find(path, "a file").resolve()
                for each in sorted(whole.parent.glob(f"{glob.escape(whole.stem)}.*")):
                    status = each.stat()
                    found.append((str(each), status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked if its name ends in .gz."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as packed:
                return packed.read()
        return path.read_bytes()
    except (OSError, EOFError, zlib.error) as problem:
        reason = str(problem) or type(problem).__name__
        raise UserError(f"{path}: cannot be read ({reason}); expected a whole, readable file") from None


def read_text(path: Path) -> str:
    """Return the content of a text file, unpacked if its name ends in .gz."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; expected UTF-8 text") from None
