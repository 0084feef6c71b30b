"""`steelyard attack`: what hostile clients do to an experiment under each rule.

What is heavy is imported inside the command, for speed of start.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard.activity import doing
from steelyard.cli.options import ExperimentArgument, FirstSeedOption, FormatOption, QuietOption, SeedsOption, SetOption
from steelyard.cli.printing import print_json, terminal_width, watched
from steelyard.cli.trust import TrustOption, asking
from steelyard.errors import UserError, printable
from steelyard.rounds.progress import watching


def attack(
    experiment: ExperimentArgument,
    attacks: Annotated[
        list[str],
        typer.Option(
            "--attack",
            help="label-flip, sign-flip, scaled-reversal, gaussian, alie, ipm, min-max, free-rider, backdoor or "
            "inflation; each also as NAME+inflation; with commas or one by one; all: each of them, lying.",
        ),
    ],
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
    out: Annotated[Path | None, typer.Option("--out", help="Folder that gets one run for each attack.")] = None,
    trust: TrustOption = False,
    quiet: QuietOption = False,
    format: FormatOption = "text",
) -> None:
    """Make some clients hostile and show accuracy under each rule, beside the same without them."""
    with watching(not quiet):
        with doing("starting"):
            from steelyard.api import runnable
            from steelyard.experiment.attacking import CLEAN, attack_names, rules_for, under_attack
            from steelyard.experiment.comparing import load_comparison
            from steelyard.experiment.folders import new_folder
            from steelyard.experiment.loading import load
            from steelyard.report.hostile import attack_document, attack_lines, outcome

        names = attack_names(attacks)
        base = load(experiment, changes or [], seed, asking(trust))
        under_attack(base, names[0], fraction)  # refuses what cannot be attacked before rules are read
        described = load_comparison(experiment, changes or [], rules or rules_for(base), seed)
        planned = {name: runnable(under_attack(described, name, fraction)) for name in [CLEAN, *names]}
        folder = new_folder(described, out)
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"--out: {folder} is not empty; allowed: a new folder, which gets one run for each attack")
        outcomes: dict[str, Any] = {}
        for name, hostile in planned.items():
            if outcomes and not quiet:
                print(f"{name}: attack {len(outcomes)} of {len(names)}", file=sys.stderr)
            result = watched(
                lambda run=hostile, name=name: run.compare(["recipe"], seeds, folder / name, progress=not quiet)
            )
            outcomes[name] = outcome(result.folder, hostile.rounds, folder / CLEAN)
    document = attack_document(outcomes, fraction)
    if format == "json":
        print_json({"folder": str(folder), "seeds": seeds, **document})
        return
    print("\n".join(attack_lines(document, terminal_width() or 80)))
    print(f"\nruns stored in {printable(str(folder))}")
