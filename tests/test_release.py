"""What a release consists of beside the code: one version everywhere, a citation, checks that call what is there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard import __version__

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="an sdist holds no workflows")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_version_is_the_same_in_the_package_the_citation_and_the_changelog() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == __version__
    newest = re.search(r"^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest.groups() == (__version__, citation["date-released"])


def test_the_citation_has_what_its_format_asks_for() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == "Apache-2.0"
    assert all({"name"} <= author.keys() or {"family-names"} <= author.keys() for author in citation["authors"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_programs_that_are_here(path: Path) -> None:
    lines = [step["run"] for job in read(path)["jobs"].values() for step in job["steps"] if "run" in step]
    called = [word for line in lines for word in line.split() if word.startswith(".ci/")]
    assert called
    assert all(os.access(ROOT / program, os.X_OK) for program in called)


def test_the_pythons_of_the_classifiers_are_those_of_the_workflow() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    classified = re.findall(r"Programming Language :: Python :: (3\.\d+)", text)
    jobs = read(ROOT / ".github" / "workflows" / "check.yml")["jobs"]
    first = jobs["all"]["steps"][1]["with"]["python-version"]
    assert classified == [first, *jobs["other-pythons"]["strategy"]["matrix"]["python"]]


def test_forms_for_issues_can_be_read() -> None:
    forms = [read(path) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert len(forms) == 2
    for form in forms:
        assert {"name", "description", "body"} <= form.keys()
        assert all({"type", "attributes"} <= field.keys() for field in form["body"])
