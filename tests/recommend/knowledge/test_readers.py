"""The readers, one after the other: what a good file gives, and what a bad one is told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.kit import assert_refused, named

from steelyard.recommend.knowledge import rdf
from steelyard.recommend.knowledge.graph import Triples
from steelyard.recommend.knowledge.readers import (
    FeatureTable,
    joined,
    read_attributes,
    read_ids,
    read_links,
    read_map,
    read_triples,
)

E = "http://e/"
TURTLE = """@prefix e: <http://e/> .
@prefix rdfs: <http://www.w3.org/2000/01/rdf-schema#> .
e:heat e:director e:mann ; e:year 1995 ; rdfs:label "Hitze"@de, "Heat"@en .
e:mann e:born e:chicago ; rdfs:label "Michael Mann" .
e:chicago e:in e:illinois .
e:other e:director e:nobody .
e:heat e:part [ e:of e:box ] .
"""

Found = set[tuple[str, ...]]


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def rows(found: Triples) -> Found:
    """Subject, predicate and object, without the IRI that all begin with; each once."""
    triples = list(zip(found.subjects, found.predicates, found.objects, strict=True))
    assert len(triples) == len(set(triples))
    return {tuple(part.removeprefix(E) for part in triple) for triple in triples}


def features(found: FeatureTable) -> set[tuple[str, str, str]]:
    """Item, chain and object."""
    each = zip(found.item, found.feature.tolist(), strict=True)
    return {(str(item), "~".join(found.chains[at]), found.objects[at]) for item, at in each}


# ---------------------------------------------------------------- RDF

ONE_HOP = {("heat", "director", "mann"), ("heat", "year", "1995"), ("heat", "part", "_:0")}


def test_rdf_from_the_items_in_so_many_hops_backwards_or_everything(file: Callable[..., Path]) -> None:
    path = file("g.ttl", TURTLE)
    assert rows(rdf.read_rdf(path, {E + "heat"}, 1)) == ONE_HOP
    two = rdf.read_rdf(path, {E + "heat"}, 2)
    # The blank node is named alike in both passes, although the library draws its name anew.
    assert rows(two) == ONE_HOP | {("mann", "born", "chicago"), ("_:0", "of", "box")}
    assert two.labels == {E + "heat": "Heat", E + "mann": "Michael Mann"}
    assert ("heat", "director", "mann") in rows(rdf.read_rdf(path, {E + "mann"}, 1, inverse=True))


def test_several_files_of_rdf_are_one_graph(file: Callable[..., Path]) -> None:
    """A chain goes from file to file and over triples beside, labels stand apart, blank nodes are not mixed up."""
    head = f"@prefix e: <{E}> .\n"
    label = f'<{E}mann> <http://www.w3.org/2000/01/rdf-schema#label> "Mann" .\n<{E}bern> <{E}in> <{E}swiss> .\n'
    files = [
        file("films.ttl", head + "e:heat e:director e:mann ; e:part [ e:of e:box ] .\n"),
        file("people.ttl", head + "e:mann e:spouse [ e:born e:rome ] .\ne:mann e:knows e:anna .\n"),
        file("labels.nt", label),
    ]
    swiss = ("bern", "in", "swiss")
    table = Triples([E + "anna"], [E + "born"], [E + "bern"])
    found = rdf.read_rdf(files, {E + "heat"}, 4, beside=[table])
    assert rows(found) == {
        ("heat", "director", "mann"),
        ("heat", "part", "_:0"),
        ("_:0", "of", "box"),
        ("mann", "spouse", "_:1.0"),
        ("_:1.0", "born", "rome"),
        ("mann", "knows", "anna"),
        swiss,
    }
    assert found.labels == {E + "mann": "Mann"}
    assert swiss not in rows(rdf.read_rdf(files, {E + "heat"}, 4))


# ---------------------------------------------------------------- tables


def test_three_columns_and_links(file: Callable[..., Path]) -> None:
    table = file("t.tsv", 'head\trelation\ttail\n<http://e/a>\tp\tb \n<http://e/a>\tq\t"c\n' + "\n" * 100_000)
    assert rows(read_triples(table)) == {("a", "p", "b"), ("a", "q", '"c')}
    titled = file("m.tsv", "1\tA title\t<http://e/a>\n2\t\thttp://e/b\n")
    assert read_links(titled) == (["1", "2"], ["http://e/a", "http://e/b"])


NAMES = "http://e/author~http://e/born\t5\t2\nhttp://e/genre\t0\t1\n"


def test_ids_and_chains_and_lines_of_one_item_that_are_joined(file: Callable[..., Path]) -> None:
    found = read_ids(file("f.tsv", "90\t5\t11\n90\t0\t2\n91\t5\t11\n"), file("p.tsv", NAMES))
    born = "http://e/author~http://e/born"
    assert features(found) == {("90", born, "11"), ("91", born, "11"), ("90", "http://e/genre", "2")}
    first, second = (read_map(file("map.tsv", text)) for text in ("7\t1\t2\n8\n7\t2\t3\n", "8\t2\t4\n"))
    assert features(first) == {("7", "feature", each) for each in "123"}
    both = joined([first, second])
    assert features(both) == features(first) | {("8", "feature", "2"), ("8", "feature", "4")}


MARKS = ["0"] * 8 + ["1"] + ["0"] * 9 + ["1"]


@pytest.mark.parametrize(
    ("name", "text", "columns", "found"),
    [
        (
            *("movies.dat", "1::Toy Story (1995)::Animation|Comedy\n2::X::Drama\n", {}),
            {("1", "genre", "Animation"), ("1", "genre", "Comedy"), ("2", "genre", "Drama")},
        ),
        (
            *("u.item", "|".join(["5", "Misérables, Les", "1-1-95", "", "http://x", *MARKS]).encode("latin-1"), {}),
            {("5", "genre", "Drama"), ("5", "genre", "Western")},
        ),
        ("a.csv", "x,Drama,1|2\ny,War,\n", {"item": 1, "code": "3"}, {("x", "code", "1"), ("x", "code", "2")}),
    ],
)
def test_attributes(
    file: Callable[..., Path], name: str, text: str | bytes, columns: dict[str, Any], found: Found
) -> None:
    assert features(read_attributes(file(name, text), columns)) == found


# ---------------------------------------------------------------- bad files


no_columns = partial(read_attributes, columns={})


@pytest.mark.parametrize(
    ("read", "name", "text", "parts"),
    named(
        [
            ("half a triple", rdf.read_rdf, "g.nt", "<http://e/a> <http://e/p>", ["N_TRIPLES"]),
            ("not packed", rdf.read_rdf, "g.nt.gz", "no gzip", ["cannot be read"]),
            ("a short line", read_triples, "t.tsv", "a\tp\tb\nc\td\n", ["line 2", "empty cell"]),
            ("nothing", read_triples, "t.tsv", "\n", ["the file is empty"]),
            ("no item before", read_map, "map.tsv", "7\t1\n\t3\n", ["line 2", "'3'"]),
            ("no header", no_columns, "a.csv", "a,b,c\n", ["3 columns", "{genre = 3}"]),
            ("titles alone", no_columns, "a.csv", "item,title\nx,1\n", ["no column of attributes", "item, title"]),
            ("no such column", partial(read_attributes, columns={"genre": 4}), "a.csv", "a,b\n", ["'4'", "1 to 2"]),
            ("no id", no_columns, "a.csv", "item,b\n,1\n", ["line 2", "no item id"]),
        ]
    ),
)
def test_what_is_wrong_with_a_file(
    file: Callable[..., Path], read: Callable[[Path], object], name: str, text: str, parts: Any
) -> None:
    path = file(name, text)
    assert_refused(lambda: read(path), name, *parts)


@pytest.mark.parametrize(
    ("given", "names", "parts"),
    [
        ("90\t7\t11\n", NAMES, ["f.tsv", "line 1", "'7'", "p.tsv"]),
        ("90\t5\t1\n", "a\t5\t1\nb\t5\t1\n", ["p.tsv", "line 2", "'5'", "twice"]),
        ("90\t5\t1\n", "~".join("a" * 10) + "\t5\t10\n", ["chain of 10"]),
    ],
)
def test_what_is_wrong_with_ids(file: Callable[..., Path], given: str, names: str, parts: list[str]) -> None:
    files = file("f.tsv", given), file("p.tsv", names)
    assert_refused(lambda: read_ids(*files), *parts)
