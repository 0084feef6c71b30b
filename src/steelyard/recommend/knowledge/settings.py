"""[knowledge]: what is known of items, where it stands, and which of it becomes features."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from steelyard.base.settings import Section
from steelyard.recommend.knowledge.naming import expanded

FormatName = Literal["auto", "rdf", "triples", "recbole", "kgflex", "map", "attributes"]
BLOCKED = (
    *("dbo:wikiPageWikiLink", "owl:sameAs", "rdf:type", "gold:hypernym", "rdfs:seeAlso", "dbp:wordnet_type"),
    *("dbo:wikiPageExternalLink", "dbo:thumbnail", "prov:wasDerivedFrom", "dbp:wikiPageUsesTemplate"),
)
"""The predicates that the thesis leaves out (§6.5.2): they say nothing of an item's content."""


class SourceSettings(Section):
    """[[knowledge.sources]]: one file of a graph, of features or of attributes; several files are joined."""

    path: Path
    """The file, plain or packed; relative paths are looked for here, in STEELYARD_DATA, ../shared/data."""
    format: FormatName = "auto"
    """What the file is: RDF, triples as TSV, RecBole, KGFlex's ids, a map of ids, attributes; "auto": by its name."""
    links: Path | None = None
    """Which entity of the graph each item is: item in the first column, entity in the last; default: ids are equal."""
    entities: Path | None = None
    """For files of features or attributes of another data set: which entity each of *its* items is, as `links` says it
    of yours; items of the same entity share their features."""
    predicates: Path | None = None
    """For "kgflex": the file predicate_mapping."""
    names: Path | None = None
    """Names of entities or objects for people: id in the first column, name in the last."""
    columns: dict[str, str | int] = Field(default_factory=dict)
    """For "attributes": column of each attribute (header name, or number from 1), and of the `item`."""


class KnowledgeSettings(Section):
    """[knowledge]: features of items from a knowledge graph or from plain attributes, and which of them are kept."""

    sources: tuple[SourceSettings, ...] = Field(min_length=1)
    """The files; graphs among them are joined into one."""
    hops: int = Field(default=2, ge=1, le=4)
    """How far the graph is explored from an item: 1 or 2 in the thesis."""
    inverse: bool = False
    """Whether triples are followed from object to subject too: film, actor, other films of hers."""
    blocked: tuple[str, ...] = BLOCKED
    """Predicates that are left out, as IRIs, as prefixed names such as dbo:thumbnail, or as a file's own ids."""
    blocked_at: Literal["first", "any"] = "first"
    """Where a blocked predicate counts: at the first hop, as in the thesis, or at any."""
    min_items: int = Field(default=10, ge=1)
    """Features of fewer items are dropped; the thesis' figures came of 11."""
    max_share: float = Field(default=1.0, gt=0, le=1)
    """Features of more than this share of the items are dropped."""
    max_features: int | None = Field(default=None, ge=1)
    """At most so many features of each number of hops, those of the most items; default: all."""
    counted: Literal["data", "source"] = "data"
    """Over which items features are counted: those of the data set, or all of the sources, as the thesis' code does."""

    def blocked_iris(self) -> frozenset[str]:
        """Return the blocked predicates in full."""
        return frozenset(expanded(name) for name in self.blocked)
