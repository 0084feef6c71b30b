"""Arenas for tests: the suite with one scene, one round and few seeds, and figures made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from steelyard.experiment.description import FederationSettings
from steelyard.studies.archive import SceneFigures
from steelyard.studies.arena import Arena, plan
from steelyard.studies.candidate import Candidate
from steelyard.studies.study import folder_for
from steelyard.studies.suite import load_suite

SUITE = load_suite("small")
QUICK = ["rounds.count=1", "compute.engine=loop"]


def trusting(where: str, code: Mapping[str, str]) -> None:
    """Ask nobody."""


def written(arena: Arena, folder: Path) -> Path:
    """Make the folder of an arena."""
    return folder_for(arena, folder, arena.suite.experiment(arena.scenes[0]), "arena")


def on_paper(scenes: Sequence[str], seeds: int = 10, name: str = "X") -> Arena:
    """Return an arena for figures made by hand, with a candidate called X."""
    found = plan(SUITE, Candidate(name, FederationSettings()), scenes=scenes, seeds=seeds)
    return found.model_copy(update={"scenes": tuple(scenes)})


def figures(base: Sequence[float], mine: Sequence[float], other: Sequence[float] | None = None) -> SceneFigures:
    """Return one scene's figures; the worst client is ten points below the mean."""
    values = {"fedavg": tuple(base), "X": tuple(mine)} | ({} if other is None else {"EQ": tuple(other)})
    worst = {rule: tuple(value - 0.1 for value in row) for rule, row in values.items()}
    return SceneFigures(values=values, worst=worst, where="on the server's 409 rows")
