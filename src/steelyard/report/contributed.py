"""What clients added, for people: one sentence and one table, on the terminal and in a report."""

from __future__ import annotations

from steelyard.contributions.document import Contributions
from steelyard.report.rendering import Table

MOST = 40
"""Clients in one table."""


def headline(document: Contributions) -> str:
    """Say in a sentence what the rounds gained, in what, and what the values were made from."""
    method, rounds = document["method"], document["rounds"]
    span = f"round {rounds[0]}" if len(rounds) == 1 else f"{len(rounds)} rounds"
    if method == "classes":
        return f"{document['rule']}, {span}: {document['unit']}; {document['source']}."
    low, high = _number(document["total_low"]), _number(document["total_high"])
    ends = f"went from {document['before']:.4g} to {document['after']:.4g}"
    return (
        f"{document['rule']}, {span}: {document['unit']} {ends}, a gain of {_number(_gain(document))}"
        + (f" ({low} to {high})" if method == "shapley" else "")
        + f"; {document['source']}."
    )


def _gain(document: Contributions) -> float:
    if document["method"] == "shapley":
        return document["total"]
    falls = document["measure"].endswith("loss")
    return (document["before"] - document["after"]) * (1 if falls else -1)


def contribution_table(document: Contributions, most: int = MOST) -> Table:
    """Lay out each client's value, the most helpful first; shares stand there only where they mean something.

    Of more than `most` clients, those that helped most and least are shown.
    """
    clients = document["clients"]
    shares = any(row["share"] is not None for row in clients)
    shown = clients if len(clients) <= most else [*clients[: most // 2], *clients[-most // 2 :]]
    rows = tuple(
        (
            row["client"],
            _number(row["value"]),
            f"{_number(row['low'])} to {_number(row['high'])}",
            row["verdict"],
            *((f"{row['share']:.0%}" if row["share"] is not None else "-",) if shares else ()),
        )
        for row in shown
    )
    headings = ("client", "added", "95 %", "verdict", *(("share",) if shares else ()))
    note = f"{most} of {len(clients)} clients: the most and the least helpful." if len(shown) < len(clients) else ""
    return Table(f"What each client added ({document['method']})", headings, rows, note)


def _number(value: float) -> str:
    return f"{value:+.4f}" if abs(value) < 100 else f"{value:+.4g}"
