"""`steelyard verify` and `record`: is a run's folder what the run wrote, and what to hand over of it.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.base.errors import printable
from steelyard.cli.options import FormatOption
from steelyard.cli.printing import print_json


def verify(
    folder: Annotated[Path, typer.Argument(help="A run's folder.")],
    keys: Annotated[
        Path | None, typer.Option("--keys", help="Folder of public keys that you trust: NODE.pub, server.pub.")
    ] = None,
    head: Annotated[str | None, typer.Option("--head", help="A head of this run that you kept elsewhere.")] = None,
    format: FormatOption = "text",
) -> None:
    """Check that a run's folder is what its run wrote; ends with 0 (whole), 1 (changed) or 2 (cannot be checked)."""
    from steelyard.report.verification import verify as look

    found = look(folder, keys, head)
    if format == "json":
        print_json(found.document())
    else:
        for line in found.lines():
            print(printable(line))
    raise typer.Exit(found.code)


def record(
    folder: Annotated[Path, typer.Argument(help="A run's folder.")],
    out: Annotated[Path, typer.Option("--out", "--output", "-o", help="The file: .html, or .json for programs.")],
    rule: Annotated[
        str | None, typer.Option("--rule", help="Which rule; default: the recommended one, or the run's main one.")
    ] = None,
    attacks: Annotated[
        Path | None, typer.Option("--attacks", help="Folder of `steelyard attack`; default: the one the run lies in.")
    ] = None,
    keys: Annotated[Path | None, typer.Option("--keys", help="Folder of public keys that you trust.")] = None,
) -> None:
    """Write one page to hand over: purpose, data by site, rule, contributions, privacy, attacks, versions, hashes."""
    from steelyard.cli.attack import outcomes_of
    from steelyard.report.record import write_record
    from steelyard.sweeps.attacking import is_attack

    tested = attacks or (folder.absolute().parent if is_attack(folder.absolute().parent) else None)
    write_record(folder, out, keys, rule, None if tested is None else outcomes_of(tested))
    print(printable(str(out)))
