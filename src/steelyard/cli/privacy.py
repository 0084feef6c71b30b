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
    print(
        f"{rounds:,} rounds with {cohorts}: epsilon {found.epsilon:.4f} at delta {delta:g} by {found.accountant}, "
        f"{found.epsilon_rdp:.4f} by rdp; after one round {found.epsilon_after_first:.4f}"
    )
