"""`steelyard recommend evaluate`, `split`, `baseline` and `features`: what is made of files of data and lists.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from steelyard.base.errors import UserError, brief, new_file, own_folder, printable
from steelyard.base.logs import doing, quiet
from steelyard.cli.options import ExperimentArgument, FormatOption, SetOption, parse_cutoffs
from steelyard.cli.printing import metric_table, print_json, print_table
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
    from steelyard.recommend.evaluate import figures, load

    cutoffs = parse_cutoffs(cutoff)
    case = load(
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
    if format == "json":
        print_json(document)
    else:
        print_table(metric_table(document))


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
    from steelyard.base.settings import validated
    from steelyard.recommend.interactions import read, write_interactions
    from steelyard.recommend.run_data import InteractionSettings

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
    from steelyard.data.files import search_folders

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
    from steelyard.experiment.loading import load
    from steelyard.recommend.baselines import needs_features, recommend, settings_of
    from steelyard.recommend.evaluate import write_lists
    from steelyard.recommend.interactions import build, read, read_columns
    from steelyard.recommend.knowledge.loading import load_features

    chosen = settings_of(kind, setting or [])
    length = parse_cutoffs(str(cutoff))[0]
    new_file(out)
    if needs_features(kind) != (knowledge is not None):
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
            lists, scores = recommend(kind, table, length, seed, chosen, features)
    write_lists(out, table.users, table.items, lists, scores)
    typer.echo(f"lists of {length} for {len(table.users):,} users in {out}")


def features(
    experiment: ExperimentArgument,
    item: Annotated[str | None, typer.Option(help="Also list the features of this item.")] = None,
    changes: SetOption = None,
    format: FormatOption = "text",
) -> None:
    """Show how many features came from which hop of the knowledge graph, and what was dropped where."""
    from steelyard.data.files import find
    from steelyard.experiment.loading import load
    from steelyard.recommend.knowledge.features import counted
    from steelyard.recommend.knowledge.loading import load as load_knowledge
    from steelyard.recommend.run_data import filtered_interactions

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
    if format == "json":
        document = {"experiment": described.name, **found.report.document()}
        print_json(document | ({} if names is None else {"item": names}))
        return
    for line in found.report.lines():
        typer.echo(printable(line))
    if names is not None:
        typer.echo(printable(f"{item} has {counted(len(names), 'feature')}{':' if names else ''}"))
        for name in names:
            typer.echo(printable(f"  {name}"))


def _knowledge_of(described: Description, experiment: str) -> KnowledgeSettings:
    """Return the section [knowledge] of an experiment of a kind that has one; else say what is missing."""
    found = getattr(described, "knowledge", None)
    if found is None:
        raise UserError(f"knowledge: {brief(experiment)} has no section [knowledge]; allowed: a recommender with one")
    return found
