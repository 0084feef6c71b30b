"""How a run goes, in a file that the server app writes and whoever started or follows the run reads."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Literal

from steelyard.base.errors import UserError
from steelyard.runs.database import reading

Status = Literal["running", "finished", "stopped"]
LOG = "log.txt"
"""What the server app printed, beside its outcome."""
_FILE = "outcome.json"


def note_outcome(folder: Path, status: Status, line: str = "", pid: int | None = None) -> None:
    """Write how a run goes; `line` says why it stopped, or where it lies when it finished."""
    file = folder / _FILE
    text = json.dumps({"status": status, "line": line, "pid": pid})
    draft = file.with_suffix(".part")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
    except OSError:
        # On a full disk there is no room for a new file, but the block that the old one has is ours.
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
            with open(file, "r+", encoding="utf-8") as old:
                old.write(text)
                old.truncate()


def read_outcome(folder: Path) -> dict[str, Any]:
    """Return how a run goes; empty before its server app started."""
    return read_json(folder / _FILE)


def forget_outcome(folder: Path) -> None:
    """Remove what an earlier start of the run left."""
    (folder / _FILE).unlink(missing_ok=True)


def read_json(file: Path) -> dict[str, Any]:
    """Return what a file of the server's own holds; nothing where it is not there, or not whole."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def is_server_app(pid: int) -> bool:
    """Whether the process of this id is a ServerApp of Flower; ids are used again, so we look."""
    try:
        return b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def rounds_of(folder: Path) -> tuple[int, dict[str, float | None]]:
    """Return the last whole round of a run folder and each rule's accuracy there; (-1, {}) before the first."""
    try:
        with reading(folder) as connection:
            found = connection.rows("rounds", ("round",), "ORDER BY round DESC LIMIT 1")
            if not found:
                return -1, {}
            ((last,),) = found
            names = dict(connection.rows("federations", ("id", "name")))
            rows = connection.rows("rounds", ("federation", "accuracy"), "WHERE round = ?", last)
            return last, {names[key]: accuracy for key, accuracy in rows if key in names}
    except UserError:
        return -1, {}
