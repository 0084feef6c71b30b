"""The commands that run experiments and compare rules: run, resume, compare, table.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.base.errors import UserError, brief, printable
from steelyard.base.logs import doing, logger, quiet
from steelyard.cli.finishing import finish, report_line, watched, write_own_report
from steelyard.cli.options import (
    BaselineOption,
    ExperimentArgument,
    FirstSeedOption,
    FormatOption,
    FullOption,
    OutOption,
    PartOption,
    ReportOption,
    SeedOption,
    SeedsOption,
    SetOption,
    TableFormat,
    TableFormatOption,
    TrustOption,
    asking,
)
from steelyard.cli.printing import emit, print_part, refuse_together, terminal_width, warn_of_changes
from steelyard.cli.studies import finish_arena, finish_attack, resume_sweep, show_arena, show_sweep
from steelyard.rounds.progress import watching

if TYPE_CHECKING:
    from steelyard.report.notices import Chain
    from steelyard.report.rendering import Style
    from steelyard.report.result import Comparison
    from steelyard.runs.history import History


_log = logger(__name__)


def run(
    experiment: ExperimentArgument,
    changes: SetOption = None,
    seed: SeedOption = None,
    out: OutOption = None,
    trust: TrustOption = False,
    report: ReportOption = False,
    format: FormatOption = "text",
) -> None:
    """Run an experiment and show its result."""
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.experiment.loading import load
            from steelyard.experiment.running import run as run_experiment
            from steelyard.result import Result

        described = load(experiment, changes or [], seed, asking(trust))
        finish(lambda: Result(run_experiment(described, out=out, progress=not quiet())), format, report)


def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, a sweep, attacks or an arena, stopped or killed.")],
    trust: TrustOption = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on even if the experiment, the data or a checkpoint changed.")
    ] = False,
    contributions: Annotated[
        bool, typer.Option("--contributions", help="Of a run: from here on, measure what each client adds.")
    ] = False,
    report: ReportOption = False,
    format: FormatOption = "text",
) -> None:
    """Continue a run, a sweep, attacks or an arena, bit for bit as if they had not been stopped."""
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.experiment.parts import part_of
            from steelyard.federate import resume as resume_run
            from steelyard.result import Result
            from steelyard.runs.history import History
            from steelyard.studies.arena import is_arena
            from steelyard.studies.attack import is_attack
            from steelyard.studies.sweep import is_sweep

        if contributions:
            from steelyard.contributions.finding import switch_on

            switch_on(folder)
        for holds, go_on_with in ((is_sweep, resume_sweep), (is_attack, finish_attack), (is_arena, finish_arena)):
            if holds(folder):
                go_on_with(folder, trust, accept_changes, format)
                return

        def go_on() -> Result:
            return Result(resume_run(folder, progress=not quiet(), ask=asking(trust), accept_changes=accept_changes))

        result = watched(go_on)
        if not report and (part := part_of(History(result.folder))) is not None:
            print_part(part, result.folder, format)
            return
        finish(lambda: result, format, report)


def compare(
    experiment: ExperimentArgument,
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--rules",
            help='Rules, with commas or one by one: DS, "LD>DS>MD", online, "online(LD>DS>MD)@20", greedy, bandit, '
            '"budget(20)", fedavg, adafed, mean, recipe, "feddisco(a=0.5)" and other policies, all (every policy '
            "once). Default: each criterion, all orders of up to three, online.",
        ),
    ] = None,
    seeds: SeedsOption = 1,
    changes: SetOption = None,
    seed: FirstSeedOption = None,
    out: OutOption = None,
    part: PartOption = None,
    baseline: BaselineOption = None,
    participation: Annotated[
        str | None,
        typer.Option(
            "--participation",
            help="Compare at several shares of clients a round, such as 1,0.75,0.1: a run and a column for each.",
        ),
    ] = None,
    trust: TrustOption = False,
    report: ReportOption = False,
    full: FullOption = False,
    format: TableFormatOption = "text",
) -> None:
    """Run several rules on the same cohorts and first models, and say which one to use."""
    of_a_run = {"--report": report, "--full": full, "--baseline": baseline}
    if participation is not None:
        allowed = "each of its runs has these by itself (steelyard table FOLDER)"
        refuse_together("--participation", {"--part": part, **of_a_run}, allowed)
        compare_shares(experiment, rules or [], changes or [], (seeds, seed), participation, out, trust, format)
        return
    if part is not None:
        refuse_together("--part", of_a_run, "the whole has these (steelyard join, then steelyard table or report)")
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.experiment.parts import Part
            from steelyard.experiment.rules import load_comparison, seeds_of
            from steelyard.experiment.running import run as run_experiment
            from steelyard.result import Result

        described = load_comparison(experiment, changes or [], rules or [], seed, asking(trust))
        if baseline is not None and baseline not in described.rules():
            raise UserError(f"--baseline: got '{baseline}'; allowed: {', '.join(described.rules())}")
        chosen = seeds_of(described, seeds)
        mine = None if part is None else Part.read(part)
        folder = watched(lambda: run_experiment(described, seeds=chosen, out=out, progress=not quiet(), part=mine))
        if mine is not None:
            print_part(mine, folder, format)
            return
        result = Result(folder)
        with doing("comparing the rules"):
            document = _print_table(result.history, baseline, format, all_tables=full, in_words=full)
    if report:
        write_own_report(result, document)
    if format == "text":
        print(f"run stored in {printable(str(result.folder))}")
        print(f"every table: steelyard table {printable(shlex.quote(str(result.folder)))}")
        print(report_line(str(result.folder), report))


def table(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, a comparison, a sweep or an arena.")],
    baseline: BaselineOption = None,
    format: TableFormatOption = "text",
    curves: Annotated[
        Path | None, typer.Option("--curves", help="Also write the accuracy curves: .svg, .png, .pdf or .csv.")
    ] = None,
    groups: Annotated[
        bool,
        typer.Option(
            "--groups", help="Absolute rounds in groups of shares (20/30, 40/50, 70/75 %), as paper 003's Table 1."
        ),
    ] = False,
    full: FullOption = False,
) -> None:
    """Say which rule to use, and show the papers' tables: rounds to target, gains, devices, samples, curves."""
    from steelyard.studies.arena import is_arena
    from steelyard.studies.sweep import is_sweep

    kind = "an arena" if is_arena(folder) else "a sweep" if is_sweep(folder) else ""
    if kind:
        of_a_run = {"--baseline": baseline, "--curves": curves, "--groups": groups, "--full": full}
        refuse_together(f"{folder} holds {kind}", of_a_run, "these with a run or a comparison")
    if kind == "an arena":
        show_arena(folder, format)
        return
    if kind:
        from steelyard.studies.sweep_table import sweep_document

        show_sweep(sweep_document(folder), format)
        return
    if groups:
        _print_groups(folder, format)
    else:
        from steelyard.runs.history import History

        _print_table(History(folder), baseline, format, curves, in_words=full)
    warn_of_changes(folder)


def _print_groups(folder: Path, format: TableFormat) -> None:
    from steelyard.experiment.loading import read_experiment
    from steelyard.report.curves import read_curves
    from steelyard.report.notices import chain_of
    from steelyard.report.rendering import render
    from steelyard.report.tables import group_tables
    from steelyard.runs.history import History

    if format in ("json", "csv"):
        raise UserError(f"--format: got '{format}' with --groups; allowed: text, markdown, latex")
    rounds = read_experiment(folder).rounds
    history = History(folder)
    found = group_tables(read_curves(history), rounds.all_targets, rounds.count, above=rounds.above)
    emit(None, format, lambda style, width: render(found, [], style, width))
    _warn_of_change(chain_of(history))


def _print_table(
    history: History,
    baseline: str | None,
    format: TableFormat,
    curves: Path | None = None,
    *,
    all_tables: bool = True,
    in_words: bool = False,
) -> Comparison:
    from steelyard.experiment.loading import read_experiment
    from steelyard.report.result import computed
    from steelyard.report.tables import comparison_csv, write_comparison

    document = computed(history, read_experiment(history.folder), baseline)
    document.tested()
    if curves is not None:
        from steelyard.report.figures import write_curves

        write_curves(history.folder, document, curves)
    written = partial(write_comparison, document, all_tables=all_tables, in_words=in_words)
    emit(document, format, written, lambda: comparison_csv(document))
    if format == "csv":
        _warn_of_change(document.chain)
    return document


def _warn_of_change(chain: Chain) -> None:
    """Say on standard error that a run is not as it was written, where what is printed has no place for it."""
    from steelyard.report.notices import chain_line

    if chain.problem:
        _log.warning(chain_line(chain))


# `steelyard compare --participation`.


LEAST = 2
"""Clients of a cohort: one alone has nobody to be weighed against."""


def compare_shares(
    experiment: str,
    rules: Sequence[str],
    changes: Sequence[str],
    seeds: tuple[int, int | None],
    shares: str,
    out: Path | None,
    trust: bool,
    format: TableFormat,
) -> None:
    """Run the comparison once for each share, and print a table with a column for each.

    `seeds` are how many, and the first. A share that comes to fewer than two clients is left out and said.
    """
    if format == "csv":
        raise UserError("--format: got 'csv' with --participation; allowed: text, markdown, latex, json")
    wanted = parse_shares(shares)
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.experiment.rules import load_comparison, seeds_of
            from steelyard.experiment.running import run
            from steelyard.report.rendering import render
            from steelyard.report.tables import participation_tables
            from steelyard.result import Result

        found: dict[float, Result] = {}
        left_out: list[str] = []
        for share in wanted:
            fields = [*changes, f"rounds.fraction={share!r}"]
            described = load_comparison(experiment, fields, rules, seeds[1], asking(trust))
            clients = described.all_clients
            if clients is not None and described.rounds.cohort(clients) < LEAST:
                left_out.append(f"{share:.0%} of {clients} clients is one alone: left out.")
                continue
            chosen = seeds_of(described, seeds[0])
            folder = None if out is None else out / f"participation-{round(100 * share):03d}"
            done = watched(lambda d=described, c=chosen, f=folder: run(d, seeds=c, out=f, progress=not quiet()))
            found[share] = Result(done)
        if not found:
            raise UserError(f"--participation: got {brief(shares)}; allowed: shares of two clients or more")
    documents = {share: result.table for share, result in found.items()}
    rows = [{"share": share, "folder": str(found[share].folder), "table": documents[share]} for share in found]

    def text(style: Style, width: int | None) -> str:
        return render(participation_tables(documents, left_out), [], style, width)

    emit({"participation": rows, "left_out": left_out}, format, text)
    if format == "text":
        for share, result in found.items():
            print(f"{share:.0%}: run stored in {printable(str(result.folder))}")


def parse_shares(text: str) -> list[float]:
    """Return the shares of "1,0.75,0.1", each above 0 and at most 1, without repeats, the largest first."""
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise UserError(
            f"--participation: got {brief(text)}; allowed: shares above 0, at most 1, joined by commas, like 1,0.75,0.1"
        )
    return sorted(set(shares), reverse=True)


# `steelyard join`.


_WORDS = {"arena": "an arena", "sweep": "a sweep", "run": "a comparison"}


def join(
    folders: Annotated[list[Path], typer.Argument(help="Folders of all parts that --part made, in any order.")],
    out: Annotated[Path, typer.Option("--out", help="The new folder of the whole run or sweep.")],
) -> None:
    """Put the parts of a comparison, a sweep or an arena (--part 3/8) together: the same as one run of all of it."""
    with watching(not quiet()), doing(f"joining {len(folders)} parts"):
        from steelyard.experiment.parts import join_runs
        from steelyard.studies.archive import write_arena_files
        from steelyard.studies.arena import is_arena
        from steelyard.studies.arena_page import arena_text
        from steelyard.studies.arena_running import join_arenas
        from steelyard.studies.study import join_sweeps
        from steelyard.studies.sweep import is_sweep
        from steelyard.studies.sweep_table import write_sweep_files

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
