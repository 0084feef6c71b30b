"""The part of an arena that is run anew to check it: the baseline alone, in one scene, with one seed.

A scene trains all its rules in one stack, and the last bits of a model depend on what else is in the stack. So the part
is run once by itself when the archive is written, client after client on the CPU, and again when it is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from steelyard.arena.figures import SceneFigures, run_figures
from steelyard.arena.plan import Arena
from steelyard.base.settings import Section
from steelyard.experiment.running import run
from steelyard.report.reporting_rows import reported
from steelyard.runs.history import History
from steelyard.sweeps.running import finished

APART = 2
"""Test samples by which the part's accuracy may differ where another kind of processor trained it: twice the most that
`python -m benchmarks.processors` finds between the settings of one processor, and at least 2, since it found none in
100 repeats and other processors were not at hand."""
REPLAY = "replay"
"""The folder in an arena's folder with the run of the part, in one of its scene's name."""
PLAIN = ("compute.engine=loop", "compute.device=cpu")


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


def replayed_scene(arena: Arena, figures: Mapping[str, SceneFigures]) -> str | None:
    """Return the scene of the part: the one that the suite names, else the first, where the baseline has figures."""
    ready = [name for name, found in figures.items() if arena.suite.baseline in found.values]
    return arena.suite.replay if arena.suite.replay in ready else next(iter(ready), None)


def replay(arena: Arena, figures: Mapping[str, SceneFigures], out: Path, *, progress: bool = False) -> Replayed | None:
    """Run the part into a folder of its scene's name, unless it is there; None where the baseline has no figures."""
    baseline, seed = arena.suite.baseline, min(arena.seeds)
    if (scene := replayed_scene(arena, figures)) is None:
        return None
    out = out / scene  # a scene that failed at first may come before this one later
    if not finished(out):
        alone = replace(arena, changes=(*arena.changes, *PLAIN))
        experiment = alone.scene(scene, rivals=[baseline], candidate=False)
        run(experiment, out=out, seeds=[seed], progress=progress)
    found, samples = run_figures(out, baseline), reported(History(out))
    model, value = found.models[baseline][0], found.values[baseline][0]
    return Replayed(scene=scene, seed=seed, model=model, value=value, samples=samples.get(str(seed), 0))


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
