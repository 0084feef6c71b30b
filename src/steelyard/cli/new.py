"""`steelyard new`: looks at somebody's data and writes a first experiment for them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.base.errors import UserError, brief

if TYPE_CHECKING:
    from steelyard.data.inspect import Form


def new(
    file: Annotated[Path, typer.Argument(help="The experiment file to write, such as my.toml.")],
    more: Annotated[list[Path] | None, typer.Argument(hidden=True)] = None,
    csv: Annotated[
        list[Path] | None,
        typer.Option(
            "--csv", help="A table with names of columns, also .xlsx, .sav, .dta; a folder or several: one client each."
        ),
    ] = None,
    parquet: Annotated[Path | None, typer.Option("--parquet", help="A table as a .parquet file.")] = None,
    images: Annotated[
        Path | None, typer.Option("--images", help="A folder or .zip of images, in a folder for each class.")
    ] = None,
    arrays: Annotated[str | None, typer.Option("--npz", "--idx", hidden=True)] = None,
    label: Annotated[str | None, typer.Option("--label", help="The column to predict.")] = None,
    owner: Annotated[
        str | None, typer.Option("--owner", help="The column that says whose row it is; images: folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there already.")] = False,
) -> None:
    """Look at your data and write an experiment for them, with comments, that runs as it is."""
    if arrays is not None:
        raise UserError(
            'new: --npz and --idx were removed. Write an experiment with [data] and source = "npz" or '
            f'source = "mnist", and path = {json.dumps(arrays)}'
        )
    # A shell that writes out sites/*.csv leaves all but the first beside the option.
    tables = [*(csv or []), *(more or [])]
    if more and not csv:
        raise UserError(f"new: got {brief(str(more[0]))} beside the file to write; allowed: one file to write")
    single: dict[Form, Path | None] = {"parquet": parquet, "images": images}
    named: list[tuple[Form, list[Path]]] = [(form, [path]) for form, path in single.items() if path is not None]
    if tables:
        named.append(("csv", tables))
    if not named and file.exists() and file.suffix != ".toml":
        raise UserError(f"new: '{file}' is the file to write; allowed: `steelyard new my.toml --csv {file}`")
    if len(named) != 1:
        raise UserError(f"new: got {len(named)} sources of data; allowed: one of --csv, --{', --'.join(single)}")
    form, paths = named[0]
    if any(file.exists() and path.exists() and file.samefile(path) for path in paths):
        raise UserError(f"new: '{file}' is the data itself; allowed: another name, such as my.toml")
    # For speed of start: --help must not wait for torch.
    from steelyard.data.inspect import look
    from steelyard.experiment.proposing import check_target, propose, write

    check_target(file, force=force)
    data = look(form, paths, label, owner)
    text, summary = propose(data, paths, file)
    write(file, text, force=force)
    for line in data.account:
        print(line)
    for line in data.hints:
        print(f"hint: {line}")
    print(f"wrote {file}: {summary}")
    print(f"next: steelyard run {shlex.quote(str(file))}")
