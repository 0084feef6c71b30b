"""`steelyard recommend ...`: which commands there are; those that read a run, audit FPL, or say what it sends.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from steelyard.base.errors import UserError, new_file, printable
from steelyard.cli.options import (
    FormatOption,
    RuleOption,
    RunArgument,
    TrustOption,
    asking,
    parse_counts,
    parse_cutoffs,
)
from steelyard.cli.printing import metric_table, print_json, print_table, print_wrapped
from steelyard.cli.recommend_files import baseline, evaluate, features, split
from steelyard.report.rendering import Table

app = typer.Typer(help="Federated recommenders: data, metrics, leakage, lists.", no_args_is_help=True)


def top(
    run: RunArgument,
    user: Annotated[str, typer.Option(help="Id of the user.")],
    cutoff: Annotated[int, typer.Option(help="Length of the list.")] = 10,
    rule: RuleOption = None,
    format: FormatOption = "text",
) -> None:
    """Print a user's list with titles, as her own device would compute it."""
    from steelyard.report.recommender import open_run

    rows = open_run(run, rule).top(user, parse_cutoffs(str(cutoff))[0])
    if format == "json":
        print_json({"user": user, "list": rows})
        return
    for row in rows:
        mark = "*" if row["in_test"] else " "
        typer.echo(f"{row['rank']:>3} {mark} {row['score']:>8.3f}  {printable(row['title'])}")
    typer.echo("* taken by the user later (in her test set)")


def lists(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="File for the lists: user, item, score.")],
    cutoff: Annotated[int, typer.Option(help="Length of the lists.")] = 10,
    rule: RuleOption = None,
) -> None:
    """Write every user's list of a run, for `evaluate` or other tools."""
    from steelyard.recommend.evaluate import write_lists
    from steelyard.report.recommender import open_run

    length = parse_cutoffs(str(cutoff))[0]
    new_file(out)
    finished = open_run(run, rule)
    found, scores = finished.lists(length)
    data = finished.run_data.data
    write_lists(out, data.users, data.items, found, scores)
    typer.echo(f"lists of {found.shape[1]} for {len(found):,} users in {out}")


def report(
    run: RunArgument,
    cutoff: Annotated[str, typer.Option(help="List lengths k, joined by commas.")] = "10",
    rule: RuleOption = None,
    format: FormatOption = "text",
) -> None:
    """Show every metric of a run's lists, what was dropped from the data, and the communication cost."""
    from steelyard.report.recommender import open_run

    document = open_run(run, rule).report(parse_cutoffs(cutoff))
    if format == "json":
        print_json(document)
        return
    for line in document["data"]:
        typer.echo(line)
    print_table(metric_table(document["metrics"]))
    for name, value in document.get("sampled", {}).items():
        typer.echo(f"{name + ' among sampled negatives':<40}{value:>8.5f}")
    for name, value in document["communication"].items():
        typer.echo(f"{name:<24}{value:>22,.0f}")


def explain(
    run: RunArgument,
    user: Annotated[str, typer.Option(help="Id of the user.")],
    item: Annotated[str, typer.Option(help="Id of the item.")],
    top: Annotated[int, typer.Option(help="How many features to print.")] = 10,
    rule: RuleOption = None,
    format: FormatOption = "text",
) -> None:
    """Print the features that made an item's score for a user, with their share (KGFlex)."""
    from steelyard.recommend.knowledge.features import counted
    from steelyard.report.explained import open_explained

    count = parse_counts(str(top), "--top")[0]
    found = open_explained(run, rule).why(user, item)
    if format == "json":
        print_json(found)
        return
    reasons = found["reasons"]
    print_wrapped(f"{found['title']} for user {found['user']}: score {found['score']:.4f}")
    shared = counted(len(reasons), "feature") if reasons else "no feature"
    print_wrapped(f"{shared} shared: the user has {found['features_of_user']}, the item {found['features_of_item']}")
    if not reasons:
        return
    rows = tuple(
        (
            row["feature"],
            f"{row['share']:.1%}",
            *(f"{row['part']:.4f}", f"{row['gain']:.3f}", f"{row['personal']:.4f}", f"{row['common']:.4f}"),
        )
        for row in reasons[:count]
    )
    print_table(
        Table("", ("feature", "share", "part", "gain", "hers", "common"), rows, "part = gain x (hers + common)")
    )
    if len(reasons) > count:
        rest = sum(abs(row["share"]) for row in reasons[count:])
        print_wrapped(f"{rest:.1%} in {counted(len(reasons) - count, 'further feature')}")


def kept(
    run: RunArgument,
    cutoff: Annotated[int, typer.Option(help="Length of the lists.")] = 10,
    rule: RuleOption = None,
    format: FormatOption = "text",
) -> None:
    """Print how much of users' most informative features their lists keep (KGFlex): quartiles over users."""
    from steelyard.recommend.knowledge.features import counted
    from steelyard.report.explained import open_explained

    found = open_explained(run, rule).kept(parse_cutoffs(str(cutoff))[0])
    if format == "json":
        print_json(found)
        return
    for name, words in (("shown", "an item of the list has it"), ("informative", "the list would select it again")):
        rows = tuple(
            (top, *("-" if quartile is None else f"{quartile:.1%}" for quartile in quartiles))
            for top, quartiles in found["kept"][name].items()
        )
        print_table(Table(f"a feature is kept if {words}:", ("best", "Q1", "median", "Q3"), rows))
    if found["prominent_kept"] is None:
        typer.echo("no user has a feature that tells her items from others, so there is nothing to keep")
        return
    prominent = counted(found["prominent"], "most prominent feature")
    typer.echo(f"of the {prominent} in what users took, {found['prominent_kept']:.0%}")
    typer.echo(f"are among the {found['prominent_after']:,} most prominent in what they are shown")


def clouds(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="File for the picture: .svg, .png or .pdf.")],
    cutoff: Annotated[int, typer.Option(help="Length of the lists.")] = 10,
    top: Annotated[int, typer.Option(help="Features on each side.")] = 30,
    rule: RuleOption = None,
) -> None:
    """Draw the most prominent features in what users took and in what they are shown (KGFlex)."""
    from steelyard.report.explained import open_explained
    from steelyard.report.figures.clouds import clouds as draw
    from steelyard.report.figures.writing import write_figure

    length, count = parse_cutoffs(str(cutoff))[0], parse_counts(str(top), "--top", 500)[0]
    new_file(out)
    write_figure(draw(open_explained(run, rule).clouds(length, count)), out)
    typer.echo(f"feature clouds in {out}")


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
    from steelyard.recommend.fpl import MODES

    if pi != pi:
        raise UserError("--pi: got nan; allowed: a number from 0 to 1")
    found = MODES[mode].cost_per_epoch(users, items, interactions, pi, epoch)
    document = {"cce_vectors": found, "tcc_vectors": found * epochs}
    if format == "json":
        print_json(document)
        return
    for name, value in document.items():
        typer.echo(f"{name:<12}{value:>26,.0f}")


def audit(
    experiment: Annotated[str, typer.Argument(help="A recipe or TOML file of kind recommend, or a run's folder.")],
    rounds: Annotated[str, typer.Option(help="After which rounds to look, joined by commas.")] = "1,5,10,20",
    pi: Annotated[float, typer.Option(help="The share π of the protections that use one.")] = 0.5,
    decoys: Annotated[float, typer.Option(help="Decoys per item of the protection that uses them.")] = 1.0,
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="Also noise on the devices: ε of all rounds; repeatable.")
    ] = None,
    clip: Annotated[float, typer.Option("--clip", min=1e-6, help="With --epsilon: length of a user's update.")] = 0.5,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change a field: fpl.factors=10.")] = None,
    trust: TrustOption = False,
    format: FormatOption = "text",
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
    found = play(described, parse_counts(rounds, "--rounds"), pi, decoys, epsilon or (), clip)
    if format == "json":
        print_json({"experiment": described.name, "protections": found})
        return
    rows: list[tuple[str, ...]] = []
    for entry in found:
        for row in entry["rounds"]:
            guesses = (row["sign"], row["absence"])
            shares = [share for guess in guesses for share in (guess["precision"], guess["recall"])]
            cells = ["-" if share is None else f"{share:.3f}" for share in (*shares, row["sum"]["precision"])]
            rows.append((entry["protection"], str(row["round"]), *cells))
    heads = ("sign: precision", "sign: recall", "absence: precision", "absence: recall", "sum: precision")
    note = "Items claimed by the sign of the bias, by the absence of negatives, and by the sum of changes."
    print_table(Table("What the server reads of users' items", ("protection", "round", *heads), tuple(rows), note))


for command in (evaluate, split, features, baseline, top, lists, report, explain, kept, clouds, cost, audit):
    app.command()(command)
