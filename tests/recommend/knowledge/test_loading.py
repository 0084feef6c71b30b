"""From [knowledge] to features: every form of file, the limits, the account, the matrix and its names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import CommandLine
from tests.kit import assert_refused

from steelyard.base.settings import validated
from steelyard.recommend.interactions import read
from steelyard.recommend.knowledge.features import build, distinct, expanded, prefixed, readable, words
from steelyard.recommend.knowledge.loading import KnowledgeSettings, Loaded, load

RDF_TYPE = "http://www.w3.org/1999/02/22-rdf-syntax-ns#type"
TRIPLES = f"""e:a	http://e/director	e:kubrick
e:b	http://e/director	e:kubrick
e:c	http://e/director	e:mann
e:kubrick	http://e/born	e:usa
e:mann	http://e/born	e:usa
e:a	{RDF_TYPE}	e:Film
e:b	{RDF_TYPE}	e:Film
"""
FILES = {
    "t.tsv": TRIPLES,
    "l.tsv": "1\tFilm A\te:a\n2\tFilm B\te:b\n3\tFilm C\te:c\n9\tUnknown\te:z\n",
    "movies.dat": "1::A::War|Drama\n2::B::War\n4::D::War\n",
    "map.tsv": "1\t10\t11\n2\t10\t12\n7\t11\t12\n",
    "names.tsv": "10\tStanley Kubrick\n",
    "f.tsv": "1\t0\t5\n1\t1\t6\n2\t2\t7\n",
    "p.tsv": "http://e/a\t0\t1\nhttp://e/a~http://e/b\t1\t2\nhttp://e/c~http://e/a\t2\t2\n",
    # Item 1 is the entity e:a, which the map calls 7; of the rest of the map only 2 is linked, as both b and c.
    "theirs.tsv": "7\te:a\n2\te:b\n2\te:c\n1\te:elsewhere\n",
}
GRAPH = {"path": "t.tsv", "links": "l.tsv"}
CHAINS = {"path": "f.tsv", "predicates": "p.tsv"}
WAR, KUBRICK, MANN, USA = "genre: War", "director: e:kubrick", "director: e:mann", "director → born: e:usa"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(**fields: Any) -> KnowledgeSettings:
    return validated(KnowledgeSettings, fields, "test")


def loaded(items: str, *sources: dict[str, Any], **fields: Any) -> Loaded:
    return load(settings(sources=sources, **{"min_items": 1, **fields}), items.split())


def test_a_graph_gives_features_of_both_hops_and_an_account() -> None:
    found = loaded("3 1 2 4", GRAPH, min_items=2)
    assert found.features.names == (KUBRICK, USA)
    assert found.features.matrix.toarray().tolist() == [[0, 1], [1, 1], [1, 1], [0, 0]]
    assert found.features.hops.tolist() == [1, 2]
    assert found.report.lines() == [
        "graph: 7 triples, 7 nodes, 3 predicates",
        "blocked: rdf:type, 2 times",
        "1 hop: 2 found, dropped: 1 rare, kept: 1 in 2 pairs",
        "2 hops: 1 found, dropped: none, kept: 1 in 3 pairs",
        "items: 4, known to the sources: 3, with features: 3",
    ]
    assert found.features.names_of(1) == [KUBRICK, USA]


@pytest.mark.parametrize(
    ("items", "sources", "fields", "names"),
    [
        # Files are joined, and ids may be entities.
        ("1 2 3", [GRAPH, {"path": "movies.dat"}], {"min_items": 2, "hops": 1}, (WAR, KUBRICK)),
        ("e:a", [{"path": "t.tsv"}], {"hops": 1, "blocked": ()}, (KUBRICK, "type: e:Film")),
        # Limits on how many items have a feature, and on the features; of equal ones the first in order stays.
        ("1 2 3", [GRAPH], {"hops": 1, "max_share": 0.5}, (MANN,)),
        ("1 2 3", [GRAPH], {"hops": 1, "max_features": 1}, (KUBRICK,)),
        # Counting over the data or over the source; a feature that only items outside of the data have is none.
        ("1", [{"path": "map.tsv"}], {"min_items": 2, "counted": "source"}, ("feature: 10", "feature: 11")),
        ("1 2", [{"path": "map.tsv", "names": "names.tsv"}], {"min_items": 2}, ("feature: Stanley Kubrick",)),
        # Files of ids: blocked chains, and fewer hops.
        ("1 2", [CHAINS], {}, ("a: 5", "a → b: 6", "c → a: 7")),
        ("1 2", [CHAINS], {"blocked": ["http://e/a"]}, ("c → a: 7",)),
    ],
)
def test_which_features_are_kept(
    items: str, sources: list[dict[str, Any]], fields: dict[str, Any], names: tuple[str, ...]
) -> None:
    found = loaded(items, *sources, **fields).features
    assert found.names == names
    assert found.matrix.shape == (len(items.split()), len(names))


def test_features_of_another_data_set_come_over_the_entity() -> None:
    found = loaded("1 2 3 4", {"path": "map.tsv", "links": "l.tsv", "entities": "theirs.tsv"}).features
    both = ["feature: 10", "feature: 12"]
    assert [found.names_of(item) for item in range(4)] == [["feature: 11", "feature: 12"], both, both, []]


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"path": "none.tsv"}, ["path", "'none.tsv'"]),
        ({"path": "movies.dat", "links": "l.tsv", "format": "attributes"}, ["links", "'attributes'"]),
        ({"path": "t.tsv", "format": "kgflex"}, ["predicates", "'kgflex'"]),
        ({"path": "t.tsv", "format": "map", "columns": {"a": 1}}, ["columns", "'map'"]),
        ({"path": "t.tsv", "format": "owl"}, ["format", "'owl'"]),
        ({"path": "t.tsv", "format": "recbole"}, ["format", "attributes"]),
    ],
)
def test_sources_that_do_not_fit_are_refused(fields: dict[str, Any], parts: list[str]) -> None:
    assert_refused(lambda: loaded("1", fields), "sources.0", *parts)


# ---------------------------------------------------------------- the matrix, and names for people


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=40))
def test_building_loses_no_pair_counts_each_once_and_sorts_each_row(pairs: list[tuple[int, int]]) -> None:
    # More than a byte holds of each.
    table = np.array(pairs * 300, dtype=np.int64).reshape(-1, 2)
    found = build(table[:, 0], table[:, 1], 6, [f"f{i}" for i in range(8)])
    assert found.matrix.sum() == len(set(pairs))
    for item in range(6):
        assert found.of(item).tolist() == sorted({feature for owner, feature in pairs if owner == item})


DBO, DBP, DBR = "http://dbpedia.org/ontology/", "http://dbpedia.org/property/", "http://dbpedia.org/resource/"


@pytest.mark.parametrize(
    ("iri", "told"),
    [
        (DBR + "Steven_Spielberg", "Steven Spielberg"),
        (DBR + "%22Crocodile%22_Dundee", '"Crocodile" Dundee'),
        ("http://www.w3.org/2002/07/owl#sameAs", "sameAs"),
        ("plain text / with a slash", "plain text / with a slash"),
        ("http://a/%ff", "\ufffd"),
    ],
)
def test_words_of_an_iri(iri: str, told: str) -> None:
    assert words(iri) == told


def test_names_for_people_and_two_that_read_the_same_are_told_apart() -> None:
    assert (expanded("dbo:director"), prefixed(DBO + "director")) == (DBO + "director", "dbo:director")
    told = {DBO + "starring": "dbo:starring", DBP + "starring": "dbp:starring", DBO + "writer": "writer"}
    assert distinct(list(told)) == told
    chains = [(DBO + "director", DBO + "birthPlace"), (DBO + "starring", DBO + "starring⁻¹"), ("wdt:P57",)]
    objects = [DBR + "Cincinnati", DBR + "Heat_(1995_film)", "Q1"]
    assert readable(chains, objects, {"Q1": "Kubrick", "wdt:P57": "director"}) == (
        "dbo:director → birthPlace: Cincinnati",
        "starring → starring⁻¹: Heat (1995 film)",
        "wdt:P57: Kubrick",
    )


# ---------------------------------------------------------------- commands

EXPERIMENT = """kind = "recommend"
name = "films"
[interactions]
path = "ratings.tsv"
[knowledge]
min_items = 2
[[knowledge.sources]]
path = "t.tsv"
links = "l.tsv"
"""


def test_the_account_of_features_and_vsm_from_files(folder: Path, command: CommandLine) -> None:
    (folder / "films.toml").write_text(EXPERIMENT)
    taken = "".join(f"{user}\t{item}\t5\t{time}\n" for time, (user, item) in enumerate(["a1", "a2", "b3", "b1", "c2"]))
    (folder / "ratings.tsv").write_text("user\titem\trating\ttime\n" + taken)
    done = command("recommend", "features", "films.toml", "--item", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["1 has 2 features:", f"  {KUBRICK}", f"  {USA}"]
    # Nobody took film 2; it shares a director with what a took.
    (folder / "train.tsv").write_text("user\titem\na\t1\nb\t3\n")
    (folder / "all.tsv").write_text("item\n1\n2\n3\n")
    files = ("--train", "train.tsv", "--catalogue", "all.tsv", "--out", "lists.tsv", "--cutoff", "1")
    done = command("recommend", "baseline", "vsm", "--knowledge", "films.toml", *files)
    assert done.returncode == 0, done.stderr
    assert (folder / "lists.tsv").read_text().splitlines()[1].startswith("a\t2\t")


# ---------------------------------------------------------------- real graphs: counts published or counted otherwise


def test_facebook_books_are_those_of_kgflex(shared: Any) -> None:
    data = shared("facebook_books")
    source = {"path": data / "item_features.tsv.gz", "predicates": data / "predicate_mapping.tsv.gz"}
    items = read(data / "dataset.tsv.gz").items
    found = load(settings(sources=[source], min_items=11, counted="source"), items).features
    # KGFlex's readme: 2,726 items, 306,847 features; all of more than 10 items.
    assert found.matrix.shape == (2726, 7761)
    assert found.matrix.nnz == 306_847
    assert found.by_hop() == {1: 523, 2: 7238}
    assert found.per_feature().min() == 11
