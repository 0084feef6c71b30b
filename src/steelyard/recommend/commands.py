"""`steelyard recommend ...`: splitting data, scoring lists, auditing what updates give away."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

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


def parse_cutoffs(text: str) -> list[int]:
    """Return the cutoffs of "10,1", each a whole number of at least 1."""
    from steelyard.errors import UserError

    try:
        cutoffs = [int(part) for part in text.split(",")]
    except ValueError:
        cutoffs = []
    if not cutoffs or min(cutoffs) < 1:
        raise UserError(f"--cutoff: got {text!r}; allowed: whole numbers from 1, joined by commas, like 10,1")
    return list(dict.fromkeys(cutoffs))


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
        places=max(cutoffs),
        threshold=threshold,
        catalogue=catalogue,
        categories=categories,
        against=against,
    )
    for note in case.notes:
        typer.echo(f"note: {note}", err=True)
    document = figures(case, cutoffs)
    typer.echo(json.dumps(document, indent=2) if format is Format.json else _table(document))


def _table(document: dict[str, dict[str, object]]) -> str:
    """Lay the document out with one line per metric and one column per cutoff."""

    def rows(block: Mapping[str, Any], before: str = "") -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for name, value in block.items():
            flat |= rows(value, f"{before}{name} ") if isinstance(value, dict) else {before + name: value}
        return flat

    def cell(value: object) -> str:
        if value is None:
            return "-"
        return f"{value:.5f}" if isinstance(value, float) else str(value)

    columns = {cutoff: rows(block) for cutoff, block in document.items()}
    names = list(next(iter(columns.values())))
    width = max(map(len, names))
    lines = [" " * width + "".join(f"{'@' + cutoff:>14}" for cutoff in columns)]
    lines += [f"{name:<{width}}" + "".join(f"{cell(block[name]):>14}" for block in columns.values()) for name in names]
    return "\n".join(lines)


@app.command()
def split(
    data: Annotated[Path, typer.Argument(help="Interactions in any known form (.dat, .data, .inter, .tsv, .gz).")],
    out: Annotated[Path, typer.Option(help="Folder for train.tsv, test.tsv and catalogue.tsv.")],
    kind: Annotated[SplitKind, typer.Option(help="How each user's rows are cut.")] = SplitKind.temporal,
    share: Annotated[float, typer.Option(help="Share of each user's rows that is tested on.")] = 0.2,
    count: Annotated[int, typer.Option(help="With kind newest: how many rows are tested on.")] = 1,
    core: Annotated[int, typer.Option(help="Keep the k-core: k for users and items alike.")] = 0,
    min_user: Annotated[int, typer.Option(help="Keep users with at least this many rows.")] = 0,
    threshold: Annotated[float | None, typer.Option(help="Keep rows rated at least this.")] = None,
    duplicates: Annotated[Repeated, typer.Option(help="Which row of a repeated pair stays.")] = Repeated.first,
    seed: Annotated[int, typer.Option(help="For the kinds random and shuffled.")] = 42,
) -> None:
    """Filter interactions, split them per user, and say what was dropped and why."""
    from steelyard.recommend import filters, splits
    from steelyard.recommend.lists import write_interactions
    from steelyard.recommend.reading import read

    table = filters.single(read(data), duplicates.value)
    if threshold is not None:
        table = filters.at_least(table, threshold)
    table = filters.core(table, max(core, min_user), core)
    for line in table.report():
        typer.echo(line)
    halves = {
        SplitKind.temporal: lambda: splits.temporal(table, share),
        SplitKind.random: lambda: splits.random(table, share, seed),
        SplitKind.shuffled: lambda: splits.shuffled(table, share, seed),
        SplitKind.newest: lambda: splits.newest(table, count),
    }[kind]()
    out.mkdir(parents=True, exist_ok=True)
    write_interactions(out / "train.tsv", halves.train)
    write_interactions(out / "test.tsv", halves.test)
    (out / "catalogue.tsv").write_text("item\n" + "\n".join(table.items) + "\n", encoding="utf-8")
    typer.echo(f"train: {len(halves.train):,}, test: {len(halves.test):,} interactions in {out}")


@app.command()
def popular(
    train: Annotated[Path, typer.Option(help="Training interactions: user, item, rating.")],
    out: Annotated[Path, typer.Option(help="File for the lists.")],
    cutoff: Annotated[int, typer.Option(help="Length of the lists.")] = 10,
) -> None:
    """Recommend to each user the most popular items that she did not train on, ties by ascending id."""
    from steelyard.recommend.lists import most_popular, write_lists
    from steelyard.recommend.reading import read

    table = read(train)
    lists, scores = most_popular(table, *parse_cutoffs(str(cutoff)))
    write_lists(out, table.users, table.items, lists, scores)
    typer.echo(f"lists of {cutoff} for {len(table.users):,} users in {out}")
