"""Studies: several runs with one answer. `steelyard sweep`, `attack` and `arena`.

What is heavy is imported inside the functions, for speed of start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.base.errors import UserError, brief, listed
from steelyard.base.logs import doing, logger, quiet
from steelyard.cli.options import (
    ExperimentArgument,
    FirstSeedOption,
    Format,
    FormatOption,
    PartOption,
    SeedOption,
    SeedsOption,
    SetOption,
    TrustOption,
    asking,
)
from steelyard.cli.printing import emit, print_part, watched
from steelyard.experiment.loading import load
from steelyard.experiment.rules import load_comparison
from steelyard.report.rendering import Table
from steelyard.rounds.progress import watching
from steelyard.studies.suite import load_suite

if TYPE_CHECKING:
    from steelyard.experiment.description import Description
    from steelyard.studies.candidate import Candidate
    from steelyard.studies.paper_table import Entry, Value
    from steelyard.studies.study import How, Study
    from steelyard.studies.suite import Suite


_log = logger(__name__)

JobsOption = Annotated[
    int, typer.Option("--jobs", min=1, max=256, help="Runs at a time, each in a process of its own.")
]


def sweep(
    experiment: ExperimentArgument,
    over: Annotated[
        list[str] | None,
        typer.Option("--over", help="A field and its values, such as training.epochs=1,5. May be given again."),
    ] = None,
    rules: Annotated[
        list[str] | None,
        typer.Option("--rules", help="Rules as in `steelyard compare` (default: the experiment's main rule)."),
    ] = None,
    seeds: SeedsOption = 1,
    measure: Annotated[
        str,
        typer.Option(
            "--measure",
            help="Metric that chooses: score (the experiment's own), worst10, rounds-to-target, loss, or one of "
            "`steelyard docs sweep measure`.",
        ),
    ] = "score",
    validation: Annotated[
        float | None,
        typer.Option("--validation", help="Share of the training data to choose on (default: the recipe's, or 0.1)."),
    ] = None,
    jobs: JobsOption = 1,
    test: Annotated[
        bool, typer.Option("--test", help="Then run the best point on the test set, with all seeds.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Also run a grid of more than 100 points.")] = False,
    changes: SetOption = None,
    seed: SeedOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The sweep's own folder; a stopped sweep continues in it.")
    ] = None,
    part: PartOption = None,
    trust: TrustOption = False,
    format: FormatOption = "text",
) -> None:
    """Run an experiment over a grid of fields and rules on a validation split, and show which point is best."""
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.experiment.parts import Part
            from steelyard.studies.sweep import plan, run_on_test
            from steelyard.studies.sweep_table import BEST

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
            many=yes,
            part=None if part is None else Part.read(part),
        )
        folder = _written(planned, out, described, f"{described.name}-sweep")
        answer = _run(planned, folder, _how(jobs), format)
        if test and answer is not None and answer.best is not None:
            best = load(folder / BEST)
            watched(lambda: run_on_test(folder, best, progress=not quiet()))
            answer = planned.answer(folder)
        _show(planned, answer, format)


def attack(
    experiment: ExperimentArgument,
    attacks: Annotated[
        list[str] | None,
        typer.Option(
            "--attack",
            help="Attacks, with commas or one by one, such as sign-flip,alie+inflation; `steelyard list attacks` has "
            "all names. all: each of them, with a false size.",
        ),
    ] = None,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive",
            help="Add attackers that know the rule and send the worst of what they tried, with a false size.",
        ),
    ] = False,
    fraction: Annotated[float, typer.Option("--fraction", help="Share of the clients that are malicious.")] = 0.2,
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--rules", help="Rules as in `steelyard compare` (default: fedavg, EQ, the robust rules, guarded)."
        ),
    ] = None,
    seeds: SeedsOption = 1,
    changes: SetOption = None,
    seed: FirstSeedOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder with one run for each attack; stopped ones continue in it.")
    ] = None,
    trust: TrustOption = False,
    format: FormatOption = "text",
) -> None:
    """Make some clients malicious, and show the accuracy under each rule with and without them."""
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.studies.attack import Attack, attack_names, rules_for, under_attack

        names = attack_names(attacks or [], adaptive=adaptive)
        base = load(experiment, changes or [], seed, asking(trust))
        under_attack(base, names[0], fraction)  # refuses what cannot be attacked before rules are read
        described = load_comparison(experiment, changes or [], rules or rules_for(base), seed)
        planned = Attack(attacks=tuple(names), fraction=fraction, seeds=seeds, experiment=described)
        for cell in planned.cells():
            planned.described(cell)  # refuses what cannot be run before there is a folder
        finish_study(planned, _written(planned, out, described, described.name), _how(), format)


# `steelyard arena`: whether an idea is better than published methods, in one sentence.


def arena(
    candidate: Annotated[
        str | None,
        typer.Argument(help='A rule such as "VP>LD>DS/max", a .py file of your own, or a TOML experiment.'),
    ] = None,
    rule: Annotated[
        str | None, typer.Option("--rule", help="Rule to test, in words that may use what the file defines.")
    ] = None,
    suite: Annotated[str, typer.Option("--suite", help="Which suite of fixed tasks.")] = "small",
    scenes: Annotated[
        list[str] | None, typer.Option("--scenes", help="Only these tasks, with commas or one by one.")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="How many of the suite's seeds.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Use tuning seeds, while you develop the idea.")] = False,
    until_decided: Annotated[
        bool,
        typer.Option("--until-decided", help="Use held-out seeds, in batches, until every task is decided."),
    ] = False,
    retune: Annotated[
        bool, typer.Option("--retune", help="Choose the other rules' settings again, beside the fixed ones.")
    ] = False,
    part: PartOption = None,
    jobs: Annotated[int, typer.Option("--jobs", help="How many tasks run at a time, each in its own process.")] = 1,
    check: Annotated[
        Path | None,
        typer.Option("--check", help="Check an archive, or its folder, and replay a part of it."),
    ] = None,
    changes: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the runs, one for each task; a stopped arena continues in it."),
    ] = None,
    trust: TrustOption = False,
    format: FormatOption = "text",
) -> None:
    """Compare a rule with published methods on fixed tasks, and say whether it is better than FedAvg."""
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
            from steelyard.studies.arena import plan
            from steelyard.studies.candidate import read_candidates
            from steelyard.studies.study import check_jobs

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
        folder = _written(planned, out, chosen.experiment(planned.scenes[0]), "arena")
        finish_study(planned, folder, _how(jobs), format)


def _chosen(
    found: Sequence[Candidate], suite: Suite, scenes: Sequence[str], changes: Sequence[str], out: Path | None, jobs: int
) -> tuple[Candidate, dict[str, float], Path | None]:
    """Return the best of a candidate's settings, what they came to, and the folder that they were tried in."""
    from steelyard.studies.candidate import Tried, Tuning, tuning_folder
    from steelyard.studies.study import go_on

    if len(found) == 1:
        return found[0], {}, out
    rules = {each.label: each.settings for each in found}
    tuning = Tuning(suite=suite, rules=rules, scenes=suite.chosen(scenes), changes=tuple(changes))
    folder = tuning_folder(suite, out)
    values = watched(lambda: tuning.answer(go_on(tuning, folder, _how(jobs))))
    best = Tried(found[0].label, values).best
    _log.info(f"chosen on the clients' own test samples: {best}, of {len(found)} settings")
    tried = {label: value for label, value in values.items() if not math.isnan(value)}
    return next(each for each in found if each.label == best), tried, folder


def _retune(
    suite: Suite, scenes: Sequence[str], changes: Sequence[str], out: Path | None, format: Format, jobs: int
) -> None:
    """Choose the rivals' settings again and show them beside those that are frozen with the suite."""
    from steelyard.studies.candidate import tune_rivals, tuning_folder, tuning_parts

    folder, named = tuning_folder(suite, out), suite.chosen(scenes)
    found = watched(lambda: tune_rivals(suite, folder, named, changes, _how(jobs)))
    rivals = [{"rule": tried.rule, "best": tried.best, "tried": dict(tried.values)} for tried in found]
    parts = tuning_parts(suite, found, whole=named == tuple(suite.scenes) and not changes)
    emit({"folder": str(folder), "rivals": rivals}, format, parts, [f"runs stored in {folder}"])


def _check(archive: Path, format: Format) -> None:
    """Check an archive, also by its folder; exit code 1 where something differs, 2 where nothing decides here."""
    from steelyard.studies.archive import ARCHIVE
    from steelyard.studies.checking import check_archive

    archive = archive / ARCHIVE if archive.is_dir() else archive
    found = watched(lambda: check_archive(archive, progress=not quiet()))
    shown = {"whole": found.code == 0, "undecided": found.undecided, "lines": found.lines}
    emit({"archive": str(archive), **shown}, format, found.lines)
    raise typer.Exit(found.code)


# `steelyard compare --participation`.


def compare_shares(
    experiment: str,
    rules: Sequence[str],
    changes: Sequence[str],
    seeds: tuple[int, int | None],
    shares: str,
    out: Path | None,
    trust: bool,
    format: Format,
) -> None:
    """Run a comparison once for each share, and print a table with a column for each.

    `seeds` are how many, and the first.
    """
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.studies.participation import plan

        described = load_comparison(experiment, changes, ["recipe"], seeds[1], asking(trust))
        planned = plan(described, rules, seeds[0], shares)
        folder = _written(planned, out, described, f"{described.name}-participation")
        finish_study(planned, folder, _how(), format)


# `steelyard paper`: the papers' tables and figures.


def paper(
    name: Annotated[
        str | None, typer.Argument(help="A table or figure, such as table-4.2; default: list them.")
    ] = None,
    data: Annotated[str | None, typer.Option("--data", help="Only these data, with commas.")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, max=1000, help="How many [as the entry says].")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="One seed and tiny settings, to see that it runs.")] = False,
    rows: Annotated[
        Path | None, typer.Option("--rows", help="Show it from values that were measured before, and run nothing.")
    ] = None,
    changes: SetOption = None,
    jobs: JobsOption = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for runs and values; of a figure also a file: .svg, .png, .pdf."),
    ] = None,
    format: FormatOption = "text",
) -> None:
    """Run a table or figure of the papers, and show it beside the printed one with a verdict."""
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.studies import paper_table as table
        if name is None:
            every = [(each, table.entry_of(each)) for each in table.entries()]
            shown = tuple((each, of.paper, f"{of.title}{of.takes and f' ({of.takes})'}") for each, of in every)
            emit(dict(every), format, [Table("", ("name", "of", "what"), shown, names=3)])
            return
        entry = table.entry_of(name)
        if entry.command:
            emit({"name": name, "title": entry.title, "command": entry.command}, format, [entry.title], [entry.command])
            return
        picture = out if out is not None and out.suffix in (".svg", ".png", ".pdf") else None
        if picture is not None and entry.figure is None:
            raise UserError(f"--out: got {brief(str(out))}, and {name} is no figure; allowed: a folder")
        if rows is not None or entry.releases:
            from steelyard.studies.paper_measures import of_releases

            values = list(of_releases(entry)) if rows is None else table.read_rows(rows)
            answer = table.found_of(name, values)
            emit(answer, format, table.parts_of(answer), csv=lambda: table.as_csv(values))
        else:
            from steelyard.studies.paper import plan

            planned = plan(name, [word for word in (data or "").split(",") if word], seeds, changes or [], tiny=tiny)
            usual = Path("runs") / f"paper-{name}{'-tiny' if tiny else ''}"
            folder = _written(planned, usual if picture or out is None else out, planned.experiment, name)
            finish_study(planned, folder, _how(jobs), format)
            values = table.read_rows(folder / table.ROWS)
        if picture is not None:
            _draw(entry, values, picture)


def _draw(entry: Entry, values: Sequence[Value], picture: Path) -> None:
    from steelyard.report.figures import write_figure
    from steelyard.studies.charts import paper_chart

    chart = paper_chart(entry, values)
    if chart is None:
        raise UserError(f"{picture}: nothing to draw; allowed: values of the figure")
    write_figure(chart, picture)
    print(f"figure drawn: {picture}")


# What all studies have in common.


def study_in(folder: Path) -> Study | None:
    """Return the study that a folder holds; None where it holds none."""
    from steelyard.studies.arena import Arena
    from steelyard.studies.attack import Attack
    from steelyard.studies.paper import Paper
    from steelyard.studies.participation import Participation
    from steelyard.studies.sweep import Sweep

    kinds = (Sweep, Attack, Arena, Participation, Paper)
    return next((kind.read(folder) for kind in kinds if kind.is_in(folder)), None)


def _how(jobs: int = 1) -> How:
    """Return how a study runs whose code was asked for already."""
    from steelyard.studies.study import How

    return How(not quiet(), _log.info, jobs=jobs)


def _written(study: Study, out: Path | None, experiment: Description, name: str) -> Path:
    from steelyard.studies.study import folder_for

    return folder_for(study, out, experiment, name)


def resume_study(study: Study, folder: Path, trust: bool, accept_changes: bool, format: Format) -> None:
    """Continue a study that was stopped or killed."""
    finish_study(study, folder, replace(_how(), ask=asking(trust), accept_changes=accept_changes), format)


def finish_study(study: Study, folder: Path, how: How, format: Format) -> None:
    """Run what is left of a study, write its files and show its answer."""
    _show(study, _run(study, folder, how, format), format)


def _run(study: Study, folder: Path, how: How, format: Format) -> Any:
    """Run what is left of a study and return its answer; None of a part, which is shown as such."""
    from steelyard.studies.study import go_on

    # What its folder holds is what runs: code of the user's own as it was when the folder was made.
    kept = study.read(folder)
    watched(lambda: go_on(kept, folder, how))
    if kept.part is not None:
        print_part(kept.part, folder, format)
        return None
    with doing("summing up"):
        return kept.write_files(folder)


def _show(study: Study, answer: Any, format: Format) -> None:
    if answer is None:
        return
    show_study(study, answer, format)
    if problem := study.problem(answer):
        # A program that looks at the exit code alone must not take this for an answer.
        raise UserError(problem)


def show_study(study: Study, answer: Any, format: Format) -> None:
    """Show the answer of a study as far as it has come; what `steelyard table` does with the folder of one."""
    emit(answer, format, study.parts(answer), study.next_lines(answer), lambda: study.csv(answer))
