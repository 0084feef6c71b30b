"""Names for people."""

from __future__ import annotations

from steelyard.recommend.knowledge.naming import distinct, expanded, prefixed, readable, words

DBO, DBP, DBR = "http://dbpedia.org/ontology/", "http://dbpedia.org/property/", "http://dbpedia.org/resource/"


def test_words_of_an_iri() -> None:
    assert words(DBR + "Steven_Spielberg") == "Steven Spielberg"
    assert words(DBR + "%22Crocodile%22_Dundee") == '"Crocodile" Dundee'
    assert words("http://www.w3.org/2002/07/owl#sameAs") == "sameAs"
    assert words("http://example.org/") == "example.org"
    assert words("http://") == "http:"
    assert words("plain text / with a slash") == "plain text / with a slash"
    assert words("film.film.genre") == "film.film.genre"
    assert words("http://a/%ff") == "\ufffd"


def test_prefixes_both_ways() -> None:
    assert expanded("dbo:director") == DBO + "director"
    assert prefixed(DBO + "director") == "dbo:director"
    assert expanded("nobody:knows") == prefixed("nobody:knows") == "nobody:knows"
    assert expanded(DBO + "director") == DBO + "director"


def test_two_that_read_the_same_are_told_apart() -> None:
    assert distinct([DBO + "starring", DBP + "starring", DBO + "writer"]) == {
        DBO + "starring": "dbo:starring",
        DBP + "starring": "dbp:starring",
        DBO + "writer": "writer",
    }


def test_a_feature_in_words() -> None:
    chains = [(DBO + "director", DBO + "birthPlace"), (DBO + "starring", DBO + "starring⁻¹"), ("wdt:P57",)]
    objects = [DBR + "Cincinnati", DBR + "Heat_(1995_film)", "Q1"]
    assert readable(chains, objects, {"Q1": "Kubrick", "wdt:P57": "director"}) == (
        "dbo:director → birthPlace: Cincinnati",
        "starring → starring⁻¹: Heat (1995 film)",
        "wdt:P57: Kubrick",
    )
