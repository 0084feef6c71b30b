"""Writing a Flower app folder: what `flwr run` needs, the experiment as one JSON text, and a README that says how."""

from __future__ import annotations

import json
import re
import shlex
import ssl
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from steelyard import __version__
from steelyard.base.errors import UserError, brief, told_as, writable
from steelyard.base.settings import change
from steelyard.base.usercode import SHIPPED
from steelyard.experiment.description import Description
from steelyard.experiment.loading import FOLDER as CODE
from steelyard.experiment.loading import build, keep_code, to_toml

DEFAULTS: dict[str, str | bool] = {"set": "", "out": "", "resume": False, "report": ""}
"""Keys of the run configuration beside `experiment`, with their defaults."""


def experiment_text(experiment: Description) -> str:
    """Return an experiment as the JSON text that travels in the run configuration."""
    return json.dumps(experiment.model_dump(mode="json", exclude_none=True), separators=(",", ":"))


def experiment_of(run_config: Mapping[str, Any]) -> Description:
    """Return the experiment of a run configuration, with the changes of its key `set` applied."""
    return _experiment(str(run_config.get("experiment") or ""), str(run_config.get("set") or ""))


@lru_cache(maxsize=8)
def _experiment(text: str, changes: str) -> Description:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"run config experiment: not JSON ({error}); write it with `steelyard federate init`") from None
    if not isinstance(document, dict):
        raise UserError("run config experiment: not a JSON object; write it with `steelyard federate init`")
    try:
        assignments = shlex.split(changes)
    except ValueError as error:
        raise UserError(f"run config set: {error}; allowed: section.field=value, separated by spaces") from None
    for assignment in assignments:
        change(document, assignment)
    return build(document, "run config experiment")


PACKAGE = "steelyard_app"
CONNECTION = "federation"
"""Name of the SuperLink connection that an app folder brings along."""
_LONGEST_NAME = 32

_PYPROJECT = """\
# A Flower app that runs a Steelyard experiment across machines. See README.md.
[project]
name = {name}
version = "1.0.0"
description = {description}
license = "Apache-2.0"
dependencies = ["steelyard[federate]=={version}"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "steelyard"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
# The whole experiment as one JSON text, made from experiment.toml by `steelyard federate init`.
experiment = {experiment}
# Changes to it: "rounds.count=10 rounds.fraction=0.5".
set = {set}
# Folder of the run, on the SuperLink's machine; empty: a new one in the experiment's store.folder.
out = {out}
# true: go on with the run in `out` from its last whole round.
resume = {resume}
# Folder on the SuperLink's machine in which the server's part says how the run goes; empty: none.
report = {report}
"""

_README = """\
# {name}

{description}

This folder is a [Flower](https://flower.ai) app: `flwr run` sends it to a SuperLink, which runs the server's part, and
to its nodes, which run the clients' part. Every machine needs `steelyard[federate]` {version}; the app itself
installs nothing.

| file | what it is |
|---|---|
| `pyproject.toml` | the app's entries and its run configuration; the experiment is one JSON text there |
| `experiment.toml` | the same experiment, for reading |
| `{package}/` | the two entries, a line each |
| `.flwr/config.toml` | the SuperLink connection `{connection}` that `flwr run` uses |

On the server. A SuperLink asks whoever reaches its port for nothing, so it listens on this machine only; to let nodes
of other machines in, use `steelyard federate serve` instead:

    export FLWR_TELEMETRY_ENABLED=0
    flower-superlink --insecure --host 127.0.0.1 --disable-runtime-dependency-installation

A node, with a file `node.toml` of its own; `partition-id` runs from 0 to `num-partitions` - 1, or give
`client = "NAME"` and `data = "/path/to/own/data"` (its file decides which rows and columns are used: see "What a server
can and cannot do to me" of Steelyard's documentation):

    server = "127.0.0.1:8000"
    insecure = true
    partition-id = 0
    num-partitions = {nodes}

    steelyard federate node node.toml

Where you are (write the server's address into `.flwr/config.toml` first):

    FLWR_HOME="$PWD/.flwr" flwr run . {connection} --stream --run-config 'set="federate.nodes={nodes}"'

Go on with a run that was stopped, from its last whole round:

    FLWR_HOME="$PWD/.flwr" flwr run . {connection} --stream --run-config 'out="runs/THE-RUN" resume=true'

With TLS and registered node keys: see the page "A real federation" of Steelyard's documentation.
To try it all on this machine: `steelyard federate local experiment.toml --nodes {nodes}`.
"""

_CONFIG = """\
[superlink]
default = "{connection}"

[superlink.{connection}]
address = {address}
{security}
"""


def write_app(
    folder: Path,
    experiment: Description,
    *,
    address: str = "127.0.0.1:8000",
    authority: Path | None = None,
    out: Path | None = None,
    resume: bool = False,
    report: Path | None = None,
    ship: bool = True,
) -> list[Path]:
    """Write the app folder and return its files; a folder that holds anything already is refused.

    Code that the experiment names goes along in the app (`ship`), since no other machine has its file; a federation on
    this machine leaves it where it is.
    """
    writable(folder, "folder")
    check_address(address)
    if authority is not None:
        _check_authority(authority)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not empty; allowed: a new or an empty folder")
    if ship:
        experiment = _with_code(experiment, folder / PACKAGE / CODE)
    settings = {
        **DEFAULTS,
        "out": "" if out is None else str(out),
        "resume": resume,
        "report": "" if report is None else str(report),
        "experiment": experiment_text(experiment),
    }
    files = {**_texts(experiment, settings), ".flwr/config.toml": connection_file(address, authority)}
    written = sorted((folder / PACKAGE / CODE).glob("*.py")) if ship else []
    if written:
        files[f"{PACKAGE}/{CODE}/__init__.py"] = '"""Code that the experiment names."""\n'
    with told_as(f"{folder}: cannot be written", "a writable folder"):
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            written.append(file)
    return written


def _texts(experiment: Description, settings: Mapping[str, str | bool]) -> dict[str, str]:
    """Return the app's own files by name; `settings` are those that the app's run configuration holds."""
    name = re.sub(r"[^a-z0-9]+", "-", experiment.name.lower()).strip("-")[:_LONGEST_NAME].strip("-") or "experiment"
    description = experiment.description or f"The experiment {experiment.name}."
    words = {
        "name": name,
        "description": description,
        "version": __version__,
        "package": PACKAGE,
        "connection": CONNECTION,
        "nodes": str(experiment.federate.nodes),
    }
    quoted = {key: _toml(value) for key, value in settings.items()}
    pyproject = {**words, **quoted, "name": _toml(name), "description": _toml(" ".join(description.split()))}
    return {
        "pyproject.toml": _PYPROJECT.format(**pyproject),
        "experiment.toml": to_toml(experiment),
        "README.md": _README.format(**words),
        f"{PACKAGE}/__init__.py": '"""The two entries of the Flower app."""\n',
        f"{PACKAGE}/client_app.py": _entry("client"),
        f"{PACKAGE}/server_app.py": _entry("server"),
    }


def _with_code(experiment: Description, folder: Path) -> Description:
    """Copy the files of code that an experiment names into the app and name them as modules of its package."""
    document = experiment.model_dump(mode="json", exclude_none=True)
    keep_code(document, folder, lambda name: f"{SHIPPED}{Path(name).stem}")
    return build(document, reading=True)


def connection_file(address: str, authority: Path | None) -> str:
    """Return the text of a Flower configuration that knows one SuperLink; `flwr` commands read it."""
    security = "insecure = true" if authority is None else f"root-certificates = {_toml(str(authority))}"
    return _CONFIG.format(connection=CONNECTION, address=_toml(address), security=security)


def check_address(address: str) -> None:
    """Refuse what is no HOST:PORT, before it is written into a file that Flower reads much later."""
    host, colon, port = address.rpartition(":")
    numbered = port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535
    bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    named = bool(bare) and re.fullmatch(r"[A-Za-z0-9._-]+" if bare == host else r"[0-9A-Fa-f:.]+", bare) is not None
    if not (colon and numbered and named):
        raise UserError(
            f"--superlink: got {brief(address)}; allowed: HOST:PORT with a port from 1 to 65535, such as 127.0.0.1:8000"
        )


def _check_authority(path: Path) -> None:
    """Refuse a file that is no certificate."""
    with told_as(f"--root-certificates: {brief(str(path))} cannot be read", "the SuperLink's ca.pem"):
        content = path.read_bytes()
    try:
        ssl.create_default_context().load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise UserError(
            f"--root-certificates: {brief(str(path))} holds no certificate; allowed: ca.pem of the SuperLink"
        ) from None


def _entry(side: str) -> str:
    return f'"""What runs on the {side}."""\n\nfrom steelyard.federate.{side}_app import app\n\n__all__ = ["app"]\n'


def _toml(value: str | bool) -> str:
    # A JSON text in ASCII is a TOML basic string as it stands.
    return json.dumps(value)


def number_of_run(output: str) -> int:
    """Return Flower's number for a run, from what `flwr run --format json` printed; ValueError or KeyError if none."""
    return int(json.loads(output[output.index("{") :])["run-id"])
