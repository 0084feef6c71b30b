"""`steelyard attack`: what hostile clients do to an experiment under each rule.

What is heavy is imported inside the command, for speed of start.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.base.errors import UserError, printable
from steelyard.base.logs import doing, logger, quiet
from steelyard.cli.finishing import watched
from steelyard.cli.options import (
    ExperimentArgument,
    FirstSeedOption,
    FormatOption,
    SeedsOption,
    SetOption,
    TrustOption,
    asking,
)
from steelyard.cli.printing import print_json, terminal_width
from steelyard.rounds.progress import watching

if TYPE_CHECKING:
    from steelyard.report.result import Attacks

_log = logger(__name__)


def attack(
    experiment: ExperimentArgument,
    attacks: Annotated[
        list[str] | None,
        typer.Option(
            "--attack",
            help="label-flip, class-flip, sign-flip, scaled-reversal, gaussian, alie, ipm, min-max, bias-push, "
            "free-rider, free-riders, backdoor, backdoor-boosted, semantic-backdoor, semantic-boosted, late-inflation "
            "or inflation; each also as NAME+inflation; with commas or one by one; all: each of them, lying.",
        ),
    ] = None,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive",
            help="Add attackers that know the rule and send the worst of what they tried: adaptive, adaptive-alie, "
            "adaptive-ipm, adaptive-drift, each lying.",
        ),
    ] = False,
    fraction: Annotated[float, typer.Option("--fraction", help="Share of the clients that are hostile.")] = 0.2,
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--rules", help="Rules as in `steelyard compare`; default: fedavg, EQ, each robust rule, and guarded."
        ),
    ] = None,
    seeds: SeedsOption = 1,
    changes: SetOption = None,
    seed: FirstSeedOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder that gets one run for each attack; one with the same goes on.")
    ] = None,
    trust: TrustOption = False,
    format: FormatOption = "text",
) -> None:
    """Make some clients hostile and show accuracy under each rule, beside the same without them."""
    with watching(not quiet()):
        with doing("starting"):
            from steelyard.experiment.loading import load
            from steelyard.experiment.rules import load_comparison
            from steelyard.sweeps.attacking import Attack, attack_folder, attack_names, rules_for, under_attack

        names = attack_names(attacks or [], adaptive=adaptive)
        base = load(experiment, changes or [], seed, asking(trust))
        under_attack(base, names[0], fraction)  # refuses what cannot be attacked before rules are read
        described = load_comparison(experiment, changes or [], rules or rules_for(base), seed)
        planned = Attack(described, tuple(names), fraction, seeds)
        _ = planned.parts  # refuses what cannot be run before there is a folder
        finish_attack(attack_folder(planned, out), True, False, format)


def outcomes_of(folder: Path) -> Attacks:
    """Return what the attacks of a folder did; one that is not done is refused."""
    from steelyard.report.hostile import CLEAN, attack_document, flawed_before, outcome
    from steelyard.sweeps.attacking import read_attack
    from steelyard.sweeps.running import finished

    done = read_attack(folder)
    names = (CLEAN, *done.names)
    if missing := [name for name in names if not finished(folder / name)]:
        raise UserError(f"{folder}: {missing[0]} is not done; allowed: attacks that have ended (`steelyard resume`)")
    outcomes = {name: outcome(folder / name, done.experiment.rounds, folder / CLEAN) for name in names}
    return attack_document(outcomes, done.fraction, flawed_before(folder / CLEAN))


def finish_attack(folder: Path, trust: bool, accept_changes: bool, format: str) -> None:
    """Do what is left of the attacks of a folder, and show what they did; their code was asked for where `trust`.

    What `steelyard resume` does with the folder of attacks that were stopped or killed.
    """
    from steelyard.report.hostile import attack_text
    from steelyard.sweeps.attacking import run_attack
    from steelyard.sweeps.running import How

    how = How(not quiet(), _log.info, None if trust else asking(trust), accept_changes)
    done = watched(lambda: run_attack(folder, how))
    with doing("summing up"):
        document = outcomes_of(folder)
    if format == "json":
        print_json({"folder": str(folder), "seeds": done.seeds, **document})
        return
    print(attack_text(document, terminal_width()))
    print(f"\nruns stored in {printable(str(folder))}")
