"""Tables on the terminal: the account of a run, and clients weighed on paper."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from steelyard.errors import printable, printable_all
from steelyard.report.documents import Reweighed, RuleSummary, Summary
from steelyard.report.notices import chain_line, privacy_lines, single_client_lines
from steelyard.rounds.progress import show_score
from steelyard.weighing.table import Weighed

SHOWN = 10
"""Names in one line."""
MOST = 40
"""Clients in one table."""
LONGEST = 24
"""Names of rules up to this many characters are not broken."""
WHOLE = 80
"""Names up to this many characters are shown whole."""


def show_summary(summary: Summary) -> None:
    """Print the account of a run as tables for people."""
    summary = printable_all(summary)
    # No markup: names of rules, clients and folders are what people gave, and a "[/b]" in one is no tag of ours.
    console = Console(markup=False, highlight=False)
    _show_results(summary, console)
    for line in single_client_lines(summary["weighed_one"]):
        console.print(printable(line), style="bold")
    if all(rule["accuracy"] is None for rule in summary["rules"]):
        why = "partition.test = 'none', or nodes with tests = false"
        console.print(f"no client tested the models ({why}): no accuracy is known")
    if summary["sentence"]:
        console.print(summary["sentence"])
    _show_flaws(summary, console)
    _show_server(summary, console)
    _show_orders(summary, console)
    _show_heaviest(summary, console)
    weighing = [rule for rule in summary["rules"] if rule["asks_clients"]]
    measured = {c["name"]: c["measured_by"] for rule in weighing for c in rule["criteria"]}
    if measured:
        console.print("measured by: " + ", ".join(f"{name} the {who}" for name, who in measured.items()))
    for rule in summary["rules"]:
        if not rule["asks_clients"]:
            console.print(f"{rule['rule']}: trained on the server's own rows; no client was asked")
    for line in privacy_lines(summary["privacy"]):
        console.print(f"privacy: {line}")
    if summary["notes"]:
        console.print(f"note: {summary['notes']}")
    if line := chain_line(summary["chain"]):
        console.print(line, soft_wrap=True)
    console.print(f"run stored in {summary['run']}", soft_wrap=True)
    console.print(f"next: steelyard table {shlex.quote(summary['run'])}", soft_wrap=True)


def _show_results(summary: Summary, console: Console) -> None:
    """The main table: the clean rows of the server first, where it has some, then the clients' own tests.

    In a narrow terminal the last columns are left out, and a line names them.
    """
    rules = summary["rules"]
    columns: dict[str, Callable[[RuleSummary], str]] = {}
    if len({rule["seed"] for rule in rules}) > 1:
        columns["seed"] = lambda rule: str(rule["seed"])
    if any("accuracy" in rule["server"] for rule in rules):
        columns["accuracy on clean rows"] = lambda rule: _score(rule["server"].get("accuracy"))
    if any(rule["flawed"] is not None for rule in rules):
        columns["weight of flawed clients"] = lambda rule: _share(rule["flawed_weight"])
    if any(rule["accuracy"] is not None for rule in rules):
        columns[f"{summary['measure']} on the clients"] = lambda rule: _score(rule["accuracy"])
        columns["worst 10%"] = lambda rule: _score(rule["worst_tenth"])
        target = f"rounds until {summary['share']:.0%} of clients reach {summary['target']:.0%}"
        columns[target] = lambda rule: (
            "not reached" if rule["rounds_to_target"] is None else str(rule["rounds_to_target"])
        )
    if any(rule["testing_rounds"] for rule in rules):
        columns["testing rounds"] = lambda rule: str(rule["testing_rounds"])
    cells = {heading: [cell(rule) for rule in rules] for heading, cell in columns.items()}
    shown = list(cells)
    # A column takes its longest word or cell, a border and two blanks; the last border is one more.
    while len(shown) > 1 and _name_width(rules) + 4 + sum(_least_width(name, cells[name]) + 3 for name in shown) > (
        console.width
    ):
        shown.pop()
    table = Table(title="Result")
    # A fixed width: with only a least one, the whole table would come out wider than the terminal.
    table.add_column("rule", overflow="fold", width=_name_width(rules))
    for heading in shown:
        table.add_column(heading, justify="right")
    for row, rule in enumerate(rules):
        table.add_row(_name(rule["rule"]), *(cells[heading][row] for heading in shown))
    console.print(table)
    if len(shown) < len(cells):
        console.print(f"in a wider terminal also: {', '.join(list(cells)[len(shown) :])}")


def _name(name: str) -> Text:
    """A name as a cell: no markup, control characters written out, very long ones cut."""
    shown = printable(name)
    return Text(shown if len(shown) <= WHOLE else f"{shown[: WHOLE - 3]}...")


def _least_width(heading: str, cells: list[str]) -> int:
    return max(map(len, (*heading.split(), *cells)))


def _name_width(rules: list[RuleSummary]) -> int:
    """How wide a column of rules must at least be: names stay whole unless they are very long."""
    return min(LONGEST, max(len(rule["rule"]) for rule in rules))


def _score(value: float | None) -> str:
    return "–" if value is None else show_score(value)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _show_flaws(summary: Summary, console: Console) -> None:
    """Say who was flawed and how, clients of one flaw together; seeds differ, so only the first is told."""
    seed, flaws = next(iter(summary["flaws"].items()), ("", {}))
    by_flaw: dict[str, list[str]] = {}
    for client, found in flaws.items():
        by_flaw.setdefault(", ".join(found), []).append(client)
    for flaw, clients in by_flaw.items():
        more = f" and {len(clients) - SHOWN} more" if len(clients) > SHOWN else ""
        which = f" (seed {seed})" if len(summary["flaws"]) > 1 else ""
        console.print(f"flawed{which}: {flaw}: {', '.join(clients[:SHOWN])}{more}")


def _show_heaviest(summary: Summary, console: Console) -> None:
    """Print who carried most weight under each rule that asks clients, as many ranks as the terminal has room for."""
    rules = [rule for rule in summary["rules"] if rule["heaviest_clients"]]
    if not rules:
        return
    rows = [_heavy_cells(rule, summary["flaws"].get(str(rule["seed"]), {})) for rule in rules]
    name_width, room = _name_width(rules), console.width
    ranks = max(len(row) for row in rows)
    widest = max(len(line) for row in rows for cell in row for line in cell)
    one_line = max(len(" ".join(cell)) for row in rows for cell in row)
    # Each column takes three characters of frame, and the frame ends with one more.
    whole = name_width + 4 + ranks * (one_line + 3) <= room
    if not whole:
        ranks = max(1, min(ranks, (room - name_width - 4) // (widest + 3)))
    title = "Clients that carried most weight (share of all weight, samples"
    table = Table(title=f"{title}, * flawed)" if any(summary["flaws"].values()) else f"{title})")
    table.add_column("rule", overflow="fold", min_width=name_width)
    for rank in range(1, ranks + 1):
        table.add_column(f"{rank}.", overflow="fold")
    for rule, row in zip(rules, rows, strict=True):
        table.add_row(_name(rule["rule"]), *(Text((" " if whole else "\n").join(cell)) for cell in row[:ranks]))
    console.print(table)


def _heavy_cells(rule: RuleSummary, flawed: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Name and figures of the heaviest clients, heaviest first."""
    return [
        (
            f"{_name(client['client'])}{'*' if client['client'] in flawed else ''}",
            f"{client['share']:.1%} ({client['samples']})",
        )
        for client in rule["heaviest_clients"]
    ]


def _show_server(summary: Summary, console: Console) -> None:
    for rule in summary["rules"]:
        hidden = ("f1", "accuracy") if rule["adapts_loss"] else ("f1", "accuracy", "macro_f1")
        tested = cast("dict[str, float]", rule["server"])
        figures = {name: value for name, value in tested.items() if name not in hidden}
        if figures:
            shown = ", ".join(f"{name.replace('_', ' ')} {show_score(value)}" for name, value in figures.items())
            console.print(f"{rule['rule']} on the server's test set: {shown}")


def _show_orders(summary: Summary, console: Console) -> None:
    adjusted = [rule for rule in summary["rules"] if len(rule["orders"]["tried"]) > 1]
    if not adjusted:
        return
    table = Table(title="Priority orders: rounds that kept each / times it was tested")
    for heading in ("rule", "seed", "kept last", "kept / tested"):
        table.add_column(heading)
    for rule in adjusted:
        orders = rule["orders"]
        counts = (f"{order} {orders['kept'].get(order, 0)}/{times}" for order, times in orders["tried"].items())
        table.add_row(_name(rule["rule"]), str(rule["seed"]), Text(orders["last"] or "–"), Text(", ".join(counts)))
    console.print(table)


def show_reweighed(document: Reweighed) -> None:
    """Print who would have counted under another rule, beside what was recorded."""
    document = printable_all(document)
    again, recorded = _name(document["rule"]), _name(document["updates_of"])
    table = Table(title=Text.assemble("Weighed again by ", again, ": updates of ", recorded))
    for heading in ("client", "share of all weight", "as recorded", "rounds"):
        table.add_column(heading, justify="left" if heading == "client" else "right")
    rows = document["clients"]
    for row in rows[:MOST]:
        name = _name(row["client"]).append("*" if row["flaws"] else "")
        table.add_row(name, f"{row['weight']:.2%}", f"{row['recorded']:.2%}", str(row["rounds"]))
    console = Console(markup=False, highlight=False)
    console.print(table)
    if len(rows) > MOST:
        console.print(f"and {len(rows) - MOST} more clients; --format json lists all")
    if document["flawed"] is not None:
        found = document["flawed"]
        console.print(f"flawed clients (*): {found['weight']:.1%} of all weight, {found['recorded']:.1%} as recorded")
    console.print(document["note"])


def show_weighed(document: Weighed) -> None:
    """Print scores and weights as a table."""
    table = Table()
    for heading in ("client", "score", "weight"):
        table.add_column(heading, justify="left" if heading == "client" else "right")
    for row in document["clients"]:
        table.add_row(_name(row["client"]), f"{row['score']:.6f}", f"{row['weight']:.6f}")
    console = Console(markup=False, highlight=False)
    console.print(table)
    for name in document["flags"]["zero_criteria"]:
        console.print(f"{_name(name)} is 0 for every client: everyone got 1/n for it")
    if document["flags"]["uniform"]:
        console.print("all scores are 0: the weights are uniform")
