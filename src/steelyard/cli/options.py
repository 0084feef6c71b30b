"""Arguments and options that several commands share: fields, seeds, formats, messages, and trust in code."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from steelyard.base import logs
from steelyard.base.errors import UserError, brief, printable
from steelyard.rounds.progress import paused

if TYPE_CHECKING:
    from steelyard.experiment.loading import Ask


def recipe_names(incomplete: str) -> list[str]:
    """Return the recipes that begin so, for the Tab key; where none does, the shell goes on with names of files."""
    names = (entry.name for entry in resources.files("steelyard.recipes").iterdir())
    found = sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))
    return [name for name in found if name.startswith(incomplete)]


SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Change a field, such as rounds.count=5. May be given again.")
]
ExperimentArgument = Annotated[
    str, typer.Argument(help="Name of a recipe, or path of a TOML file.", autocompletion=recipe_names)
]
PartOption = Annotated[
    str | None,
    typer.Option("--part", help="Run only this part, such as 3/8; `steelyard join` puts all parts together."),
]
OutOption = Annotated[Path | None, typer.Option("--out", help="The run's own folder; it must not hold a run yet.")]
Format = Literal["text", "markdown", "latex", "csv", "json"]
FormatOption = Annotated[
    Format,
    typer.Option("--format", metavar="FORMAT", help="text, markdown or latex for people, csv or json for programs."),
]
BaselineOption = Annotated[
    str | None, typer.Option("--baseline", help="Rule to compare with (default: FedAvg, else the first).")
]
FullOption = Annotated[bool, typer.Option("--full", help="Also every test of every rule in words, and every table.")]
ReportOption = Annotated[bool, typer.Option("--report", help="Also write the report: report.html in the run's folder.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of everything (default: the experiment's).")]
FirstSeedOption = Annotated[int | None, typer.Option("--seed", help="The first seed (default: the experiment's).")]
SeedsOption = Annotated[
    int, typer.Option("--seeds", metavar="NUMBER", min=1, help="How many seeds, counted from the first.")
]
AcceptOption = Annotated[
    list[str] | None,
    typer.Option("--accept", help="Continue in spite of this finding of `steelyard check`. May be given again."),
]
RunArgument = Annotated[Path, typer.Argument(help="Folder of a run of kind recommend.")]
KeysOption = Annotated[
    Path | None, typer.Option("--keys", help="Folder of public keys that you trust: NODE.pub, server.pub.")
]
HeadOption = Annotated[str | None, typer.Option("--head", help="The final hash of this run that you kept elsewhere.")]
RuleOption = Annotated[str | None, typer.Option(help="Which rule of the run (default: the main one).")]


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


_PANEL = "Messages"
_LEVEL = "steelyard.level"


def _level(context: typer.Context, level: str) -> None:
    if context.meta.setdefault(_LEVEL, level) != level:
        raise UserError("--verbose, --quiet: got both; allowed: one of them")
    logs.show(level)


def _verbose(context: typer.Context, given: bool) -> None:
    if given:
        _level(context, "debug")


def _quiet(context: typer.Context, given: bool) -> None:
    if given:
        _level(context, "warning")


def _log_file(path: Path | None) -> None:
    if path is not None:
        logs.show(file=path)


VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", callback=_verbose, help="Log every step.", rich_help_panel=_PANEL)
]
QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", callback=_quiet, help="Show no progress; warnings and errors only.", rich_help_panel=_PANEL
    ),
]
LogFileOption = Annotated[
    Path | None,
    typer.Option(
        "--log-file", callback=_log_file, help="Add every message, with its time, to a file.", rich_help_panel=_PANEL
    ),
]


def share_options(root: Any, command: Any) -> None:
    """Have a command, and all below it, take the options on messages that the root takes; they act when read."""
    shared = [option for option in root.params if option.name in ("verbose", "quiet", "log_file")]
    for option in shared:
        option.expose_value = False
    command.params.extend(shared)
    for below in getattr(command, "commands", {}).values():
        share_options(root, below)


TrustOption = Annotated[
    bool, typer.Option("--trust", help="Run code that the experiment names (criteria, model, loss) without asking.")
]


def asking(trust: bool) -> Ask:
    """Return what is called before named code runs: it asks at a terminal, and elsewhere needs --trust."""

    def ask(where: str, code: Mapping[str, str]) -> None:
        # For speed of start: most experiments name no code.
        from steelyard.experiment.loading import refuse

        if trust:
            return
        with paused():  # a moving bar would write over the question, and stands in the way of standard error
            if not (sys.stdin.isatty() and sys.stderr.isatty()):
                refuse(where, code, "add --trust")
            # A file from elsewhere must not hide, with a terminal's control characters, what it would run.
            print(f"{printable(where)} names code, which would run with your permissions:", file=sys.stderr)
            for field, value in code.items():
                print(f"  {printable(field)} = {printable(value)}", file=sys.stderr)
            if not typer.confirm("Run it?", default=False, err=True):
                raise UserError(f"{where}: its code was not to run, so nothing was done")

    return ask
