"""RDF through pyoxigraph: N-Triples, N-Quads, Turtle and TriG, plain, .gz or .bz2.

A dump may be far larger than memory: it is read as a stream, once for each hop, and of each pass only the triples
stay that begin where the last pass arrived. It needs the extra: pip install 'steelyard[knowledge]'.
"""

from __future__ import annotations

import bz2
import gzip
import io
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from steelyard.base.errors import UserError, brief, listed
from steelyard.recommend.knowledge.features import LABELS
from steelyard.recommend.knowledge.graph import Triples

FORMATS = {".nt": "N_TRIPLES", ".nq": "N_QUADS", ".ttl": "TURTLE", ".trig": "TRIG"}
"""The ends of names by which the form of a file is known; .gz or .bz2 may follow."""
PACKED: Mapping[str, Callable[[Path], AbstractContextManager[Any]]] = {".gz": gzip.open, ".bz2": bz2.open}
_LANGUAGES = {"en": 0, None: 1}
Statement = tuple[str, str, str, str | None]
"""Subject, predicate, object, and the language of the object if it is text in one."""


def format_of(path: Path) -> str | None:
    """Return the form of RDF that a file's name gives, None if it gives none."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in PACKED]
    return FORMATS.get(suffixes[-1]) if suffixes else None


def read_rdf(
    paths: Path | Sequence[Path],
    start: Collection[str] | None = None,
    hops: int = 1,
    inverse: bool = False,
    beside: Sequence[Triples] = (),
) -> Triples:
    """Read the triples that can be reached from the entities in `start` in so many hops; all without `start`.

    Several files are one graph: a chain may lead from one into another, or over the triples `beside` them, which are
    not returned. Blank nodes of different files are different. With `inverse`, triples are followed from object to
    subject too. Names of entities (rdfs:label, English before others) become labels, not triples.
    """
    files = _forms([paths] if isinstance(paths, Path) else paths)
    # A triple that is met again, in another pass or file, is the same one.
    kept: dict[tuple[str, str, str], None] = {}
    frontier, reached, labelled = None if start is None else set(start), set(start or ()), False
    for _ in range(1 if start is None else hops):
        found: set[str] = set()
        for subject, predicate, value, _language in _streams(files):
            if predicate in LABELS:
                labelled = True
            elif frontier is None or subject in frontier or (inverse and value in frontier):
                kept[subject, predicate, value] = None
                found.update((subject, value))
        if frontier is not None:
            found |= _led_to(beside, frontier, inverse)
        frontier = found - reached
        reached |= found
        if not frontier:
            break
    subjects, predicates, objects = zip(*kept, strict=True) if kept else ((), (), ())
    named = _labels(files, reached.union(predicates)) if labelled else {}
    return Triples(list(subjects), list(predicates), list(objects), named)


def _forms(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return files with the form of RDF that their names give."""
    found: list[tuple[Path, str]] = []
    for path in paths:
        form = format_of(path)
        if form is None:
            raise UserError(f"{path}: no known form of RDF; allowed: {listed(FORMATS)}, plain or with .gz or .bz2")
        found.append((path, form))
    return found


def _led_to(beside: Sequence[Triples], frontier: Collection[str], inverse: bool) -> set[str]:
    """Return where triples that are in memory already lead from these entities."""
    found: set[str] = set()
    for triples in beside:
        for subject, value in zip(triples.subjects, triples.objects, strict=True):
            if subject in frontier:
                found.add(value)
            if inverse and value in frontier:
                found.add(subject)
    return found


def _labels(files: Sequence[tuple[Path, str]], wanted: Collection[str]) -> dict[str, str]:
    """Return the names of these entities: English before text without a language, before any other language."""
    found: dict[str, tuple[int, str]] = {}
    for subject, predicate, value, language in _streams(files):
        if predicate in LABELS and subject in wanted and value.strip():
            rank = _LANGUAGES.get(language, 2)
            if subject not in found or rank < found[subject][0]:
                found[subject] = (rank, value.strip())
    return {subject: name for subject, (_, name) in found.items()}


def _streams(files: Sequence[tuple[Path, str]]) -> Iterator[Statement]:
    """Yield the triples of all files, one file after the other."""
    for number, (path, form) in enumerate(files):
        # The first file's blank nodes have plain numbers; a node of the same number in another file is another one.
        yield from _stream(path, form, f"{number}." if number else "")


def _stream(path: Path, form: str, own: str = "") -> Iterator[Statement]:
    library = _library()
    blanks: dict[str, str] = {}

    def text(term: Any) -> str:
        if isinstance(term, library.BlankNode):
            # The library draws names for those that have none; numbered as they come, each pass names them alike.
            return blanks.setdefault(term.value, f"_:{own}{len(blanks)}")
        if isinstance(term, library.Triple):
            return str(term)
        return term.value

    try:
        with PACKED.get(path.suffix.lower(), io.FileIO)(path) as content:
            for quad in library.parse(input=content, format=getattr(library.RdfFormat, form), lenient=True):
                value = quad.object
                language = value.language if isinstance(value, library.Literal) else None
                yield text(quad.subject), quad.predicate.value, text(value), language
    except SyntaxError as error:
        reason = " ".join(str(error.msg).split())
        raise UserError(f"{path}: {brief(reason, '')}; expected RDF as its name tells ({form})") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: cannot be read ({brief(reason, '')}); expected a whole file of RDF") from None


def _library() -> Any:
    try:
        import pyoxigraph  # For speed of start, and in an extra.
    except ImportError:
        raise UserError("knowledge: RDF needs pyoxigraph; install it with pip install 'steelyard[knowledge]'") from None
    return pyoxigraph
