"""The site builds strictly, and its reference pages name all that there is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("mkdocs", reason="the site is built with mkdocs (extra docs)")


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generated", ROOT / "docs" / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_builds_without_a_warning(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference" / "fields" / "index.html").is_file()
    view = (tmp_path / "reference" / "view" / "index.html").read_text(encoding="utf-8")
    for attribute in ("label_counts", "first_losses", "divergence", "gram", "memory", "remember", "device", "marks"):
        assert f".{attribute}" in view, attribute


def test_every_field_of_the_schema_is_on_the_page_with_its_meaning(generated: ModuleType):
    from steelyard.experiment.loading import kind_of

    rows = [line for line in generated.fields_page().splitlines() if line.startswith("| `")]
    documented = {row.split("`")[1] for row in rows}
    for kind in ("learning", "recommend"):
        for section in kind_of(kind).model_json_schema()["$defs"].values():
            for name, field in section.get("properties", {}).items():
                if "$ref" in str(field):
                    continue  # a section of its own
                assert name in documented, name
    assert not [row for row in rows if row.rstrip(" |").endswith("|")]


def test_every_command_option_and_argument_has_its_help(generated: ModuleType):
    page = generated.commands_page()
    for command in ("run", "compare", "weigh", "recommend top", "federate local"):
        assert f"## `steelyard {command}`" in page
    assert not [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]


def test_a_field_is_shown_as_a_user_writes_it(generated: ModuleType):
    page = generated.fields_page()
    assert "| `fraction` | number, > 0, ≤ 1 | `0.1` |" in page
    assert '| `when_zero` | `"uniform"`, `"keep"` | `"uniform"` |' in page
