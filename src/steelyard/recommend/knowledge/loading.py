"""From [knowledge] to features: read the files, explore the graph, keep what is within the limits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from steelyard.data.files import State, states_of
from steelyard.recommend.interactions import Names, numbered
from steelyard.recommend.knowledge import explore, graph, table
from steelyard.recommend.knowledge.features import ItemFeatures
from steelyard.recommend.knowledge.naming import counted
from steelyard.recommend.knowledge.report import FeatureReport
from steelyard.recommend.knowledge.settings import KnowledgeSettings
from steelyard.recommend.knowledge.sieve import Limits, Sieve
from steelyard.recommend.knowledge.sources import Source, read_graphs


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
        joined = table.joined(found)
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
    walk = explore.Walk(settings.hops, left_out, settings.blocked_at == "any", settings.inverse)
    blocked.update(explore.blocked_triples(whole, np.unique(node[inside]), walk))
    for reached in explore.explore(whole, marked, walk):
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
    settings: KnowledgeSettings, joined: table.FeatureTable, items: list[str], sieve: Sieve, blocked: Counter[str]
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
