"""What fields mean, from the strings under them."""

from __future__ import annotations

from steelyard.experiment.loading import kind_of
from steelyard.field_texts import field_texts, schema_with_texts
from steelyard.settings import Section


class Inner(Section):
    """A section inside another."""

    depth: int = 1
    """How deep
    it lies."""
    bare: int = 2


class Outer(Inner):
    """A section that derives from another and holds one."""

    inner: Inner = Inner()
    """What it holds."""
    depth: int = 3
    """How deep this one lies."""


def test_a_text_is_the_string_right_under_a_field_and_the_nearest_class_decides():
    assert field_texts(Inner) == {"depth": "How deep\nit lies."}
    assert field_texts(Outer) == {"depth": "How deep this one lies.", "inner": "What it holds."}


def test_the_schema_holds_the_texts_of_all_sections_inside():
    schema = schema_with_texts(Outer)
    assert schema["properties"]["inner"]["description"] == "What it holds."
    assert schema["properties"]["depth"]["description"] == "How deep this one lies."
    assert schema["$defs"]["Inner"]["properties"]["depth"]["description"] == "How deep\nit lies."
    assert "description" not in schema["$defs"]["Inner"]["properties"]["bare"]


def test_a_class_without_a_file_has_no_texts():
    made: dict[str, type[Section]] = {}
    exec("from steelyard.settings import Section\nclass Typed(Section):\n    a: int = 1\n    'text'", made)
    assert field_texts(made["Typed"]) == {}


def test_every_field_of_an_experiment_has_a_text():
    for kind in ("learning", "recommend"):
        parts = schema_with_texts(kind_of(kind))["$defs"]
        bare = [
            (name, field)
            for name, part in parts.items()
            for field, entry in part.get("properties", {}).items()
            if "description" not in entry
        ]
        assert bare == []
