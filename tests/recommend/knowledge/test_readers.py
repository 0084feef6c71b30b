"""The readers, one after the other: what a good file gives, and the one line that a bad one gets."""

from __future__ import annotations

import bz2
import gzip
from pathlib import Path

import pytest

from steelyard.errors import UserError
from steelyard.recommend.knowledge import rdf
from steelyard.recommend.knowledge.attributes import read_attributes
from steelyard.recommend.knowledge.graph import Triples
from steelyard.recommend.knowledge.readers import (
    link_file,
    read_ids,
    read_kg,
    read_labels,
    read_links,
    read_map,
    read_triples,
)
from steelyard.recommend.knowledge.table import FeatureTable, joined

E = "http://e/"
TURTLE = """@prefix e: <http://e/> .
@prefix rdfs: <http://www.w3.org/2000/01/rdf-schema#> .
e:heat e:director e:mann ; e:year 1995 ; rdfs:label "Hitze"@de, "Heat"@en .
e:mann e:born e:chicago ; rdfs:label "Michael Mann" .
e:chicago e:in e:illinois .
e:other e:director e:nobody .
e:heat e:part [ e:of e:box ] .
"""


def file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows(found: Triples) -> list[tuple[str, str, str]]:
    return list(zip(found.subjects, found.predicates, found.objects, strict=True))


def features(found: FeatureTable) -> set[tuple[str, tuple[str, ...], str]]:
    return {
        (str(item), found.chains[each], found.objects[each])
        for item, each in zip(found.item, found.feature.tolist(), strict=True)
    }


class TestRdf:
    def test_from_the_items_in_so_many_hops(self, tmp_path: Path) -> None:
        path = file(tmp_path, "g.ttl", TURTLE)
        one = rdf.read_rdf(path, {E + "heat"}, 1)
        assert set(rows(one)) == {
            (E + "heat", E + "director", E + "mann"),
            (E + "heat", E + "year", "1995"),
            (E + "heat", E + "part", "_:0"),
        }
        two = rdf.read_rdf(path, {E + "heat"}, 2)
        # The blank node is named alike in both passes, although the library draws its name anew.
        assert set(rows(two)) - set(rows(one)) == {
            (E + "mann", E + "born", E + "chicago"),
            ("_:0", E + "of", E + "box"),
        }
        assert two.labels == {E + "heat": "Heat", E + "mann": "Michael Mann"}

    def test_everything_without_a_start_and_backwards(self, tmp_path: Path) -> None:
        path = file(tmp_path, "g.ttl", TURTLE)
        assert len(rows(rdf.read_rdf(path))) == 7
        back = rdf.read_rdf(path, {E + "mann"}, 1, inverse=True)
        assert set(rows(back)) == {
            (E + "heat", E + "director", E + "mann"),
            (E + "mann", E + "born", E + "chicago"),
        }

    def test_several_files_are_one_graph(self, tmp_path: Path) -> None:
        """A chain goes from file to file and over triples beside, labels stand apart, blank nodes are not mixed up."""
        head = f"@prefix e: <{E}> .\n"
        films = file(tmp_path, "films.ttl", head + "e:heat e:director e:mann ; e:part [ e:of e:box ] .\n")
        people = file(tmp_path, "people.ttl", head + "e:mann e:spouse [ e:born e:rome ] .\ne:mann e:knows e:anna .\n")
        named = f'<{E}mann> <http://www.w3.org/2000/01/rdf-schema#label> "Mann" .\n<{E}bern> <{E}in> <{E}swiss> .\n'
        labels = file(tmp_path, "labels.nt", named)
        table = Triples([E + "anna"], [E + "born"], [E + "bern"])
        found = rdf.read_rdf([films, people, labels], {E + "heat"}, 4, beside=[table])
        assert set(rows(found)) == {
            (E + "heat", E + "director", E + "mann"),
            (E + "heat", E + "part", "_:0"),
            ("_:0", E + "of", E + "box"),
            (E + "mann", E + "spouse", "_:1.0"),
            ("_:1.0", E + "born", E + "rome"),
            (E + "mann", E + "knows", E + "anna"),
            (E + "bern", E + "in", E + "swiss"),
        }
        assert found.labels == {E + "mann": "Mann"}
        assert (E + "bern", E + "in", E + "swiss") not in rows(rdf.read_rdf([films, people, labels], {E + "heat"}, 4))

    def test_a_triple_that_is_met_again_counts_once(self, tmp_path: Path) -> None:
        path = file(tmp_path, "g.ttl", TURTLE)
        back = rdf.read_rdf([path, path], {E + "heat"}, 3, inverse=True)
        assert len(rows(back)) == len(set(rows(back)))

    @pytest.mark.parametrize("pack", [gzip.compress, bz2.compress], ids=["gz", "bz2"])
    def test_packed_n_triples(self, tmp_path: Path, pack) -> None:
        text = f'<{E}a> <{E}p> "x y"@en .\n<{E}a> <{E}q> <{E}b> .\n'.encode()
        suffix = "gz" if pack is gzip.compress else "bz2"
        found = rdf.read_rdf(file(tmp_path, f"g.nt.{suffix}", pack(text)), {E + "a"}, 2)
        assert rows(found) == [(E + "a", E + "p", "x y"), (E + "a", E + "q", E + "b")]

    def test_what_is_wrong_is_one_line(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"g.nt: Parser error .*; expected RDF as its name tells \(N_TRIPLES\)"):
            rdf.read_rdf(file(tmp_path, "g.nt", "<http://e/a> <http://e/p>"))
        with pytest.raises(UserError, match=r"cannot be read \(Not a gzipped file"):
            rdf.read_rdf(file(tmp_path, "g.nt.gz", "no gzip"))
        with pytest.raises(UserError, match=r"no known form of RDF; allowed: \.nt, \.nq, \.ttl, \.trig"):
            rdf.read_rdf(file(tmp_path, "g.xml", "<rdf/>"))


class TestTriples:
    def test_three_columns(self, tmp_path: Path) -> None:
        found = read_triples(
            file(tmp_path, "t.tsv", 'head\trelation\ttail\n<http://e/a>\tp\tb \n<http://e/a>\tq\t"c\n')
        )
        assert rows(found) == [("http://e/a", "p", "b"), ("http://e/a", "q", '"c')]

    def test_what_is_wrong_is_one_line(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"t.tsv: line 2: an empty cell; expected subject, predicate"):
            read_triples(file(tmp_path, "t.tsv", "a\tp\tb\nc\td\n"))
        with pytest.raises(UserError, match=r"t.tsv: line 2: an empty cell"):
            read_triples(file(tmp_path, "t.tsv", "a\tp\tb\nc\t\td\n"))
        with pytest.raises(UserError, match=r"t.tsv: line 3: an empty cell"):
            read_triples(file(tmp_path, "t.tsv", "head\trelation\ttail\na\tp\tb\nc\t\td\n"))
        with pytest.raises(UserError, match="2 columns; expected subject"):
            read_triples(file(tmp_path, "t.tsv", "a\tp\n"))
        with pytest.raises(UserError, match="the file is empty"):
            read_triples(file(tmp_path, "t.tsv", "\n"))
        for nothing in ("|", "\t\t\n", " , \n\n"):
            with pytest.raises(UserError, match="the file is empty"):
                read_links(file(tmp_path, "t.tsv", nothing))
        assert rows(read_triples(file(tmp_path, "t.tsv", "a\tp\tb\n" + "\n" * 100_000))) == [("a", "p", "b")]
        with pytest.raises(UserError, match="no such file"):
            read_triples(tmp_path / "none.tsv")


class TestRecBole:
    def test_the_header_says_which_column_is_which(self, tmp_path: Path) -> None:
        text = "tail_id:token\thead_id:token\trelation_id:token\nm.1\tm.2\tfilm.genre\n"
        assert rows(read_kg(file(tmp_path, "d.kg", text))) == [("m.2", "film.genre", "m.1")]
        with pytest.raises(UserError, match=r"line 1 names a, b, c; expected a RecBole \.kg file"):
            read_kg(file(tmp_path, "d.kg", "a\tb\tc\n"))

    def test_links_beside_and_links_of_others(self, tmp_path: Path) -> None:
        graph = file(tmp_path, "d.kg.gz", b"")
        assert link_file(graph) is None
        link = file(tmp_path, "d.link.gz", gzip.compress(b"item_id:token\tentity_id:token\n7\tm.2\n"))
        assert link_file(graph) == link
        assert read_links(link) == (["7"], ["m.2"])
        titled = file(tmp_path, "m.tsv", "1\tA title\t<http://e/a>\n2\t\thttp://e/b\n")
        assert read_links(titled) == (["1", "2"], ["http://e/a", "http://e/b"])
        assert read_labels(titled) == {"1": "http://e/a", "2": "http://e/b"}


class TestIdFiles:
    NAMES = "http://e/author~http://e/born\t5\t2\nhttp://e/genre\t0\t1\n"

    def test_ids_and_chains(self, tmp_path: Path) -> None:
        found = read_ids(
            file(tmp_path, "f.tsv", "90\t5\t11\n90\t0\t2\n91\t5\t11\n"), file(tmp_path, "p.tsv", self.NAMES)
        )
        assert features(found) == {
            ("90", ("http://e/author", "http://e/born"), "11"),
            ("91", ("http://e/author", "http://e/born"), "11"),
            ("90", ("http://e/genre",), "2"),
        }
        assert len(found.chains) == 2

    @pytest.mark.parametrize(
        ("given", "names", "told"),
        [
            ("90\t7\t11\n", NAMES, r"f.tsv: line 1: predicate '7' is not in .*p.tsv; allowed: its ids"),
            ("90\t5\n", NAMES, "f.tsv: 2 columns"),
            ("90\t5\t1\n", "a~b\t5\t1\n", "p.tsv: line 1: hops is '1' for a chain of 2"),
            ("90\t5\t1\n", "a~~b\t5\t3\n", "p.tsv: line 1: hops is '3' for a chain of 3"),
            ("90\t5\t1\n", "a\t5\t1\nb\t5\t1\n", "p.tsv: line 2: id '5' stands there twice"),
            ("90\t5\t1\n", "~".join("a" * 10) + "\t5\t10\n", "for a chain of 10"),
        ],
    )
    def test_what_is_wrong_is_one_line(self, tmp_path: Path, given: str, names: str, told: str) -> None:
        with pytest.raises(UserError, match=told):
            read_ids(file(tmp_path, "f.tsv", given), file(tmp_path, "p.tsv", names))


class TestMapFiles:
    def test_lines_of_one_item_are_joined(self, tmp_path: Path) -> None:
        found = read_map(file(tmp_path, "map.tsv", "7\t1\t2\n8\n7\t2\t3\n"))
        assert features(found) == {("7", ("feature",), each) for each in "123"}

    def test_what_is_wrong_is_one_line(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="line 2: begins with '3' after no item"):
            read_map(file(tmp_path, "map.tsv", "7\t1\n\t3\n"))
        with pytest.raises(UserError, match="no item has a feature"):
            read_map(file(tmp_path, "map.tsv", "7\n8\n"))


class TestAttributes:
    def test_movielens(self, tmp_path: Path) -> None:
        found = read_attributes(file(tmp_path, "movies.dat", "1::Toy Story (1995)::Animation|Comedy\n2::X::Drama\n"))
        assert features(found) == {
            ("1", ("genre",), "Animation"),
            ("1", ("genre",), "Comedy"),
            ("2", ("genre",), "Drama"),
        }

    def test_the_marks_of_u_item(self, tmp_path: Path) -> None:
        marks = ["0"] * 19
        marks[8] = marks[18] = "1"
        line = "|".join(["5", "Misérables, Les", "1-1-95", "", "http://x", *marks]) + "\n"
        found = read_attributes(file(tmp_path, "u.item", line.encode("latin-1")))
        assert features(found) == {("5", ("genre",), "Drama"), ("5", ("genre",), "Western")}

    def test_a_header_and_recboles_sequences(self, tmp_path: Path) -> None:
        header = "item_id:token\tmovie_title:token_seq\tyear:token\tclass:token_seq\trank:float\n"
        text = header + "1\tToy Story\t1995\tA B\t3\n"
        found = read_attributes(file(tmp_path, "ml.item", text))
        assert features(found) == {("1", ("year",), "1995"), ("1", ("class",), "A"), ("1", ("class",), "B")}

    def test_columns_by_number_and_name(self, tmp_path: Path) -> None:
        plain = file(tmp_path, "a.csv", "x,Drama,1|2\ny,War,\n")
        assert features(read_attributes(plain, {"item": 1, "code": "3"})) == {
            ("x", ("code",), "1"),
            ("x", ("code",), "2"),
        }
        headed = file(tmp_path, "b.csv", "kind,what,key\nwar,long,x\n")
        assert features(read_attributes(headed, {"item": "key", "kind": "kind"})) == {("x", ("kind",), "war")}
        two = file(tmp_path, "c.tsv", "x\tDrama\nx\tWar\n")
        assert features(read_attributes(two)) == {("x", ("attribute",), "Drama"), ("x", ("attribute",), "War")}

    @pytest.mark.parametrize(
        ("text", "columns", "told"),
        [
            ("a,b,c\n", {}, r"3 columns without a header; allowed: columns = \{genre = 3\}"),
            ("a,b,c\n", {"genre": 4}, "no column '4' for genre; allowed: a number from 1 to 3"),
            ("item,b\nx,1\n", {"genre": "c"}, "no column 'c' for genre; its header has: item, b"),
            ("item,title\nx,1\n", {}, "no column of attributes; its header has: item, title"),
            ("item,b\n,1\n", {}, "line 2: no item id"),
        ],
    )
    def test_what_is_wrong_is_one_line(self, tmp_path: Path, text: str, columns: dict, told: str) -> None:
        with pytest.raises(UserError, match=told):
            read_attributes(file(tmp_path, "a.csv", text), columns)


def test_tables_are_joined_by_chain_and_object(tmp_path: Path) -> None:
    first = read_map(file(tmp_path, "a.tsv", "7\t1\t2\n"))
    second = read_map(file(tmp_path, "b.tsv", "8\t2\t3\n"))
    both = joined([first, second])
    assert features(both) == features(first) | features(second)
    assert len(both.chains) == 3
