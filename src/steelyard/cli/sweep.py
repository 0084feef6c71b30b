"""`steelyard sweep`: an experiment over a grid of fields and rules, on a validation split.

What is heavy is imported inside the functions, for speed of start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.base.errors import UserError
from steelyard.base.logs import doing, logger, quiet
from steelyard.cli.finishing import watched
from steelyard.cli.options import (
    ExperimentArgument,
    PartOption,
    SeedOption,
    SeedsOption,
    SetOption,
    TableFormat,
    TableFormatOption,
    TrustOption,
    asking,
)
from steelyard.cli.printing import print_json, print_part, terminal_width
from steelyard.rounds.progress import watching

if TYPE_CHECKING:
    from steelyard.report.result import SweepDocument

_log = logger(__name__)

JobsOption = Annotated[
    int, typer.Option("--jobs", min=1, max=256, help="Runs at a time, each in a process of its own.")
]


def sweep(
    experiment: ExperimentArgument,
    over: Annotated[
        list[str] | None,
        typer.Option("--over", help="A field and its values: training.learning_rate=0.05,0.1. May be given again."),
    ] = None,
    rules: Annotated[
        list[str] | None,
        typer.Option("--rules", help="Rules as in `steelyard compare`; default: the experiment's main rule."),
    ] = None,
    seeds: SeedsOption = 1,
    measure: Annotated[
        str,
        typer.Option(
            "--measure",
            help="What to choose by: score (the experiment's own), worst10, rounds-to-target, loss; of classes also "
            "accuracy, server-accuracy, server-macro-f1; of numbers rmse, mae, mape, server-mape; of survival "
            "server-c-index; of masks server-dice; of several labels server-macro-f1; "
            "of recommenders ndcg, precision, recall, hit_rate, f1_per_user.",
        ),
    ] = "score",
    validation: Annotated[
        float | None,
        typer.Option("--validation", help="Share of the training data to choose on; default: the recipe's, or 0.1."),
    ] = None,
    stacked: Annotated[
        bool,
        typer.Option("--stacked/--one-by-one", help="Rules and seeds of one point as one run, or each as its own."),
    ] = True,
    jobs: JobsOption = 1,
    test: Annotated[bool, typer.Option("--test", help="Then run the best on the test set, with all seeds.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Also run a grid of more than 100 points.")] = False,
    changes: SetOption = None,
    seed: SeedOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The sweep's own folder; one that holds the same sweep goes on.")
    ] = None,
    part: PartOption = None,
    trust: TrustOption = False,
    format: TableFormatOption = "text",
) -> None:
    """Run an experiment over a grid of fields and rules on a validation split, and show which point is best."""
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.experiment.loading import load
            from steelyard.experiment.parts import Part
            from steelyard.sweeps.plan import plan
            from steelyard.sweeps.running import How
            from steelyard.sweeps.running import sweep as run_sweep

        ask = asking(trust)
        swept, fixed = ({text.partition("=")[0].strip() for text in texts or []} for texts in (over, changes))
        if both := sorted(swept & fixed):
            raise UserError(f"--set: {both[0]} is in --over too, which would change it again; allowed: one of the two")
        if part is not None and test:
            raise UserError("--test: got it with --part, where no best point is known; allowed: it alone")
        described = load(experiment, changes or [], seed, ask)
        planned = plan(
            *(described, over or []),
            rules=rules or [],
            seeds=seeds,
            measure=measure,
            validation=validation,
            stacked=stacked,
            many=yes,
            part=None if part is None else Part.read(part),
        )
        how = How(not quiet(), _log.info, jobs=jobs)
        finish_sweep(lambda: run_sweep(planned, out, how), test, format)


def resume_sweep(folder: Path, trust: bool, accept_changes: bool, format: TableFormat) -> None:
    """Go on with a sweep that was stopped or killed; what `steelyard resume` does with the folder of one."""
    from steelyard.sweeps.running import How
    from steelyard.sweeps.running import resume_sweep as go_on

    how = How(not quiet(), _log.info, asking(trust), accept_changes)
    finish_sweep(lambda: go_on(folder, how), False, format)


def finish_sweep(work: Callable[[], Path], test: bool, format: TableFormat) -> None:
    """Do the work of a sweep, write its files, run the best on the test set where asked, and show the table."""
    from steelyard.sweeps.plan import read_sweep
    from steelyard.sweeps.result import BEST, sweep_document, write_sweep_files

    folder = watched(work)
    if (part := read_sweep(folder).part) is not None:
        print_part(part, folder, format)
        return
    with doing("summing up"):
        document = write_sweep_files(folder)
    if test and document["best"] is not None:
        from steelyard.experiment.loading import load
        from steelyard.sweeps.running import run_on_test

        best = load(folder / BEST)
        watched(lambda: run_on_test(folder, best, progress=not quiet()))
        document = sweep_document(folder)
    show_sweep(document, format)


def show_sweep(document: SweepDocument, format: TableFormat) -> None:
    """Print a sweep's table for people or programs."""
    from steelyard.sweeps.result import next_lines, sweep_csv, sweep_table

    if format == "json":
        print_json(document)
    elif format == "csv":
        print(sweep_csv(document), end="")
        for problem in document["problems"]:
            _log.warning(problem)
    else:
        print(sweep_table(document, format, terminal_width()), end="")
        if format == "text":
            print("\n".join(next_lines(document)))
