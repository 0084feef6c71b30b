"""Tables on the terminal: the account of a run, and clients weighed on paper."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from steelyard.report.summary import TOP
from steelyard.rounds.progress import show_score


def show_summary(summary: dict[str, Any]) -> None:
    """Print the account of a run as tables for people."""
    console = Console()
    several = len({rule["seed"] for rule in summary["rules"]}) > 1
    target = f"rounds until {summary['share']:.0%} of clients reach {summary['target']:.0%}"
    table = Table(title="Result")
    for heading in (
        "rule",
        *(("seed",) if several else ()),
        summary["measure"],
        "worst 10 %",
        target,
        "testing rounds",
    ):
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for rule in summary["rules"]:
        reached = rule["rounds_to_target"]
        cells = [
            rule["rule"],
            *((str(rule["seed"]),) if several else ()),
            show_score(rule["accuracy"]),
            show_score(rule["worst_tenth"]),
            "not reached" if reached is None else str(reached),
            str(rule["testing_rounds"]),
        ]
        table.add_row(*cells)
    console.print(table)
    _show_server(summary, console)
    _show_orders(summary, console)
    heavy = Table(title="Clients that carried most weight (share of all weight, samples)")
    heavy.add_column("rule")
    for rank in range(1, TOP + 1):
        heavy.add_column(f"{rank}.")
    for rule in summary["rules"]:
        cells = [
            f"{client['client']} {client['share']:.1%} ({client['samples']})" for client in rule["heaviest_clients"]
        ]
        heavy.add_row(rule["rule"], *cells)
    console.print(heavy)
    measured = {c["name"]: c["measured_by"] for rule in summary["rules"] for c in rule["criteria"]}
    console.print("measured by: " + ", ".join(f"{name} the {who}" for name, who in measured.items()))
    if summary["notes"]:
        console.print(f"note: {summary['notes']}", highlight=False)
    console.print(f"run stored in {summary['run']}", soft_wrap=True)


def _show_server(summary: dict[str, Any], console: Console) -> None:
    for rule in summary["rules"]:
        figures = {name: value for name, value in rule["server"].items() if name != "f1"}
        if figures:
            shown = ", ".join(f"{name.replace('_', ' ')} {show_score(value)}" for name, value in figures.items())
            console.print(f"{rule['rule']} on the server's test set: {shown}", highlight=False)


def _show_orders(summary: dict[str, Any], console: Console) -> None:
    adjusted = [rule for rule in summary["rules"] if len(rule["orders"]["tried"]) > 1]
    if not adjusted:
        return
    table = Table(title="Priority orders: rounds that kept each / times it was tested")
    for heading in ("rule", "seed", "kept last", "kept / tested"):
        table.add_column(heading)
    for rule in adjusted:
        orders = rule["orders"]
        counts = (f"{order} {orders['kept'].get(order, 0)}/{times}" for order, times in orders["tried"].items())
        table.add_row(rule["rule"], str(rule["seed"]), orders["last"], ", ".join(counts))
    console.print(table)


def show_weighed(document: dict[str, Any]) -> None:
    """Print scores and weights as a table."""
    table = Table()
    for heading in ("client", "score", "weight"):
        table.add_column(heading, justify="left" if heading == "client" else "right")
    for row in document["clients"]:
        table.add_row(row["client"], f"{row['score']:.6f}", f"{row['weight']:.6f}")
    console = Console()
    console.print(table)
    for name in document["flags"]["zero_criteria"]:
        console.print(f"{name} is 0 for every client: everyone got 1/n for it")
    if document["flags"]["uniform"]:
        console.print("all scores are 0: the weights are uniform")
