"""Arguments and options that several commands share."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import typer

from steelyard.errors import UserError, brief


def recipe_names(incomplete: str) -> list[str]:
    """Return the recipes that begin so, for the Tab key; where none does, the shell goes on with names of files."""
    names = (entry.name for entry in resources.files("steelyard.recipes").iterdir())
    found = sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))
    return [name for name in found if name.startswith(incomplete)]


Format = Literal["text", "json"]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Change a field: section.field=value. May be given again.")
]
ExperimentArgument = Annotated[
    str, typer.Argument(help="Name of a recipe, or path of a TOML file.", autocompletion=recipe_names)
]
FormatOption = Annotated[Format, typer.Option("--format", help="text for people, json for programs.")]
PartOption = Annotated[
    str | None,
    typer.Option("--part", help="Run only this part, such as 3/8; `steelyard join` puts all parts together."),
]
OutOption = Annotated[Path | None, typer.Option("--out", help="The run's own folder; it must not hold a run yet.")]
TableFormat = Literal["text", "markdown", "latex", "csv", "json"]
TableFormatOption = Annotated[
    TableFormat, typer.Option("--format", help="text, markdown or latex for people, csv or json for programs.")
]
BaselineOption = Annotated[
    str | None, typer.Option("--baseline", help="Rule that the others are held against; default: DS alone.")
]
FullOption = Annotated[bool, typer.Option("--full", help="Also every test of every rule in words, and every table.")]
ReportOption = Annotated[bool, typer.Option("--report", help="Also write the report: report.html in the run's folder.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of everything; in place of the experiment's.")]
FirstSeedOption = Annotated[int | None, typer.Option("--seed", help="The first seed; default: the experiment's.")]
SeedsOption = Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds, counted from the first.")]
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
