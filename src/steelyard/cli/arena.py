"""`steelyard arena`: whether an idea is better than the field, in one sentence.

What is heavy is imported inside the functions, for speed of start.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.base.errors import UserError, brief, listed, printable
from steelyard.base.logs import doing, logger, quiet
from steelyard.cli.finishing import watched
from steelyard.cli.options import FormatOption, PartOption, SetOption, TrustOption, asking
from steelyard.cli.printing import print_json, print_wrapped, terminal_width
from steelyard.rounds.progress import watching

if TYPE_CHECKING:
    from steelyard.arena.plan import Candidate
    from steelyard.arena.suite import Suite
    from steelyard.arena.verdict import ArenaDocument

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
    until_decided: Annotated[
        bool,
        typer.Option("--until-decided", help="On held-out seeds, in batches, until every scene is decided."),
    ] = False,
    retune: Annotated[
        bool, typer.Option("--retune", help="Choose the rivals' settings again, beside those that are frozen.")
    ] = False,
    part: PartOption = None,
    jobs: Annotated[int, typer.Option("--jobs", help="How many scenes go at a time, in processes of their own.")] = 1,
    check: Annotated[
        Path | None,
        typer.Option("--check", help="Check an archive, or its folder, and replay a part of it."),
    ] = None,
    changes: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder that gets one run for each scene; one with the same goes on.")
    ] = None,
    trust: TrustOption = False,
    format: FormatOption = "text",
) -> None:
    """Hold a rule against the field in a frozen suite of scenes, and say whether it is better than FedAvg."""
    if sum((candidate is not None, check is not None, retune)) != 1:
        raise UserError("arena: got none or several of CANDIDATE, --check and --retune; allowed: one of them")
    options = {"--rule": rule, "--draft": draft, "--until-decided": until_decided, "--part": part}
    options["--seeds"] = seeds is not None
    if check is not None:
        options |= {"--suite": suite != "small", "--jobs": jobs != 1}
        options |= {"--scenes": scenes, "--set": changes, "--out": out}
    if (check or retune) and (useless := [name for name, value in options.items() if value]):
        raise UserError(f"arena: got {listed(useless)} with {'--check' if check else '--retune'}; allowed: without")
    with watching(not quiet()):
        if check is not None:
            _check(check, format)
            return
        with doing("starting"):
            from steelyard.arena.plan import arena_folder, plan, read_candidates
            from steelyard.arena.suite import load_suite
            from steelyard.experiment.parts import Part
            from steelyard.sweeps.running import check_jobs

        check_jobs(jobs)
        chosen = load_suite(suite)
        named = [name.strip() for text in scenes or [] for name in text.split(",") if name.strip()]
        if scenes and not named:
            raise UserError(f"--scenes: got {brief(','.join(scenes))}; allowed: {listed(chosen.scenes)}")
        if retune:
            _retune(chosen, named, changes or [], out, format, jobs)
            return
        assert candidate is not None
        found = read_candidates(candidate, rule, chosen, asking(trust))
        share = None if part is None else Part.read(part)
        picked, tried, out = _chosen(found, chosen, named, changes or [], out, jobs)
        planned = plan(
            *(chosen, picked),
            scenes=named,
            seeds=seeds,
            draft=draft,
            until_decided=until_decided,
            changes=changes or [],
            tried=tried,
            part=share,
        )
        finish_arena(arena_folder(planned, out), True, False, format, jobs)


def _chosen(
    found: Sequence[Candidate], suite: Suite, scenes: Sequence[str], changes: Sequence[str], out: Path | None, jobs: int
) -> tuple[Candidate, dict[str, float], Path | None]:
    """Return the best of a candidate's settings, what they came to, and the folder that they were tried in."""
    from steelyard.arena.plan import tuning_folder
    from steelyard.arena.suite import Tried, tune
    from steelyard.sweeps.running import How

    if len(found) == 1:
        return found[0], {}, out
    folder = tuning_folder(suite, out)
    rules = {each.label: each.settings for each in found}
    named, how = suite.chosen(scenes), How(_shown(jobs), _log.info, jobs=jobs)
    values = watched(lambda: tune(suite, rules, folder, named, changes, how))
    best = Tried(found[0].label, values).best
    _log.info(f"chosen on the clients' own test rows: {best}, of {len(found)} settings")
    return next(each for each in found if each.label == best), values, folder


def _retune(
    suite: Suite, scenes: Sequence[str], changes: Sequence[str], out: Path | None, format: str, jobs: int
) -> None:
    """Choose the rivals' settings again and show them beside those that are frozen with the suite."""
    from steelyard.arena.plan import tuning_folder
    from steelyard.arena.suite import tune_rivals
    from steelyard.arena.table import tuning_text
    from steelyard.sweeps.running import How

    folder = tuning_folder(suite, out)
    named, how = suite.chosen(scenes), How(_shown(jobs), _log.info, jobs=jobs)
    found = watched(lambda: tune_rivals(suite, folder, named, changes, how))
    if format == "json":
        print_json(
            {
                "folder": str(folder),
                "rivals": [{"rule": t.rule, "best": t.best, "tried": dict(t.values)} for t in found],
            }
        )
        return
    whole = named == tuple(suite.scenes) and not changes
    print(tuning_text(suite, found, terminal_width(), whole=whole))
    print(f"runs stored in {printable(str(folder))}")


def _shown(jobs: int) -> bool:
    """Whether rounds are shown: several scenes at a time would write over each other's lines."""
    return not quiet() and jobs == 1


def finish_arena(folder: Path, trust: bool, accept_changes: bool, format: str, jobs: int = 1) -> None:
    """Run what is left of an arena's scenes, write its files and show the answer; its code was asked for if `trust`.

    What `steelyard resume` does with the folder of an arena that was stopped or killed.
    """
    from steelyard.arena.archive import ARCHIVE, REPORT, write_arena_files
    from steelyard.arena.running import run_arena
    from steelyard.sweeps.running import How

    how = How(_shown(jobs), _log.info, None if trust else asking(trust), accept_changes, jobs)
    watched(lambda: run_arena(folder, how))
    with doing("summing up"):
        document = write_arena_files(folder)
    _show(folder, document, format)
    if format == "text":
        print(f"runs stored in {printable(str(folder))}; archive: {printable(str(folder / ARCHIVE))}")
        print(f"report: {printable(str(folder / REPORT))}")
    if document["failed"] and document["mean_gain"] is None:
        # A program that looks at the exit code alone must not take this for an answer.
        raise UserError(f"arena: no verdict: {document['sentence']}")


def show_arena(folder: Path, format: str) -> None:
    """Show the answer of an arena as far as it has come; what `steelyard table` does with the folder of one."""
    from steelyard.arena.figures import read_figures
    from steelyard.arena.plan import read_arena
    from steelyard.arena.verdict import judge

    if format not in ("text", "json"):
        raise UserError(f"--format: got '{format}' with an arena; allowed: text, json")
    arena = read_arena(folder)
    _show(folder, judge(arena, read_figures(folder, arena)), format)


def _show(folder: Path, document: ArenaDocument, format: str) -> None:
    from steelyard.arena.table import arena_text

    if format == "json":
        print_json({"folder": str(folder), **document})
    else:
        print(arena_text(document, width=terminal_width()))


def _check(archive: Path, format: str) -> None:
    """Check an archive, also by its folder; exit code 1 where something differs, 2 where nothing decides here."""
    from steelyard.arena.archive import ARCHIVE, check_archive

    archive = archive / ARCHIVE if archive.is_dir() else archive
    found = watched(lambda: check_archive(archive, progress=not quiet()))
    if format == "json":
        print_json(
            {
                "archive": str(archive),
                "whole": found.code == 0,
                "undecided": found.undecided,
                "lines": list(found.lines),
            }
        )
    else:
        for line in found.lines:
            print_wrapped(line)
    raise typer.Exit(found.code)
