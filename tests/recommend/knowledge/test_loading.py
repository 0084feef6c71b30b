"""From [knowledge] to features: every form of file, the limits, the account."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import UserError
from steelyard.recommend.knowledge.loading import load, load_features
from steelyard.recommend.knowledge.settings import BLOCKED, KnowledgeSettings
from steelyard.settings import validated

TRIPLES = """e:a	http://e/director	e:kubrick
e:b	http://e/director	e:kubrick
e:c	http://e/director	e:mann
e:kubrick	http://e/born	e:usa
e:mann	http://e/born	e:usa
e:a	http://www.w3.org/1999/02/22-rdf-syntax-ns#type	e:Film
e:b	http://www.w3.org/1999/02/22-rdf-syntax-ns#type	e:Film
"""
LINKS = "1\tFilm A\te:a\n2\tFilm B\te:b\n3\tFilm C\te:c\n9\tUnknown\te:z\n"


def settings(**fields: Any) -> KnowledgeSettings:
    return validated(KnowledgeSettings, fields, "test")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "t.tsv").write_text(TRIPLES)
    (tmp_path / "l.tsv").write_text(LINKS)
    (tmp_path / "movies.dat").write_text("1::A::War|Drama\n2::B::War\n4::D::War\n")
    (tmp_path / "map.tsv").write_text("1\t10\t11\n2\t10\t12\n7\t11\t12\n")
    return tmp_path


def graph(folder: Path) -> dict[str, Any]:
    return {"path": folder / "t.tsv", "links": folder / "l.tsv"}


def test_a_graph_gives_features_of_both_hops(folder: Path) -> None:
    found = load(settings(sources=[graph(folder)], min_items=2), ["3", "1", "2", "4"])
    assert found.features.names == ("director: e:kubrick", "director → born: e:usa")
    assert found.features.matrix.toarray().tolist() == [[0, 1], [1, 1], [1, 1], [0, 0]]
    assert found.features.hops.tolist() == [1, 2]
    assert found.report.lines() == [
        "graph: 7 triples, 7 nodes, 3 predicates",
        "blocked: rdf:type, 2 times",
        "1 hop: 2 found, dropped: 1 rare, kept: 1 in 2 pairs",
        "2 hops: 1 found, dropped: none, kept: 1 in 3 pairs",
        "items: 4, known to the sources: 3, with features: 3",
    ]
    assert found.report.document()["hops"][0] == {
        "hop": 1,
        "found": 2,
        "rare": 1,
        "common": 0,
        "beyond": 0,
        "kept": 1,
        "pairs": 2,
    }


def test_files_are_joined_and_ids_may_be_entities(folder: Path) -> None:
    found = load_features(
        settings(sources=[graph(folder), {"path": folder / "movies.dat"}], min_items=2, hops=1), ["1", "2", "3"]
    )
    assert found.names == ("genre: War", "director: e:kubrick")
    own = load_features(settings(sources=[{"path": folder / "t.tsv"}], min_items=1, hops=1, blocked=()), ["e:a", "e:c"])
    assert own.names_of(0) == ["director: e:kubrick", "type: e:Film"]


def test_chains_lead_from_one_file_of_rdf_into_another(tmp_path: Path) -> None:
    def line(subject: str, predicate: str, value: str) -> str:
        return f"<http://e/{subject}> <http://e/{predicate}> <http://e/{value}> .\n"

    (tmp_path / "films.nt").write_text(line("a", "director", "mann") + line("b", "director", "lee"))
    (tmp_path / "people.nt").write_text(line("mann", "born", "usa") + line("lee", "born", "usa"))
    (tmp_path / "links.tsv").write_text("1\thttp://e/a\n2\thttp://e/b\n")
    sources = [{"path": tmp_path / f"{name}.nt", "links": tmp_path / "links.tsv"} for name in ("people", "films")]
    found = load(settings(sources=sources, min_items=2), ["1", "2"])
    assert found.features.names == ("director → born: usa",)
    assert found.report.lines()[0] == "graph: 4 triples, 5 nodes, 2 predicates"


def test_items_that_the_graph_does_not_have_are_not_known(folder: Path) -> None:
    """Without links ids are entities, but not every id is in the graph; nor is every linked entity."""
    unlinked = load(settings(sources=[{"path": folder / "t.tsv"}], min_items=1), ["e:a", "e:c", "e:nowhere"])
    assert unlinked.report.lines()[-1] == "items: 3, known to the sources: 2, with features: 2"
    linked = load(settings(sources=[graph(folder)], min_items=1), ["1", "9"])
    assert linked.report.lines()[-1] == "items: 2, known to the sources: 1, with features: 1"


def test_only_triples_that_are_left_out_count_as_blocked(folder: Path) -> None:
    """`born` is two triples, both of people; at the first hop none of them is left out, for they begin at no film."""
    born = {"sources": [graph(folder)], "min_items": 1, "blocked": ["http://e/born"]}
    items = ["1", "2", "3"]
    assert load(settings(**born), items).report.blocked == {}
    assert load(settings(**born, blocked_at="any"), items).report.blocked == {"http://e/born": 2}
    kind = {**born, "blocked": ["rdf:type"]}
    rdf_type = "http://www.w3.org/1999/02/22-rdf-syntax-ns#type"
    # Of the two films that have a type, one is no item of the data.
    assert load(settings(**kind), ["1", "3"]).report.blocked == {rdf_type: 1}
    (folder / "t.tsv").write_text(TRIPLES + TRIPLES)
    assert load(settings(**kind, inverse=True, hops=1), items).report.blocked == {rdf_type: 2}


def test_features_of_another_data_set_come_over_the_entity(folder: Path) -> None:
    """Item 1 is the entity e:a, which the map calls 7; of the rest of the map only 2 is linked, as both b and c."""
    (folder / "theirs.tsv").write_text("7\te:a\n2\te:b\n2\te:c\n1\te:elsewhere\n")
    source = {"path": folder / "map.tsv", "links": folder / "l.tsv", "entities": folder / "theirs.tsv"}
    found = load_features(settings(sources=[source], min_items=1), ["1", "2", "3", "4"])
    assert [found.names_of(item) for item in range(4)] == [
        ["feature: 11", "feature: 12"],
        ["feature: 10", "feature: 12"],
        ["feature: 10", "feature: 12"],
        [],
    ]


def test_one_of_a_thing_is_told_in_the_singular(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("a\tp\tb\na\tkind\tc\n")
    (tmp_path / "map.tsv").write_text("a\t10\n")
    sources = [{"path": tmp_path / "t.tsv", "format": "triples"}, {"path": tmp_path / "map.tsv", "format": "map"}]
    found = load(settings(sources=sources, min_items=1, hops=1, blocked=["kind"]), ["a"])
    assert found.report.lines()[1:3] == ["table: 1 pair of 1 item and 1 feature", "blocked: kind, 1 time"]
    assert str(found.features) == "2 features (2 of 1 hop) of 1 item in 2 pairs"
    (tmp_path / "t.tsv").write_text("a\tp\tb\n")
    one = load(settings(sources=sources[:1], min_items=1, hops=1), ["a"])
    assert one.report.lines()[0] == "graph: 1 triple, 2 nodes, 1 predicate"
    assert one.report.lines()[1] == "1 hop: 1 found, dropped: none, kept: 1 in 1 pair"


def test_the_limits(folder: Path) -> None:
    every = {"sources": [graph(folder)], "blocked": [], "hops": 1}
    items = ["1", "2", "3"]
    assert load_features(settings(**every, min_items=3), items).features == 0
    assert load_features(settings(**every, min_items=1), items).features == 3
    rare = load(settings(**every, min_items=1, max_share=0.5), items)
    assert rare.features.names == ("director: e:mann",)
    assert rare.report.hops[0].common == 2
    # Two features have two items each: of those the first in order stays.
    capped = load(settings(**every, min_items=1, max_features=1), items)
    assert capped.features.names == ("director: e:kubrick",)
    assert (capped.report.hops[0].beyond, capped.report.hops[0].kept) == (2, 1)


def test_counting_over_the_source_or_over_the_data(folder: Path) -> None:
    source = [{"path": folder / "map.tsv"}]
    here = load(settings(sources=source, min_items=2), ["1", "2"])
    assert here.features.names == ("feature: 10",)
    there = load(settings(sources=source, min_items=2, counted="source"), ["1", "2"])
    assert there.features.names == ("feature: 10", "feature: 11", "feature: 12")
    assert there.features.items == 2
    # A feature that only items outside of the data have is none.
    assert load_features(settings(sources=source, min_items=1, counted="source"), ["1"]).names == (
        "feature: 10",
        "feature: 11",
    )


def test_names_for_people(folder: Path) -> None:
    (folder / "names.tsv").write_text("10\tStanley Kubrick\n")
    source = {"path": folder / "map.tsv", "names": folder / "names.tsv"}
    assert load_features(settings(sources=[source], min_items=2), ["1", "2"]).names == ("feature: Stanley Kubrick",)


def test_the_thesis_defaults() -> None:
    chosen = settings(sources=[{"path": "x"}])
    assert (chosen.hops, chosen.min_items, chosen.blocked_at) == (2, 10, "first")
    assert len(BLOCKED) == 10
    assert "http://dbpedia.org/ontology/wikiPageWikiLink" in chosen.blocked_iris()
    assert "http://purl.org/linguistics/gold/hypernym" in chosen.blocked_iris()


def test_id_files_with_blocked_chains_and_fewer_hops(tmp_path: Path) -> None:
    (tmp_path / "f.tsv").write_text("1\t0\t5\n1\t1\t6\n2\t2\t7\n")
    (tmp_path / "p.tsv").write_text("http://e/a\t0\t1\nhttp://e/a~http://e/b\t1\t2\nhttp://e/c~http://e/a\t2\t2\n")
    source = [{"path": tmp_path / "f.tsv", "predicates": tmp_path / "p.tsv"}]

    def found(**fields: Any) -> tuple[str, ...]:
        return load_features(settings(sources=source, min_items=1, **fields), ["1", "2"]).names

    assert found() == ("a: 5", "a → b: 6", "c → a: 7")
    assert found(hops=1) == ("a: 5",)
    assert found(blocked=["http://e/a"]) == ("c → a: 7",)
    assert found(blocked=["http://e/a"], blocked_at="any") == ()
    assert load(settings(sources=source, blocked=["http://e/a"]), ["1"]).report.blocked == {"http://e/a": 2}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"path": "none.tsv"}, r"path \(knowledge.sources.0.path\): found no 'none.tsv'"),
        ({"path": "movies.dat", "links": "l.tsv", "format": "attributes"}, "links: given with format 'attributes'"),
        ({"path": "t.tsv", "format": "kgflex"}, "predicates: missing; format 'kgflex' needs"),
        (
            {"path": "t.tsv", "format": "map", "columns": {"a": 1}},
            "columns: given with format 'map'; allowed",
        ),
        (
            {"path": "map.tsv", "entities": "l.tsv"},
            r"sources.0.entities: given without links; allowed with: links, and",
        ),
        (
            {"path": "t.tsv", "links": "l.tsv", "entities": "l.tsv", "format": "triples"},
            "entities: given with format 'triples'",
        ),
        (
            {"path": "map.tsv", "links": "l.tsv", "entities": "none"},
            r"entities \(knowledge.sources.0.entities\): found",
        ),
        ({"path": "t.tsv", "links": "none.tsv"}, r"links \(knowledge.sources.0.links\): found no"),
    ],
)
def test_what_is_wrong_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], told: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=told):
        load(settings(sources=[fields]), ["1"])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"sources": []}, "sources: got .*; allowed: at least 1 value"),
        ({"sources": [{"path": "x"}], "hops": 5}, "hops: got 5; allowed: less than or equal to 4"),
        ({"sources": [{"path": "x", "format": "owl"}]}, "format: got 'owl'"),
    ],
)
def test_wrong_settings_are_one_line(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        settings(**fields)


def test_no_feature_is_no_error(folder: Path) -> None:
    found = load(settings(sources=[graph(folder)]), ["77"])
    assert found.features.matrix.shape == (1, 0)
    assert found.report.lines()[-1] == "items: 1, known to the sources: 0, with features: 0"
