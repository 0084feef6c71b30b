"""What a release consists of beside the code: one version, a citation, licences, checks that call what is there."""

from __future__ import annotations

import functools
import os
import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from steelyard import __version__

ROOT = Path(__file__).parent.parent

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

ALLOWED = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0",
    "ISC", "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Unlicense", "Zlib", "public domain",
}  # fmt: skip

OTHER_NAMES = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Public Domain": "public domain",
    "Python Software Foundation License": "PSF-2.0",
}

NOT_INSTALLED = {"trackio", "wandb", "mlflow-skinny", "ir-measures"}
"""Trackers are no part of `dev`, and two packages have no wheels for ARM."""


def licence(name: str) -> str:
    """Return the licence of an installed package in the words of SPDX, however its author wrote it."""
    about = distribution(name).metadata
    if expression := about.get("License-Expression"):
        return expression
    classes = [line.split(" :: ")[-1] for line in about.get_all("Classifier") or [] if line.startswith("License ::")]
    written = [each for each in classes if each != "DFSG approved"] or [str(about.get("License"))]
    return " OR ".join(OTHER_NAMES.get(each, each) for each in written)


def allowed(name: str, found: str) -> bool:
    """Whether a package may be asked for: one of its alternatives holds nothing that we refuse."""
    choices = [set(re.split(r" AND ", choice.strip("() "))) for choice in found.split(" OR ")]
    if name.startswith(("nvidia-", "cuda-")):
        return True  # What torch is built on where it is built for GPUs; the docs name it.
    return any(choice <= ALLOWED for choice in choices)


def asked_for() -> dict[str, list[Requirement]]:
    """Return what is asked for directly, by extra; "" is what is always asked for."""
    extras = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    wanted = {extra: [Requirement(line) for line in lines] for extra, lines in extras.items()}
    return {extra: [each for each in lines if each.name != PROJECT["name"]] for extra, lines in wanted.items()}


@functools.cache
def everything() -> set[str]:
    """Return all packages that are installed here for the sake of one that is asked for."""
    waiting = [each for lines in asked_for().values() for each in lines]
    found: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        for extra in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), extra)
            try:
                lines = distribution(requirement.name).requires or []
            except PackageNotFoundError:
                continue
            if key not in found:
                found.add(key)
                further = map(Requirement, lines)
                waiting += [each for each in further if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def test_nothing_that_is_installed_for_us_has_a_licence_that_we_refuse() -> None:
    names = everything()
    assert len(names) > 100  # The search went through what packages ask for themselves.
    assert "phe" not in names
    assert not allowed("phe", "GPL-3.0-only")
    assert not allowed("phe", "MIT AND GPL-2.0")
    assert allowed("phe", "None OR MIT")
    assert {name: licence(name) for name in names if not allowed(name, licence(name))} == {}


def test_whatever_is_advised_to_be_installed_is_an_extra_of_the_package() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    advised = {word for text in texts for word in re.findall(r"pip install ('[^']*'|\S+)", text)}
    extras = {f"'steelyard[{extra}]'" for extra in (*PROJECT["optional-dependencies"], "{extra}", "{settings.to}")}
    assert advised - extras == {'{package}"'}  # openpyxl and others, which read one kind of file each
    assert "'steelyard[federate]'" in advised


def test_the_docs_list_what_every_extra_asks_for_with_its_licence() -> None:
    text = (ROOT / "docs" / "reference" / "licences.md").read_text(encoding="utf-8")
    row = r"^\| (.*?) \| `(.*?)` \| \S.* \| \S+ \(\d{4}-\d\d-\d\d\) \| (.*?) \|$"  # why, and when it was last released
    rows = re.findall(row, text, flags=re.MULTILINE)
    assert {(extra.strip("`"), name) for extra, name, _ in rows} == {
        (extra, each.name) for extra, lines in asked_for().items() for each in lines
    }
    for _, name, found in rows:
        if canonicalize_name(name) in everything():
            assert found == licence(name), name
        else:
            assert name in NOT_INSTALLED
            assert allowed(name, found), name


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_version_is_the_same_in_the_package_the_citation_and_the_changelog() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == __version__
    newest = re.search(r"^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest.groups() == (__version__, citation["date-released"])
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


@pytest.mark.skipif(not WORKFLOWS, reason="an sdist holds no workflows")
def test_the_pythons_of_the_classifiers_are_those_of_the_workflow() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    classified = re.findall(r"Programming Language :: Python :: (3\.\d+)", text)
    jobs = read(ROOT / ".github" / "workflows" / "check.yml")["jobs"]
    first = jobs["all"]["steps"][1]["with"]["python-version"]
    assert classified == [first, *jobs["other-pythons"]["strategy"]["matrix"]["python"]]


@pytest.mark.skipif(not WORKFLOWS, reason="an sdist holds no workflows")
def test_workflows_call_programs_that_are_here_and_forms_can_be_read() -> None:
    for path in WORKFLOWS:
        lines = [step["run"] for job in read(path)["jobs"].values() for step in job["steps"] if "run" in step]
        called = [word for line in lines for word in line.split() if word.startswith(".ci/")]
        assert called, path.name
        assert all(os.access(ROOT / program, os.X_OK) for program in called)
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = read(path)
        assert path.stem == "config" or all({"type", "attributes"} <= field.keys() for field in form["body"])
