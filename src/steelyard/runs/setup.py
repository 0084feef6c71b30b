"""Setting up the folder of a run: a folder is a run, whole, or it is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from steelyard.base import files
from steelyard.base.errors import MachineError, UserError, told_as
from steelyard.base.files import BESIDE, DATABASE, sync_folder, sync_tree
from steelyard.rounds.state import Federation
from steelyard.runs.store import Store, exists, held
from steelyard.runs.tensor_files import FOLDER

DRAFT = ".setup"
"""Folder in which a run is put together; what is in it is no run yet."""


def set_up(
    folder: Path,
    texts: Mapping[str, str],
    info: Mapping[str, object],
    federations: Sequence[Federation],
    made: Iterable[str] = (),
    fill: Callable[[Path], None] | None = None,
) -> None:
    """Make a folder a run: texts by file name, facts, rules. All of it is there, on the disk, or the folder is no run.

    The database comes last, in one rename, and a folder without it is no run; what a set-up that was killed has left
    behind is replaced. `made` are further files and folders in it that are of this run: flushed with the rest, and
    removed with it where the set-up fails. `fill` writes rounds into the draft of the folder, which it is given.
    """
    with told_as(f"{folder}: cannot be written", "a writable folder with room on the disk", kind=MachineError):
        fresh = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        own = {*made, *(name for name in texts if not (folder / name).exists())}
        files.check_run(folder)
        with held(folder):
            if exists(folder):
                raise UserError(f"{folder}: holds a run already; allowed: a new folder, or `steelyard resume {folder}`")
            try:
                for name in made:
                    sync_tree(folder / name)
                _put_together(folder, texts, info, federations, fill)
            except BaseException:
                if not exists(folder):
                    discard(folder, own)
                raise
        if fresh:
            sync_folder(folder.parent)


def _put_together(
    folder: Path,
    texts: Mapping[str, str],
    info: Mapping[str, object],
    federations: Sequence[Federation],
    fill: Callable[[Path], None] | None,
) -> None:
    draft = folder / DRAFT
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    with closing(Store(draft)) as store:
        store.register(federations)
        store.note(**info)
    if fill is not None:
        fill(draft)
    with (draft / DATABASE).open("rb") as file:
        os.fsync(file.fileno())
    for name, text in texts.items():
        files.write(folder / name, text.encode())
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    for name in (FOLDER, files.UPDATES):
        if (draft / name).exists():
            (draft / name).replace(folder / name)
    for ending in BESIDE:
        # They would be taken for a part of the new database.
        (folder / (DATABASE + ending)).unlink(missing_ok=True)
    sync_folder(folder)
    (draft / DATABASE).replace(folder / DATABASE)
    sync_folder(folder)
    shutil.rmtree(draft, ignore_errors=True)


def discard(folder: Path, made: Iterable[str]) -> None:
    """Take back what `set_up` made, where a run fails before its first round: its folder is free again.

    Other files in the folder stay, and so does the folder then.
    """
    with suppress(OSError):
        for ending in ("", *BESIDE):
            (folder / (DATABASE + ending)).unlink(missing_ok=True)
        for name in (*made, files.LOCK, DRAFT, FOLDER):
            if (folder / name).is_dir() and not (folder / name).is_symlink():
                shutil.rmtree(folder / name, ignore_errors=True)
            else:
                (folder / name).unlink(missing_ok=True)
        folder.rmdir()
