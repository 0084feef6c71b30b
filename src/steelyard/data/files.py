"""Finding and opening files of data, with one clear line where something is missing or broken; fingerprints."""

from __future__ import annotations

import glob
import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from steelyard.base.errors import MachineError, UserError, brief

if TYPE_CHECKING:
    from steelyard.data.dataset import Population


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
                beside = whole.iterdir() if whole.is_dir() else whole.parent.glob(f"{glob.escape(whole.stem)}.*")
                for each in sorted(beside):
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


# Fingerprints of data: cheap to take, and different when a single number of the data is.


def digest(arrays: Iterable[object]) -> str:
    """Return the SHA-256, shortened, of arrays with their types and shapes; texts and None count as themselves."""
    found = hashlib.sha256()
    for array in arrays:
        if isinstance(array, np.ndarray) and array.dtype.kind in "biuf":
            found.update(f"{array.dtype.str}{array.shape}".encode())
            found.update(np.ascontiguousarray(array).view(np.uint8).data)
        else:
            text = "\n".join(map(str, array.tolist())) if isinstance(array, np.ndarray) else str(array)
            found.update(f"{len(text)}:{text}".encode())
    return found.hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, or of the names and bytes of all files in a folder."""
    found = hashlib.sha256()
    for file in sorted(part for part in path.rglob("*") if part.is_file()) if path.is_dir() else [path]:
        found.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                found.update(block)
    return found.hexdigest()


def fingerprint(population: Population) -> dict[str, str]:
    """Return what tells a population from another: its features, its labels, and who holds which rows.

    A resumed run holds it against the one that the run began with.
    """
    dataset = population.dataset
    rows: list[object] = [population.server, population.report]
    for client in population.clients:
        labels = None if client.train_labels is None else client.train_labels.numpy()
        rows += [client.client, client.train, client.test, labels]
    behaviours = [f"{name}={how}" for name, how in sorted(population.behaviours.items())]
    return {
        "samples": str(len(dataset)),
        "features": digest([dataset.features.cpu().numpy(), *(dataset.marks[name] for name in sorted(dataset.marks))]),
        "labels": digest([dataset.labels.cpu().numpy()]),
        "clients' rows": digest([*rows, *behaviours]),
    }
