"""What a run's experiment says, as text: shown on the page, and looked through for code of its own before a resume."""

from __future__ import annotations

from pathlib import Path

from steelyard.experiment.code import named_code
from steelyard.experiment.loading import RUN_FILE, own_text
from steelyard.settings import parse


def read_text(folder: Path) -> str:
    """Return the experiment of a run as text; a link or a huge file is refused."""
    return own_text(folder / RUN_FILE)


def own_code(folder: Path) -> list[str]:
    """Return the code that a run's experiment names, as `section.field = value`; empty for one without any."""
    return [f"{field} = {value}" for field, value in named_code(parse(read_text(folder), RUN_FILE)).items()]
