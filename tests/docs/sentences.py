"""The sentences of a page of documentation, as a reader meets them, and how many words each has."""

from __future__ import annotations

import re
from collections.abc import Iterator

MOST_WORDS = 40

_FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_NEW_PART = re.compile(r"^\s*(#|[-*+] |\d+[.)] |\||>|:   |\?\?\?|!!!|    \S|<)")
_END = re.compile(r"(?<=[.!?:;])[*_)\"”]*\s+(?=[\"“(*_]*[A-Z0-9`\[])|(?<=[.!?])[*_)\"”]*\s+(?=code\b)")


def sentences(page: str) -> Iterator[str]:
    """Yield the sentences of a page: code is one word, a link its text, a cell of a table stands for itself."""
    page = _COMMENT.sub("", _FENCE.sub("", page))
    for part in _parts(page):
        text = _LINK.sub(r"\1", _CODE.sub("code", part))
        yield from (found.strip() for found in re.split(r"(?<=[.!?])[*_)\"”]*\s+(?=\S)", text) if found.strip())


def _parts(page: str) -> Iterator[str]:
    """Yield paragraphs, items of lists and cells of tables."""
    part: list[str] = []
    for line in [*page.splitlines(), ""]:
        if line.lstrip().startswith("|"):
            yield " ".join(part)
            part = []
            yield from re.split(r"(?<!\\)\|", line)
        elif not line.strip() or _NEW_PART.match(line):
            yield " ".join(part)
            part = [line.strip().lstrip("#-*+> ")]
        else:
            part.append(line.strip())


def words(sentence: str) -> int:
    """Return how many words a sentence has; signs between words are none."""
    return sum(any(letter.isalnum() for letter in word) for word in sentence.split())


def long_sentences(page: str) -> list[str]:
    """Return the sentences with more words than a reader takes in at once."""
    return [sentence for sentence in sentences(page) if words(sentence) > MOST_WORDS]
