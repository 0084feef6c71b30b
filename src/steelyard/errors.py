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


def listed(words: Iterable[str]) -> str:
    """Join names for an error line: `a, b, c`; use it for "allowed: ..." parts."""
    return ", ".join(words)
