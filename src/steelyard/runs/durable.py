"""Writing files so that they are on the disk, whole, when a function returns."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, also after a power cut: a draft, flushed, then renamed."""
    draft = path.with_name(path.name + ".part")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()  # on a full disk half a file takes room that somebody needs
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put a folder's list of names on the disk; a renamed or new file is only safe after that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(path: Path) -> None:
    """Put a file, or all files of a folder, on the disk; nothing is done where there is none."""
    if not path.exists():
        return
    for inner in path.iterdir() if path.is_dir() else ():
        sync_tree(inner)
    sync_folder(path)


@contextmanager
def owners_only(folder: Path) -> Generator[None]:
    """Make a folder, and what is written meanwhile readable by its owner alone; for all that a node keeps."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
