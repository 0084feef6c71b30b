"""Printing results on the command line: a document for programs, a summary or metrics for people."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import typer
from pydantic_core import to_jsonable_python

from steelyard.base import files
from steelyard.base.errors import Stopped, UserError, ends_as_interrupted, printable
from steelyard.base.logs import doing, logger
from steelyard.base.measures import measure_of
from steelyard.report.decide import more_seeds
from steelyard.report.rendering import Block, Table, render, tables_csv
from steelyard.report.tables import (
    chain_lines,
    comparison_csv,
    headline,
    main_table,
    privacy_lines,
    ranks_lists,
    server_tables,
)

if TYPE_CHECKING:
    from steelyard.cli.options import Format
    from steelyard.report.recommender import Metrics
    from steelyard.report.result import Comparison, SeedResult
    from steelyard.result import Result


_log = logger(__name__)


def print_json(document: object) -> None:
    """Print one document on standard output as JSON, the one place that does; NaN becomes null.

    What a terminal would act on stands in texts only, and is escaped there.
    """
    plain = json.dumps(to_jsonable_python(document))
    text = json.dumps(json.loads(plain, parse_constant=lambda name: None), indent=2, ensure_ascii=False)
    print("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def emit(
    document: object,
    format: Format,
    parts: Sequence[Block] = (),
    after: Sequence[str] = (),
    csv: Callable[[], str] | None = None,
) -> None:
    """Print what a command found, the one place that knows the formats: for programs the document itself or its tables
    as CSV, for people its parts.

    The lines `after` them, which are copied, are for the terminal alone and are not broken; `csv` is a form of its own.
    """
    if format == "json":
        print_json(document)
    elif format == "csv":
        print(tables_csv(parts) if csv is None else csv(), end="")
    else:
        print(render(parts, format, terminal_width()) if parts else "", end="")
        for line in after if format == "text" else ():
            print(printable(line))


def refuse_together(beside: str, others: Mapping[str, object], allowed: str) -> None:
    """Refuse options that say nothing beside another one, or of a folder, each by its name, where it is given."""
    if given := [name for name, value in others.items() if value not in (None, False)]:
        raise UserError(f"{' and '.join(given)}: got with {beside}; allowed: {allowed}")


def print_part(part: object, folder: Path, format: str) -> None:
    """Print that a part of a comparison or a sweep is done: alone it has no table."""
    lines = (f"part {part} stored in {folder}", "when all parts are done: steelyard join FOLDERS --out WHOLE")
    emit({"part": str(part), "folder": str(folder)}, "json" if format == "json" else "text", (), lines)


def terminal_width() -> int:
    """Return the terminal's width, also as COLUMNS gives it; of a file or a program, which have none, 100."""
    return max(40, shutil.get_terminal_size((100, 24)).columns)


def metric_table(document: Metrics) -> Table:
    """Lay metrics by cutoff out with one line per metric and one column per cutoff; use it for people."""

    def flat(block: Mapping[str, object], before: str = "") -> dict[str, object]:
        found: dict[str, object] = {}
        for name, value in block.items():
            inner = cast("Mapping[str, object]", value)
            found |= flat(inner, f"{before}{name} ") if isinstance(value, Mapping) else {before + name: value}
        return found

    def cell(value: object) -> str:
        if value is None:
            return "-"
        return f"{value:.5f}" if isinstance(value, float) else str(value)

    columns = {cutoff: flat(block) for cutoff, block in document.items()}
    names = list(next(iter(columns.values())))
    rows = tuple((name, *(cell(block[name]) for block in columns.values())) for name in names)
    return Table("", ("metric", *(f"@{cutoff}" for cutoff in columns)), rows)


def warn_of_changes(folder: Path) -> None:
    """Warn that the experiment file of a run is not as the run wrote it, where that is so."""
    # For speed of start: few commands read runs.
    from steelyard.experiment.resuming import changed_since
    from steelyard.runs.history import History

    if line := changed_since(folder, History(folder).facts):
        _log.warning(line)


# What every command does that runs something.


DoneT = TypeVar("DoneT")

SHOWN = 10
"""Names in one line."""
LONGEST = 80
"""Names up to this many characters are shown whole."""


def watched(work: Callable[[], DoneT]) -> DoneT:
    """Do the work of a run; a stop by the user (Ctrl-C, or SIGTERM as a page sends it) is reported in one line."""
    try:
        with ends_as_interrupted():
            return work()
    except Stopped as stop:
        folder = str(stop.folder)
        how = "the same command and --out" if stop.again else "steelyard resume"
        _log.error(f"stopped; what is done is in {folder}; continue with: {how} {shlex.quote(folder)}")
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        _log.error("stopped before the run began; nothing was written")
        raise typer.Exit(130) from None


def write_own_report(result: Result, document: Comparison) -> None:
    """Write the report of a run into its folder, from what its terminal shows."""
    # For speed of start: what draws is large.
    from steelyard.report.html import write_report
    from steelyard.report.view import RunView

    with doing("writing the report"):
        view = RunView([result.history], document.baseline, [document])
        write_report(view, result.folder / files.REPORT)


def report_line(folder: str, written: bool) -> str:
    """Say where the report of a run is, or how to make it."""
    if written:
        return f"report to open: {Path(folder) / files.REPORT}"
    return f"a report to open: steelyard report {shlex.quote(folder)}"


def finish(work: Callable[[], Result], format: Format, report: bool = False) -> None:
    """Do the work of a command that runs an experiment and print its result; use it for every such command."""
    result = watched(work)
    with doing("summing up"):
        document = result.comparison
    if report:
        write_own_report(result, document)
    line = report_line(str(result.folder), report)
    show_result(document, format, line, has_model=result.history.facts.has_model)


def show_result(document: Comparison, format: Format = "text", *lines: str, has_model: bool = False) -> None:
    """Print the result of a run, and what to do next; `lines` come last."""
    after = [*more_seeds(document.recommendation), f"run stored in {document.run}"]
    after += next_step(document.run, None if document.recommendation is None else "table", has_model=has_model)
    emit(document, format, result_parts(document), [*after, *lines], lambda: comparison_csv(document))


def next_step(run: str, look: str | None = None, *, has_model: bool) -> list[str]:
    """Return the line that names what to do with a run: take its model, or else `look` at it, where that shows much."""
    taken = f"model {shlex.quote(run)} --out {shlex.quote(f'{run}-model')}"
    command = taken if has_model else None if look is None else f"{look} {shlex.quote(run)}"
    return [] if command is None else [f"next: steelyard {command}"]


def result_parts(document: Comparison) -> list[Block]:
    """Return the result of a run as tables and sentences for people."""
    rules = document.rules
    tested = [] if document.recommendation is None else [main_table(document, target=True)]
    lines: list[str] = []
    if not document.has("worst"):
        why = "partition.test = 'none', or nodes with tests = false"
        lines.append(f"No client tested the models ({why})")
    lines += _sampled(document)
    parts: list[Block] = [*headline(document, lines=False), *tested, *lines, _readings(document), *_flaws(document)]
    # Of classes the accuracy stands above; macro F1 is of interest where the loss follows it.
    server = server_tables(document)
    if not document.has("server_accuracy") or any(rule.adapts_loss for rule in rules):
        parts += server
    for rule in rules:
        if lost := rule.figures.get("product_error"):
            parts.append(
                f"{rule.rule}: cutting the weighted sum of the adapters to their rank lost {lost.mean:.1%} of it in "
                f"the last round; averages of A and of B would have lost {rule.figures['factor_error'].mean:.1%}"
            )
    if ranks_lists(document.measure):
        parts += _of_lists(document)
    parts += [*_orders(document), *_heaviest(document)]
    parts += [f"privacy: {line}" for line in privacy_lines(document.privacy)]
    parts += [f"note: {document.notes}"] if document.notes else []
    return [*parts, *chain_lines(document.chain)]


def _readings(document: Comparison) -> tuple[str, ...]:
    """Return each rule in words, where they are few enough to read."""
    few = document.rules if len(document.rules) <= SHOWN else ()
    more = () if few else ("each rule in words: steelyard explain RULE",)
    return (*(f"{rule.rule}: {rule.reading}" for rule in few if rule.reading), *more)


def _name(name: str) -> str:
    """A name as a cell; very long ones are cut."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."


def _each(document: Comparison) -> list[tuple[str, SeedResult]]:
    """Return every rule with every seed, and what the two are called."""
    several = len(document.seeds) > 1
    return [
        (_name(rule.rule) + (f", seed {seed.seed}" if several else ""), seed)
        for rule in document.rules
        for seed in rule.seeds
    ]


def _sampled(document: Comparison) -> list[str]:
    """Say on how many clients scores rest, where a sample of them tests, and how far that may be from all clients."""
    found = [(name, on) for name, seed in _each(document) if (on := seed.accuracy_on) is not None]
    if not found:
        return []
    show, drawn = measure_of(document.measure).show, found[0][1]
    each = [f"{name} {show(on.low)} to {show(on.high)}" for name, on in found[:SHOWN]]
    return [f"tested on {drawn.clients:,} of {drawn.of:,} clients; 95% interval for all: {', '.join(each)}"]


def _flaws(document: Comparison) -> list[str]:
    """Say who was flawed and how, clients of one flaw together; seeds differ, so only the first is shown."""
    seed, *others = document.seeds
    by_flaw: dict[str, list[str]] = {}
    for client, found in document.flaws[seed].items():
        by_flaw.setdefault(", ".join(found), []).append(client)
    lines: list[str] = []
    for flaw, clients in by_flaw.items():
        more = f" and {len(clients) - SHOWN} more" if len(clients) > SHOWN else ""
        which = f" (seed {seed})" if others else ""
        lines.append(f"faulty{which}: {flaw}: {', '.join(clients[:SHOWN])}{more}")
    return lines


_OF_LISTS = {
    "precision": "P",
    "recall": "R",
    "ndcg": "nDCG",
    "hit_rate": "HR",
    "item_coverage": "items shown",
    "gini": "Gini",
}
"""Metrics of lists that people look at first, and what they are called."""


def _of_lists(document: Comparison) -> list[Table]:
    """How good the users' lists are, beside two systems that learn nothing; none where a run has no lists."""
    from steelyard.report.recommender import beside_simple  # For speed of start: it needs torch.

    found = beside_simple(Path(document.run), [rule.rule for rule in document.rules])
    plain = {"EQ": "this run"} if len(document.rules) == 1 else {}
    rows = tuple(
        (plain.get(name, _name(name)), *(_figure(metrics[metric]) for metric in _OF_LISTS))
        for name, metrics in found.items()
    )
    note = "Gini: 1 if every item is shown as often, 0 if one alone is. All metrics: steelyard recommend report RUN"
    title = f"Lists of the users, {document.measure.partition('@')[2]} items each"
    return [Table(title, ("", *_OF_LISTS.values()), rows, note)] if rows else []


def _figure(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "–" if value is None else f"{value:,}"


def _heaviest(document: Comparison) -> list[Table]:
    """Who carried most weight under each rule that asks clients, as many ranks as the terminal has room for."""
    flaws = document.flaws

    def shown(seed: SeedResult) -> list[str]:
        marks = dict.fromkeys(flaws[seed.seed], "*")
        return [
            f"{_name(each.client)}{marks.get(each.client, '')} {each.share:.1%} ({each.samples})"
            for each in seed.heaviest_clients
        ]

    alike = {rule.rule for rule in document.rules if [each.name for each in rule.criteria] == ["EQ"]}
    rows = [(name, *shown(seed)) for name, seed in _each(document) if seed.heaviest_clients and name not in alike]
    if not rows:
        return []
    widest = max(len(cell) for row in rows for cell in row[1:])
    room = (terminal_width() - max(len(row[0]) for row in rows)) // (widest + 2)
    ranks = max(1, min(max(map(len, rows)) - 1, room))
    who = "Users" if ranks_lists(document.measure) else "Clients"
    title = f"{who} with most weight (share of all weight, samples"
    title += ", * faulty)" if any(flaws.values()) else ")"
    filled = tuple((*row, *[""] * ranks)[: ranks + 1] for row in rows)
    return [Table(title, ("rule", *(f"{rank}." for rank in range(1, ranks + 1))), filled)]


def _orders(document: Comparison) -> list[Table]:
    rows: list[tuple[str, ...]] = []
    for name, seed in _each(document):
        orders = seed.orders
        if len(orders.tried) > 1:
            counts = (f"{order} {orders.kept.get(order, 0)}/{times}" for order, times in orders.tried.items())
            rows.append((name, orders.last or "–", ", ".join(counts)))
    title = "Priority orders: rounds that kept each / times it was tested"
    return [Table(title, ("rule", "kept last", "kept / tested"), tuple(rows))] if rows else []
