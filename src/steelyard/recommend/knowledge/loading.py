"""From [knowledge] to features: read the files, explore the graph, keep what is within the limits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from steelyard.base.errors import UserError, counted, listed
from steelyard.base.marks import DataFile
from steelyard.base.settings import Section
from steelyard.data.files import State, find, states_of
from steelyard.data.tables import read_text
from steelyard.recommend.interactions import Names, numbered
from steelyard.recommend.knowledge import graph, rdf, readers
from steelyard.recommend.knowledge.features import FeatureReport, ItemFeatures, Limits, Sieve, expanded
from steelyard.recommend.knowledge.graph import Triples
from steelyard.recommend.knowledge.readers import FeatureTable

FormatName = Literal["auto", "rdf", "triples", "kgflex", "map", "attributes"]
BLOCKED = (
    *("dbo:wikiPageWikiLink", "owl:sameAs", "rdf:type", "gold:hypernym", "rdfs:seeAlso", "dbp:wordnet_type"),
    *("dbo:wikiPageExternalLink", "dbo:thumbnail", "prov:wasDerivedFrom", "dbp:wikiPageUsesTemplate"),
)
"""The predicates that the thesis leaves out (§6.5.2): they say nothing of an item's content."""


class SourceSettings(Section):
    """[[knowledge.sources]]: one file of a graph, of features or of attributes; several files are joined."""

    path: Annotated[Path, DataFile()]
    """The file, plain or packed; relative paths are looked for here, in STEELYARD_DATA, ../shared/data."""
    format: FormatName = "auto"
    """What the file is: RDF, triples as TSV, KGFlex's ids, a map of ids, attributes; "auto": by its name."""

    links: Annotated[Path, DataFile()] | None = None
    """Which entity of the graph each item is: item in the first column, entity in the last; default: ids are equal."""
    entities: Annotated[Path, DataFile()] | None = None
    """For files of features or attributes of another data set: which entity each of *its* items is, as `links` says it
    of yours; items of the same entity share their features."""
    predicates: Annotated[Path, DataFile()] | None = None
    """For "kgflex": the file predicate_mapping."""
    names: Annotated[Path, DataFile()] | None = None
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


_READS = {
    "rdf": "links",
    "triples": "links",
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
        return list(item_ids), list(item_ids)

    def table(self) -> FeatureTable:
        """Read features or attributes; those of another data set stand under the items of this one."""
        if self.settings.entities is None or self.settings.links is None:
            return self._table()
        mine = find(self.settings.links, readers.LINKS, field=f"links ({self.field}.links)")
        others = find(self.settings.entities, readers.LINKS, field=f"entities ({self.field}.entities)")
        return readers.renamed(self._table(), readers.same_items(mine, others))

    def _table(self) -> FeatureTable:
        if self.format == "kgflex" and self.settings.predicates is not None:
            mapping = find(self.settings.predicates, readers.MAPPING, field=f"predicates ({self.field})")
            return readers.read_ids(self.path, mapping)
        if self.format == "map":
            return readers.read_map(self.path)
        return readers.read_attributes(self.path, self.settings.columns)

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
    if settings.predicates is not None:
        return "kgflex"
    if settings.links is not None and settings.entities is None:
        return "triples"
    if settings.columns or plain.endswith((".dat", ".item")):
        return "attributes"
    first = read_text(path, readers.EXPECTED).splitlines()[0].split("\t")
    if len(first) > 2 and all(cell.strip().isdigit() for cell in first):
        return "map"
    return "triples" if len(first) == 3 and "://" in first[1] else "attributes"


def read_graphs(sources: Sequence[Source], start: set[str], hops: int, inverse: bool) -> list[Triples]:
    """Read the graphs among the sources, which are one: of RDF only what can be reached from `start`, over any file."""
    whole = [readers.read_triples(source.path) for source in sources if source.is_graph and source.format != "rdf"]
    streamed = [source.path for source in sources if source.format == "rdf"]
    return [*whole, rdf.read_rdf(streamed, start, hops, inverse, whole)] if streamed else whole


@dataclass(frozen=True, eq=False)
class Loaded:
    """The features of a data set's items, and the account of how they came about."""

    features: ItemFeatures
    report: FeatureReport


def load_features(settings: KnowledgeSettings, item_ids: Sequence[str] | Names) -> ItemFeatures:
    """Return the features of these items, rows in their order; read once for equal settings, files and items."""
    return load(settings, item_ids).features


def load(settings: KnowledgeSettings, item_ids: Sequence[str] | Names) -> Loaded:
    """Return the features of these items with the account; use it where the account is shown."""
    files = [path for s in settings.sources for path in (s.path, s.links, s.entities, s.predicates, s.names)]
    described = json.dumps(settings.model_dump(mode="json"))
    return _load(described, tuple(str(item) for item in item_ids), states_of(files))


@lru_cache(maxsize=4)
def _load(described: str, item_ids: tuple[str, ...], states: tuple[State, ...]) -> Loaded:
    """Read what [knowledge] describes; `states` are of its files, so that edited ones are read again."""
    settings = KnowledgeSettings.model_validate_json(described)
    sources = [Source.of(each, number) for number, each in enumerate(settings.sources)]
    linked = [source.linked(item_ids) for source in sources if source.is_graph]
    found = [source.table() for source in sources if not source.is_graph]
    known = [item for items, _ in linked for item in items]
    known += [item for each in found for item in np.unique(np.asarray(each.item, dtype=object)).tolist()]
    items = list(dict.fromkeys([*item_ids, *(known if settings.counted == "source" else ())]))
    sieve = Sieve(len(item_ids), Limits(settings.min_items, settings.max_share, settings.max_features))
    notes: list[str] = []
    blocked: Counter[str] = Counter()
    labels: dict[str, str] = {}
    there: set[str] = set()
    if linked:
        start = {entity for _, entities in linked for entity in entities}
        whole = graph.build(read_graphs(sources, start, settings.hops, settings.inverse))
        notes.append(f"graph: {whole}")
        labels |= whole.labels
        there |= _explore(settings, whole, linked, items, sieve, blocked)
    if found:
        joined = readers.joined(found)
        sizes = (counted(len(set(joined.item)), "item"), counted(len(joined.chains), "feature"))
        notes.append(f"table: {counted(len(joined), 'pair')} of {sizes[0]} and {sizes[1]}")
        there |= set(np.unique(np.asarray(joined.item, dtype=object)).tolist())
        _take(settings, joined, items, sieve, blocked)
    labels |= {name: label for source in sources for name, label in source.names().items()}
    features, counts = sieve.result(labels)
    described_items = int((features.per_item() > 0).sum())
    report = FeatureReport(
        notes, len(item_ids), len(there & set(item_ids)), described_items, counts, dict(sorted(blocked.items()))
    )
    return Loaded(features, report)


def _explore(
    settings: KnowledgeSettings,
    whole: graph.Graph,
    linked: Sequence[tuple[list[str], list[str]]],
    items: list[str],
    sieve: Sieve,
    blocked: Counter[str],
) -> set[str]:
    """Hand the graph's features to the sieve; return the items that the graph has."""
    from scipy import sparse  # For speed of start: much of the package needs no SciPy.

    row = numbered(np.array([item for names, _ in linked for item in names], dtype=object), items)
    node = numbered(np.array([entity for _, names in linked for entity in names], dtype=object), whole.nodes)
    inside = (row >= 0) & (node >= 0)
    ones = np.ones(int(inside.sum()), dtype=bool)
    marked = sparse.coo_array((ones, (row[inside], node[inside])), shape=(len(items), len(whole.nodes))).tocsr()
    left_out = settings.blocked_iris()
    walk = graph.Walk(settings.hops, left_out, settings.blocked_at == "any", settings.inverse)
    blocked.update(graph.blocked_triples(whole, np.unique(node[inside]), walk))
    for reached in graph.explore(whole, marked, walk):
        chains = [reached.chain] * len(reached.objects)
        sieve.add(chains, _Named(whole.nodes, reached.objects), reached.matrix)
    return {items[each] for each in np.unique(row[inside]).tolist()}


class _Named(Sequence[str]):
    """The texts of some nodes, looked up only where they are asked for: most features are dropped unnamed."""

    def __init__(self, nodes: list[str], codes: np.ndarray) -> None:
        self._nodes, self._codes = nodes, codes

    def __len__(self) -> int:
        return len(self._codes)

    def __getitem__(self, index: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._nodes[int(self._codes[index])]


def _take(
    settings: KnowledgeSettings, joined: readers.FeatureTable, items: list[str], sieve: Sieve, blocked: Counter[str]
) -> None:
    """Hand a table's features to the sieve, less those that are blocked or further away than asked."""
    from scipy import sparse  # For speed of start: much of the package needs no SciPy.

    left_out = settings.blocked_iris()
    steps = 1 if settings.blocked_at == "first" else None
    hit = [next((step for step in chain[:steps] if step in left_out), "") for chain in joined.chains]
    times = np.bincount(joined.feature, minlength=len(joined.chains)).tolist()
    for name, count in zip(hit, times, strict=True):
        if name:
            blocked[name] += count
    stays = np.array([not name and len(c) <= settings.hops for name, c in zip(hit, joined.chains, strict=True)], bool)
    columns = np.flatnonzero(stays)
    number = np.cumsum(stays) - 1
    row = numbered(np.asarray(joined.item, dtype=object), items)
    pairs = (row >= 0) & stays[joined.feature]
    ones = np.ones(int(pairs.sum()), dtype=bool)
    shape = (len(items), len(columns))
    matrix = sparse.coo_array((ones, (row[pairs], number[joined.feature[pairs]])), shape=shape).tocsc()
    sieve.add(
        [joined.chains[each] for each in columns.tolist()], [joined.objects[each] for each in columns.tolist()], matrix
    )
