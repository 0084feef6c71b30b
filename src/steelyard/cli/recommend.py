"""`steelyard recommend ...`: which commands there are, and what they print.

What reads a run or attacks one needs torch, and is imported inside the commands, for speed of start.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from steelyard.base.errors import UserError, brief, counted, new_file, own_folder
from steelyard.base.files import RUN_FILE, is_file
from steelyard.base.logs import doing, quiet
from steelyard.base.settings import change, validated
from steelyard.cli.options import (
    ExperimentArgument,
    FormatOption,
    RuleOption,
    RunArgument,
    SetOption,
    TrustOption,
    asking,
    parse_counts,
    parse_cutoffs,
)
from steelyard.cli.printing import emit, metric_table, refuse_together
from steelyard.data.files import find, search_folders
from steelyard.experiment.loading import load, read_experiment
from steelyard.experiment.recommend import RecommendDescription
from steelyard.recommend import baselines
from steelyard.recommend.evaluate import figures, write_lists
from steelyard.recommend.evaluate import load as load_case
from steelyard.recommend.fpl import MODES
from steelyard.recommend.interactions import build, read, read_columns, write_interactions
from steelyard.recommend.knowledge.loading import load as load_knowledge
from steelyard.recommend.knowledge.loading import load_features
from steelyard.recommend.run_data import InteractionSettings, filtered_interactions
from steelyard.report.rendering import Block, Table
from steelyard.rounds.progress import watching

if TYPE_CHECKING:
    from steelyard.experiment.description import Description
    from steelyard.recommend.knowledge.loading import KnowledgeSettings


def evaluate(
    train: Annotated[Path, typer.Option(help="Training interactions: user, item, rating.")],
    test: Annotated[Path, typer.Option(help="Test interactions: user, item, rating.")],
    recommendations: Annotated[Path, typer.Option(help="A system's lists: user, item, score.")],
    cutoff: Annotated[str, typer.Option(help="List lengths k, joined by commas.")] = "10",
    threshold: Annotated[float | None, typer.Option(help="A test item is relevant from this rating on.")] = None,
    catalogue: Annotated[Path | None, typer.Option(help="All items that could have been recommended.")] = None,
    categories: Annotated[Path | None, typer.Option(help="Item and category: adds bias disparity.")] = None,
    against: Annotated[Path | None, typer.Option(help="Another system's lists: adds paired tests.")] = None,
    format: FormatOption = "text",
) -> None:
    """Score any system's lists with every metric (all unrated items protocol)."""
    cutoffs = parse_cutoffs(cutoff)
    case = load_case(
        *(train, test, recommendations),
        cutoff=max(cutoffs),
        threshold=threshold,
        catalogue=catalogue,
        categories=categories,
        against=against,
    )
    for note in case.notes:
        typer.echo(f"note: {note}", err=True)
    document = figures(case, cutoffs)
    emit(document, format, [metric_table(document)])


def split(
    data: Annotated[Path, typer.Argument(help="Interactions (.dat, .data, .tsv, .gz), here or in STEELYARD_DATA.")],
    out: Annotated[Path, typer.Option(help="Folder for train.tsv, test.tsv and catalogue.tsv.")],
    kind: Annotated[
        Literal["temporal", "random", "shuffled", "newest"], typer.Option(help="How each user's rows are cut.")
    ] = "temporal",
    share: Annotated[float, typer.Option(help="Share of each user's rows that is tested on.")] = 0.2,
    count: Annotated[int, typer.Option(min=1, help="With kind newest: how many rows are tested on.")] = 1,
    validation: Annotated[
        float | None, typer.Option(help="Share of each user's training rows, the latest, that goes to validation.tsv.")
    ] = None,
    core: Annotated[int, typer.Option(min=0, help="Keep the k-core: k for users and items alike.")] = 0,
    min_user: Annotated[int, typer.Option(min=0, help="Keep users with at least this many rows.")] = 0,
    min_item: Annotated[int, typer.Option(min=0, help="Keep items with at least this many rows.")] = 0,
    threshold: Annotated[float | None, typer.Option(help="Keep rows rated at least this.")] = None,
    duplicates: Annotated[
        Literal["first", "last", "mean", "keep"], typer.Option(help="Which row of a repeated pair stays.")
    ] = "first",
    seed: Annotated[int, typer.Option(help="For the kinds random and shuffled.")] = 42,
) -> None:
    """Filter interactions, split them per user, and say what was dropped and why."""
    files = _new_files(out, ("train", "test", "catalogue", *(() if validation is None else ("validation",))))
    fields = {"path": data, "duplicates": duplicates, "threshold": threshold, "core": core, "min_user": min_user}
    fields |= {"min_item": min_item, "split": kind, "share": share, "count": count, "validation": validation}
    settings = validated(InteractionSettings, {**fields, "split_seed": seed}, "recommend split")
    table = settings.keep(read(_located(data)))
    if not len(table):
        raise UserError(f"{data}: nothing is left after the filters; allowed: a lower core, threshold or minimum")
    for line in table.report():
        typer.echo(line)
    halves = settings.cut(table)
    sides = {"train": halves.train, "test": halves.test}
    if validation is not None:
        again = settings.cut_again(halves.train, validation)
        sides = {"train": again.train, "validation": again.test, "test": halves.test}
    for name, side in sides.items():
        if not len(side):
            raise UserError(
                f"split: no row is left to {'train' if name == 'train' else 'test'} on ({name}.tsv); allowed: another "
                "--share, --count or --validation, or longer histories"
            )
    out.mkdir(parents=True, exist_ok=True)
    for name, side in sides.items():
        write_interactions(files[name], side)
    files["catalogue"].write_text("item\n" + "\n".join(table.items) + "\n", encoding="utf-8")
    counts = ", ".join(f"{name}: {len(side):,}" for name, side in sides.items())
    typer.echo(f"{counts} interactions in {out}")


def _located(path: Path) -> Path:
    """Return where a file of data lies: here, in STEELYARD_DATA or in ../shared/data, as for experiments."""
    return next((folder / path for folder in search_folders() if (folder / path).exists()), path)


def _new_files(out: Path, names: Sequence[str]) -> dict[str, Path]:
    """Return the files to write by name, before anything is read; none of them may be there already."""
    own_folder(out, "--out")
    files = {name: out / f"{name}.tsv" for name in names}
    for file in files.values():
        if file.exists():
            raise UserError(f"--out: {brief(str(file))} exists already; allowed: a folder without it")
    return files


def baseline(
    kind: Annotated[
        str,
        typer.Argument(
            help="random, popular, user-knn, item-knn, svd, mf, neumf, bpr-mf, bpr, vae, fcf, vsm or kahfm."
        ),
    ],
    train: Annotated[Path, typer.Option(help="Training interactions: user, item, rating.")],
    out: Annotated[Path, typer.Option(help="File for the lists.")],
    cutoff: Annotated[int, typer.Option(help="Length of the lists.")] = 10,
    catalogue: Annotated[Path | None, typer.Option(help="All items, also those without training rows.")] = None,
    knowledge: Annotated[
        str | None,
        typer.Option(help="For vsm and kahfm: an experiment whose section \\[knowledge] gives the items' features."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of what is random.")] = 1,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the baseline: neighbours=50, divide=all, ...")
    ] = None,
) -> None:
    """Train a baseline and write each user's list of items that she did not train on."""
    settings: dict[str, Any] = {}
    for assignment in setting or []:
        change(settings, assignment)
    chosen = baselines.baseline(kind, settings)
    length = parse_cutoffs(str(cutoff))[0]
    new_file(out)
    if chosen.of_features != (knowledge is not None):
        needed = "needs it" if knowledge is None else "looks at no features"
        raise UserError(
            f"--knowledge: {kind} {needed}; allowed: an experiment with [knowledge] for vsm and kahfm, none for others"
        )
    with watching(not quiet()), doing(f"baseline {kind}"):
        table = read(train)
        if catalogue is not None:
            everything = read_columns(catalogue, {"item": "item"})["item"]
            names = (table.users[table.user].tolist(), table.items[table.item].tolist())
            table = build(*names, table.rating.tolist(), all_items=everything)
        features = None if knowledge is None else load_features(_knowledge_of(load(knowledge), knowledge), table.items)
        with doing(f"training on {len(table):,} interactions"):
            lists, scores = baselines.recommend(chosen, table, length, seed, features)
    write_lists(out, table.users, table.items, lists, scores)
    typer.echo(f"lists of {length} for {len(table.users):,} users in {out}")


def features(
    experiment: ExperimentArgument,
    item: Annotated[str | None, typer.Option(help="Also list the features of this item.")] = None,
    changes: SetOption = None,
    format: FormatOption = "text",
) -> None:
    """Show how many features came from which hop of the knowledge graph, and what was dropped where."""
    described = load(experiment, changes or [])
    knowledge = _knowledge_of(described, experiment)
    interactions = described.interactions  # pyright: ignore[reportAttributeAccessIssue]
    path = find(interactions.path, "a table of interactions", field="path (interactions.path)")
    data = filtered_interactions(path, interactions)
    found = load_knowledge(knowledge, data.items)
    names: list[str] | None = None
    if item is not None:
        if item not in data.items:
            raise UserError(f"--item: got {brief(item)}; allowed: one of {len(data.items):,} items of {experiment}")
        names = found.features.names_of(data.items.tolist().index(item))
    document = {"experiment": described.name, **found.report.document()}
    lines = list(found.report.lines())
    if names is not None:
        document["item"] = names
        lines.append(f"{item} has {counted(len(names), 'feature')}{':' if names else ''}")
        lines += [f"  {name}" for name in names]
    emit(document, format, lines)


def _knowledge_of(described: Description, experiment: str) -> KnowledgeSettings:
    """Return the section [knowledge] of an experiment of a kind that has one; else say what is missing."""
    found = getattr(described, "knowledge", None)
    if found is None:
        raise UserError(f"knowledge: {brief(experiment)} has no section [knowledge]; allowed: a recommender with one")
    return found


# Commands that read a run, audit FPL, or say what it sends.


app = typer.Typer(no_args_is_help=True, add_completion=False)


ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a recommender (`steelyard model`).")]
OwnUserOption = Annotated[str, typer.Option("--user", help="Id of the user (default: whose part or rows there are).")]
OwnRowsOption = Annotated[
    Path | None, typer.Option("--rows", help="Her items, of a folder that does not hold her own part.")
]


def list_items(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, or of a recommender (`steelyard model`).")],
    user: OwnUserOption = "",
    rows: OwnRowsOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="Of a run: write every user's list into this file.")] = None,
    cutoff: Annotated[int, typer.Option(help="Length of the list.")] = 10,
    rule: RuleOption = None,
    format: FormatOption = "text",
) -> None:
    """Print a user's list as her own device would compute it, with the features that made it (KGFlex)."""
    from steelyard.models.recommender import Recommender, listed
    from steelyard.report.recommender import open_run

    length = parse_cutoffs(str(cutoff))[0]
    if not is_file(folder / RUN_FILE):
        refuse_together("the folder of a recommender", {"--out": out, "--rule": rule}, "with the folder of a run")
        found = Recommender.load(folder).list(user, length, rows=rows)
    elif out is not None:
        refuse_together("--out", {"--user": user or None, "--rows": rows}, "without, for every user's list")
        _write_all(folder, rule, length, out)
        return
    else:
        refuse_together("the folder of a run", {"--rows": rows}, "with the folder of a recommender")
        if not user:
            raise UserError("--user: missing; allowed: the id of a user, or --out FILE for every user's list")
        found = listed(open_run(folder, rule), user, length)
    why = ("because of",) if any(one.reasons for one in found.items) else ()
    shown = tuple(
        (
            *(f"{one.rank}{'*' if one.taken_later else ''}", f"{one.score:.3f}", one.title),
            *(", ".join(one.reasons) for _ in why),
        )
        for one in found.items
    )
    note = "* taken by the user later (in her test set)" if any(one.taken_later for one in found.items) else ""
    emit(found, format, [Table(f"For {found.user}", ("rank", "score", "title", *why), shown, note)])


def _write_all(run: Path, rule: str | None, length: int, out: Path) -> None:
    """Write every user's list of a run, for `evaluate` or other tools."""
    from steelyard.report.recommender import open_run

    new_file(out)
    finished = open_run(run, rule)
    found, scores = finished.lists(length)
    data = finished.run_data.data
    write_lists(out, data.users, data.items, found, scores)
    typer.echo(f"lists of {found.shape[1]} for {len(found):,} users in {out}")


def on_later_items(
    model: ModelArgument,
    later: Annotated[Path, typer.Argument(metavar="FILE", help="Items that the user took later.")],
    user: OwnUserOption = "",
    rows: OwnRowsOption = None,
    format: FormatOption = "text",
) -> None:
    """Test a user's list from a saved recommender on items that she took later: the run's metrics."""
    from steelyard.models.recommender import Recommender

    found = Recommender.load(model).test(later, user, rows=rows)
    group = found.groups[0]
    shown = tuple((figure.measure, figure.shown) for figure in group.figures)
    emit(found, format, [Table(f"Tests of {group.name} on {counted(group.rows, 'item')}", ("metric", "value"), shown)])


def report(
    run: RunArgument,
    cutoff: Annotated[str, typer.Option(help="List lengths k, joined by commas.")] = "10",
    rule: RuleOption = None,
    format: FormatOption = "text",
) -> None:
    """Show every metric of a run's lists, what was dropped from the data, and the communication cost."""
    from steelyard.report.recommender import open_run

    document = open_run(run, rule).report(parse_cutoffs(cutoff))
    sampled = [
        f"{name + ' among sampled negatives':<40}{value:>8.5f}" for name, value in document.get("sampled", {}).items()
    ]
    sent = [f"{name:<24}{value:>22,.0f}" for name, value in document["communication"].items()]
    emit(document, format, [*document["data"], metric_table(document["metrics"]), *sampled, *sent])


def explain(
    run: RunArgument,
    user: Annotated[str, typer.Option(help="Id of the user.")],
    item: Annotated[str, typer.Option(help="Id of the item.")],
    top: Annotated[int, typer.Option(help="How many features to print.")] = 10,
    rule: RuleOption = None,
    format: FormatOption = "text",
) -> None:
    """Print the features that made an item's score for a user, with their share (KGFlex)."""
    from steelyard.report.recommender import open_explained

    count = parse_counts(str(top), "--top")[0]
    found = open_explained(run, rule).why(user, item)
    reasons = found["reasons"]
    shared = counted(len(reasons), "feature") if reasons else "no feature"
    parts: list[Block] = [
        f"{found['title']} for user {found['user']}: score {found['score']:.4f}",
        f"{shared} shared: the user has {found['features_of_user']}, the item {found['features_of_item']}",
    ]
    rows = tuple(
        (
            row["feature"],
            f"{row['share']:.1%}",
            *(f"{row['part']:.4f}", f"{row['gain']:.3f}", f"{row['personal']:.4f}", f"{row['common']:.4f}"),
        )
        for row in reasons[:count]
    )
    if rows:
        headings = ("feature", "share", "part", "gain", "hers", "common")
        parts.append(Table("", headings, rows, "part = gain x (hers + common)"))
    if len(reasons) > count:
        rest = sum(abs(row["share"]) for row in reasons[count:])
        parts.append(f"{rest:.1%} in {counted(len(reasons) - count, 'further feature')}")
    emit(found, format, parts)


def kept(
    run: RunArgument,
    cutoff: Annotated[int, typer.Option(help="Length of the lists.")] = 10,
    rule: RuleOption = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Also draw the features before and after: .svg, .png or .pdf.")
    ] = None,
    top: Annotated[int, typer.Option(help="Features on each side of the picture.")] = 30,
    format: FormatOption = "text",
) -> None:
    """Print how much of users' most informative features their lists keep (KGFlex): quartiles over users."""
    from steelyard.report.recommender import open_explained

    length, count = parse_cutoffs(str(cutoff))[0], parse_counts(str(top), "--top", 500)[0]
    if picture is not None:
        new_file(picture, "--picture")
    explained = open_explained(run, rule)
    found = explained.kept(length)
    parts: list[Block] = []
    for name, words in (("shown", "an item of the list has it"), ("informative", "the list would select it again")):
        rows = tuple(
            (top, *("-" if quartile is None else f"{quartile:.1%}" for quartile in quartiles))
            for top, quartiles in found["kept"][name].items()
        )
        parts.append(Table(f"a feature is kept if {words}:", ("best", "Q1", "median", "Q3"), rows))
    if found["prominent_kept"] is None:
        parts.append("no user has a feature that tells her items from others, so there is nothing to keep")
    else:
        prominent = counted(found["prominent"], "most prominent feature")
        parts.append(f"of the {prominent} in what users took, {found['prominent_kept']:.0%}")
        parts.append(f"are among the {found['prominent_after']:,} most prominent in what they are shown")
    if picture is not None:
        from steelyard.report.figures import write_figure
        from steelyard.report.recommended import clouds

        write_figure(clouds(explained.clouds(length, count)), picture)
        parts.append(f"feature clouds in {picture}")
    emit(found, format, parts)


def cost(
    users: Annotated[int, typer.Option(min=1, max=10**12, help="Number of users |U|.")],
    items: Annotated[int, typer.Option(min=1, max=10**12, help="Number of items |I|.")],
    interactions: Annotated[int, typer.Option(min=1, max=10**15, help="Number of positive interactions R+.")],
    mode: Annotated[
        Literal["sFPL", "sFPL+", "pFPL", "pFPL+"], typer.Option(help="Which of the four configurations.")
    ] = "pFPL+",
    pi: Annotated[float, typer.Option(min=0, max=1, help="Share of positive updates sent.")] = 1.0,
    epochs: Annotated[int, typer.Option(min=1, max=10**9, help="Number of epochs.")] = 1,
    epoch: Annotated[
        Literal["formula", "tables"],
        typer.Option(help="formula: R+ triples an epoch; tables: R+ visits of T triples, as the thesis' tables."),
    ] = "formula",
    format: FormatOption = "text",
) -> None:
    """Compute the thesis' communication cost, CCE per epoch and TCC in all, in vectors both ways."""
    if pi != pi:
        raise UserError("--pi: got nan; allowed: a number from 0 to 1")
    found = MODES[mode].cost_per_epoch(users, items, interactions, pi, epoch)
    document = {"cce_vectors": found, "tcc_vectors": found * epochs}
    emit(document, format, [f"{name:<12}{value:>26,.0f}" for name, value in document.items()])


def audit(
    experiment: Annotated[str, typer.Argument(help="A recipe or TOML file of kind recommend, or a run's folder.")],
    rounds: Annotated[str, typer.Option(help="After which rounds to look, joined by commas.")] = "1,5,10,20",
    pi: Annotated[float, typer.Option(help="The share π of the protections that use one.")] = 0.5,
    decoys: Annotated[float, typer.Option(help="Decoys per item of the protection that uses them.")] = 1.0,
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="Also local noise: ε of all rounds. May be given again.")
    ] = None,
    clip: Annotated[
        float, typer.Option("--clip", min=1e-6, help="With --epsilon: L2 norm to which a user's update is clipped.")
    ] = 0.5,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change a field: fpl.factors=10.")] = None,
    trust: TrustOption = False,
    format: FormatOption = "text",
) -> None:
    """Play the curious server: reconstruct users' items from their updates, under each protection."""
    from steelyard.experiment.run_audits import audit as play
    from steelyard.experiment.run_audits import chance

    folder = Path(experiment)
    if folder.is_dir() and changes:
        raise UserError("--set: got changes beside a run's folder; allowed: with a recipe or a file")
    described = read_experiment(folder) if folder.is_dir() else load(experiment, changes or [], ask=asking(trust))
    if folder.is_dir() and (code := described.named_code()):
        asking(trust)(str(folder), code)
    if not isinstance(described, RecommendDescription):
        raise UserError(f"audit: '{experiment}' is not of kind 'recommend'; allowed: fpl-ml1m and the like")
    if not 0 <= pi <= 1 or not 0 <= decoys <= 100:
        raise UserError(f"--pi, --decoys: got {pi} and {decoys}; allowed: 0 to 1, and 0 to 100")
    found = play(described, parse_counts(rounds, "--rounds"), pi, decoys, epsilon or (), clip)
    rows: list[tuple[str, ...]] = []
    for entry in found:
        for row in entry.rounds:
            shares = (row.sign.precision, row.sign.recall, row.absence.precision, row.absence.recall, row.sum.precision)
            cells = ["-" if share is None else f"{share:.3f}" for share in shares]
            rows.append((entry.protection, str(row.round), *cells))
    heads = ("sign: precision", "sign: recall", "absence: precision", "absence: recall", "sum: precision")
    guessed = chance(described)
    note = "Items claimed by the sign of the bias, by the absence of negatives, and by the sum of changes. "
    note += f"Claims at random would be right in {guessed:.3f}."
    table = Table("What the server reads of users' items", ("protection", "round", *heads), tuple(rows), note)
    emit({"experiment": described.name, "chance": guessed, "protections": found}, format, [table])


app.command("list")(list_items)
app.command("test")(on_later_items)
for command in (evaluate, split, features, baseline, report, explain, kept, cost, audit):
    app.command()(command)
