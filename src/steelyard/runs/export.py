"""Writing a run's tables as files that any tool reads."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from steelyard.errors import UserError
from steelyard.runs.reader import History

TABLES = ("federations", "rounds", "clients", "evaluations")


def export_run(folder: Path, to: Literal["csv", "json"], out: Path | None = None) -> list[Path]:
    """Write each table of a run as one file and return the files; works while the run goes on."""
    history = History(folder)
    target = out or folder / "export"
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {target} cannot be made: {error.strerror}; allowed: a writable folder") from error
    written: list[Path] = []
    for name in TABLES:
        frame = getattr(history, name)
        path = target / f"{name}.{to}"
        if to == "csv":
            frame.to_csv(path, index=False)
        else:
            frame.to_json(path, orient="records", double_precision=15)
        written.append(path)
    return written
