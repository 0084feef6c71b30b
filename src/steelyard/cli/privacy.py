"""`steelyard privacy`: the noise that a budget asks for, and what attacks still find out.

Attacks, which need torch, are imported inside the commands, for speed of start.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

import typer

from steelyard.base.errors import UserError
from steelyard.base.logs import doing, quiet
from steelyard.cli.options import FormatOption
from steelyard.cli.printing import emit
from steelyard.learning.settings import TrainingSettings, batches
from steelyard.privacy.accounting import check_accounting
from steelyard.privacy.planning import plan
from steelyard.privacy.settings import LEAST_DELTA, check_delta
from steelyard.report.rendering import Block, Table
from steelyard.rounds.progress import watching

if TYPE_CHECKING:
    from steelyard.experiment.digit_audits import ExtractionRow, InversionRow, MembershipRow
    from steelyard.experiment.run_audits import CanaryResult


app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command("plan")
def plan_budget(
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=10_000_000, help="Number of rounds, T.")],
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="The budget's ε; finds the noise for it.")] = None,
    delta: Annotated[float, typer.Option("--delta", help="The budget's δ, well below 1/number of clients.")] = 1e-5,
    sampling: Annotated[
        float, typer.Option("--sampling", help="Share of the clients in a round, q; 1 for all, or for public cohorts.")
    ] = 1.0,
    noise: Annotated[
        float | None, typer.Option("--noise", help="A noise multiplier z in place of ε: shows what it costs.")
    ] = None,
    sampled: Annotated[
        Literal["poisson", "fixed"],
        typer.Option("--sampled", help="poisson: each client by itself; fixed: always as many clients."),
    ] = "poisson",
    clients: Annotated[
        int | None, typer.Option("--clients", min=1, help="Number of clients; δ must be below one over it.")
    ] = None,
    accept_large_delta: Annotated[
        bool, typer.Option("--accept-large-delta", help="Allow a δ that guarantees nothing to single clients.")
    ] = False,
    records: Annotated[
        int | None, typer.Option("--records", min=1, help="Protect the samples of a client that has so many.")
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="With --records: training.batch_size, samples in a batch.")
    ] = 10,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="With --records: training.epochs.")] = 1,
    format: FormatOption = "text",
) -> None:
    """Find the noise multiplier for a budget over some rounds, or what a noise multiplier costs."""
    steps = 1
    if records is not None:
        if (clients, sampling, sampled) != (None, 1.0, "poisson"):
            raise UserError(
                "--records: got it with --clients, --sampling or --sampled, which are of whole clients; allowed: "
                "--batch and --epochs"
            )
        sampling, steps = batches(records, TrainingSettings(batch_size=batch, epochs=epochs))
    with watching(not quiet()), doing("adding up rounds"):
        check_accounting()
        found = plan(
            epsilon=epsilon,
            delta=delta,
            rounds=rounds,
            sampling=sampling,
            noise=noise,
            sampled=sampled,
            clients=records or clients,
            accept_large_delta=accept_large_delta,
            steps=steps,
            unit="client" if records is None else "sample",
        )
    cohorts = "all clients" if sampling == 1 else f"{sampling:.3g} of the clients ({sampled})"
    times = "clip and largest weight"
    if records is not None:
        counted = "1 batch" if steps == 1 else f"{steps:,} batches"
        cohorts = f"{counted}, each of the {records:,} samples in a batch with probability {sampling:.3g}"
        times = "clip, on the sum of a batch's gradients"
    lines = (
        f"noise multiplier {found.noise_multiplier:.4f} (times {times})",
        f"{rounds:,} rounds with {cohorts}, delta {delta:g}",
        f"  epsilon {found.epsilon:.4g}",
        f"  epsilon {found.epsilon_after_first:.4g} after one round",
    )
    emit({name: value for name, value in asdict(found).items() if value is not None}, format, lines)


@app.command("audit")
def audit(
    tries: Annotated[
        int, typer.Option("--tries", min=1, max=10_000, help="Clients attacked by gradient inversion.")
    ] = 20,
    steps: Annotated[
        int, typer.Option("--steps", min=0, max=100_000, help="Steps of the search for samples; 0 leaves it out.")
    ] = 300,
    questions: Annotated[
        int, typer.Option("--questions", min=0, max=600, help="Questions by which a model is copied; 0 leaves it out.")
    ] = 500,
    noise: Annotated[float, typer.Option("--noise", help="Noise multiplier of the runs that canaries audit.")] = 1.0,
    sampling: Annotated[float, typer.Option("--sampling", help="Share of the clients in a round, q.")] = 1.0,
    sampled: Annotated[
        Literal["poisson", "fixed"],
        typer.Option("--sampled", help="poisson: each client by itself; fixed: always as many clients."),
    ] = "poisson",
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=10_000, help="Rounds of a run with canaries.")] = 1,
    runs: Annotated[int, typer.Option("--runs", min=1, max=100_000, help="Whole runs with canaries.")] = 1,
    canaries: Annotated[int, typer.Option("--canaries", min=10, max=600, help="Canaries in each run.")] = 300,
    delta: Annotated[float, typer.Option("--delta", help="δ of the guarantee that canaries audit.")] = 1e-5,
    format: FormatOption = "text",
) -> None:
    """Attack runs by canaries, clients of digits by gradient inversion and membership inference, a model by questions:
    what is found out?
    """
    _check_audit(noise, sampling, delta, canaries)
    with watching(not quiet()):
        check_accounting()
        with doing("starting"):
            from steelyard.experiment.digit_audits import audit_extraction, audit_inversion, audit_membership
            from steelyard.experiment.run_audits import audit_runs
        with doing("running with canaries"):
            canary = audit_runs(noise, sampling, rounds, sampled=sampled, runs=runs, canaries=canaries, delta=delta)
        with doing("looking for samples in updates"):
            membership = audit_membership(tries=tries)
        with doing("copying models by questions"):
            extraction = audit_extraction(questions) if questions else []
        with doing("inverting gradients"):
            inversion = audit_inversion(tries=tries, steps=steps)
    document: Audit = {"canary": canary, "membership": membership, "extraction": extraction, "inversion": inversion}
    emit(document, format, audit_parts(document))


def _check_audit(noise: float, sampling: float, delta: float, canaries: int) -> None:
    if not 1e-3 <= noise <= 1e6:
        raise UserError(f"--noise: got {noise:g}; allowed: numbers from 0.001 to 1e6")
    if not 0 < sampling <= 1:
        raise UserError(f"--sampling: got {sampling:g}; allowed: numbers above 0, up to 1")
    if not LEAST_DELTA <= delta < 1:
        raise UserError(f"--delta: got {delta:g}; allowed: numbers from {LEAST_DELTA:g} to below 1")
    check_delta("--delta", delta, canaries, "fewer --canaries")


# What an audit found out, as a document and as text.


_WAYS = {"analytic": "read off"}
"""Attacks whose name in a table is another than in JSON."""


class Audit(TypedDict):
    """What `steelyard privacy audit` found out."""

    canary: CanaryResult
    membership: list[MembershipRow]
    extraction: list[ExtractionRow]
    inversion: list[InversionRow]


def audit_parts(document: Audit) -> list[Block]:
    """Return the bounds that canaries give, then a table for each attack."""
    canary, found = document["canary"], document["inversion"]
    rounds = "1 round" if canary.rounds == 1 else f"{canary.rounds:,} rounds"
    cohorts = "all clients" if canary.rate == 1 else f"{canary.rate:.3g} of the clients"
    runs = "1 run" if canary.runs == 1 else f"{canary.runs:,} runs"
    parts: list[Block] = [
        f"canaries: {canary.canaries:,} in {runs}, each stopped and resumed once;",
        f"noise {canary.noise:g}, {rounds} with {cohorts}",
        f"  epsilon is at least {canary.lower:.3f} ({canary.confidence:.0%} confidence)",
        f"  and at most         {canary.accounted:.3f} by the ledger (delta {canary.delta:g})",
    ]
    if canary.lower > canary.accounted:
        parts.append("  the guarantee does not hold: canaries refute it")
    parts += [_inversion_table(found), _membership_table(document["membership"])]
    parts += [_extraction_table(document["extraction"])] if document["extraction"] else []
    return parts


def _inversion_table(rows: list[InversionRow]) -> Table:
    cells = tuple(
        (
            *(row.model, str(row.samples), _WAYS.get(row.attack, row.attack), row.protection),
            *(f"{row.likeness:.2f}", f"{row.read:.0%}"),
        )
        for row in rows
    )
    note = "alike: correlation of each sample with what is found; read: the share that is read"
    headings = ("model", "samples", "attack", "protection", "alike", "read")
    return Table("gradient inversion on digits", headings, cells, note, names=4)


def _membership_table(rows: list[MembershipRow]) -> Table:
    cells = tuple(
        (row.model, str(row.samples), row.protection, f"{row.ranked:.2f}", f"{row.found:.0%}") for row in rows
    )
    note = "ranked: how often a client's sample is above a stranger; found: the share above 99 of 100 strangers"
    headings = ("model", "samples", "protection", "ranked", "found")
    return Table("membership on digits", headings, cells, note, names=3)


def _extraction_table(rows: list[ExtractionRow]) -> Table:
    cells = tuple((row.model, row.questions, row.answer, f"{row.agrees:.1%}", f"{row.apart:.3f}") for row in rows)
    note = f"{rows[0].count} questions; same: fresh digits that copy and model call the same; apart: probabilities"
    headings = ("model", "asked about", "answer", "same", "apart")
    return Table("copies of a model of digits", headings, cells, note, names=3)
