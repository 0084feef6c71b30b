"""The errors that a user can cause."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user gave: one line that names the field or file, what it held and what is allowed.

    Raise it wherever input from outside (a config, a file, an option) turns out wrong; the command line prints
    the line and exits with code 2, without a traceback.
    """


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the closest known word, or an empty string when none is close.

    Use it at the end of an error line about a misspelt name.
    """
    known = sorted(known)
    folded = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), list(folded), n=1, cutoff=0.6)
    return f" (did you mean '{folded[close[0]]}'?)" if close else ""


_LONGEST = 60


def brief(value: object, quote: str = "'") -> str:
    """Show a value in an error line: what a terminal would act on is escaped, and a very long value is cut."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) > 10**_LONGEST:
        return "a whole number of very many digits"
    text = f"{quote}{printable(value)}{quote}" if isinstance(value, str) else printable(repr(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...{quote if isinstance(value, str) else ''}"


def printable(text: str) -> str:
    """Return text with control characters written out, such as \\x1b, so that no terminal acts on them.

    Use it for every name that comes from a file or a person: owners, rules, columns.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def one_line(text: str, longest: int = 1000) -> str:
    """Return an error as the one line that a terminal shows: no control characters, the middle of a long one cut."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= longest else f"{line[: longest * 2 // 3]} ... {line[-longest // 3 :]}"


def listed(words: Iterable[str]) -> str:
    """Join names for an error line: `a, b, c`; use it for "allowed: ..." parts."""
    return ", ".join(words)
