"""Flower's internals: one package imports them, and every version that is supported has what it needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("flwr")

SOURCES = Path(__file__).parents[3] / "src" / "steelyard"
ADAPTER = SOURCES / "clients" / "flower" / "adapter"
PUBLIC = {"flwr.app", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.clientapp"}
"""What Flower documents for apps."""
PRIVATE = r"_runtime_client|_message_id|object_id"
"""Attributes of Flower's objects that it does not document."""
VERSIONS = ("1.41.0", "1.42.0")
"""The versions that pyproject.toml allows, one of each minor number."""

NEEDS = """
import importlib, inspect, pathlib, sys
folder = pathlib.Path(sys.argv[1])
import flwr
for file in sorted(folder.glob("*.py")):
    importlib.import_module("steelyard.clients.flower.adapter." + file.stem)
from flwr.superlink.grid import HttpGrid
from steelyard.clients.flower.adapter import fleet; from steelyard.clients.flower.adapter import fleet as transport
assert isinstance(inspect.getattr_static(HttpGrid, "_runtime_client"), property)
client = fleet.FleetHttpClient("http://127.0.0.1:1")
fleet.bound_answers(client)
assert isinstance(client._client._transport, fleet._Bounded)
superlink = importlib.import_module("flwr.superlink.cli.flower_superlink")
assert callable(superlink.flower_superlink) and callable(superlink.uvicorn.run)
from steelyard.clients.flower.adapter import messages
from flwr.app import ConfigRecord, Message, RecordDict
messages.enter_run(1, 7)
message = Message(RecordDict({"form": ConfigRecord({"json": "text"})}), 7, "train.task", ttl=1.0)
apart = messages.take_apart(message)
names = messages.part_names(messages.PartsTree.FromString(apart.tree))
assert set(names) == set(apart.parts) and message.metadata.message_id in names
assert bytes([messages.TEXT_TAG]) + bytes([4]) + b"text" in b"".join(apart.parts.values())
print(flwr.__file__)
"""


def internal(file: Path) -> set[str]:
    """Return what a file names of Flower beside what Flower documents: imports, attributes and strings."""
    names = rf"""^\s*(?:from|import) (flwr[\w.]*)|\.({PRIVATE})\b|["'](flwr(?:\.\w+)+|{PRIVATE})["']"""
    found = re.finditer(names, file.read_text(encoding="utf-8"), re.MULTILINE)
    return {name for one in found for name in one.groups() if name} - PUBLIC


def test_nobody_but_the_adapter_names_flowers_internals():
    found = {str(file.relative_to(SOURCES)): internal(file) for file in SOURCES.rglob("*.py")}
    outside = {name: names for name, names in found.items() if names and ADAPTER not in (SOURCES / name).parents}
    assert outside == {}
    assert len(set().union(*found.values())) > 15  # The adapter itself does.


def test_the_versions_are_those_of_the_package():
    bounds = re.search(r'"flwr>=1\.(\d+),<1\.(\d+)"', (SOURCES.parents[1] / "pyproject.toml").read_text())
    assert bounds is not None
    assert [f"1.{minor}.0" for minor in range(int(bounds[1]), int(bounds[2]))] == list(VERSIONS)


@pytest.mark.parametrize(
    "wanted", [one if one == version("flwr") else pytest.param(one, marks=pytest.mark.slow) for one in VERSIONS]
)
def test_a_supported_version_has_what_the_adapter_needs(wanted: str, tmp_path: Path):
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
    command = [sys.executable, "-c", NEEDS, str(ADAPTER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert wanted == version("flwr") or done.stdout.startswith(str(tmp_path))
