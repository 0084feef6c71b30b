"""`steelyard contributions`: what each client of a run added to its model.

What is heavy is imported inside the command, for speed of start.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from steelyard.activity import doing
from steelyard.cli.options import FormatOption, QuietOption, RuleOption
from steelyard.cli.printing import print_json, print_table, print_wrapped, say_changed
from steelyard.cli.trust import TrustOption, asking
from steelyard.errors import printable_all
from steelyard.rounds.progress import watching

if TYPE_CHECKING:
    from steelyard.contributions.document import Contributions


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
    trust: TrustOption = False,
    quiet: QuietOption = False,
    format: FormatOption = "text",
) -> None:
    """Show what each client added to the model, with an interval: as measured, from kept updates or by a replay."""
    with watching(not quiet):
        with doing("starting"):
            from steelyard.contributions.finding import contributions as find

        document = find(run, rule, measure, method, ask=asking(trust))
    if format == "json":
        print_json(document)
    else:
        show(document)
    say_changed(run)


def show(document: Contributions) -> None:
    """Print what clients added as a table, and what it means."""
    # For speed of start, as in every command.
    from steelyard.report.contributed import contribution_table, headline

    document = printable_all(document)
    print_wrapped(headline(document))
    print_table(contribution_table(document))
    for note in document["notes"]:
        print_wrapped(note)
