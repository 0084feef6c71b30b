"""What a run's experiment says, as text: shown on the page, and looked through for code of its own before a resume."""

from __future__ import annotations

from pathlib import Path

from steelyard.errors import UserError
from steelyard.experiment.code import named_code
from steelyard.experiment.loading import RUN_FILE
from steelyard.settings import parse

LONGEST = 1_000_000
"""Bytes of an experiment file that are looked at; none of ours comes near."""


def read_text(folder: Path) -> str:
    """Return the experiment of a run as text; a link or a huge file is refused."""
    path = folder / RUN_FILE
    try:
        if path.is_symlink() or path.stat().st_size > LONGEST:
            raise UserError(f"{path}: a link, or longer than {LONGEST} bytes; allowed: what `steelyard run` wrote")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from error


def own_code(folder: Path) -> list[str]:
    """Return the code that a run's experiment names, as `section.field = value`; empty for one without any."""
    return [f"{field} = {value}" for field, value in named_code(parse(read_text(folder), RUN_FILE)).items()]
