"""A comparison at several shares of clients a round: a run for each share, and a column for each in one table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.base import files
from steelyard.base.errors import UserError, brief
from steelyard.base.measures import measure_of
from steelyard.experiment.description import Description
from steelyard.experiment.loading import read_experiment
from steelyard.experiment.rules import seeds_of, with_rules
from steelyard.report.rendering import Block, Table
from steelyard.report.result import Comparison, computed
from steelyard.report.statistics import FIGURES
from steelyard.report.tables import cell
from steelyard.studies.study import AnyExperiment, Cell, Study, finished

LEAST = 2
"""Clients of a cohort: one alone has nobody to be weighed against."""
FRACTION = "rounds.fraction"


@dataclass(frozen=True)
class Share:
    """The comparison at one share of the clients."""

    share: float
    folder: str
    table: Comparison


@dataclass(frozen=True)
class Shares:
    """A comparison at every share that is done, the largest first."""

    participation: tuple[Share, ...]
    left_out: tuple[str, ...]


class Participation(Study):
    """Rules, and the shares of clients a round at which they are compared, a run each."""

    kind = "a comparison at several shares"
    file = files.PARTICIPATION_FILE

    shares: tuple[float, ...]
    """The largest first."""
    left_out: tuple[str, ...] = ()
    """Sentences on shares that come to one client alone."""
    rules: tuple[str, ...] = ()
    """As words; empty for the usual ones."""
    seeds: int
    """How many."""
    experiment: AnyExperiment
    """Before its rules are set."""

    def cells(self) -> list[Cell]:
        """Return a run for each share."""
        seeds = tuple(seeds_of(self.experiment, self.seeds))
        return [Cell(f"participation-{round(100 * share):03d}", seeds, {FRACTION: share}) for share in self.shares]

    def described(self, cell: Cell) -> Description:
        """Return the comparison at one share."""
        return with_rules(self.experiment.changed(cell.changes), self.rules)

    def answer(self, folder: Path) -> Shares:
        """Return the comparison at every share that is done."""
        done = {cell.changes[FRACTION]: folder / cell.folder for cell in self.cells() if finished(folder / cell.folder)}
        found = {share: computed(run, read_experiment(run)) for share, run in done.items()}
        if not done:
            raise UserError(f"{folder}: no share is done; allowed: `steelyard resume {folder}`")
        return Shares(
            participation=tuple(
                Share(share=float(share), folder=str(done[share]), table=found[share]) for share in done
            ),
            left_out=self.left_out,
        )

    def parts(self, answer: Shares) -> Sequence[Block]:
        """Return a table with a column for each share."""
        return participation_tables({each.share: each.table for each in answer.participation}, answer.left_out)

    def next_lines(self, answer: Shares) -> Sequence[str]:
        """Return where the runs are, and what shows one."""
        stored = [f"{each.share:.0%}: run stored in {each.folder}" for each in answer.participation]
        return [*stored, f"next: steelyard table {shlex.quote(str(answer.participation[0].folder))}"]


def plan(experiment: Description, rules: Sequence[str], seeds: int, shares: str) -> Participation:
    """Return a comparison at shares such as "1,0.75,0.1"; one that comes to a single client is left out and said."""
    clients = experiment.all_clients
    kept: list[float] = []
    left_out: list[str] = []
    for share in parse_shares(shares):
        rounds = experiment.changed({FRACTION: share}).rounds
        if clients is None or rounds.cohort(clients) >= LEAST:
            kept.append(share)
        else:
            left_out.append(f"{share:.0%} of {clients} clients is one client alone: skipped.")
    if not kept:
        raise UserError(f"--participation: got {brief(shares)}; allowed: shares of two clients or more")
    planned = Participation(
        experiment=experiment, shares=tuple(kept), left_out=tuple(left_out), rules=tuple(rules), seeds=seeds
    )
    for each in planned.cells():
        planned.described(each)
    return planned


def parse_shares(text: str) -> list[float]:
    """Return the shares of "1,0.75,0.1", each above 0 and at most 1, each once, the largest first."""
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise UserError(
            f"--participation: got {brief(text)}; allowed: shares above 0, at most 1, joined by commas, like 1,0.75,0.1"
        )
    if len(set(shares)) < len(shares):
        raise UserError(f"--participation: got {brief(text)}; allowed: each share once")
    return sorted(shares, reverse=True)


def participation_tables(documents: Mapping[float, Comparison], left_out: Sequence[str] = ()) -> list[Table]:
    """Return how every rule does at each share: what decides, and the worst client where clients test.

    Every figure has the interval over seeds that the comparison itself has.
    """
    first = next(iter(documents.values()))
    local = f"Local {first.measure}"
    titles = {"server_accuracy": "Accuracy on the server's test set", "final": f"{local}, all test samples"}
    titles["worst"] = f"{local} of the worst client"
    seeds = len(first.seeds)
    note = f"After the last round. {'One seed.' if seeds == 1 else f'Mean ± 95% interval over {seeds} seeds.'}"
    tables: list[Table] = []
    for figure in FIGURES:
        if (
            figure.name not in titles
            or not first.has(figure.name)
            or (figure.name == "final" and not first.has("worst"))
        ):
            continue
        measure = figure.measure or measure_of(first.measure)
        digits, unit = (2, " (%)") if measure.percent else (4, "")
        found = {
            share: {rule.rule: rule.figures.get(figure.name) for rule in each.rules}
            for share, each in documents.items()
        }
        rules = dict.fromkeys(rule for known in found.values() for rule in known)
        rows = [(rule, *(cell(known.get(rule), digits, measure.factor) for known in found.values())) for rule in rules]
        headings = ("rule", *(f"{share:.0%}" for share in found))
        title = f"{titles[figure.name]}{unit}, by participation"
        tables.append(Table(title, headings, tuple(rows), " ".join([note, *left_out])))
    return tables
