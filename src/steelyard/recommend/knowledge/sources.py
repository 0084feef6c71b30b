"""One file of [knowledge]: its form recognised, found, and read by the reader of its form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.base.errors import UserError, listed
from steelyard.data.files import find
from steelyard.data.tables import read_text
from steelyard.recommend.knowledge import attributes, rdf, readers, table
from steelyard.recommend.knowledge.graph import Triples
from steelyard.recommend.knowledge.settings import FormatName, SourceSettings
from steelyard.recommend.knowledge.table import FeatureTable

_READS = {
    "rdf": "links",
    "triples": "links",
    "recbole": "links",
    "kgflex": "predicates",
    "map": "",
    "attributes": "columns",
}
"""The form of a file, and the further field that it reads."""


@dataclass(frozen=True)
class Source:
    """One file of [knowledge], found and recognised; `of` makes it from its settings."""

    settings: SourceSettings
    field: str
    path: Path
    format: FormatName

    @staticmethod
    def of(settings: SourceSettings, number: int) -> Source:
        """Find the file and its form; fields that this form does not read are refused."""
        field = f"knowledge.sources.{number}"
        path = find(settings.path, "a file of triples, features or attributes", field=f"path ({field}.path)")
        form = recognised(settings, path) if settings.format == "auto" else settings.format
        for name in ("links", "predicates", "columns"):
            if name == "links" and settings.entities is not None:
                continue
            if getattr(settings, name) and _READS[form] != name:
                fitting = [each for each, reads in _READS.items() if reads == name]
                raise UserError(f"{field}.{name}: given with format '{form}'; allowed with: {listed(fitting)}")
        if settings.entities is not None and (_READS[form] == "links" or settings.links is None):
            wrong = f"with format '{form}'" if settings.links is not None else "without links"
            raise UserError(
                f"{field}.entities: given {wrong}; allowed with: links, and a file of features or attributes"
            )
        if form == "kgflex" and settings.predicates is None:
            raise UserError(f"{field}.predicates: missing; format 'kgflex' needs the file predicate_mapping")
        return Source(settings, field, path, form)

    @property
    def is_graph(self) -> bool:
        """Whether the file holds triples; else it holds features."""
        return _READS[self.format] == "links"

    def linked(self, item_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return items and their entities; without links, an item's id is its entity."""
        if self.settings.links is not None:
            path = find(self.settings.links, readers.LINKS, field=f"links ({self.field}.links)")
            return readers.read_links(path)
        near = readers.link_file(self.path) if self.format == "recbole" else None
        return readers.read_links(near) if near is not None else (list(item_ids), list(item_ids))

    def triples(self) -> Triples:
        """Read a graph that is no RDF."""
        return readers.read_kg(self.path) if self.format == "recbole" else readers.read_triples(self.path)

    def table(self) -> FeatureTable:
        """Read features or attributes; those of another data set stand under the items of this one."""
        if self.settings.entities is None or self.settings.links is None:
            return self._table()
        mine = find(self.settings.links, readers.LINKS, field=f"links ({self.field}.links)")
        others = find(self.settings.entities, readers.LINKS, field=f"entities ({self.field}.entities)")
        return table.renamed(self._table(), readers.same_items(mine, others))

    def _table(self) -> FeatureTable:
        if self.format == "kgflex" and self.settings.predicates is not None:
            mapping = find(self.settings.predicates, readers.MAPPING, field=f"predicates ({self.field})")
            return readers.read_ids(self.path, mapping)
        if self.format == "map":
            return readers.read_map(self.path)
        return attributes.read_attributes(self.path, self.settings.columns)

    def names(self) -> Mapping[str, str]:
        """Return names of entities for people, where a file of them is given."""
        if self.settings.names is None:
            return {}
        path = find(self.settings.names, "a table of ids and names", field=f"names ({self.field}.names)")
        return readers.read_labels(path)


def recognised(settings: SourceSettings, path: Path) -> FormatName:
    """Find out what a file is by its name, by the fields beside it, and by its first line."""
    plain = path.name.removesuffix(".gz").removesuffix(".bz2").lower()
    if rdf.format_of(path) is not None:
        return "rdf"
    if plain.endswith(".kg"):
        return "recbole"
    if settings.predicates is not None:
        return "kgflex"
    if settings.links is not None and settings.entities is None:
        return "triples"
    if settings.columns or plain.endswith((".dat", ".item")):
        return "attributes"
    first = read_text(path, attributes.EXPECTED).splitlines()[0].split("\t")
    if len(first) > 2 and all(cell.strip().isdigit() for cell in first):
        return "map"
    return "triples" if len(first) == 3 and "://" in first[1] else "attributes"


def read_graphs(sources: Sequence[Source], start: set[str], hops: int, inverse: bool) -> list[Triples]:
    """Read the graphs among the sources, which are one: of RDF only what can be reached from `start`, over any file."""
    whole = [source.triples() for source in sources if source.is_graph and source.format != "rdf"]
    streamed = [source.path for source in sources if source.format == "rdf"]
    return [*whole, rdf.read_rdf(streamed, start, hops, inverse, whole)] if streamed else whole
