"""Files of runs: whole or not at all, and never through a link, since a run's folder may come from elsewhere.

A path below the folder of a run, of a sweep or of attacks is walked from there, one name at a time, and a link on the
way is refused; that folder itself and those above it may be links. Of any other path only the last name may be no link.
Nothing is ever cut off in place: a file that has a second name elsewhere keeps what it holds. Also the one reader of a
CSV whose columns are found by name.
"""

from __future__ import annotations

import csv
import os
import re
import stat
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from steelyard.base.errors import UserError

DATABASE, BESIDE = "run.sqlite", ("-wal", "-shm", "-journal")
"""A run's database, and the endings of what SQLite keeps beside it while it is written."""
RUN_FILE, LEDGER, LOCK, REPORT = "experiment.toml", "privacy.jsonl", "lock", "report.html"
SET_UP = ".setup"
"""Folder in which a run is put together; what is in it is no run yet."""
"""Other files of a run: its resolved experiment, its privacy ledger, what its writer holds, its report."""
CHECKPOINTS, CODE, EXPORT, FIGURES, FLOWER, UPDATES = "checkpoints", "code", "export", "figures", "flower", "updates"
"""Folders of a run."""
CHECKPOINT_NAME = re.compile(r"round-\d{6,}\.safetensors")
"""What a run calls its checkpoint files; nothing else in their folder is ever opened or removed."""
SWEEP_FILE, ATTACK_FILE = "sweep.toml", "attack.toml"
ARENA_FILE, PARTICIPATION_FILE, PAPER_FILE = "arena.toml", "participation.toml", "paper.toml"
"""The plans of studies, which are several runs in one folder."""
_STUDIES = (SWEEP_FILE, ATTACK_FILE, ARENA_FILE, PARTICIPATION_FILE, PAPER_FILE)
DRAFT = ".part"
"""Ending of a file that is being written; it gets its name when it is whole."""


def _place(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the folder from which a path is walked, and the names below it: the outermost of one or more runs."""
    whole = os.path.abspath(path)
    names = whole.strip(os.sep).split(os.sep)
    # Texts, not paths: a summary of a run asks this a thousand times.
    for depth in range(len(names)):
        above = os.sep + os.sep.join(names[:depth])
        if _is_ours(f"{above}{os.sep}"):
            return Path(above), tuple(names[depth:])
    return Path(whole).parent, (names[-1],)


def _is_ours(folder: str) -> bool:
    """Say whether a folder is a run, or one of several runs: a user's own sweep.toml has no lock of ours beside it."""
    if os.path.lexists(folder + DATABASE):
        return True
    return os.path.lexists(folder + LOCK) and any(os.path.lexists(folder + mark) for mark in _STUDIES)


@contextmanager
def _holding(path: Path, *, make: bool = False) -> Generator[tuple[int, str]]:
    """Open the folder that holds a file, a name at a time; yield its handle and the file's name in it."""
    start, names = _place(path)
    if make and not start.exists():
        start.mkdir(parents=True, exist_ok=True)
    handle = os.open(start, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for depth, name in enumerate(names[:-1], 1):
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=handle)
            found = _status(handle, name)
            if found is not None and not stat.S_ISDIR(found.st_mode):
                raise _refused(start.joinpath(*names[:depth]), found, "a folder of the run's own")
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = inner
        yield handle, names[-1]
    finally:
        os.close(handle)


def _status(handle: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=handle, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _refused(path: Path, found: os.stat_result, allowed: str) -> UserError:
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFREG: "a file"}
    what = kinds.get(stat.S_IFMT(found.st_mode), "no plain file")
    return UserError(f"{path}: is {what}; allowed: {allowed}")


def files_in(folder: Path, names: Iterable[str], alone: Collection[str] = (), *, folders: bool = False) -> set[str]:
    """Return which of these names in a folder are files, or folders; a link or device in the place of one is refused.

    Those of `alone` may have no second name (a hard link) either: use it before a file is written in place.
    """
    kind, allowed = (stat.S_IFDIR, "a folder") if folders else (stat.S_IFREG, "a file")
    there = _statuses(folder, names)
    for name, found in there.items():
        if stat.S_IFMT(found.st_mode) != kind:
            raise _refused(folder / name, found, f"{allowed} of the run's own")
        if name in alone and found.st_nlink > 1:
            raise UserError(f"{folder / name}: has {found.st_nlink} names (hard links); allowed: a copy of its own")
    return set(there)


def _statuses(folder: Path, names: Iterable[str]) -> dict[str, os.stat_result]:
    """Return what stands under those of the names that are there; the way to the folder is walked once for all."""
    try:
        with _holding(folder / "x") as (handle, _):
            return {name: found for name in names if (found := _status(handle, name)) is not None}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def is_file(path: Path, *, alone: bool = False) -> bool:
    """Whether a file is there, as `files_in` says of several."""
    folder, name = _named(path)
    return bool(files_in(folder, [name], [name] if alone else ()))


def is_folder(path: Path) -> bool:
    """Whether a folder is there; a link or a file in its place is refused."""
    folder, name = _named(path)
    return bool(files_in(folder, [name], folders=True))


def _named(path: Path) -> tuple[Path, str]:
    """Return the folder that holds a path, and its name there; the present folder has one only when it is spelt out."""
    path = path if path.name else Path(os.path.abspath(path))
    return path.parent, path.name


def check_run(folder: Path) -> None:
    """Refuse a run's folder in which a link stands where the run writes, before anything in it is touched."""
    in_place = (DATABASE, *(DATABASE + ending for ending in BESIDE), LEDGER)
    files_in(folder, (*in_place, LOCK, RUN_FILE, REPORT), alone=in_place)
    files_in(folder, (CHECKPOINTS, CODE, EXPORT, FIGURES, FLOWER, UPDATES), folders=True)


def refuse_links(folder: Path, remade: Iterable[str] = ()) -> None:
    """Refuse a folder in which any link stands; for folders that other programs fill, which would follow it.

    What is inside the folders that are `remade` anyway is not looked at.
    """
    if not is_folder(folder):
        return
    for here, folders, names in os.walk(folder):
        for name in (*folders, *names):
            if os.path.islink(os.path.join(here, name)):
                raise UserError(f"{os.path.join(here, name)}: is a link; allowed: what the run wrote")
        if Path(here) == folder:
            folders[:] = [name for name in folders if name not in remade]


def _open(path: Path, flags: int, *, alone: bool = False) -> int:
    is_file(path, alone=alone)
    with _holding(path) as (handle, name):
        # Not blocking: a pipe that took the file's place would be waited for.
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=handle)


def read_bytes(path: Path, longest: int | None = None, first: int = -1) -> bytes:
    """Return what a file holds, or its first bytes; one of more than `longest` bytes is refused before it is read."""
    with os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
        if longest is not None and os.fstat(file.fileno()).st_size > longest:
            raise UserError(f"{path}: longer than {longest} bytes; allowed: the file as the run wrote it")
        return file.read(first)


def open_to_append(path: Path) -> BinaryIO:
    """Open a file that only grows, made where there is none."""
    return os.fdopen(_open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, alone=True), "ab")


def open_lock(path: Path) -> BinaryIO:
    """Open a file to be locked, made where there is none; what it holds stays."""
    return os.fdopen(_open(path, os.O_RDWR | os.O_CREAT), "r+b")


def write(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file that is there whole or not at all, also after a power cut: a draft, flushed, then renamed."""
    write_all({path: content})


def write_all(contents: Mapping[Path, bytes | Iterable[bytes]]) -> None:
    """Write files so that all of them are new or, where the disk is full, all of them are as they were."""
    for path in contents:
        is_file(path)
    drafts: list[Path] = []
    try:
        for path, content in contents.items():
            drafts.append(path)
            _write_draft(path, content)
        for path in contents:
            with _holding(path) as (handle, name):
                os.replace(name + DRAFT, name, src_dir_fd=handle, dst_dir_fd=handle)
                os.fsync(handle)
    except BaseException:
        for path in drafts:
            with suppress(OSError):  # on a full disk half a file takes room that somebody needs
                remove(path.with_name(path.name + DRAFT))
        raise


def _write_draft(path: Path, content: bytes | Iterable[bytes]) -> None:
    with _holding(path, make=True) as (handle, name):
        with suppress(FileNotFoundError):
            os.unlink(name + DRAFT, dir_fd=handle)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name + DRAFT, flags, 0o666, dir_fd=handle), "wb") as file:
            for part in (content,) if isinstance(content, bytes) else content:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Remove a name; of a link the link alone, and nothing through one. One that is not there is no error."""
    with suppress(FileNotFoundError), _holding(path) as (handle, name):
        os.unlink(name, dir_fd=handle)


def make_folder(path: Path) -> None:
    """Make a folder where there is none, those above it too."""
    if not is_folder(path):
        with _holding(path, make=True) as (handle, name), suppress(FileExistsError):
            os.mkdir(name, dir_fd=handle)


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, in order; none where there is no folder."""
    if not is_folder(folder):
        return []
    with _holding(folder / "x") as (handle, _):
        return sorted(os.listdir(handle))


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


def in_bytes(count: int) -> str:
    """Write a size, short: "12 kB", "3.4 MB"."""
    for unit, length in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= length:
            return f"{count / length:.3g} {unit}"
    return f"{count} B"


# The folder for what can be made again: choices of engines, scripts of figures.


def cache_folder() -> Path:
    """Return where things are kept between runs: $STEELYARD_CACHE, else steelyard/ in the user's cache folder."""
    given = os.environ.get("STEELYARD_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steelyard"


Rows = Iterator[tuple[int, dict[str, str]]]
"""Rows of a CSV with a header: the line of the file, and the cells by column, blanks around them gone."""


def csv_rows(
    lines: Iterable[str], where: str, check: Callable[[str, list[str]], None] | None = None
) -> tuple[list[str], Rows]:
    """Return the header of a CSV and its rows; use it where columns are found by name. Blank lines are no rows.

    `check` is called with the place of the header and the columns, and refuses those that will not do.
    """
    reader = csv.reader(lines)
    filled = ([cell.strip() for cell in row] for row in reader if any(cell.strip() for cell in row))
    header = next(filled, [])
    if len(set(header)) != len(header) or "" in header:
        raise UserError(
            f"{where}, line {reader.line_num}: header {','.join(header)}; allowed: each column named, each name once"
        )
    if header and check is not None:
        check(f"{where}, line {reader.line_num}", header)

    def rows() -> Rows:
        for row in filled:
            if len(row) != len(header):
                raise UserError(
                    f"{where}, line {reader.line_num}: {len(row)} cells; allowed: {len(header)}, as in the header"
                )
            yield reader.line_num, dict(zip(header, row, strict=True))

    return header, rows()


def read_csv(path: Path, where: str) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Return the header and the rows of a CSV file with few rows, each with its line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, rows = csv_rows(file, where)
            return header, list(rows)
    except UnicodeDecodeError:
        raise UserError(f"{where} cannot be read: it is not UTF-8 text; allowed: a CSV file with a header") from None
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{where} cannot be read: {reason}; allowed: a CSV file with a header") from None
