"""`steelyard privacy`: the noise that a budget asks for, and what attacks still find out.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

import typer

from steelyard.activity import doing
from steelyard.cli.options import FormatOption
from steelyard.cli.printing import print_json
from steelyard.errors import UserError
from steelyard.rounds.progress import watching

app = typer.Typer(help="Differential privacy: plan a budget, audit what attacks find out.", no_args_is_help=True)


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
    accountant: Annotated[
        Literal["pld", "rdp"] | None, typer.Option("--accountant", help="Default: pld, or rdp for fixed cohorts.")
    ] = None,
    format: FormatOption = "text",
) -> None:
    """Find the noise multiplier for a budget over some rounds, or what a noise multiplier costs."""
    with watching(), doing("adding up rounds"):
        from steelyard.privacy.planning import plan
        from steelyard.privacy.requirements import check_accounting

        check_accounting()
        found = plan(
            epsilon=epsilon,
            delta=delta,
            rounds=rounds,
            sampling=sampling,
            noise=noise,
            sampled=sampled,
            accountant=accountant,
        )
    if format == "json":
        print_json({name: value for name, value in asdict(found).items() if value is not None})
        return
    print(f"noise multiplier {found.noise_multiplier:.4f} (noise = multiplier x clip x largest weight)")
    cohorts = "all clients" if sampling == 1 else f"{sampling:.3g} of the clients ({sampled})"
    besides = f" ({found.epsilon_rdp:.4f} by rdp)" if found.accountant != "rdp" else ""
    print(
        f"{rounds:,} rounds with {cohorts}: epsilon {found.epsilon:.4f} at delta {delta:g} by {found.accountant}"
        f"{besides}; after one round {found.epsilon_after_first:.4f}"
    )


@app.command("audit")
def audit(
    tries: Annotated[
        int, typer.Option("--tries", min=1, max=10_000, help="Clients attacked by gradient inversion.")
    ] = 20,
    steps: Annotated[
        int, typer.Option("--steps", min=0, max=100_000, help="Steps of the search for samples; 0 leaves it out.")
    ] = 300,
    noise: Annotated[
        float, typer.Option("--noise", help="Noise multiplier of the mechanism that canaries audit.")
    ] = 1.0,
    sampling: Annotated[float, typer.Option("--sampling", help="Share of the clients in a round, q.")] = 1.0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=10_000, help="Rounds of a play.")] = 1,
    trials: Annotated[
        int, typer.Option("--trials", min=20, max=1_000_000, help="Plays with a canary, and as many without.")
    ] = 1000,
    delta: Annotated[float, typer.Option("--delta", help="δ of the promise that canaries audit.")] = 1e-5,
    format: FormatOption = "text",
) -> None:
    """Attack clients of digits by gradient inversion, and the noise itself by canaries: what is still found out?"""
    if not 1e-3 <= noise <= 1e6:
        raise UserError(f"--noise: got {noise:g}; allowed: numbers from 0.001 to 1e6")
    if not 0 < sampling <= 1:
        raise UserError(f"--sampling: got {sampling:g}; allowed: numbers above 0, up to 1")
    if not 0 < delta < 1:
        raise UserError(f"--delta: got {delta:g}; allowed: numbers between 0 and 1")
    with watching():
        with doing("starting"):
            from steelyard.experiment.privacy_audit import audit_inversion
            from steelyard.privacy.canaries import audit_canary
            from steelyard.privacy.requirements import check_accounting

        check_accounting()
        with doing("playing the mechanism with and without a canary"):
            canary = audit_canary(noise, sampling, rounds, trials, delta)
        with doing("inverting gradients"):
            found = audit_inversion(tries=tries, steps=steps)
    if format == "json":
        print_json({"canary": asdict(canary), "inversion": found})
        return
    print(
        f"canary, noise {noise:g}, {rounds:,} rounds with {sampling:.3g} of the clients: epsilon is at least "
        f"{canary.lower:.3f} ({canary.confidence:.0%} confidence, {trials:,} plays each), at most "
        f"{canary.accounted:.3f} by the accountant, at delta {delta:g}"
    )
    print("\ngradient inversion on digits: correlation of each sample with what is found, share that is read")
    width = max(len(entry["protection"]) for entry in found)
    print(f"{'model':8}{'samples':>8}  {'attack':10}{'protection':{width + 2}}{'likeness':>9}{'read':>7}")
    for entry in found:
        print(
            f"{entry['model']:8}{entry['samples']:>8}  {entry['attack']:10}{entry['protection']:{width + 2}}"
            f"{entry['likeness']:>9.3f}{entry['read']:>7.0%}"
        )
