"""The site builds strictly, and its reference pages name all that there is."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.docs.made import fields, generated, pages
from tests.docs.sentences import long_sentences
from tests.warm import command_environment

ROOT = Path(__file__).parents[2]


ENTRY = re.compile(r"^#### `([\w.]+)` \{: #([\w-]+) \}\n\n(.*?)(?=\n\n+#|\n*\Z)", re.DOTALL | re.MULTILINE)


@pytest.mark.slow  # `.ci/run` builds it each time, as strictly
def test_the_site_builds_without_a_warning(tmp_path: Path):
    pytest.importorskip("zensical", reason="the site is built with Zensical (extra docs)")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "build.py"), str(site)],
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site / "reference" / "fields" / "index.html").is_file()
    view = (site / "reference" / "view" / "index.html").read_text(encoding="utf-8")
    for attribute in ("label_counts", "first_losses", "divergence", "gram", "memory", "remember", "device", "marks"):
        assert f".{attribute}" in view, attribute


def entries() -> dict[str, str]:
    """Return what the page says of each field, by anchor."""
    found = ENTRY.findall(pages()["reference/fields.md"])
    assert len({anchor for _, anchor, _ in found}) == len(found)
    return {f"{anchor} {path}": text for path, anchor, text in found}


def test_every_field_of_the_schema_is_on_the_page_with_its_meaning():
    from steelyard.experiment.loading import kind_of

    documented = {path.split()[-1].split(".")[-1] for path in entries()}
    for kind in ("learning", "recommend"):
        for section in kind_of(kind).model_json_schema()["$defs"].values():
            for name, field in section.get("properties", {}).items():
                if "$ref" in str(field):
                    continue  # a section of its own
                assert name in documented, name
    assert not [name for name, text in entries().items() if len(text.split("\n\n")) < 2]


def test_every_field_has_an_example_that_it_accepts():
    from steelyard.experiment.loading import kind_of

    places = [place for kind in ("learning", "recommend") for place in fields().sections(kind_of(kind))]
    tried = 0
    for place in places:
        for name, field in place.fields().items():
            value = tomllib.loads(fields().example_line(place, name, field))
            for part in [*(place.path.split(".") if place.path and not place.several else []), name]:
                value = value[part]
            assert fields().accepts(field, value), f"{place.path}.{name} = {value}"
            tried += 1
    assert tried > 250
    assert "`rounds.stop_at_target = true`" in pages()["reference/fields.md"]


def test_what_a_field_does_not_take_is_no_example():
    from steelyard.experiment.loading import kind_of

    kind = kind_of("learning").model_fields["kind"]
    assert fields().accepts(kind, "learning")
    assert not fields().accepts(kind, "recommend")  # which other recipes have there


def test_a_field_is_shown_as_a_user_writes_it():
    found = entries()
    assert "number, > 0, ≤ 1 · default `0.1` · example" in found["recommend-rounds-fraction rounds.fraction"]
    assert '`"uniform"`, `"keep"` · default `"uniform"`' in found["learning-weighing-when-zero weighing.when_zero"]
    assert "- `iid`: at random." in found["learning-partition-scheme partition.scheme"]
    assert "none: it must be given" in found["learning-flaws-kind flaws.kind"]


def test_every_command_option_and_argument_has_its_help():
    page = generated().commands_page()
    for command in ("run", "compare", "weigh", "recommend top", "federate local"):
        assert f"## `steelyard {command}`" in page
    assert not [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]


def test_no_sentence_of_a_made_page_is_too_long():
    assert {path: found for path, text in pages().items() if (found := long_sentences(text))} == {}
