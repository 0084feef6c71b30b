"""`steelyard compare --participation`: the same comparison with several shares of the clients in each round.

What is heavy is imported inside the command, for speed of start.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from steelyard.base.errors import UserError, brief, printable
from steelyard.base.logs import doing, quiet
from steelyard.cli.finishing import watched
from steelyard.cli.options import TableFormat, asking
from steelyard.cli.printing import print_json, terminal_width
from steelyard.rounds.progress import watching

LEAST = 2
"""Clients of a cohort: one alone has nobody to be weighed against."""


def compare_shares(
    experiment: str,
    rules: Sequence[str],
    changes: Sequence[str],
    seeds: tuple[int, int | None],
    shares: str,
    out: Path | None,
    trust: bool,
    format: TableFormat,
) -> None:
    """Run the comparison once for each share, and print a table with a column for each.

    `seeds` are how many, and the first. A share that comes to fewer than two clients is left out and said.
    """
    if format == "csv":
        raise UserError("--format: got 'csv' with --participation; allowed: text, markdown, latex, json")
    wanted = parse_shares(shares)
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.experiment.comparing import load_comparison, seeds_of
            from steelyard.experiment.running import run
            from steelyard.report.participation import participation_tables
            from steelyard.report.rendering import render
            from steelyard.result import Result

        found: dict[float, Result] = {}
        left_out: list[str] = []
        for share in wanted:
            fields = [*changes, f"rounds.fraction={share!r}"]
            described = load_comparison(experiment, fields, rules, seeds[1], asking(trust))
            clients = described.all_clients
            if clients is not None and described.rounds.cohort(clients) < LEAST:
                left_out.append(f"{share:.0%} of {clients} clients is one alone: left out.")
                continue
            chosen = seeds_of(described, seeds[0])
            folder = None if out is None else out / f"participation-{round(100 * share):03d}"
            done = watched(lambda d=described, c=chosen, f=folder: run(d, seeds=c, out=f, progress=not quiet()))
            found[share] = Result(done)
        if not found:
            raise UserError(f"--participation: got {brief(shares)}; allowed: shares of two clients or more")
    documents = {share: result.table for share, result in found.items()}
    if format == "json":
        rows = [{"share": share, "folder": str(found[share].folder), "table": documents[share]} for share in found]
        print_json({"participation": rows, "left_out": left_out})
        return
    print(render(participation_tables(documents, left_out), [], format, terminal_width()), end="")
    if format == "text":
        for share, result in found.items():
            print(f"{share:.0%}: run stored in {printable(str(result.folder))}")


def parse_shares(text: str) -> list[float]:
    """Return the shares of "1,0.75,0.1", each above 0 and at most 1, without repeats, the largest first."""
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise UserError(
            f"--participation: got {brief(text)}; allowed: shares above 0, at most 1, joined by commas, like 1,0.75,0.1"
        )
    return sorted(set(shares), reverse=True)
