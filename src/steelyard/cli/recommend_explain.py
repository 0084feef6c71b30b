"""`steelyard recommend explain`, `kept` and `clouds`: what the features of KGFlex say about a run's lists.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.options import FormatOption
from steelyard.cli.printing import print_json, terminal_width
from steelyard.cli.recommend_options import RuleOption, RunArgument, parse_counts, parse_cutoffs
from steelyard.errors import new_file, printable
from steelyard.recommend.knowledge.naming import counted

if TYPE_CHECKING:
    from steelyard.report.documents import Explanation

_HEADER = f"{'share':>7}{'part':>10}{'gain':>8}{'hers':>9}{'common':>9}  "
"""The columns of a reason before the feature's name: part = gain x (hers + common)."""


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
    for line in _told(found, count, terminal_width()):
        typer.echo(printable(line))


def _told(found: Explanation, count: int, width: int | None) -> Iterator[str]:
    """Yield why an item has its score; where the terminal is too narrow for a table, two lines for each feature."""
    reasons = found["reasons"]
    yield f"{found['title']} for user {found['user']}: score {found['score']:.4f}"
    shared = counted(len(reasons), "feature") if reasons else "no feature"
    yield f"{shared} shared: the user has {found['features_of_user']}, the item {found['features_of_item']}"
    if not reasons:
        return
    shown = reasons[:count]
    wide = width is None or max(len(row["feature"]) for row in shown) + len(_HEADER) <= width
    if wide:
        yield f"{_HEADER}feature"
    for row in shown:
        if wide:
            numbers = f"{row['part']:>10.4f}{row['gain']:>8.3f}{row['personal']:>9.4f}{row['common']:>9.4f}"
            yield f"{row['share']:>7.1%}{numbers}  {row['feature']}"
            continue
        yield f"{row['share']:>7.1%}  {row['feature']}"
        inner = f"{row['personal']:.4f} hers + {row['common']:.4f} common"
        yield f"{'':>9}{row['part']:.4f} = {row['gain']:.3f} x ({inner})"
    if len(reasons) > count:
        rest = sum(abs(row["share"]) for row in reasons[count:])
        yield f"{rest:>7.1%}  in {counted(len(reasons) - count, 'further feature')}"


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
        typer.echo(f"a feature is kept if {words}:")
        typer.echo(f"{'best':>8}{'Q1':>9}{'median':>9}{'Q3':>9}")
        for top, quartiles in found["kept"][name].items():
            typer.echo(f"{top:>8}" + "".join("        -" if q is None else f"{q:>9.1%}" for q in quartiles))
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
    new_file(out, "--out")
    write_figure(draw(open_explained(run, rule).clouds(length, count)), out)
    typer.echo(f"feature clouds in {out}")
