"""`steelyard join`: the parts of a comparison, a sweep or an arena as one.

What is heavy is imported inside the function, for speed of start.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from steelyard.base.errors import UserError, printable
from steelyard.base.logs import doing, quiet
from steelyard.cli.printing import terminal_width
from steelyard.rounds.progress import watching

_WORDS = {"arena": "an arena", "sweep": "a sweep", "run": "a comparison"}


def join(
    folders: Annotated[list[Path], typer.Argument(help="Folders of all parts that --part made, in any order.")],
    out: Annotated[Path, typer.Option("--out", help="The new folder of the whole run or sweep.")],
) -> None:
    """Put the parts of a comparison, a sweep or an arena (--part 3/8) together: the same as one run of all of it."""
    with watching(not quiet()), doing(f"joining {len(folders)} parts"):
        from steelyard.arena.archive import write_arena_files
        from steelyard.arena.plan import is_arena
        from steelyard.arena.running import join_arenas
        from steelyard.arena.table import arena_text
        from steelyard.experiment.joining import join_runs
        from steelyard.sweeps.plan import is_sweep
        from steelyard.sweeps.result import write_sweep_files
        from steelyard.sweeps.running import join_sweeps

        answer = ""
        if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
            raise UserError(f"join: {twice} is given twice; allowed: each part once")
        kinds = {folder: "arena" if is_arena(folder) else "sweep" if is_sweep(folder) else "run" for folder in folders}
        first = kinds[folders[0]]
        if other := next((folder for folder in folders if kinds[folder] != first), None):
            raise UserError(f"join: {folders[0]} holds a part of {_WORDS[first]}, {other} none; allowed: parts of one")
        if first == "arena":
            whole = join_arenas(folders, out)
            answer = arena_text(write_arena_files(whole), width=terminal_width())
        elif first == "sweep":
            whole = join_sweeps(folders, out)
            write_sweep_files(whole)
        else:
            whole = join_runs(folders, out)
    if answer:
        print(answer)
    print(f"{len(folders)} parts joined in {printable(str(whole))}")
    if not answer:
        print(f"every table: steelyard table {printable(shlex.quote(str(whole)))}")
