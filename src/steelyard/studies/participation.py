"""A comparison at several shares of clients a round: a run for each share, and a column for each in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.base import files
from steelyard.base.errors import UserError, brief
from steelyard.experiment.description import Description
from steelyard.experiment.loading import read_experiment
from steelyard.experiment.rules import seeds_of, with_rules
from steelyard.report.rendering import Block
from steelyard.report.result import Comparison, computed
from steelyard.report.tables import participation_tables
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
        """Return where the runs are."""
        return [f"{each.share:.0%}: run stored in {each.folder}" for each in answer.participation]


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
            left_out.append(f"{share:.0%} of {clients} clients is one alone: left out.")
    if not kept:
        raise UserError(f"--participation: got {brief(shares)}; allowed: shares of two clients or more")
    planned = Participation(
        experiment=experiment, shares=tuple(kept), left_out=tuple(left_out), rules=tuple(rules), seeds=seeds
    )
    for cell in planned.cells():
        planned.described(cell)
    return planned


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
