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
from steelyard.experiment.running import run
from steelyard.settings import Section
from steelyard.sweeps.running import finished

REPLAY = "replay"
"""The folder in an arena's folder with the run of the part."""
PLAIN = ("compute.engine=loop", "compute.device=cpu")


class Replayed(Section):
    """What the part came to: the digest of its last model, and its accuracy."""

    scene: str
    seed: int
    model: str
    value: float


def replay(arena: Arena, figures: Mapping[str, SceneFigures], out: Path, *, progress: bool = False) -> Replayed | None:
    """Run the part into a folder, unless it holds it already; None where no scene has figures of the baseline."""
    baseline, seed = arena.suite.baseline, min(arena.seeds)
    scene = next((name for name, found in figures.items() if baseline in found.values), None)
    if scene is None:
        return None
    if not finished(out):
        alone = replace(arena, changes=(*arena.changes, *PLAIN))
        experiment = alone.scene(scene, rivals=[baseline], candidate=False)
        run(experiment, out=out, seeds=[seed], progress=progress)
    found = run_figures(out, baseline)
    return Replayed(scene=scene, seed=seed, model=found.models[baseline][0], value=found.values[baseline][0])


def distance(arena: Arena, figures: Mapping[str, SceneFigures], was: Replayed) -> float:
    """Return how far the part's accuracy is from that of the scene, where the baseline trained beside all others."""
    values = figures[was.scene].values[arena.suite.baseline]
    return abs(values[sorted(arena.seeds).index(was.seed)] - was.value)
