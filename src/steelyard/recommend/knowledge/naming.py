"""Names that people can read: the words at the end of an IRI, and prefixes for the vocabularies that graphs use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import unquote

PREFIXES: Mapping[str, str] = {
    "dbo": "http://dbpedia.org/ontology/",
    "dbp": "http://dbpedia.org/property/",
    "dbr": "http://dbpedia.org/resource/",
    "dct": "http://purl.org/dc/terms/",
    "dc": "http://purl.org/dc/elements/1.1/",
    "foaf": "http://xmlns.com/foaf/0.1/",
    "gold": "http://purl.org/linguistics/gold/",
    "owl": "http://www.w3.org/2002/07/owl#",
    "prov": "http://www.w3.org/ns/prov#",
    "rdf": "http://www.w3.org/1999/02/22-rdf-syntax-ns#",
    "rdfs": "http://www.w3.org/2000/01/rdf-schema#",
    "schema": "http://schema.org/",
    "skos": "http://www.w3.org/2004/02/skos/core#",
    "wd": "http://www.wikidata.org/entity/",
    "wdt": "http://www.wikidata.org/prop/direct/",
}
"""Prefixes that may stand in settings, as in dbo:director."""

LABELS = frozenset({PREFIXES["rdfs"] + "label", PREFIXES["skos"] + "prefLabel"})
"""Predicates that name an entity: they make names, never features."""
INVERSE = "⁻¹"
"""Follows a predicate that is walked from its object to its subject."""
ARROW = " → "


def expanded(name: str) -> str:
    """Return the full IRI of a prefixed name such as dbo:director; anything else as it is."""
    prefix, colon, rest = name.partition(":")
    return PREFIXES[prefix] + rest if colon and prefix in PREFIXES and not rest.startswith("//") else name


def prefixed(iri: str) -> str:
    """Return an IRI in its short form where its vocabulary is known: dbo:director; anything else as it is."""
    for prefix, base in PREFIXES.items():
        if iri.startswith(base):
            return f"{prefix}:{iri[len(base) :]}"
    return iri


def words(text: str) -> str:
    """Return the last part of an IRI as words, "Steven Spielberg"; text that is no IRI stays as it is."""
    if "://" not in text:
        return text
    last = text.rstrip("/#").replace("#", "/").rsplit("/", 1)[-1]
    # A percent sign may hide bytes that are no text; those are replaced.
    return unquote(last, errors="replace").replace("_", " ").strip() or text


def distinct(names: Iterable[str], labels: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a readable form of each name: its label, else its words; where two would read the same, more of both."""
    known = labels or {}
    names = list(dict.fromkeys(names))
    short = {name: known.get(name) or words(name) for name in names}
    times = Counter(short.values())
    return {name: short[name] if times[short[name]] == 1 else prefixed(name) for name in names}


def readable(
    chains: Sequence[tuple[str, ...]], objects: Sequence[str], labels: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return each feature ⟨ρ, ω⟩ in words: "director → birthPlace: Cincinnati"."""
    steps = distinct((step.removesuffix(INVERSE) for chain in chains for step in chain), labels)
    ends = distinct(objects, labels)
    worded = {chain: ARROW.join(_step(step, steps) for step in chain) for chain in dict.fromkeys(chains)}
    return tuple(f"{worded[chain]}: {ends[end]}" for chain, end in zip(chains, objects, strict=True))


def _step(step: str, names: Mapping[str, str]) -> str:
    return names[step.removesuffix(INVERSE)] + (INVERSE if step.endswith(INVERSE) else "")


def counted(count: int, word: str) -> str:
    """Return a number with its noun: "1 triple", "2,000 triples"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
