"""The commands that run experiments and compare rules: run, resume, compare, table.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.base.errors import UserError, printable
from steelyard.base.logs import doing, logger, quiet
from steelyard.cli.options import (
    AcceptOption,
    BaselineOption,
    ExperimentArgument,
    FirstSeedOption,
    Format,
    FormatOption,
    FullOption,
    OutOption,
    PartOption,
    ReportOption,
    SeedOption,
    SeedsOption,
    SetOption,
    TrustOption,
    asking,
)
from steelyard.cli.printing import (
    emit,
    finish,
    next_step,
    print_part,
    refuse_together,
    report_line,
    warn_of_changes,
    watched,
    write_own_report,
)
from steelyard.cli.studies import compare_shares, resume_study, show_study, study_in
from steelyard.contributions.finding import switch_on
from steelyard.experiment.loading import load, read_experiment
from steelyard.experiment.rules import load_comparison, seeds_of
from steelyard.federate import resume as resume_run
from steelyard.report.curves import chain_of, read_curves
from steelyard.report.decide import more_seeds
from steelyard.report.result import computed
from steelyard.report.tables import chain_line, comparison_csv, comparison_parts, group_tables
from steelyard.result import Result
from steelyard.rounds.progress import watching
from steelyard.runs.history import History

if TYPE_CHECKING:
    from steelyard.report.curves import Chain
    from steelyard.report.result import Comparison


_log = logger(__name__)


def run(
    experiment: ExperimentArgument,
    changes: SetOption = None,
    seed: SeedOption = None,
    out: OutOption = None,
    trust: TrustOption = False,
    accept: AcceptOption = None,
    report: ReportOption = False,
    format: FormatOption = "text",
) -> None:
    """Run an experiment and show its result."""
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.experiment.running import run as run_experiment

        described = load(experiment, changes or [], seed, asking(trust))
        chosen = accept or []
        finish(lambda: Result(run_experiment(described, out=out, progress=not quiet(), accept=chosen)), format, report)


def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of what was stopped or killed: a run, a sweep and so on.")],
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
    """Continue a run, a comparison, a sweep, attacks or an arena, with bit-identical results."""
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.experiment.parts import part_of

        if contributions:
            switch_on(folder)
        if (study := study_in(folder)) is not None:
            resume_study(study, folder, trust, accept_changes, format)
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
            help='Rules, with commas or one by one, such as "fedavg,LD>DS/max"; `steelyard list rules` has all words '
            "(default: each criterion, all orders of up to three, online).",
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
    accept: AcceptOption = None,
    report: ReportOption = False,
    full: FullOption = False,
    format: FormatOption = "text",
) -> None:
    """Run several rules on the same cohorts and first models, and say which one to use."""
    of_a_run = {"--report": report, "--full": full, "--baseline": baseline, "--accept": accept}
    if participation is not None:
        allowed = "each of its runs has these by itself (steelyard table FOLDER)"
        refuse_together("--participation", {"--part": part, **of_a_run}, allowed)
        compare_shares(experiment, rules or [], changes or [], (seeds, seed), participation, out, trust, format)
        return
    if part is not None:
        refuse_together(
            "--part",
            {**of_a_run, "--accept": None},
            "the whole has these (steelyard join, then steelyard table or report)",
        )
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.experiment.parts import Part
            from steelyard.experiment.running import run as run_experiment

        described = load_comparison(experiment, changes or [], rules or [], seed, asking(trust))
        if baseline is not None and baseline not in described.rules():
            raise UserError(f"--baseline: got '{baseline}'; allowed: {', '.join(described.rules())}")
        chosen = seeds_of(described, seeds)
        mine = None if part is None else Part.read(part)
        options: dict[str, Any] = {"seeds": chosen, "out": out, "part": mine, "accept": accept or []}
        folder = watched(lambda: run_experiment(described, progress=not quiet(), **options))
        if mine is not None:
            print_part(mine, folder, format)
            return
        result = Result(folder)
        with doing("comparing the rules"):
            document = computed(result.history, result.experiment, baseline)
            document.tested()
    if report:
        write_own_report(result, document)
    taken = next_step(str(folder), has_model=result.history.facts.has_model)
    lines = [f"run stored in {folder}", _tables_line(folder), *taken, report_line(str(folder), report)]
    _print_table(document, format, lines, all_tables=full, in_words=full)


def table(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, a comparison, a sweep, attacks or an arena.")],
    baseline: BaselineOption = None,
    format: FormatOption = "text",
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
    if (study := study_in(folder)) is not None:
        of_a_run = {"--baseline": baseline, "--curves": curves, "--groups": groups, "--full": full}
        allowed = f"a run in it, such as {folder / study.cells()[0].folder}"
        refuse_together(f"{folder}, which holds {study.kind}", of_a_run, allowed)
        show_study(study, study.answer(folder), format)
        return
    if groups:
        _print_groups(folder, format)
    else:
        document = computed(folder, read_experiment(folder), baseline)
        document.tested()
        if curves is not None:
            from steelyard.report.figures import write_curves

            write_curves(folder, document, curves)
        _print_table(document, format, in_words=full)
    warn_of_changes(folder)


def _print_groups(folder: Path, format: Format) -> None:
    if format in ("json", "csv"):
        raise UserError(f"--format: got '{format}' with --groups; allowed: text, markdown, latex")
    rounds = read_experiment(folder).rounds
    history = History(folder)
    found = group_tables(read_curves(history), rounds.all_targets, rounds.count, above=rounds.above)
    emit(None, format, found)
    _warn_of_change(chain_of(history))


def _print_table(
    document: Comparison, format: Format, lines: Sequence[str] = (), *, all_tables: bool = True, in_words: bool = False
) -> None:
    parts = comparison_parts(document, all_tables=all_tables, in_words=in_words)
    emit(document, format, parts, [*more_seeds(document.recommendation), *lines], lambda: comparison_csv(document))
    if format == "csv":
        _warn_of_change(document.chain)


def _tables_line(folder: Path) -> str:
    return f"every table: steelyard table {shlex.quote(str(folder))}"


def _warn_of_change(chain: Chain) -> None:
    """Say on standard error that a run is not as it was written, where what is printed has no place for it."""
    if chain.problem:
        _log.warning(chain_line(chain))


# `steelyard join`.


def join(
    folders: Annotated[list[Path], typer.Argument(help="Folders of all parts that --part made, in any order.")],
    out: Annotated[Path, typer.Option("--out", help="The new folder of the whole run or sweep.")],
) -> None:
    """Put the parts of a comparison, a sweep or an arena (--part 3/8) together: the same as one run of all of it."""
    with watching(not quiet()), doing(f"joining {len(folders)} parts"):
        from steelyard.experiment.parts import join_runs
        from steelyard.studies.study import join as join_studies

        if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
            raise UserError(f"join: {twice} is given twice; allowed: each part once")
        if inside := next((folder for folder in folders if folder.resolve() in out.resolve().parents), None):
            raise UserError(f"--out: {out} lies in the part {inside}; allowed: a folder of its own")
        studies = {folder: study_in(folder) for folder in folders}
        first = studies[folders[0]]
        if other := next((folder for folder, study in studies.items() if type(study) is not type(first)), None):
            kind = "a comparison" if first is None else first.kind
            raise UserError(f"join: {folders[0]} holds a part of {kind}, {other} none; allowed: parts of one")
        whole = join_runs(folders, out) if first is None else join_studies(type(first), folders, out)
        answer = None if first is None else first.read(whole).write_files(whole)
    if first is not None:
        show_study(first, answer, "text")
    print(f"{len(folders)} parts joined in {printable(str(whole))}")
    if first is None:
        print(printable(_tables_line(whole)))
