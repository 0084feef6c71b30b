"""Text as rows of tokens of one length: characters by a fixed alphabet, words by their hash.

Both need no vocabulary that clients would have to agree on, so that nodes read text alike without sharing any of it.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

PADDING, UNKNOWN, FIRST = 0, 1, 2
"""Tokens before the text, of characters beyond the alphabet, and the first that stands for something."""
ALPHABET = "".join(sorted("\n !\"&'(),-.:;>?[]}" + string.digits + string.ascii_letters))
"""The 80 characters of LEAF's Shakespeare, as its labels are numbered."""
_WORDS = re.compile(r"[\w']+|[^\w\s]")


def characters(texts: Sequence[str], length: int) -> NDArray[np.int64]:
    """Return one token for each character, [texts, length]: the last ones of a longer text, padding before a shorter.

    Use it where the next character is to be predicted.
    """
    known = {letter: number for number, letter in enumerate(ALPHABET, FIRST)}
    return _rows([[known.get(letter, UNKNOWN) for letter in text[-length:]] for text in texts], length)


def words(texts: Sequence[str], length: int, vocabulary: int) -> NDArray[np.int64]:
    """Return one token below `vocabulary` for each of the first words, [texts, length], with padding before them.

    Words of one hash share a token (Weinberger et al. 2009). Use it where whole texts are classified.
    """
    found = ([_hashed(word, vocabulary) for word in _WORDS.findall(text.lower())[:length]] for text in texts)
    return _rows(list(found), length)


@lru_cache(maxsize=1 << 20)
def _hashed(word: str, vocabulary: int) -> int:
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return FIRST + int.from_bytes(digest, "little") % (vocabulary - FIRST)


def _rows(tokens: Sequence[Sequence[int]], length: int) -> NDArray[np.int64]:
    table = np.full((len(tokens), length), PADDING, dtype=np.int64)
    for row, mine in zip(table, tokens, strict=True):
        if mine:
            row[length - len(mine) :] = mine
    return table
