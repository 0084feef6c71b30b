"""The main commands: run, resume, compare, table, show, export and the lists.

What is heavy is imported inside the commands, for speed of start: `steelyard --help` must not wait for torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import click
import typer

from steelyard import __version__
from steelyard.activity import doing
from steelyard.cli.attack import attack
from steelyard.cli.completion import recipe_names
from steelyard.cli.federate import app as federate_app
from steelyard.cli.models import models
from steelyard.cli.new import new
from steelyard.cli.printing import (
    finish,
    print_entries,
    print_json,
    report_line,
    terminal_width,
    watched,
    write_own_report,
)
from steelyard.cli.recommend import app as recommend_app
from steelyard.cli.report import app as report_app
from steelyard.cli.trust import TrustOption, asking
from steelyard.cli.watching import app as watching_app
from steelyard.errors import UserError, one_line, printable
from steelyard.rounds.progress import watching

app = typer.Typer(
    name="steelyard",
    help="Federated learning in which each client's say is weighed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.add_typer(recommend_app, name="recommend")
app.add_typer(federate_app)
app.command()(new)
app.command()(models)
app.add_typer(watching_app)
app.add_typer(report_app)
app.command()(attack)

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


def main() -> NoReturn:
    """Run the command line; a user's mistake is one line on standard error and exit code 2."""
    try:
        code = app(prog_name="steelyard", standalone_mode=False)
    except UserError as error:
        fail(one_line(str(error)))
    except click.UsageError as error:
        _explain_usage(error)
    except click.ClickException as error:
        fail(one_line(error.format_message()))
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; that is no error of ours.
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        # Files and folders of every command: too long a name, no right to write, a folder where a file is asked.
        fail(one_line(f"{error.filename or 'files'}: {error.strerror or error}"))
    except MemoryError:
        fail("not enough memory for this; allowed: fewer clients, smaller models or less data at once")
    except (KeyboardInterrupt, click.Abort):
        print("steelyard: stopped", file=sys.stderr)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _explain_usage(error: click.UsageError) -> NoReturn:
    """Say in one line what is wrong with the command itself; a command without anything shows its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(2)
    path = error.ctx.command_path if error.ctx is not None else "steelyard"
    message = error.format_message().rstrip(".")
    fail(one_line(f"{message}{'' if message.endswith('?') else ';'} see `{path} --help`"))


def fail(line: str) -> NoReturn:
    """Print one line and exit with code 2."""
    print(f"steelyard: {line}", file=sys.stderr)
    sys.exit(2)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(f"steelyard {__version__}")
        raise typer.Exit


@app.command()
def run(
    experiment: ExperimentArgument,
    changes: SetOption = None,
    seed: SeedOption = None,
    out: OutOption = None,
    trust: TrustOption = False,
    quiet: QuietOption = False,
    report: ReportOption = False,
    format: FormatOption = "text",
) -> None:
    """Run an experiment and show its result."""
    with watching(not quiet):
        with doing("starting"):
            from steelyard.api import runnable
            from steelyard.experiment.loading import load

        described = runnable(load(experiment, changes or [], seed, asking(trust)))
        finish(lambda: described.run(out, progress=not quiet), format, report)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a run that was stopped or killed.")],
    trust: TrustOption = False,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Go on even if the experiment, the data or a checkpoint changed."),
    ] = False,
    quiet: QuietOption = False,
    report: ReportOption = False,
    format: FormatOption = "text",
) -> None:
    """Continue a run, bit for bit as if it had not been stopped."""
    with watching(not quiet):
        with doing("starting"):
            from steelyard.api import Result
            from steelyard.federate.resuming import resume as resume_run

        def go_on() -> Result:
            return Result(resume_run(folder, progress=not quiet, ask=asking(trust), accept_changes=accept_changes))

        finish(go_on, format, report)


@app.command()
def compare(
    experiment: ExperimentArgument,
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--rules",
            help='Rules, with commas or one by one: DS, "LD>DS>MD", online, "online(LD>DS>MD)@20", greedy, bandit, '
            '"budget(20)", fedavg, adafed, mean, recipe. Default: each criterion, all orders of up to three, online.',
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds, counted from the first.")] = 1,
    changes: SetOption = None,
    seed: Annotated[int | None, typer.Option("--seed", help="The first seed; default: the experiment's.")] = None,
    out: OutOption = None,
    baseline: BaselineOption = None,
    trust: TrustOption = False,
    quiet: QuietOption = False,
    report: ReportOption = False,
    format: TableFormatOption = "text",
) -> None:
    """Run several rules on the same cohorts and first models, and show the papers' tables."""
    with watching(not quiet):
        with doing("starting"):
            from steelyard.api import runnable
            from steelyard.experiment.comparing import load_comparison

        described = runnable(load_comparison(experiment, changes or [], rules or [], seed, asking(trust)))
        if baseline is not None and baseline not in described.rules():
            raise UserError(f"--baseline: got '{baseline}'; allowed: {', '.join(described.rules())}")
        result = watched(lambda: described.compare(["recipe"], seeds, out, progress=not quiet))
        with doing("comparing the rules"):
            _print_table(result.folder, baseline, format)
    if report:
        write_own_report(result)
    if format == "text":
        print(f"run stored in {result.folder}")
        print(report_line(str(result.folder), report))


@app.command()
def table(
    folder: Annotated[Path, typer.Argument(help="Folder of a run or comparison.")],
    baseline: BaselineOption = None,
    format: TableFormatOption = "text",
    curves: Annotated[
        Path | None,
        typer.Option("--curves", help="Also write the accuracy curves: .svg, .png, .pdf or .csv."),
    ] = None,
) -> None:
    """Show a comparison as the papers' tables: rounds to target, gains, intervals, tests, devices, samples, curves."""
    _print_table(folder, baseline, format, curves)


def _print_table(folder: Path, baseline: str | None, format: TableFormat, curves: Path | None = None) -> None:
    from steelyard.experiment.loading import read_experiment
    from steelyard.report.comparison import compare_run
    from steelyard.report.tables import write_csv, write_tables

    document = compare_run(folder, read_experiment(folder).rounds, baseline)
    if curves is not None:
        from steelyard.report.figures.curves_file import write_curves

        write_curves(folder, document, curves)
    if format == "json":
        print_json(document)
    elif format == "csv":
        print(write_csv(document), end="")
    else:
        print(write_tables(document, format, terminal_width()), end="")


@app.command()
def recipes(format: FormatOption = "text") -> None:
    """List the ready experiments."""
    from steelyard.experiment.loading import recipes as ready
    from steelyard.settings import parse

    described = {name: parse(entry.read_text(encoding="utf-8"), name) for name, entry in ready().items()}
    if format == "json":
        print_json([{"name": name, "description": d.get("description", "")} for name, d in described.items()])
        return
    print_entries({name: str(document.get("description", "")) for name, document in described.items()})


@app.command()
def show(
    experiment: Annotated[
        str | None, typer.Argument(help="Name of a recipe, or path of a TOML file.", autocompletion=recipe_names)
    ] = None,
    changes: SetOption = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of an experiment file.")] = False,
    resolved: Annotated[bool, typer.Option("--resolved", help="With every default filled in.")] = False,
) -> None:
    """Print an experiment as TOML, or the schema of experiment files."""
    from steelyard.experiment.kinds import kind_of
    from steelyard.experiment.loading import load, source_text, to_toml

    if schema:
        kind = "learning" if experiment is None else str(load(experiment).model_dump().get("kind", "learning"))
        print_json(kind_of(kind).model_json_schema())
        return
    if experiment is None:
        raise UserError("show: no experiment named; allowed: a recipe, a file, or --schema")
    described = load(experiment, changes or [])
    print(to_toml(described) if changes or resolved else source_text(experiment), end="")


@app.command()
def criteria(
    plugin: Annotated[list[str] | None, typer.Option("--plugin", help="Python file or module with criteria.")] = None,
    format: FormatOption = "text",
) -> None:
    """List the criteria: what each measures, who takes the measure, what it is about, how far it can be trusted."""
    from steelyard.weighing.criteria import known
    from steelyard.weighing.plugins import load_module
    from steelyard.weighing.rule import WeighingSettings
    from steelyard.weighing.trust import trust_of

    for path in plugin or []:
        load_module(path)
    plain = WeighingSettings()
    found = [
        {
            "name": c.name,
            "measured_by": c.measured_by,
            "about": c.about,
            "trust": trust_of(c, plain),
            "description": c.description,
        }
        for c in known().values()
    ]
    if format == "json":
        print_json(found)
        return
    print_entries(
        {
            e["name"]: f"{e['description']} (about the {e['about']}, measured by the {e['measured_by']}, {e['trust']})"
            for e in found
        }
    )


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    to: Annotated[Literal["csv", "json"], typer.Option("--to", help="Format of the tables.")] = "csv",
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the files; default: DIR/export.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over files of an earlier export.")] = False,
) -> None:
    """Write a run's rounds, clients and evaluations as files."""
    from steelyard.runs.export import export_run

    for path in export_run(folder, to, out, force=force):
        print(printable(str(path)))
