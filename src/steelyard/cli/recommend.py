"""`steelyard recommend ...`: splitting data, scoring lists, auditing what updates give away.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.printing import metric_table
from steelyard.cli.trust import TrustOption, asking
from steelyard.errors import UserError, brief, new_file, printable, writable

app = typer.Typer(help="Federated recommenders: data, metrics, leakage, lists.", no_args_is_help=True)


class Format(StrEnum):
    text = "text"
    json = "json"


class Repeated(StrEnum):
    first = "first"
    last = "last"
    mean = "mean"
    keep = "keep"


class SplitKind(StrEnum):
    temporal = "temporal"
    random = "random"
    shuffled = "shuffled"
    newest = "newest"


def parse_counts(text: str, option: str, most: int = 1_000_000) -> list[int]:
    """Return the numbers of "10,1", each whole and at least 1, without repeats."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > most:
        raise UserError(
            f"{option}: got {brief(text)}; allowed: whole numbers from 1 to {most:,}, joined by commas, like 10,1"
        )
    return list(dict.fromkeys(counts))


def parse_cutoffs(text: str) -> list[int]:
    """Return the cutoffs of "10,1"."""
    return parse_counts(text, "--cutoff", 10_000)


@app.command()
def evaluate(
    train: Annotated[Path, typer.Option(help="Training interactions: user, item, rating.")],
    test: Annotated[Path, typer.Option(help="Test interactions: user, item, rating.")],
    recommendations: Annotated[Path, typer.Option(help="A system's lists: user, item, score.")],
    cutoff: Annotated[str, typer.Option(help="List lengths k, joined by commas.")] = "10",
    threshold: Annotated[float | None, typer.Option(help="A test item is relevant from this rating on.")] = None,
    catalogue: Annotated[Path | None, typer.Option(help="All items that could have been recommended.")] = None,
    categories: Annotated[Path | None, typer.Option(help="Item and category: adds bias disparity.")] = None,
    against: Annotated[Path | None, typer.Option(help="Another system's lists: adds paired tests.")] = None,
    format: Annotated[Format, typer.Option(help="text: a table; json: by cutoff and metric.")] = Format.text,
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
    typer.echo(json.dumps(document, indent=2) if format is Format.json else metric_table(document))


@app.command()
def split(
    data: Annotated[Path, typer.Argument(help="Interactions in any known form (.dat, .data, .inter, .tsv, .gz).")],
    out: Annotated[Path, typer.Option(help="Folder for train.tsv, test.tsv and catalogue.tsv.")],
    kind: Annotated[SplitKind, typer.Option(help="How each user's rows are cut.")] = SplitKind.temporal,
    share: Annotated[float, typer.Option(help="Share of each user's rows that is tested on.")] = 0.2,
    count: Annotated[int, typer.Option(min=1, help="With kind newest: how many rows are tested on.")] = 1,
    core: Annotated[int, typer.Option(min=0, help="Keep the k-core: k for users and items alike.")] = 0,
    min_user: Annotated[int, typer.Option(min=0, help="Keep users with at least this many rows.")] = 0,
    min_item: Annotated[int, typer.Option(min=0, help="Keep items with at least this many rows.")] = 0,
    threshold: Annotated[float | None, typer.Option(help="Keep rows rated at least this.")] = None,
    duplicates: Annotated[Repeated, typer.Option(help="Which row of a repeated pair stays.")] = Repeated.first,
    seed: Annotated[int, typer.Option(help="For the kinds random and shuffled.")] = 42,
) -> None:
    """Filter interactions, split them per user, and say what was dropped and why."""
    from steelyard.recommend import filters, splits
    from steelyard.recommend.lists import write_interactions
    from steelyard.recommend.reading import read

    writable(out, "--out")
    if out == Path():
        raise UserError("--out: got nothing or the folder that you are in; allowed: a folder of its own")
    files = {name: out / f"{name}.tsv" for name in ("train", "test", "catalogue")}
    for file in files.values():
        if file.exists():
            raise UserError(f"--out: {brief(str(file))} exists already; allowed: a folder without it")
    table = filters.keep(
        read(data),
        duplicates=duplicates.value,
        threshold=threshold,
        k_core=core,
        min_user=min_user,
        min_item=min_item,
    )
    if not len(table):
        raise UserError(f"{data}: nothing is left after the filters; allowed: a lower core, threshold or minimum")
    for line in table.report():
        typer.echo(line)
    halves = splits.split(table, kind.value, share=share, count=count, seed=seed)
    if not len(halves.train) or not len(halves.test):
        empty = "train" if not len(halves.train) else "test"
        raise UserError(
            f"split: no row is left to {empty} on; allowed: another --share or --count, or longer histories"
        )
    out.mkdir(parents=True, exist_ok=True)
    write_interactions(files["train"], halves.train)
    write_interactions(files["test"], halves.test)
    files["catalogue"].write_text("item\n" + "\n".join(table.items) + "\n", encoding="utf-8")
    typer.echo(f"train: {len(halves.train):,}, test: {len(halves.test):,} interactions in {out}")


RunArgument = Annotated[Path, typer.Argument(help="Folder of a run of kind recommend.")]
RuleOption = Annotated[str | None, typer.Option(help="Which rule of the run; default: the main one.")]
FormatOption = Annotated[Format, typer.Option(help="text for people, json for programs.")]


@app.command()
def baseline(
    kind: Annotated[str, typer.Argument(help="random, popular, user-knn, item-knn, bpr, vae or fcf.")],
    train: Annotated[Path, typer.Option(help="Training interactions: user, item, rating.")],
    out: Annotated[Path, typer.Option(help="File for the lists.")],
    cutoff: Annotated[int, typer.Option(help="Length of the lists.")] = 10,
    catalogue: Annotated[Path | None, typer.Option(help="All items, also those without training rows.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of what is random.")] = 1,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the baseline: neighbours=50, factors=20, ...")
    ] = None,
) -> None:
    """Train a baseline and write each user's list of items that she did not train on."""
    from steelyard.recommend.baselines import recommend, settings_of
    from steelyard.recommend.interactions import build
    from steelyard.recommend.lists import write_lists
    from steelyard.recommend.reading import read, read_columns

    chosen = settings_of(kind, setting or [])
    length = parse_cutoffs(str(cutoff))[0]
    new_file(out, "--out")
    table = read(train)
    if catalogue is not None:
        everything = read_columns(catalogue, {"item": "item"})["item"]
        names = (table.users[table.user].tolist(), table.items[table.item].tolist())
        table = build(*names, table.rating.tolist(), all_items=everything)
    lists, scores = recommend(kind, table, length, seed, chosen)
    write_lists(out, table.users, table.items, lists, scores)
    typer.echo(f"lists of {length} for {len(table.users):,} users in {out}")


@app.command()
def top(
    run: RunArgument,
    user: Annotated[str, typer.Option(help="Id of the user.")],
    cutoff: Annotated[int, typer.Option(help="Length of the list.")] = 10,
    rule: RuleOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Print a user's list with titles, as her own device would compute it."""
    from steelyard.report.recommender import open_run

    rows = open_run(run, rule).top(user, parse_cutoffs(str(cutoff))[0])
    if format is Format.json:
        typer.echo(json.dumps({"user": user, "list": rows}, indent=2, ensure_ascii=False))
        return
    for row in rows:
        mark = "*" if row["in_test"] else " "
        typer.echo(f"{row['place']:>3} {mark} {row['score']:>8.3f}  {printable(row['title'])}")
    typer.echo("* taken by the user later (in her test set)")


@app.command()
def lists(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="File for the lists: user, item, score.")],
    cutoff: Annotated[int, typer.Option(help="Length of the lists.")] = 10,
    rule: RuleOption = None,
) -> None:
    """Write every user's list of a run, for `evaluate` or other tools."""
    from steelyard.recommend.lists import write_lists
    from steelyard.report.recommender import open_run

    length = parse_cutoffs(str(cutoff))[0]
    new_file(out, "--out")
    finished = open_run(run, rule)
    found, scores = finished.lists(length)
    data = finished.prepared.data
    write_lists(out, data.users, data.items, found, scores)
    typer.echo(f"lists of {found.shape[1]} for {len(found):,} users in {out}")


@app.command()
def report(
    run: RunArgument,
    cutoff: Annotated[str, typer.Option(help="List lengths k, joined by commas.")] = "10",
    rule: RuleOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Show every metric of a run's lists, what was dropped from the data, and the communication cost."""
    from steelyard.report.recommender import open_run

    document = open_run(run, rule).report(parse_cutoffs(cutoff))
    if format is Format.json:
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    for line in document["data"]:
        typer.echo(line)
    typer.echo(metric_table(document["metrics"]))
    for name, value in document["communication"].items():
        typer.echo(f"{name:<24}{value:>22,.0f}")


class Mode(StrEnum):
    sequential = "sFPL"
    sequential_plus = "sFPL+"
    parallel = "pFPL"
    parallel_plus = "pFPL+"


@app.command()
def cost(
    users: Annotated[int, typer.Option(min=1, max=10**12, help="Number of users |U|.")],
    items: Annotated[int, typer.Option(min=1, max=10**12, help="Number of items |I|.")],
    interactions: Annotated[int, typer.Option(min=1, max=10**15, help="Number of positive interactions R+.")],
    mode: Annotated[Mode, typer.Option(help="Which of the four configurations.")] = Mode.parallel_plus,
    pi: Annotated[float, typer.Option(min=0, max=1, help="Share of positive updates sent.")] = 1.0,
    epochs: Annotated[int, typer.Option(min=1, max=10**9, help="Number of epochs.")] = 1,
    format: FormatOption = Format.text,
) -> None:
    """Compute the thesis' communication cost, CCE per epoch and TCC in all, in vectors both ways."""
    from steelyard.recommend.fpl import MODES

    if pi != pi:
        raise UserError("--pi: got nan; allowed: a number from 0 to 1")
    found = MODES[mode.value].cost_per_epoch(users, items, interactions, pi)
    document = {"cce_vectors": found, "tcc_vectors": found * epochs}
    if format is Format.json:
        typer.echo(json.dumps(document))
        return
    for name, value in document.items():
        typer.echo(f"{name:<12}{value:>26,.0f}")


@app.command()
def audit(
    experiment: Annotated[str, typer.Argument(help="A recipe or TOML file of kind recommend, or a run's folder.")],
    rounds: Annotated[str, typer.Option(help="After which rounds to look, joined by commas.")] = "1,5,10,20",
    pi: Annotated[float, typer.Option(help="The share π of the protections that use one.")] = 0.5,
    decoys: Annotated[float, typer.Option(help="Decoys per item of the protection that uses them.")] = 1.0,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change a field: fpl.factors=10.")] = None,
    trust: TrustOption = False,
    format: FormatOption = Format.text,
) -> None:
    """Play the curious server: reconstruct users' items from their updates, under each protection."""
    from steelyard.experiment.loading import load, read_experiment
    from steelyard.experiment.recommend import RecommendDescription
    from steelyard.experiment.recommend_audit import audit as play

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
    found = play(described, parse_counts(rounds, "--rounds"), pi, decoys)
    if format is Format.json:
        typer.echo(json.dumps({"experiment": described.name, "protections": found}, indent=2, ensure_ascii=False))
        return
    typer.echo(f"{'':<44}{'by sign of the bias':^26}{'by absence of negatives':^26}")
    typer.echo(f"{'protection':<38}{'round':>6}{'precision':>14}{'recall':>10}{'precision':>16}{'recall':>10}")
    for entry in found:
        for row in entry["rounds"]:
            cells = [
                row["sign"]["precision"],
                row["sign"]["recall"],
                row["absence"]["precision"],
                row["absence"]["recall"],
            ]
            shown = ["-" if cell is None else f"{cell:.3f}" for cell in cells]
            typer.echo(
                f"{entry['protection']:<38}{row['round']:>6}{shown[0]:>14}{shown[1]:>10}{shown[2]:>16}{shown[3]:>10}"
            )
