"""What the runs of an arena recorded: for each scene the figures of every rule and seed, or why there are none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from steelyard import files
from steelyard.arena.plan import SCENES, Arena
from steelyard.experiment.loading import own_text, read_experiment
from steelyard.report.recorded_curves import Curve, read_curves
from steelyard.report.reporting_rows import recommendation_of
from steelyard.runs.reader import History, at_once
from steelyard.settings import Section
from steelyard.sweeps.running import finished

FAILED = ".failed"
"""A file beside the folder of a scene's run, of its name with this ending, says why the candidate has no figures."""


class SceneFigures(Section):
    """One scene: by rule, for each seed, the accuracy, that of the worst client, and the digest of the last model."""

    values: dict[str, tuple[float, ...]] = Field(default_factory=dict[str, tuple[float, ...]])
    worst: dict[str, tuple[float, ...]] = Field(default_factory=dict[str, tuple[float, ...]])
    """Empty where clients test nothing."""
    models: dict[str, tuple[str, ...]] = Field(default_factory=dict[str, tuple[str, ...]])
    head: str = ""
    """Of the run's chain, which every figure goes into; of several batches all heads."""
    where: str = ""
    failed: str = ""
    """Why the candidate has no figures."""


def scene_folder(folder: Path, scene: str, batch: int = 1) -> Path:
    """Return the folder of a scene's run; until decided there is one for each batch of seeds."""
    return folder / SCENES / (scene if batch == 1 else f"{scene}-{batch}")


def read_figures(folder: Path, arena: Arena, batches: int | None = None) -> dict[str, SceneFigures]:
    """Return the figures of every scene that is done, or failed, in the suite's order; of the first batches only."""
    batches = len(arena.batches) if batches is None else batches
    found: dict[str, SceneFigures] = {}
    for name in arena.scenes:
        done: list[SceneFigures] = []
        for batch in range(1, batches + 1):
            run = scene_folder(folder, name, batch)
            if finished(run):
                done.append(run_figures(run, arena.suite.baseline, arena.candidate.label))
            elif files.is_file(failure := run.with_name(f"{run.name}{FAILED}")):
                done.append(SceneFigures(failed=own_text(failure).strip()))
            else:
                break
        if done:
            found[name] = _joined(done)
    return found


def _joined(batches: Sequence[SceneFigures]) -> SceneFigures:
    """Return the figures of all batches of a scene's seeds as one; a rule has some where it has them in each batch."""
    if failed := next((found.failed for found in batches if found.failed), ""):
        return batches[0].model_copy(update={"failed": failed}) if len(batches) == 1 else SceneFigures(failed=failed)
    rules = [rule for rule in batches[0].values if all(rule in found.values for found in batches)]
    return SceneFigures(
        values={rule: tuple(value for found in batches for value in found.values[rule]) for rule in rules},
        worst={
            rule: tuple(value for found in batches for value in found.worst[rule])
            for rule in rules
            if all(rule in found.worst for found in batches)
        },
        models={rule: tuple(model for found in batches for model in found.models[rule]) for rule in rules},
        head=" ".join(found.head for found in batches),
        where=batches[0].where,
    )


@at_once
def run_figures(run: Path, baseline: str, candidate: str = "") -> SceneFigures:
    """Return the figures of one scene's run: the mean of its last rounds, on rows that chose nothing; seeds rise."""
    history, experiment = History(run), read_experiment(run)
    if spoilt := _left_out_for_all(history):
        return SceneFigures(head=history.chain.head, failed=spoilt)
    curves = sorted(read_curves(history), key=lambda curve: curve.seed)
    decided = recommendation_of(history, experiment, curves, baseline)
    left_out = {row["rule"]: row["left_out"] for row in decided["rules"] if row["left_out"]}
    # A rival whose model exploded has no place in the table; the candidate has one, with the reason.
    values = {row["rule"]: tuple(row["value"]["values"]) for row in decided["rules"] if row["rule"] not in left_out}
    worst: dict[str, tuple[float, ...]] = {}
    for curve in curves:
        if curve.rule in values and curve.scores.size:
            worst[curve.rule] = (*worst.get(curve.rule, ()), _worst_client(curve, experiment.rounds.last))
    seeds = sorted({curve.seed for curve in curves})
    return SceneFigures(
        values=values,
        worst=worst,
        models={rule: tuple(history.models[rule, seed] for seed in seeds) for rule in values},
        head=history.chain.head,
        where=decided["where"],
        failed=left_out.get(candidate, ""),
    )


def _worst_client(curve: Curve, last: int) -> float:
    """Return the accuracy of the client that the last rounds' models serve worst, on its own test rows."""
    return float(curve.scores[-last:].mean(axis=0).min())


def _left_out_for_all(history: History) -> str:
    """Say where a client's criterion failed: clients are asked once for all rules, so the rivals lost that client too.

    No rival's criteria fail in these scenes. What is left then would be compared with another FedAvg than the suite's.
    """
    failures = history.failures_after()
    mine = failures[failures["failure"].str.startswith("criterion ")]
    if not len(mine):
        return ""
    first = mine.iloc[0]
    return f"{first['failure']} (round {first['round']}, {first['client']}, which no rule could weigh then)"
