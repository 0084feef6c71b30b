"""`steelyard watch`, `top`, `ls`, `report`, `weigh` and `import`: runs to look at, rules to try, runs from files.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from steelyard.base import files
from steelyard.base.errors import UserError, printable, printable_all
from steelyard.cli.options import FormatOption
from steelyard.cli.printing import print_json, print_table, print_wrapped, warn_of_changes
from steelyard.report.rendering import Table

if TYPE_CHECKING:
    from steelyard.report.view import Reweighed
    from steelyard.weighing.table import WeighedDocument

MOST = 40
"""Clients in one table."""
LONGEST = 80
"""Names up to this many characters are shown whole."""

FolderArgument = Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder with runs in it, or a run's own folder.")]


def ls(folder: FolderArgument = Path("runs"), format: FormatOption = "text") -> None:
    """List the runs in a folder: state, progress, accuracy, age and size."""
    from steelyard.runs.glance import glances

    found = glances(folder)
    if format == "json":
        print_json([glance.document() for glance in found])
        return
    from steelyard.cli.top import show_runs

    show_runs(folder, found)


def top(
    folder: FolderArgument = Path("runs"),
    every: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Watch runs in the terminal: progress, accuracy, who counts most; q or Ctrl-C leaves."""
    from steelyard.cli.top import watch_runs

    if not math.isfinite(every):
        raise UserError(f"--every: got {every}; allowed: a number of seconds, at least 0.2")
    watch_runs(folder, every=every, once=once)


def watch(
    folder: FolderArgument = Path("runs"),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free port.")] = 8765,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; other machines reach any but loopback.")
    ] = ("127.0.0.1"),
    token: Annotated[
        str | None,
        typer.Option("--token", help="What a browser must bring, 16 characters or more; default: made and printed."),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Also start and resume experiments that name Python code of their own.")
    ] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Show runs only: nothing is started, stopped or resumed.")
    ] = False,
    server: Annotated[
        Path | None,
        typer.Option("--server", help="Folder of a federation's server: its runs, its queue and its nodes, too."),
    ] = None,
) -> None:
    """Open a page over the runs in a folder, live while they run; Ctrl-C ends it."""
    from steelyard.page import require_page

    require_page()
    if not folder.exists() and folder != Path("runs"):
        raise UserError(f"{folder}: no such folder; allowed: a folder of runs, which may be empty")
    from steelyard.page.app import serve

    announce = functools.partial(print, flush=True)
    serve(folder, host=host, port=port, token=token, announce=announce, trust=trust, read_only=read_only, server=server)


# `steelyard report`, `weigh` and `import`.


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folder of a run, several to compare, or of an arena.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "--output", "-o", help="The HTML file; default: report.html in the (first) run."),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Also write each figure as SVG, PNG and PDF into this folder.")
    ] = None,
) -> None:
    """Write one HTML file that shows what happened, with no network needed: who counted how much, when and why."""
    from steelyard.report.figures import draw_all, write_figures
    from steelyard.report.html import write_report
    from steelyard.report.view import RunView
    from steelyard.studies.arena import Arena
    from steelyard.studies.arena_page import write_page

    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError(f"RUNS: got {', '.join(map(str, runs))}; allowed: each run once")
    path = out or runs[0] / files.REPORT
    if path.suffix not in (".html", ".htm"):
        raise UserError(f"--out: got '{path}'; allowed: a file name that ends in .html")
    files.is_file(path)  # a link is refused before anything is drawn
    if len(runs) == 1 and Arena.is_in(runs[0]):
        if figures is not None:
            raise UserError(f"--figures: got '{figures}' with an arena; allowed: for a run, as {runs[0]}/scenes/NAME")
        write_page(Arena.read(runs[0]).answer(runs[0]), path)
        print(f"report to open: {printable(str(path))}")
        return
    if figures is not None:
        files.is_folder(figures)
    view = RunView(runs)
    for run in runs:
        warn_of_changes(run)
    write_report(view, path)
    print(f"report to open: {printable(str(path))}")
    if figures is not None:
        made = write_figures(draw_all(view), figures)
        print(f"{len(made)} files of figures in {printable(str(figures))}")


def weigh(
    source: Annotated[
        Path, typer.Argument(help="CSV with a client column and a column per criterion, or the folder of a run.")
    ],
    by: Annotated[
        str | None, typer.Option(help='The rule in words, as in `compare --rules`: "VP>LD>DS/max", "mean(DS,LD)".')
    ] = None,
    score: Annotated[
        str, typer.Option(help="prioritized, mean, weighted-mean, owa, choquet, product or power.")
    ] = "prioritized",
    priority: Annotated[str | None, typer.Option(help='For prioritized: "DS>CD>IS"; default: as listed.')] = None,
    weights: Annotated[str | None, typer.Option(help="For weighted-mean and owa: numbers with commas.")] = None,
    quantifier: Annotated[
        str | None, typer.Option(help="For owa: all, most, at-least-half, as-many-as-possible, or a,b.")
    ] = None,
    capacity: Annotated[Path | None, typer.Option(help="For choquet: TOML with a value per subset.")] = None,
    power: Annotated[float | None, typer.Option(help="For power: the exponent.")] = None,
    normalise: Annotated[
        Literal["share", "max", "rank", "none"] | None,
        typer.Option(
            help="How criteria are brought to 0..1; none: values as they are (CSV). Default: share, or as the run did."
        ),
    ] = None,
    criteria: Annotated[
        str | None, typer.Option("--criteria", help="For a run: which of its criteria, with commas; default: all.")
    ] = None,
    rule: Annotated[
        str | None, typer.Option("--rule", help="For a run: whose updates; default: the main rule's.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="For a run: which seed; default: the first.")] = None,
    format: FormatOption = "text",
) -> None:
    """Score and weigh clients from a table, or the updates of a run by another rule: no training needed."""
    from steelyard.weighing.table import RuleOptions, weigh_file

    options = RuleOptions(score, priority, weights, quantifier, capacity, power)
    if by is not None and options != RuleOptions():
        raise UserError(f"--by: got '{by}' together with options of a score; allowed: one of the two")
    if source.is_dir():
        if normalise == "none":
            raise UserError("--normalise: got 'none' for a run; allowed: share, max, rank")
        _weigh_run(source, by, options, normalise, criteria, rule, seed, format)
        return
    for name, value in {"criteria": criteria, "rule": rule, "seed": seed}.items():
        if value is not None:
            raise UserError(f"--{name}: given for a table; allowed: only for the folder of a run")
    weighed = weigh_file(source, options if by is None else by, None if normalise == "none" else normalise or "share")
    document = weighed.document()
    if format == "json":
        print_json(document)
    else:
        show_weighed(document)


def _weigh_run(
    folder: Path,
    by: str | None,
    options: object,
    normalise: str | None,
    criteria: str | None,
    rule: str | None,
    seed: int | None,
    format: str,
) -> None:
    from steelyard.report.view import RunView, federation_with, reweigh
    from steelyard.weighing.table import RuleOptions, read_words

    assert isinstance(options, RuleOptions)
    view = RunView([folder])
    settings = None if by is None else read_words(by, None)
    named = criteria.replace(" ", "").split(",") if criteria else options.named()
    part = federation_with(view, named if settings is None else settings.criteria, rule, seed)
    recorded = part.settings.normalise
    if settings is None:
        settings = options.settings(named or part.criteria, normalise or recorded)
    elif settings.normalise == "share":
        settings = settings.model_copy(update={"normalise": normalise or recorded})
    document = reweigh(view, part, settings)
    if format == "json":
        print_json(document)
        return
    show_reweighed(document)


def import_run(
    file: Annotated[Path, typer.Argument(help="CSV with a header, or JSON lines: a row per client and round.")],
    out: Annotated[Path, typer.Option("--out", help="The run's own folder; it must not hold a run yet.")],
    by: Annotated[str | None, typer.Option("--by", help='Rule that weighs where the file does not: "VP>DS".')] = None,
) -> None:
    """Make a run folder from what another federation wrote down: criteria, weights, reasons and tests by round."""
    from steelyard.adapters.importing import import_file

    rounds = import_file(file, out, by)
    print(f"{rounds} rounds stored in {printable(str(out))}")
    print(f"look at them: steelyard report {printable(str(out))}")


def show_reweighed(document: Reweighed) -> None:
    """Print who would have counted under another rule, beside what was recorded."""
    rows = tuple(
        (f"{_short(row.client)}{'*' if row.flaws else ''}", f"{row.weight:.2%}", f"{row.recorded:.2%}", str(row.rounds))
        for row in document.clients
    )
    title = f"Weighed again by {_short(document.rule)}: updates of {_short(document.updates_of)}"
    print_table(Table(title, ("client", "share of all weight", "as recorded", "rounds"), rows[:MOST]))
    if len(rows) > MOST:
        print_wrapped(f"and {len(rows) - MOST} more clients; --format json lists all")
    if found := document.flawed:
        print_wrapped(f"flawed clients (*): {found.weight:.1%} of all weight, {found.recorded:.1%} as recorded")
    print_wrapped(document.note)


def show_weighed(document: WeighedDocument) -> None:
    """Print scores and weights as a table."""
    document = printable_all(document)
    rows = tuple((_short(row["client"]), f"{row['score']:.6f}", f"{row['weight']:.6f}") for row in document["clients"])
    print_table(Table("", ("client", "score", "weight"), rows))
    for name in document["flags"]["zero_criteria"]:
        print_wrapped(f"{_short(name)} is 0 for every client: everyone got 1/n for it")
    if document["flags"]["uniform"]:
        print_wrapped("all scores are 0: the weights are uniform")


def _short(name: str) -> str:
    """A name as a cell; very long ones are cut."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."
