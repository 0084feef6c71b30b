"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from steelyard.cli.completion import recipe_names

Format = Literal["text", "json"]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Change a field: section.field=value. May be given again.")
]
ExperimentArgument = Annotated[
    str, typer.Argument(help="Name of a recipe, or path of a TOML file.", autocompletion=recipe_names)
]
FormatOption = Annotated[Format, typer.Option("--format", help="text for people, json for programs.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="The run's own folder; it must not hold a run yet.")]
TableFormat = Literal["text", "markdown", "latex", "csv", "json"]
TableFormatOption = Annotated[
    TableFormat, typer.Option("--format", help="text, markdown or latex for people, csv or json for programs.")
]
BaselineOption = Annotated[
    str | None, typer.Option("--baseline", help="Rule that the others are held against; default: DS alone.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
ReportOption = Annotated[bool, typer.Option("--report", help="Also write the report: report.html in the run's folder.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of everything; in place of the experiment's.")]
FirstSeedOption = Annotated[int | None, typer.Option("--seed", help="The first seed; default: the experiment's.")]
SeedsOption = Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds, counted from the first.")]
