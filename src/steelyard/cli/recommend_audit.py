"""`steelyard recommend audit` and `cost`: what FPL gives away, and what it sends.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from steelyard.cli.options import FormatOption, TrustOption, asking, parse_counts
from steelyard.cli.printing import print_json, print_table
from steelyard.errors import UserError
from steelyard.report.rendering import Table


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
