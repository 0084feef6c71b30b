"""`steelyard recommend explain`, `kept` and `clouds`: what the features of KGFlex say about a run's lists.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import FormatOption, RuleOption, RunArgument, parse_counts, parse_cutoffs
from steelyard.cli.printing import print_json, print_table, print_wrapped
from steelyard.errors import new_file
from steelyard.recommend.knowledge.naming import counted
from steelyard.report.rendering import Table


def explain(
    run: RunArgument,
    user: Annotated[str, typer.Option(help="Id of the user.")],
    item: Annotated[str, typer.Option(help="Id of the item.")],
    top: Annotated[int, typer.Option(help="How many features to print.")] = 10,
    rule: RuleOption = None,
    format: FormatOption = "text",
) -> None:
    """Print the features that made an item's score for a user, with their share (KGFlex)."""
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
