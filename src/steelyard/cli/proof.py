"""`steelyard verify`, `record`, `contributions` and `withdraw`: what a run proves, and what each client added.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from steelyard.base.errors import UserError, printable
from steelyard.base.logs import doing, quiet
from steelyard.cli.options import (
    FormatOption,
    HeadOption,
    KeysOption,
    OutOption,
    ReportOption,
    RuleOption,
    TrustOption,
    asking,
)
from steelyard.cli.printing import emit, finish, warn_of_changes
from steelyard.contributions import finding
from steelyard.report.rendering import Copied
from steelyard.result import Result
from steelyard.rounds.progress import watching

if TYPE_CHECKING:
    from steelyard.contributions.replaying import Without


def verify(
    folder: Annotated[Path, typer.Argument(help="A run's folder.")],
    keys: KeysOption = None,
    head: HeadOption = None,
    prefix: Annotated[
        str | None, typer.Option("--prefix", help="The head of a round that you kept, if the run has continued since.")
    ] = None,
    model: Annotated[Path | None, typer.Option("--model", help="Folder of a model: is it a model of this run?")] = None,
    format: FormatOption = "text",
) -> None:
    """Check that a run's folder is as its run wrote it; ends with 0 (intact), 1 (modified) or 2 (cannot be checked)."""
    from steelyard.report.verification import verify as look

    with watching(not quiet()), doing("checking the run"):
        found = look(folder, keys, head, prefix)
        if model is not None:
            from steelyard.models.taking import look_at_model

            look_at_model(model, folder, found.found)
    emit(found.document(), format, [Copied(line) for line in found.lines()])
    raise typer.Exit(found.code)


def record(
    folder: Annotated[Path, typer.Argument(help="A run's folder.")],
    out: Annotated[
        Path | None, typer.Option("--out", "--output", "-o", help="The new file: .html, or .json for programs.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option("--check", help="In place of --out: a record that you were given; is it this run's?")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out replace a file that is there.")] = False,
    rule: Annotated[
        str | None, typer.Option("--rule", help="Which rule (default: the recommended one, or the run's main one).")
    ] = None,
    attacks: Annotated[
        Path | None, typer.Option("--attacks", help="Folder of `steelyard attack` (default: the one around the run).")
    ] = None,
    keys: KeysOption = None,
) -> None:
    """Write one page to hand over: verdict, purpose, data by site, rule, contributions, privacy, attacks, versions.

    Ends with 1 where the run is not as it was written, or --check finds another page.
    """
    from steelyard.report.record import page_differs, write_record
    from steelyard.report.record import record as made
    from steelyard.studies.attack import Attack

    if (out is None) == (check is None):
        raise UserError("--out, --check: give one of them, the file to write or the one to check")
    tested = attacks or (folder.absolute().parent if Attack.is_in(folder.absolute().parent) else None)
    with watching(not quiet()), doing("checking the run"):
        document = made(folder, keys, rule, None if tested is None else Attack.read(tested).answer(tested).lines_on)
    differs = check is not None and page_differs(check, document)
    if out is not None:
        write_record(document, out, replace=force)
        print(printable(str(out)))
    else:
        print(printable(f"{check}: {'NOT the record that this run gives' if differs else 'the record of this run'}"))
    verdict = document["verified"]["verdict"]
    if verdict != "intact":
        print(printable(f"{folder}: {verdict}; see `steelyard verify {shlex.quote(str(folder))}`"))
    raise typer.Exit(1 if differs or verdict == "MODIFIED" else 0)


# What each client of a run added to its model; a run without one.


def contributions(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    rule: RuleOption = None,
    measure: Annotated[
        Literal["loss", "accuracy", "local-loss", "local-accuracy"] | None,
        typer.Option(
            help="On the server's rows, or local- on all clients' test rows. Default: as the run did, else loss."
        ),
    ] = None,
    method: Annotated[
        Literal["shapley", "leave-one-out", "classes"],
        typer.Option(help="shapley; leave-one-out; classes: agreement by class in the last layer (ShapFed)."),
    ] = "shapley",
    without: Annotated[
        str | None,
        typer.Option("--without", metavar="CLIENT", help="How the model would do without this client, approximately."),
    ] = None,
    retrain: Annotated[
        bool, typer.Option("--retrain", help="Train every coalition of up to 10 clients; with --without, only the one.")
    ] = False,
    trust: TrustOption = False,
    format: FormatOption = "text",
) -> None:
    """Show what each client added to the model, with an interval: as measured, from kept updates or by a replay."""
    from steelyard.report.record import contribution_parts

    with watching(not quiet()):
        ask = asking(trust)
        if without is None:
            found = finding.contributions(run, rule, measure, method, retrained=retrain, ask=ask)
        else:
            found = finding.without(run, without, rule, measure, retrained=retrain, ask=ask)
    emit(found, format, [_without(found)] if "client" in found else contribution_parts(found))
    warn_of_changes(run)


def withdraw(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    client: Annotated[str, typer.Argument(help="The client that withdraws, by name.")],
    out: OutOption = None,
    trust: TrustOption = False,
    report: ReportOption = False,
    format: FormatOption = "text",
) -> None:
    """Run an experiment again without one client, as if it had never taken part; both folders name each other."""
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.contributions.withdrawing import withdraw as run_without

        ask = asking(trust)
        finish(lambda: Result(run_without(run, client, out=out, ask=ask, progress=not quiet())), format, report)


def _without(found: Without) -> str:
    width = "" if found["low"] == found["high"] else f" ({found['low']:.4f} to {found['high']:.4f})"
    return (
        f"{found['rule']}: {found['unit']} is {found['after']:.4f}; without {found['client']} it would be "
        f"{found['without']:.4f}{width}: {found['source']}."
    )
