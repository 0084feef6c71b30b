"""What an arena's runs recorded, scene by scene, and its archive: one file with the figures and digests of all models.

It also holds the suite, the candidate, seeds and versions. Whoever has it can compute the verdict again, compare it
with the runs where they are still there, and run a part of it anew to the same bits. It holds no code: of a candidate's
own file it has the digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast

from pydantic import Field

from steelyard.base import files
from steelyard.base.errors import UserError, told_as
from steelyard.base.settings import Section, validated
from steelyard.experiment.description import READING
from steelyard.experiment.loading import own_text, read_experiment
from steelyard.report.curves import read_run
from steelyard.report.decide import verdict_of
from steelyard.runs.history import History, at_once
from steelyard.studies.study import finished
from steelyard.studies.verdict import ArenaVerdict

FAILED = ".failed"
"""A file beside the folder of a scene's run, of its name with this ending, says why the candidate has no figures."""
RIVALS = "-rivals"
"""A folder beside that of a scene's run, of its name with this ending, has the run of the others without it then."""


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
    """Why the candidate has no figures; the rivals' are then of a run of their own, unless its model exploded."""


def rivals_folder(run: Path) -> Path:
    """Return where the rivals run without a candidate that failed in a scene's run."""
    return run.with_name(f"{run.name}{RIVALS}")


def scene_figures(run: Path, baseline: str, candidate: str) -> SceneFigures | None:
    """Return the figures of a scene's run, of the rivals' own run where the candidate failed; None before its end."""
    if finished(run):
        found = run_figures(run, baseline, candidate)
    elif files.is_file(failure := run.with_name(f"{run.name}{FAILED}")):
        found = SceneFigures(failed=own_text(failure).strip())
    else:
        return None
    if not found.failed or found.values or not finished(rivals_folder(run)):
        return found
    alone = run_figures(rivals_folder(run), baseline)
    return alone.model_copy(update={"failed": found.failed, "head": f"{found.head} {alone.head}".strip()})


def joined(batches: Sequence[SceneFigures]) -> SceneFigures:
    """Return the figures of all batches of a scene's seeds as one; a rule has some where it has them in each batch."""
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
        failed=next((found.failed for found in batches if found.failed), ""),
    )


@at_once
def run_figures(run: Path, baseline: str, candidate: str = "") -> SceneFigures:
    """Return the figures of one scene's run: the mean of its last rounds, on rows that chose nothing; seeds rise."""
    history, experiment = History(run), read_experiment(run)
    if spoilt := left_out_for_all(history):
        return SceneFigures(head=history.chain.head, failed=spoilt)
    found = read_run(history, baseline)
    decided = verdict_of(found, experiment)
    left_out = {row.rule: row.left_out for row in decided.rules if row.left_out}
    # A rival whose model exploded has no place in the table; the candidate has one, with the reason.
    values = {row.rule: row.value.values for row in decided.rules if row.rule not in left_out}
    worst: dict[str, tuple[float, ...]] = {}
    for curve in found.curves:
        if curve.rule in values and curve.scores.size:
            of_clients = curve.scores[-experiment.rounds.last :].mean(axis=0)
            worst[curve.rule] = (*worst.get(curve.rule, ()), float(of_clients.min()))
    seeds = sorted({curve.seed for curve in found.curves})
    return SceneFigures(
        values=values,
        worst=worst,
        models={rule: tuple(history.models[rule, seed] for seed in seeds) for rule in values},
        head=history.chain.head,
        where=decided.where,
        failed=left_out.get(candidate, ""),
    )


def left_out_for_all(history: History) -> str:
    """Say where a client's criterion failed: clients are asked once for all rules, so the rivals lost that client too.

    No rival's criteria fail in these scenes. What is left then would be compared with another FedAvg than the suite's.
    """
    failures = history.failures_after()
    mine = failures[failures["failure"].str.startswith("criterion ")]
    if not len(mine):
        return ""
    first = mine.iloc[0]
    return f"{first['failure']} (round {first['round']}, {first['client']}, which no rule could weigh then)"


# The archive.


ARCHIVE = "arena.json"
FORMAT = 2
LONGEST = 20_000_000
"""Bytes of an archive that are read; none of ours comes near."""

PlanT = TypeVar("PlanT")


class Replayed(Section):
    """What the part came to: the digest of its last model, its accuracy, and on how many samples of the server."""

    scene: str
    seed: int
    model: str
    value: float
    samples: int = 0
    """0 in archives before 0.3, which did not say."""

    def apart(self, other: Replayed) -> float:
        """Return by how many test samples two accuracies of the part differ."""
        return round(abs(self.value - other.value) * (self.samples or other.samples), 6)


class Archive(Section, Generic[PlanT]):
    """What an archive holds, beside its own format and digest."""

    verdict: ArenaVerdict
    versions: dict[str, str]
    plan: PlanT
    """The arena, with code by its content."""
    figures: dict[str, SceneFigures]
    replayed: Replayed | None

    def write(self, path: Path) -> None:
        """Write the file."""
        content = {"format": FORMAT, **self.model_dump(mode="json")}
        text = json.dumps({**content, "digest": digest(content)}, indent=1, ensure_ascii=False)
        with told_as(f"{path.parent}: cannot be written", "a writable folder"):
            files.write(path, f"{text}\n".encode("utf-8", "replace"))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what a file holds; one whose digest is not that of its content is refused, as are older formats."""
        refused = f"{path}: is no archive of the arena"
        allowed = f"allowed: the {ARCHIVE} of an arena's folder"
        try:
            content: Any = json.loads(files.read_bytes(path, LONGEST))
        except FileNotFoundError:
            raise UserError(f"--check: there is no file {path}; {allowed}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{refused} ({type(error).__name__}); {allowed}") from None
        fields = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
        if fields.get("format") == 1:
            raise UserError(
                f"{path}: is of format 1, without the verdict; allowed: format {FORMAT}, or steelyard 0.2.0"
            )
        if fields.get("format") != FORMAT:
            raise UserError(f"{refused} of format {FORMAT}; {allowed}")
        if fields.pop("digest", None) != digest(fields):
            raise UserError(
                f"{path}: was changed since it was written: its digest is another; allowed: the file as it was"
            )
        del fields["format"]
        return validated(cls, fields, str(path), READING)


def digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything else in an archive, in a form that white space does not change."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
