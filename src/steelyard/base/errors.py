"""The errors that a user can cause, and stops by a user."""

from __future__ import annotations

import difflib
import os
import signal
import warnings
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast


class UserError(ValueError):
    """A mistake in what the user gave: one line that names the field or file, what it held and what is allowed.

    Raise it wherever input from outside (a config, a file, an option) turns out wrong; the command line prints
    the line and exits with code 2, without a traceback. Whatever names and values it holds, it is one line of
    printable characters.

        >>> steelyard.UserError("rounds.count: got 0; allowed: 1 or more")
        UserError('rounds.count: got 0; allowed: 1 or more')
    """

    def __init__(self, line: str = "") -> None:
        super().__init__(one_line(str(line)))


class MachineError(UserError):
    """What this machine lacks: room on the disk, a file of data, another process of the run.

    Raise it where no idea that is being tried can be the cause, so that none is blamed for it.
    """


@contextmanager
def told_as(what: str, allowed: str = "", *, kind: type[UserError] = UserError) -> Generator[None]:
    """Tell in one line what the system refuses inside: `what` could not be done, why, and what is allowed.

        with told_as(f"{path}: cannot be written", "a writable folder"):

    Use it around every reading and writing of files that a user named.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}{f'; allowed: {allowed}' if allowed else ''}") from error


_deprecated: set[str] = set()
"""What was warned of already."""


def deprecated(name: str, instead: str, gone_in: str) -> None:
    """Warn, once for each name, that a public name goes: call it where the old name still works as before.

    A `FutureWarning`, since Python hides those for developers from whoever runs a script.
    """
    if name not in _deprecated:
        _deprecated.add(name)
        # The level of whoever used the name: above this function and the one that calls it.
        warnings.warn(f"{name} is deprecated: use {instead}; it goes in {gone_in}", FutureWarning, stacklevel=3)


class Stopped(KeyboardInterrupt):
    """The user stopped a run that had begun; its folder holds what is done.

    `steelyard resume` goes on from it, or with `again` the same command with this folder as its `--out`.
    """

    def __init__(self, folder: Path, *, again: bool = False) -> None:
        super().__init__(str(folder))
        self.folder, self.again = folder, again


@contextmanager
def ends_as_interrupted() -> Generator[None]:
    """Being asked to end (SIGTERM, as a page or a service manager sends it) stops what is done inside as Ctrl-C does.

    Use it around work that tidies up when it is interrupted.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def expect(where: str, value: object, kinds: type | tuple[type, ...], allowed: str) -> None:
    """Refuse a value of another kind; true and false are no numbers. Use it where users call from Python."""
    number = isinstance(value, bool) and bool not in (kinds if isinstance(kinds, tuple) else (kinds,))
    if number or not isinstance(value, kinds):
        raise UserError(f"{where}: got {brief(value)}; allowed: {allowed}")


def path_of(value: object, where: str, allowed: str = "the path of a folder") -> Path:
    """Return a path that a user gave in Python, as text or as a path; what no file system can hold is refused."""
    expect(where, value, (str, os.PathLike), allowed)
    path = Path(cast("str", value))
    if "\0" in str(path) or any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise UserError(f"{where}: got {brief(str(path))}; allowed: {allowed}")
    return path


def texts_of(value: object, where: str, allowed: str) -> tuple[str, ...]:
    """Return a list of texts that a user gave in Python; one text alone is a slip and is refused."""
    expect(where, value, (list, tuple), allowed)
    found = cast("Sequence[object]", value)
    for text in found:
        expect(where, text, str, allowed)
    return cast("tuple[str, ...]", tuple(found))


def nearest(word: object, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the closest known word, or an empty string when none is close.

    Use it at the end of an error line about a misspelt name.
    """
    known = sorted(known)
    folded = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(word).lower(), list(folded), n=1, cutoff=0.6)
    return f" (did you mean '{folded[close[0]]}'?)" if close else ""


def writable(folder: Path, option: str) -> Path:
    """Return a folder in which one may write, made or not; anything else is refused before any work is done.

    Use it for every folder that a user asks a command to make.
    """
    try:
        # The nearest folder that there is says whether the rest can be made.
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        folder.stat() if there == folder else (folder / "x").exists()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{option}: {brief(str(folder))} cannot be a folder ({reason}); allowed: a folder") from None
    if not there.is_dir():
        raise UserError(f"{option}: {brief(str(there))} is a file; allowed: a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{option}: {brief(str(there))} cannot be written to; allowed: a folder in which you may write")
    return folder


def own_folder(folder: Path, option: str) -> Path:
    """Return a folder in which one may write and that is not the one that the user is in.

    Use it where a command fills a folder of its own.
    """
    if folder == Path():
        # An empty name is the same path as ".".
        raise UserError(f"{option}: got nothing or the working folder; allowed: a folder of its own")
    return writable(folder, option)


def empty_folder(folder: Path, option: str, keeps: Collection[str] = (), allowed: str = "a new folder") -> Path:
    """Return a folder of its own that is not there yet, or holds nothing but what it `keeps`.

    Use it where a command fills a folder, so that nothing of the user's is mixed with what it writes, or written over.
    """
    own_folder(folder, option)
    with told_as(f"{option}: {brief(str(folder))} cannot be read", allowed):
        if folder.exists() and any(entry.name not in keeps for entry in folder.iterdir()):
            raise UserError(f"{option}: {folder} is not empty; allowed: {allowed}")
    return folder


def new_file(path: Path, option: str = "--out") -> None:
    """Refuse a path but that of a file that is not there yet, in a folder in which one may write.

    Use it for every file that a command writes for the user, before the work is done, so that nothing is overwritten.
    """
    if not path.name:
        raise UserError(f"{option}: got {brief(str(path))}; allowed: a new file")
    writable(path.parent, option)
    if not path.parent.is_dir():
        raise UserError(f"{option}: there is no folder {brief(str(path.parent))}; allowed: a file in one that exists")
    with told_as(f"{option}: {brief(str(path))} cannot be a file", "a new file"):
        there = path.exists()
    if there:
        raise UserError(f"{option}: {brief(str(path))} exists already; allowed: a new file")


_LONGEST = 60


def brief(value: object, quote: str = "'") -> str:
    """Show a value in an error line: what a terminal would act on is escaped, and a very long value is cut."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) > 10**_LONGEST:
        return "a whole number of very many digits"
    text = f"{quote}{printable(value)}{quote}" if isinstance(value, str) else printable(repr(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 2 :]}"


def printable(text: str) -> str:
    """Return text with control characters written out, such as \\x1b, so that no terminal acts on them.

    Use it for every name that comes from a file or a person: owners, rules, columns.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def printable_all(document: Any) -> Any:
    """Return a document with all its texts as a terminal may show them: control characters are written out."""
    if isinstance(document, str):
        return printable(document)
    if isinstance(document, Mapping):
        pairs = cast("Mapping[Any, Any]", document)
        return {printable_all(key): printable_all(inner) for key, inner in pairs.items()}
    return [printable_all(inner) for inner in cast("list[Any]", document)] if isinstance(document, list) else document


_FORMULA = tuple("=+-@＝＋－＠|")
"""Signs, also in their wide forms, with which a spreadsheet begins a formula or a command."""
_BLANK = tuple("\t\r\n\v\f\0")
"""Blanks that no name of ours begins with; some spreadsheets take a text after them for a formula."""


def no_formula(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula; use it for every text that goes into a CSV file.

    Spreadsheets look past blanks for a formula's first sign, and names and reasons come from other people's machines.
    """
    first = next((letter for letter in text if not letter.isspace() and letter.isprintable()), "")
    return f"'{text}" if first in _FORMULA or text[:1] in _BLANK else text


def one_line(text: str) -> str:
    """Return an error as the one line that a terminal shows: no control characters, the middle of a long one cut."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= 1000 else f"{line[:666]} ... {line[-333:]}"


def fault(error: BaseException) -> str:
    """Return an error of a user's code in one line: its kind and what it says."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def in_words(federation: str) -> str:
    """Return a federation's name as a line for people has it: "fedavg#101", of several seeds, is "fedavg, seed 101"."""
    return federation.replace("#", ", seed ")


def listed(words: Iterable[str]) -> str:
    """Join names for an error line: `a, b, c`; use it for "allowed: ..." parts."""
    return ", ".join(words)


def first_names(names: Sequence[str], most: int = 5) -> str:
    """Return names for a line that stays short: "a, b, c and 7 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def counted(count: int, word: str) -> str:
    """Return a number with its noun: "1 triple", "2,000 triples"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def without_controls(text: str, instead: str = "?") -> str:
    """Return text from outside with everything that a terminal would not print as a letter put as `instead`."""
    return "".join(letter if letter.isprintable() else instead for letter in text)
