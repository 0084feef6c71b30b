"""The files for a deployment: read for slips, since they are not built here."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

from steelyard import __version__
from steelyard.cli.main import command_line

FOLDER = Path(__file__).parents[2] / "examples" / "deployment"
UNITS = sorted(FOLDER.glob("*.service"))


def composed() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())


def commands() -> dict[str, list[str]]:
    """Return every command that these files give to `steelyard federate`, by where it stands."""
    found = {name: list(part["command"]) for name, part in composed()["services"].items()}
    for unit in UNITS:
        (line,) = re.findall(r"^ExecStart=\S+/steelyard federate (.*)$", unit.read_text(), re.MULTILINE)
        found[unit.name] = line.split()
    return found


def test_a_server_and_three_hospitals_that_may_do_no_more_than_they_must():
    document = composed()
    services = document["services"]
    assert sorted(services) == ["hospital-a", "hospital-b", "hospital-c", "server"]
    for name, part in services.items():
        assert (part["read_only"], part["cap_drop"], part["init"]) == (True, ["ALL"], True)
        assert ("ports" in part) == (name == "server")  # Nobody calls a node.
        assert set(part["networks"]) <= set(document["networks"])
        folders = [volume.split(":")[0] for volume in part["volumes"]]
        assert f"./{name}" in folders
        others = {f"./{other}" for other in services if other != name}
        assert not others & set(folders)  # No part sees the folder of another.
        assert (FOLDER / part["build"]["dockerfile"]).is_file()


def test_every_command_is_one_of_ours_with_options_that_it_has():
    main = command_line()
    assert isinstance(main, click.Group)
    group = main.commands["federate"]
    assert isinstance(group, click.Group)
    for where, words in commands().items():
        command = group.commands[words[0]]
        command.make_context(words[0], words[1:])  # Raises where an option or an argument is wrong.
        assert words[0] == ("serve" if "server" in where else "node"), where


def test_the_container_file_installs_this_version_and_does_not_run_as_root():
    text = (FOLDER / "Containerfile").read_text()
    assert f"STEELYARD_VERSION={__version__}" in text
    words = [line.split()[0] for line in text.replace("\\\n", " ").splitlines() if line and line[0] not in "# "]
    assert words[0] == "FROM"
    assert set(words) <= {"FROM", "ARG", "RUN", "USER", "WORKDIR", "ENV", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert words.index("USER") > words.index("RUN")
    assert ":latest" not in text


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_nothing_wrong_in_a_unit(unit: Path, tmp_path: Path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/steelyard/bin/steelyard", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    about = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, about) == (0, []), done.stderr
