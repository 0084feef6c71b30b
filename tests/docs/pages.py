"""The pages of documentation: the programs of docs/ that make some, and their sentences as a reader meets them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType

from tests.warm import ROOT

MOST_WORDS = 40

_FENCE = re.compile(r"^( *)```.*?^\1```$|<!--.*?-->", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_NEW_PART = re.compile(r"^\s*(#|[-*+] |\d+[.)] |\||>|:   |\?\?\?|!!!|    \S|<)")


@cache
def beside(name: str) -> ModuleType:
    """Return a program of docs/, which finds the others there as docs/build.py does."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(ROOT / "docs"))


@cache
def made_pages() -> dict[str, str]:
    """Return the pages that docs/generated.py makes from the code, by path."""
    return beside("generated").pages()


@cache
def written_pages() -> dict[str, str]:
    """Return all pages that people write, by path, without the list of changes."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def long_sentences(page: str) -> list[str]:
    """Return the sentences with more words than a reader takes in at once; code is one word, a link its text."""
    return [sentence for sentence in sentences(page) if sum(map(_is_word, sentence.split())) > MOST_WORDS]


def sentences(page: str) -> Iterator[str]:
    """Yield the sentences of paragraphs, items of lists and cells of tables."""
    for part in _parts(_FENCE.sub("", page)):
        text = _LINK.sub(r"\1", _CODE.sub("code", part))
        yield from (found.strip() for found in re.split(r"(?<=[.!?])[*_)\"”]*\s+(?=\S)", text) if found.strip())


def _is_word(text: str) -> bool:
    return any(letter.isalnum() for letter in text)


def _parts(page: str) -> Iterator[str]:
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
