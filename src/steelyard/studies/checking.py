"""Checking the archive of an arena: the verdict computed again, the runs beside it, a part of it run anew."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from steelyard.base.errors import counted
from steelyard.base.processor import in_words, same_kind
from steelyard.experiment.resuming import versions
from steelyard.runs.history import History
from steelyard.studies.archive import Archive, Replayed, SceneFigures
from steelyard.studies.arena import Arena, judge
from steelyard.studies.study import finished

APART = 2
"""Test samples by which the part's accuracy may differ where another kind of processor trained it: twice the most that
`python -m benchmarks.processors` finds between the settings of one processor, and at least 2, since it found none in
100 repeats and other processors were not at hand."""

ArenaArchive = Archive[Arena]


def distance(arena: Arena, figures: Mapping[str, SceneFigures], now: Replayed) -> float:
    """Return how far the part's accuracy is from that of the scene, where the baseline trained beside all others."""
    values = figures[now.scene].values[arena.suite.baseline]
    return abs(values[sorted(arena.seeds).index(now.seed)] - now.value)


def shifted(
    arena: Arena, figures: Mapping[str, SceneFigures], now: Replayed, samples: float
) -> dict[str, SceneFigures]:
    """Return the figures as they would be if the part had so many more samples right, or fewer."""
    baseline, scene = arena.suite.baseline, figures[now.scene]
    values = list(scene.values[baseline])
    values[sorted(arena.seeds).index(now.seed)] += samples / now.samples
    changed = scene.model_copy(update={"values": {**scene.values, baseline: tuple(values)}})
    return {**figures, now.scene: changed}


@dataclass(frozen=True)
class Checked:
    """What a look at an archive has shown, a line each, and whether something in it does not hold."""

    lines: tuple[str, ...]
    differs: bool
    undecided: bool = False
    """Another kind of processor made it, and what may come of that alone would turn a verdict."""

    @property
    def code(self) -> int:
        """What the command ends with: 0 it holds, 1 something differs, 2 this processor cannot decide."""
        return 1 if self.differs else 2 if self.undecided else 0


def check_archive(path: Path, *, anew: bool = True, progress: bool = False) -> Checked:
    """Compute an archive's verdict again, hold it against the runs beside it, and run a part of it anew."""
    archive = ArenaArchive.read(path)
    suite = archive.plan.suite
    lines = [f"intact: the digest is that of the content; suite {suite.name}, version {suite.version}"]
    document = judge(archive.plan, archive.figures)
    if document.verdict == archive.verdict:
        lines.append(f"the figures say the same: {document.sentence}")
    else:
        lines.append(f"DIFFERS: the verdict is not that of the figures, which say: {document.sentence}")
    lines += _beside(archive, path.parent)
    lines += [_replayed(archive, progress)] if anew else []
    differs = [line for line in lines if line.startswith("DIFFERS")]
    kept = [line for line in lines if line not in differs]
    return Checked((*kept, *differs), bool(differs), any(line.startswith("UNDECIDED") for line in kept))


def _beside(archive: ArenaArchive, folder: Path) -> list[str]:
    """Hold the figures against those of the runs in the archive's folder, whose chains are computed again."""
    arena = archive.plan
    if not arena.is_in(folder):
        return ["the runs are not beside it: their figures are taken as they stand"]
    now = arena.figures(folder)
    if changed := [name for name, found in archive.figures.items() if now.get(name) != found]:
        return [f"DIFFERS: the run of task {name} has other figures or another head" for name in changed]
    broken = [
        f"DIFFERS: the run of task {cell.name}: {problem}"
        for cell in arena.cells()
        for name in arena.folders(cell)
        if finished(folder / name) and (problem := History(folder / name).chain.problem)
    ]
    return broken or [f"the runs of {counted(len(now), 'task')} are intact and have these figures"]


def _replayed(archive: ArenaArchive, progress: bool) -> str:
    """Run the part of the archive anew and compare the model's bits, or what another processor cannot change."""
    was = archive.replayed
    if was is None:
        return "nothing to replay: no task has figures"
    with tempfile.TemporaryDirectory() as place:
        now = archive.plan.replay(archive.figures, Path(place), progress=progress)
    assert now is not None
    return replay_answer(archive, was, now, versions())


def replay_answer(archive: ArenaArchive, was: Replayed, now: Replayed, here: Mapping[str, str]) -> str:
    """Say whether the part that was run anew is that of the archive; `here` is what runs it now.

    What an archive says of its processor is a claim. So the scene's figure is held to the part as it came out here, and
    a verdict that the samples allowed to another processor would turn is undecided.
    """
    arena = archive.plan
    what = f"{arena.suite.baseline} in task {was.scene}, seed {was.seed}"
    same = (now.scene, now.seed, now.model, now.value) == (was.scene, was.seed, was.model, was.value)
    if not same and (now.scene, now.seed) != (was.scene, was.seed):
        return f"DIFFERS: replayed {now.scene}, seed {now.seed}, where the archive has {what}"
    made = in_words(archive.versions)
    if not same and same_kind(archive.versions, here):
        return f"DIFFERS: replayed {what}: another model, on the same kind of processor ({made})"
    margin, apart = arena.suite.margin, distance(arena, archive.figures, now)
    allowed = 0 if same else APART
    if not same and now.apart(was) > allowed:
        return (
            f"DIFFERS: replayed {what}: {_samples(now.apart(was), now.samples)} apart, "
            f"where another processor changes at most {allowed}; made on {made}"
        )
    if apart > margin + allowed / now.samples:
        return f"DIFFERS: replayed {what}: {100 * apart:.1f} points from the figure of the task"
    if same:
        return f"replayed {what}: the same model, bit for bit"
    agrees = f"replayed {what}: agrees within {_samples(now.apart(was), now.samples)}; made on {made}"
    if apart > margin:
        return f"UNDECIDED: {agrees}; the task's own figure is {100 * apart:.1f} points away"
    moved = [judge(arena, shifted(arena, archive.figures, now, by)) for by in (-allowed, 0, allowed)]
    if any((each.decision, each.verdicts) != (moved[0].decision, moved[0].verdicts) for each in moved):
        return f"UNDECIDED: {agrees}; {allowed} samples more or fewer would turn the verdict"
    return agrees


def _samples(apart: float, of: int) -> str:
    # A figure is the mean of the last rounds, so it may be a part of a sample off.
    return f"{math.ceil(apart)} of {of} samples"
