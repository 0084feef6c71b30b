"""`steelyard arena`: whether an idea is better than the field, in one sentence.

What is heavy is imported inside the functions, for speed of start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.activity import doing
from steelyard.cli.finishing import watched
from steelyard.cli.options import FormatOption, SetOption
from steelyard.cli.printing import print_json, terminal_width
from steelyard.cli.trust import TrustOption, asking
from steelyard.errors import UserError, printable
from steelyard.logs import logger, quiet
from steelyard.rounds.progress import watching

_log = logger(__name__)


def arena(
    candidate: Annotated[
        str | None,
        typer.Argument(help='A rule such as "VP>LD>DS/max", a .py file of your own, or a TOML experiment.'),
    ] = None,
    rule: Annotated[
        str | None, typer.Option("--rule", help="Which rule of a file, in words that may join what it defines.")
    ] = None,
    suite: Annotated[str, typer.Option("--suite", help="Which frozen suite of scenes.")] = "small",
    scenes: Annotated[
        list[str] | None, typer.Option("--scenes", help="Only these scenes, with commas or one by one.")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Only the first so many of the suite's seeds.")] = None,
    draft: Annotated[
        bool, typer.Option("--draft", help="On the seeds for choosing, while you still change your idea.")
    ] = False,
    check: Annotated[
        Path | None, typer.Option("--check", help="Check an archive (arena.json) and replay a part of it.")
    ] = None,
    changes: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder that gets one run for each scene; one with the same goes on.")
    ] = None,
    trust: TrustOption = False,
    format: FormatOption = "text",
) -> None:
    """Hold a rule against the field in a frozen suite of scenes, and say whether it is better than FedAvg."""
    if (candidate is None) == (check is None):
        raise UserError("arena: got neither or both of CANDIDATE and --check; allowed: one of them")
    with watching(not quiet()):
        if check is not None:
            _check(check, format)
            return
        assert candidate is not None
        with doing("starting"):
            from steelyard.arena.candidate import read_candidate
            from steelyard.arena.plan import arena_folder, plan
            from steelyard.arena.suite import load_suite

        chosen = load_suite(suite)
        named = [name.strip() for text in scenes or [] for name in text.split(",") if name.strip()]
        found = read_candidate(candidate, rule, chosen, asking(trust))
        planned = plan(chosen, found, scenes=named, seeds=seeds, draft=draft, changes=changes or [])
        _finish(arena_folder(planned, out), True, False, format)


def resume_arena(folder: Path, trust: bool, accept_changes: bool, format: str) -> None:
    """Go on with an arena that was stopped or killed; what `steelyard resume` does with the folder of one."""
    _finish(folder, trust, accept_changes, format)


def _finish(folder: Path, trust: bool, accept_changes: bool, format: str) -> None:
    """Run what is left of an arena's scenes, write its files and show the answer; its code was asked for if `trust`."""
    from steelyard.arena.archive import ARCHIVE, write_arena_files
    from steelyard.arena.running import run_arena
    from steelyard.arena.table import arena_text

    ask = None if trust else asking(trust)
    watched(lambda: run_arena(folder, progress=not quiet(), tell=_log.info, ask=ask, accept_changes=accept_changes))
    with doing("summing up"):
        document = write_arena_files(folder)
    if format == "json":
        print_json({"folder": str(folder), **document})
        return
    print(arena_text(document, width=terminal_width()))
    print(f"runs stored in {printable(str(folder))}; archive: {printable(str(folder / ARCHIVE))}")


def _check(archive: Path, format: str) -> None:
    """Check an archive; exit code 1 where something in it does not hold."""
    from steelyard.arena.archive import check_archive

    found = watched(lambda: check_archive(archive, progress=not quiet()))
    if format == "json":
        print_json({"archive": str(archive), "whole": not found.differs, "lines": list(found.lines)})
    else:
        for line in found.lines:
            print(printable(line))
    raise typer.Exit(int(found.differs))
