"""Asking before code runs that an experiment or a run folder names: `--trust`, or a question at the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.errors import UserError, printable
from steelyard.rounds.progress import paused

if TYPE_CHECKING:
    from steelyard.experiment.code import Ask

TrustOption = Annotated[
    bool, typer.Option("--trust", help="Run code that the experiment names (criteria, model, loss) without asking.")
]


def asking(trust: bool) -> Ask:
    """Return what is called before named code runs: it asks at a terminal, and elsewhere needs --trust."""

    def ask(where: str, code: Mapping[str, str]) -> None:
        # For speed of start: most experiments name no code.
        from steelyard.experiment.code import refuse

        if trust:
            return
        with paused():  # a moving bar would write over the question, and stands in the way of standard error
            if not (sys.stdin.isatty() and sys.stderr.isatty()):
                refuse(where, code, "with --trust, once you have looked at it")
            # A file from elsewhere must not hide, with a terminal's control characters, what it would run.
            print(f"{printable(where)} names code of its own, which would run with your rights:", file=sys.stderr)
            for field, value in code.items():
                print(f"  {printable(field)} = {printable(value)}", file=sys.stderr)
            if not typer.confirm("Run it?", default=False, err=True):
                raise UserError(f"{where}: its code was not to run, so nothing was done")

    return ask
