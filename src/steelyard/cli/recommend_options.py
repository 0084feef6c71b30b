"""Arguments and options that several `steelyard recommend` commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.errors import UserError, brief

RunArgument = Annotated[Path, typer.Argument(help="Folder of a run of kind recommend.")]
RuleOption = Annotated[str | None, typer.Option(help="Which rule of the run; default: the main one.")]


def parse_counts(text: str, option: str, most: int = 1_000_000) -> list[int]:
    """Return the numbers of "10,1", each whole and at least 1, without repeats."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > most:
        raise UserError(
            f"{option}: got {brief(text)}; allowed: whole numbers from 1 to {most:,}, joined by commas, like 10,1"
        )
    return list(dict.fromkeys(counts))


def parse_cutoffs(text: str) -> list[int]:
    """Return the cutoffs of "10,1"."""
    return parse_counts(text, "--cutoff", 10_000)
