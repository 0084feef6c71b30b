"""`steelyard recommend ...`: which commands there are, and those that read a run of a recommender.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import FormatOption, RuleOption, RunArgument, parse_cutoffs
from steelyard.cli.printing import metric_table, print_json, print_table
from steelyard.cli.recommend_audit import audit, cost
from steelyard.cli.recommend_explain import clouds, explain, kept
from steelyard.cli.recommend_features import features
from steelyard.cli.recommend_files import baseline, evaluate, split
from steelyard.errors import new_file, printable

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
    from steelyard.recommend.lists import write_lists
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


for command in (evaluate, split, features, baseline, top, lists, report, explain, kept, clouds, cost, audit):
    app.command()(command)
