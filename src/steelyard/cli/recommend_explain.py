"""`steelyard recommend explain`, `kept` and `clouds`: what the features of KGFlex say about a run's lists.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import FormatOption
from steelyard.cli.recommend_options import RuleOption, RunArgument, parse_counts, parse_cutoffs
from steelyard.errors import new_file, printable


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
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    reasons = found["reasons"]
    typer.echo(
        f"{printable(found['title'])} for {printable(user)}: score {found['score']:.4f} from {len(reasons)} features "
        f"that her {found['features_of_user']} and its {found['features_of_item']} share"
    )
    typer.echo(f"{'share':>7}{'part':>10}{'gain':>8}{'hers':>9}{'common':>9}  feature")
    for row in reasons[:count]:
        numbers = (
            f"{row['share']:>7.1%}{row['part']:>10.4f}{row['gain']:>8.3f}{row['personal']:>9.4f}{row['common']:>9.4f}"
        )
        typer.echo(f"{numbers}  {printable(row['feature'])}")
    if len(reasons) > count:
        rest = sum(abs(row["share"]) for row in reasons[count:])
        typer.echo(f"{rest:>7.1%} in {len(reasons) - count} further features")


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
        typer.echo(json.dumps(found, indent=2))
        return
    for name, words in (("shown", "an item of the list has it"), ("informative", "the list would select it again")):
        typer.echo(f"kept: {words}")
        typer.echo(f"{'top':>8}{'Q1':>9}{'median':>9}{'Q3':>9}")
        for top, quartiles in found["kept"][name].items():
            typer.echo(f"{top:>8}" + "".join("        -" if q is None else f"{q:>9.1%}" for q in quartiles))
    typer.echo(f"of the 100 most prominent features before, {found['prominent_kept']:.0%} are among those after")


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
    new_file(out, "--out")
    write_figure(draw(open_explained(run, rule).clouds(length, count)), out)
    typer.echo(f"feature clouds in {out}")
