"""Studies: several runs with one answer. `steelyard sweep`, `attack` and `arena`.

What is heavy is imported inside the functions, for speed of start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.base.errors import UserError, brief, listed, printable
from steelyard.base.logs import doing, logger, quiet
from steelyard.cli.finishing import watched
from steelyard.cli.options import (
    ExperimentArgument,
    FirstSeedOption,
    FormatOption,
    PartOption,
    SeedOption,
    SeedsOption,
    SetOption,
    TableFormat,
    TableFormatOption,
    TrustOption,
    asking,
)
from steelyard.cli.printing import print_json, print_part, print_wrapped, terminal_width
from steelyard.rounds.progress import watching

if TYPE_CHECKING:
    from steelyard.report.hostile import Attacks
    from steelyard.studies.arena import Candidate
    from steelyard.studies.suite import Suite
    from steelyard.studies.sweep_table import SweepDocument
    from steelyard.studies.verdict import ArenaDocument


_log = logger(__name__)

JobsOption = Annotated[
    int, typer.Option("--jobs", min=1, max=256, help="Runs at a time, each in a process of its own.")
]


def sweep(
    experiment: ExperimentArgument,
    over: Annotated[
        list[str] | None,
        typer.Option("--over", help="A field and its values: training.learning_rate=0.05,0.1. May be given again."),
    ] = None,
    rules: Annotated[
        list[str] | None,
        typer.Option("--rules", help="Rules as in `steelyard compare`; default: the experiment's main rule."),
    ] = None,
    seeds: SeedsOption = 1,
    measure: Annotated[
        str,
        typer.Option(
            "--measure",
            help="What to choose by: score (the experiment's own), worst10, rounds-to-target, loss; of classes also "
            "accuracy, server-accuracy, server-macro-f1; of numbers rmse, mae, mape, server-mape; of survival "
            "server-c-index; of masks server-dice; of several labels server-macro-f1; "
            "of recommenders ndcg, precision, recall, hit_rate, f1_per_user.",
        ),
    ] = "score",
    validation: Annotated[
        float | None,
        typer.Option("--validation", help="Share of the training data to choose on; default: the recipe's, or 0.1."),
    ] = None,
    stacked: Annotated[
        bool,
        typer.Option("--stacked/--one-by-one", help="Rules and seeds of one point as one run, or each as its own."),
    ] = True,
    jobs: JobsOption = 1,
    test: Annotated[bool, typer.Option("--test", help="Then run the best on the test set, with all seeds.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Also run a grid of more than 100 points.")] = False,
    changes: SetOption = None,
    seed: SeedOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The sweep's own folder; one that holds the same sweep goes on.")
    ] = None,
    part: PartOption = None,
    trust: TrustOption = False,
    format: TableFormatOption = "text",
) -> None:
    """Run an experiment over a grid of fields and rules on a validation split, and show which point is best."""
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.experiment.loading import load
            from steelyard.experiment.parts import Part
            from steelyard.studies.study import How
            from steelyard.studies.study import sweep as run_sweep
            from steelyard.studies.sweep import plan

        ask = asking(trust)
        swept, fixed = ({text.partition("=")[0].strip() for text in texts or []} for texts in (over, changes))
        if both := sorted(swept & fixed):
            raise UserError(f"--set: {both[0]} is in --over too, which would change it again; allowed: one of the two")
        if part is not None and test:
            raise UserError("--test: got it with --part, where no best point is known; allowed: it alone")
        described = load(experiment, changes or [], seed, ask)
        planned = plan(
            *(described, over or []),
            rules=rules or [],
            seeds=seeds,
            measure=measure,
            validation=validation,
            stacked=stacked,
            many=yes,
            part=None if part is None else Part.read(part),
        )
        how = How(not quiet(), _log.info, jobs=jobs)
        finish_sweep(lambda: run_sweep(planned, out, how), test, format)


def resume_sweep(folder: Path, trust: bool, accept_changes: bool, format: TableFormat) -> None:
    """Go on with a sweep that was stopped or killed; what `steelyard resume` does with the folder of one."""
    from steelyard.studies.study import How
    from steelyard.studies.study import resume_sweep as go_on

    how = How(not quiet(), _log.info, asking(trust), accept_changes)
    finish_sweep(lambda: go_on(folder, how), False, format)


def finish_sweep(work: Callable[[], Path], test: bool, format: TableFormat) -> None:
    """Do the work of a sweep, write its files, run the best on the test set where asked, and show the table."""
    from steelyard.studies.sweep import read_sweep
    from steelyard.studies.sweep_table import BEST, sweep_document, write_sweep_files

    folder = watched(work)
    if (part := read_sweep(folder).part) is not None:
        print_part(part, folder, format)
        return
    with doing("summing up"):
        document = write_sweep_files(folder)
    if test and document["best"] is not None:
        from steelyard.experiment.loading import load
        from steelyard.studies.study import run_on_test

        best = load(folder / BEST)
        watched(lambda: run_on_test(folder, best, progress=not quiet()))
        document = sweep_document(folder)
    show_sweep(document, format)


def show_sweep(document: SweepDocument, format: TableFormat) -> None:
    """Print a sweep's table for people or programs."""
    from steelyard.studies.sweep_table import next_lines, sweep_csv, sweep_table

    if format == "json":
        print_json(document)
    elif format == "csv":
        print(sweep_csv(document), end="")
        for problem in document["problems"]:
            _log.warning(problem)
    else:
        print(sweep_table(document, format, terminal_width()), end="")
        if format == "text":
            print("\n".join(next_lines(document)))


# `steelyard attack`: what hostile clients do to an experiment under each rule.


def attack(
    experiment: ExperimentArgument,
    attacks: Annotated[
        list[str] | None,
        typer.Option(
            "--attack",
            help="label-flip, class-flip, sign-flip, scaled-reversal, gaussian, alie, ipm, min-max, bias-push, "
            "free-rider, free-riders, backdoor, backdoor-boosted, semantic-backdoor, semantic-boosted, late-inflation "
            "or inflation; each also as NAME+inflation; with commas or one by one; all: each of them, lying.",
        ),
    ] = None,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive",
            help="Add attackers that know the rule and send the worst of what they tried: adaptive, adaptive-alie, "
            "adaptive-ipm, adaptive-drift, each lying.",
        ),
    ] = False,
    fraction: Annotated[float, typer.Option("--fraction", help="Share of the clients that are hostile.")] = 0.2,
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--rules", help="Rules as in `steelyard compare`; default: fedavg, EQ, each robust rule, and guarded."
        ),
    ] = None,
    seeds: SeedsOption = 1,
    changes: SetOption = None,
    seed: FirstSeedOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder that gets one run for each attack; one with the same goes on.")
    ] = None,
    trust: TrustOption = False,
    format: FormatOption = "text",
) -> None:
    """Make some clients hostile and show accuracy under each rule, beside the same without them."""
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.experiment.loading import load
            from steelyard.experiment.rules import load_comparison
            from steelyard.studies.attack import Attack, attack_folder, attack_names, rules_for, under_attack

        names = attack_names(attacks or [], adaptive=adaptive)
        base = load(experiment, changes or [], seed, asking(trust))
        under_attack(base, names[0], fraction)  # refuses what cannot be attacked before rules are read
        described = load_comparison(experiment, changes or [], rules or rules_for(base), seed)
        planned = Attack(described, tuple(names), fraction, seeds)
        _ = planned.parts  # refuses what cannot be run before there is a folder
        finish_attack(attack_folder(planned, out), True, False, format)


def outcomes_of(folder: Path) -> Attacks:
    """Return what the attacks of a folder did; one that is not done is refused."""
    from steelyard.report.hostile import CLEAN, attack_document, flawed_before, outcome
    from steelyard.studies.attack import read_attack
    from steelyard.studies.study import finished

    done = read_attack(folder)
    names = (CLEAN, *done.names)
    if missing := [name for name in names if not finished(folder / name)]:
        raise UserError(f"{folder}: {missing[0]} is not done; allowed: attacks that have ended (`steelyard resume`)")
    outcomes = {name: outcome(folder / name, done.experiment.rounds, folder / CLEAN) for name in names}
    return attack_document(outcomes, done.fraction, flawed_before(folder / CLEAN))


def finish_attack(folder: Path, trust: bool, accept_changes: bool, format: str) -> None:
    """Do what is left of the attacks of a folder, and show what they did; their code was asked for where `trust`.

    What `steelyard resume` does with the folder of attacks that were stopped or killed.
    """
    from steelyard.report.hostile import attack_text
    from steelyard.studies.attack import run_attack
    from steelyard.studies.study import How

    how = How(not quiet(), _log.info, None if trust else asking(trust), accept_changes)
    done = watched(lambda: run_attack(folder, how))
    with doing("summing up"):
        document = outcomes_of(folder)
    if format == "json":
        print_json({"folder": str(folder), "seeds": done.seeds, **document})
        return
    print(attack_text(document, terminal_width()))
    print(f"\nruns stored in {printable(str(folder))}")


# `steelyard arena`: whether an idea is better than the field, in one sentence.


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
            from steelyard.experiment.parts import Part
            from steelyard.studies.arena import arena_folder, plan, read_candidates
            from steelyard.studies.study import check_jobs
            from steelyard.studies.suite import load_suite

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
    from steelyard.studies.arena import tuning_folder
    from steelyard.studies.study import How
    from steelyard.studies.suite import Tried, tune

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
    from steelyard.studies.arena import tuning_folder
    from steelyard.studies.arena_page import tuning_text
    from steelyard.studies.study import How
    from steelyard.studies.suite import tune_rivals

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
    from steelyard.studies.archive import ARCHIVE, REPORT, write_arena_files
    from steelyard.studies.arena_running import run_arena
    from steelyard.studies.study import How

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
    from steelyard.studies.arena import read_arena
    from steelyard.studies.scenes import read_figures
    from steelyard.studies.verdict import judge

    if format not in ("text", "json"):
        raise UserError(f"--format: got '{format}' with an arena; allowed: text, json")
    arena = read_arena(folder)
    _show(folder, judge(arena, read_figures(folder, arena)), format)


def _show(folder: Path, document: ArenaDocument, format: str) -> None:
    from steelyard.studies.arena_page import arena_text

    if format == "json":
        print_json({"folder": str(folder), **document})
    else:
        print(arena_text(document, width=terminal_width()))


def _check(archive: Path, format: str) -> None:
    """Check an archive, also by its folder; exit code 1 where something differs, 2 where nothing decides here."""
    from steelyard.studies.archive import ARCHIVE, check_archive

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
