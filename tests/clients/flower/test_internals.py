"""Flower's internals: one file imports twelve modules at most, each with its reason, and all versions have them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from packaging.requirements import Requirement
from packaging.version import Version
from tests.kit import assert_refused

from steelyard.clients import flower
from steelyard.clients.flower import check_version

SOURCES = Path(__file__).parents[3] / "src" / "steelyard"
INTERNALS = SOURCES / "clients" / "flower" / "internals.py"
PUBLIC = {"flwr.app", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.clientapp"}
"""What Flower documents for apps."""
NAMES = re.compile(r"""^\s*(?:from|import) (flwr[\w.]*)|["'](flwr(?:\.\w+)+)["']""", re.MULTILINE)
"""Modules of Flower that a file names, in an import or as text."""
VERSIONS = ("1.41.0", "1.42.0")


def named(file: Path) -> set[str]:
    """Return the modules of Flower that a file names and Flower does not document."""
    found = NAMES.findall(file.read_text(encoding="utf-8"))
    return {name for one in found for name in one if name} - PUBLIC


def test_one_file_names_at_most_twelve_of_flowers_internal_modules_each_with_its_reason():
    found = {file: names for file in SOURCES.rglob("*.py") if (names := named(file))}
    assert list(found) == [INTERNALS]
    assert len(found[INTERNALS]) == 12
    lines = INTERNALS.read_text(encoding="utf-8").splitlines()
    starts = [
        at for at, line in enumerate(lines) if line.startswith("from flwr") and not lines[at - 1].startswith("from")
    ]
    assert [lines[at] for at in starts if not lines[at - 1].startswith("# ")] == []  # The reason is above it.


def test_nothing_imports_httpx():
    """Flower's client is httpx, and may be another one tomorrow."""
    found = [
        file for file in SOURCES.rglob("*.py") if re.search(r"^\s*(from|import) httpx", file.read_text(), re.MULTILINE)
    ]
    assert found == []


def test_the_extras_name_the_versions_that_were_tried(monkeypatch: pytest.MonkeyPatch):
    project = tomllib.loads((SOURCES.parents[1] / "pyproject.toml").read_text())["project"]
    ranges = {
        extra: next(Requirement(line).specifier for line in project["optional-dependencies"][extra] if "flwr" in line)
        for extra in ("flower", "federate")
    }
    minors = [f"1.{minor}.0" for minor in range(20, 61)]
    assert [one for one in minors if Version(one) in ranges["federate"]] == list(VERSIONS)
    assert [one for one in minors if Version(one) in ranges["flower"]] == [one for one in minors if one >= "1.29.0"]
    for one in minors:
        monkeypatch.setattr(flower, "version", lambda _, one=one: one)
        if one in VERSIONS:
            check_version()
        else:
            assert_refused(check_version, "federate: Flower (flwr)", one, "pip install 'steelyard[federate]'")


@pytest.mark.parametrize(
    "wanted", [one if one == version("flwr") else pytest.param(one, marks=pytest.mark.slow) for one in VERSIONS]
)
def test_a_supported_version_has_what_we_need(wanted: str, tmp_path: Path):
    paths = [str(SOURCES.parent)]
    if wanted != version("flwr"):
        command = [sys.executable, "-m", "pip", "download", f"flwr=={wanted}", "--no-deps", "-q", "-d", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        wheels = list(tmp_path.glob("flwr-*.whl"))
        if done.returncode or not wheels:
            pytest.skip(f"flwr {wanted} does not install here")
        zipfile.ZipFile(wheels[0]).extractall(tmp_path / "flwr")
        paths.insert(0, str(tmp_path / "flwr"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "FLWR_TELEMETRY_ENABLED": "0"}
    command = [sys.executable, str(Path(__file__).with_name("needs.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert wanted == version("flwr") or done.stdout.startswith(str(tmp_path))
