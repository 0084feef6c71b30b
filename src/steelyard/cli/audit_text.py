"""What `steelyard privacy audit` found out, as a document and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, NotRequired, TypedDict

from steelyard.cli.printing import print_table
from steelyard.report.rendering import Table

if TYPE_CHECKING:
    from steelyard.experiment.canary_runs import CanaryResult
    from steelyard.experiment.extraction_audit import ExtractionRow
    from steelyard.experiment.membership_audit import MembershipRow
    from steelyard.experiment.privacy_audit import InversionRow
    from steelyard.experiment.privacy_sweeps import InversionSweep
    from steelyard.experiment.recommend_audit import AuditedProtection

_WAYS = {"analytic": "read off"}
"""Attacks whose name in a table is another than in JSON."""


class RecommenderAudit(TypedDict):
    """What a curious server reads of a recommender's users; `chance` is what claims at random would find."""

    experiment: str
    chance: float
    protections: list[AuditedProtection]


class Audit(TypedDict):
    """What `steelyard privacy audit` found out."""

    canary: CanaryResult
    membership: list[MembershipRow]
    extraction: list[ExtractionRow]
    inversion: list[InversionRow]
    recommender: NotRequired[RecommenderAudit]
    inversion_sweep: NotRequired[InversionSweep]
    canary_sweep: NotRequired[list[CanaryResult]]


def print_audit(document: Audit) -> None:
    """Print the bounds that canaries give, then a table for each attack."""
    canary, found = document["canary"], document["inversion"]
    rounds = "1 round" if canary.rounds == 1 else f"{canary.rounds:,} rounds"
    cohorts = "all clients" if canary.rate == 1 else f"{canary.rate:.3g} of the clients"
    runs = "1 run" if canary.runs == 1 else f"{canary.runs:,} runs"
    print(f"canaries: {canary.canaries:,} in {runs}, each stopped and resumed once;")
    print(f"noise {canary.noise:g}, {rounds} with {cohorts}")
    print(f"  epsilon is at least {canary.lower:.3f} ({canary.confidence:.0%} confidence)")
    print(f"  and at most         {canary.accounted:.3f} by the ledger (delta {canary.delta:g})")
    if canary.lower > canary.accounted:
        print("  the promise is not kept: canaries refute what the run states")
    print()
    print_table(_inversion_table(found))
    print()
    print_table(_membership_table(document["membership"]))
    if document["extraction"]:
        print()
        print_table(_extraction_table(document["extraction"]))
    if "recommender" in document:
        users = document["recommender"]
        print()
        print_table(_recommender_table(users))
        print(f"claimed at random: {users['chance']:.3f}")


def _inversion_table(rows: list[InversionRow]) -> Table:
    cells = tuple(
        (
            *(row["model"], str(row["samples"]), _WAYS.get(row["attack"], row["attack"]), row["protection"]),
            *(f"{row['likeness']:.2f}", f"{row['read']:.0%}"),
        )
        for row in rows
    )
    note = "alike: correlation of each sample with what is found; read: the share that is read"
    headings = ("model", "samples", "attack", "protection", "alike", "read")
    return Table("gradient inversion on digits", headings, cells, note, names=4)


def _membership_table(rows: list[MembershipRow]) -> Table:
    cells = tuple(
        (row["model"], str(row["samples"]), row["protection"], f"{row['ranked']:.2f}", f"{row['found']:.0%}")
        for row in rows
    )
    note = "ranked: how often a client's sample is above a stranger; found: the share above 99 of 100 strangers"
    headings = ("model", "samples", "protection", "ranked", "found")
    return Table("membership on digits", headings, cells, note, names=3)


def _extraction_table(rows: list[ExtractionRow]) -> Table:
    cells = tuple(
        (row["model"], row["questions"], row["answer"], f"{row['agrees']:.1%}", f"{row['apart']:.3f}") for row in rows
    )
    note = f"{rows[0]['count']} questions; same: fresh digits that copy and model call the same; apart: probabilities"
    headings = ("model", "asked about", "answer", "same", "apart")
    return Table("copies of a model of digits", headings, cells, note, names=3)


def _recommender_table(users: RecommenderAudit) -> Table:
    rounds = tuple(f"round {row['round']}" for row in users["protections"][0]["rounds"])
    rows: list[tuple[str, ...]] = []
    for entry in users["protections"]:
        shares = [row["sum"]["precision"] for row in entry["rounds"]]
        rows.append((entry["protection"], *("-" if share is None else f"{share:.3f}" for share in shares)))
    title = f"{users['experiment']}: share of claimed items that are the user's"
    return Table(title, ("protection", *rounds), tuple(rows))
