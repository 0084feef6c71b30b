"""The account of a run on the terminal, and clients weighed on paper."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import cast

from steelyard.base.errors import printable_all
from steelyard.base.measures import Measure, measure_of
from steelyard.cli.printing import print_table, print_wrapped, terminal_width
from steelyard.report.notices import chain_line, privacy_lines, single_client_lines
from steelyard.report.rendering import Table
from steelyard.report.result import Reweighed, RuleSummary, Summary
from steelyard.report.summary import ranks_lists, show_measure
from steelyard.report.tables import on_cell
from steelyard.rounds.progress import show_score
from steelyard.weighing.table import WeighedDocument

SHOWN = 10
"""Names in one line."""
MOST = 40
"""Clients in one table."""
LONGEST = 80
"""Names up to this many characters are shown whole."""


def show_summary(summary: Summary) -> None:
    """Print the account of a run as tables for people."""
    summary = printable_all(summary)
    print_table(_results(summary))
    rules = summary["rules"]
    lines = single_client_lines(summary["weighed_one"])
    if all(rule["accuracy"] is None for rule in rules):
        why = "partition.test = 'none', or nodes with tests = false"
        lines.append(f"no client tested the models ({why}): no accuracy is known")
    lines += [summary["sentence"]] if summary["sentence"] else []
    for line in [*lines, *_sampled(summary), *_flaws(summary), *_server(summary)]:
        print_wrapped(line)
    for table in (*_orders(summary), *_heaviest(summary)):
        print_table(table)
    weighing = [rule for rule in rules if rule["asks_clients"]]
    measured = {c["name"]: c["measured_by"] for rule in weighing for c in rule["criteria"]}
    if measured:
        print_wrapped("measured by: " + ", ".join(f"{name} the {who}" for name, who in measured.items()))
    for rule in rules:
        if not rule["asks_clients"]:
            print_wrapped(f"{rule['rule']}: trained on the server's own rows; no client was asked")
    for line in privacy_lines(summary["privacy"]):
        print_wrapped(f"privacy: {line}")
    if summary["notes"]:
        print_wrapped(f"note: {summary['notes']}")
    # Not broken: these are copied.
    if line := chain_line(summary["chain"]):
        print(line)
    print(f"run stored in {summary['run']}")
    look = "recommend report" if ranks_lists(summary["measure"]) else "table"
    print(f"next: steelyard {look} {shlex.quote(summary['run'])}")


def _results(summary: Summary) -> Table:
    """The main table: the clean rows of the server first, where it has some, then the clients' own tests."""
    rules = summary["rules"]
    columns: dict[str, Callable[[RuleSummary], str]] = {}
    if len({rule["seed"] for rule in rules}) > 1:
        columns["seed"] = lambda rule: str(rule["seed"])
    if any("accuracy" in rule["server"] for rule in rules):
        columns[f"accuracy on {summary['server_rows']}"] = lambda rule: _score(rule["server"].get("accuracy"))
    if any(rule["flawed"] is not None for rule in rules):
        columns["weight of flawed clients"] = lambda rule: _share(rule["flawed_weight"])
    if any(rule["accuracy"] is not None for rule in rules):
        columns |= _local_columns(summary["measure"], summary)
    if any(rule["testing_rounds"] for rule in rules):
        columns["testing rounds"] = lambda rule: str(rule["testing_rounds"])
    rows = tuple((_name(rule["rule"]), *(cell(rule) for cell in columns.values())) for rule in rules)
    measure = measure_of(summary["measure"])
    return Table("Result", ("rule", *columns), rows, "" if measure.of_rows else f"{measure.name}: {measure.direction}.")


def _local_columns(measure: str, summary: Summary) -> dict[str, Callable[[RuleSummary], str]]:
    """The clients' own tests; only accuracies are shares of rows, with targets and intervals."""
    who = "users" if ranks_lists(measure) else "clients"
    known = measure_of(measure)
    worst = "worst 10% [95% interval] (rows)"
    if not known.of_rows:
        on = any(rule["worst_tenth_on"] for rule in summary["rules"])
        return {
            f"{measure}, mean over the {who}": lambda rule: known.show(rule["accuracy"]),
            worst if on else f"worst 10% of the {who}": lambda rule: _worst(rule, known),
        }

    def reached(rule: RuleSummary) -> str:
        return "not reached" if rule["rounds_to_target"] is None else str(rule["rounds_to_target"])

    return {
        "accuracy on the clients": lambda rule: _score(rule["accuracy"]),
        worst: lambda rule: _worst(rule, known),
        f"rounds until {summary['share']:.0%} of clients reach {summary['target']:.0%}": reached,
    }


def _worst(rule: RuleSummary, measure: Measure) -> str:
    found, score = rule["worst_tenth_on"], measure.show(rule["worst_tenth"])
    return score if found is None else f"{score} {on_cell(found, measure)} ({found['rows']})"


def _name(name: str) -> str:
    """A name as a cell; very long ones are cut."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."


def _score(value: float | None) -> str:
    return "–" if value is None else show_score(value)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _sampled(summary: Summary) -> list[str]:
    """Say on how many clients scores rest, where a sample of them tests, and how far that may be from all clients."""
    found = [(rule, on) for rule in summary["rules"] if (on := rule["accuracy_on"]) is not None]
    if not found:
        return []
    measure = summary["measure"]
    each = [
        f"{_name(rule['rule'])} {show_measure(on['low'], measure)} to {show_measure(on['high'], measure)}"
        for rule, on in found[:SHOWN]
    ]
    drawn = found[0][1]
    return [f"tested on {drawn['clients']:,} of {drawn['of']:,} clients; 95% interval for all: {', '.join(each)}"]


def _flaws(summary: Summary) -> list[str]:
    """Say who was flawed and how, clients of one flaw together; seeds differ, so only the first is shown."""
    seed, flaws = next(iter(summary["flaws"].items()), ("", {}))
    by_flaw: dict[str, list[str]] = {}
    for client, found in flaws.items():
        by_flaw.setdefault(", ".join(found), []).append(client)
    lines: list[str] = []
    for flaw, clients in by_flaw.items():
        more = f" and {len(clients) - SHOWN} more" if len(clients) > SHOWN else ""
        which = f" (seed {seed})" if len(summary["flaws"]) > 1 else ""
        lines.append(f"flawed{which}: {flaw}: {', '.join(clients[:SHOWN])}{more}")
    return lines


def _heaviest(summary: Summary) -> list[Table]:
    """Who carried most weight under each rule that asks clients, as many ranks as the terminal has room for."""
    rules = [rule for rule in summary["rules"] if rule["heaviest_clients"]]
    if not rules:
        return []
    rows = [(_name(rule["rule"]), *_heavy_cells(rule, summary)) for rule in rules]
    ranks = max(map(len, rows)) - 1
    width = terminal_width()
    if width is not None:
        widest = max(len(cell) for row in rows for cell in row[1:])
        ranks = max(1, min(ranks, (width - max(len(row[0]) for row in rows)) // (widest + 2)))
    who = "Users" if ranks_lists(summary["measure"]) else "Clients"
    title = f"{who} that carried most weight (share of all weight, samples"
    title += ", * flawed)" if any(summary["flaws"].values()) else ")"
    filled = tuple((*row, *[""] * ranks)[: ranks + 1] for row in rows)
    return [Table(title, ("rule", *(f"{rank}." for rank in range(1, ranks + 1))), filled)]


def _heavy_cells(rule: RuleSummary, summary: Summary) -> list[str]:
    """Name and figures of the heaviest clients, heaviest first."""
    flawed = summary["flaws"].get(str(rule["seed"]), {})
    return [
        f"{_name(client['client'])}{'*' if client['client'] in flawed else ''} {client['share']:.1%} "
        f"({client['samples']})"
        for client in rule["heaviest_clients"]
    ]


def _server(summary: Summary) -> list[str]:
    lines: list[str] = []
    for rule in summary["rules"]:
        tested = cast("dict[str, float]", rule["server"])
        # Of classes the accuracy stands in the table; macro F1 is of interest where the loss follows it.
        hidden = ("f1", "accuracy", "macro_f1") if "f1" in tested and not rule["adapts_loss"] else ("f1", "accuracy")
        figures = {name: value for name, value in tested.items() if name not in hidden}
        if figures:
            measured = {measure_of(name): value for name, value in figures.items()}
            shown = ", ".join(f"{measure.name} {measure.show(value)}" for measure, value in measured.items())
            directions = " or ".join(dict.fromkeys(measure.direction for measure in measured))
            lines.append(f"{rule['rule']} on the server's test set: {shown} ({directions})")
        if rule["lost"] is not None:
            product, factors = rule["lost"]["product"], rule["lost"]["factors"]
            lines.append(
                f"{rule['rule']}: cutting the weighted sum of the adapters to their rank lost {product:.1%} of it in "
                f"the last round; averages of A and of B would have lost {factors:.1%}"
            )
    return lines


def _orders(summary: Summary) -> list[Table]:
    adjusted = [rule for rule in summary["rules"] if len(rule["orders"]["tried"]) > 1]
    rows: list[tuple[str, ...]] = []
    for rule in adjusted:
        orders = rule["orders"]
        counts = (f"{order} {orders['kept'].get(order, 0)}/{times}" for order, times in orders["tried"].items())
        rows.append((_name(rule["rule"]), str(rule["seed"]), orders["last"] or "–", ", ".join(counts)))
    title = "Priority orders: rounds that kept each / times it was tested"
    return [Table(title, ("rule", "seed", "kept last", "kept / tested"), tuple(rows))] if rows else []


def show_reweighed(document: Reweighed) -> None:
    """Print who would have counted under another rule, beside what was recorded."""
    document = printable_all(document)
    rows = tuple(
        (
            f"{_name(row['client'])}{'*' if row['flaws'] else ''}",
            f"{row['weight']:.2%}",
            f"{row['recorded']:.2%}",
            str(row["rounds"]),
        )
        for row in document["clients"]
    )
    title = f"Weighed again by {_name(document['rule'])}: updates of {_name(document['updates_of'])}"
    print_table(Table(title, ("client", "share of all weight", "as recorded", "rounds"), rows[:MOST]))
    if len(rows) > MOST:
        print_wrapped(f"and {len(rows) - MOST} more clients; --format json lists all")
    if document["flawed"] is not None:
        found = document["flawed"]
        print_wrapped(f"flawed clients (*): {found['weight']:.1%} of all weight, {found['recorded']:.1%} as recorded")
    print_wrapped(document["note"])


def show_weighed(document: WeighedDocument) -> None:
    """Print scores and weights as a table."""
    document = printable_all(document)
    rows = tuple((_name(row["client"]), f"{row['score']:.6f}", f"{row['weight']:.6f}") for row in document["clients"])
    print_table(Table("", ("client", "score", "weight"), rows))
    for name in document["flags"]["zero_criteria"]:
        print_wrapped(f"{_name(name)} is 0 for every client: everyone got 1/n for it")
    if document["flags"]["uniform"]:
        print_wrapped("all scores are 0: the weights are uniform")
