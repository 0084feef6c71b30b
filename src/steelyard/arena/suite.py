"""A suite: frozen scenes, rivals with frozen settings, the seeds that choose and those that report; a file of data."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Annotated, Any, cast

from pydantic import Field

from steelyard.errors import UserError, brief, listed, nearest
from steelyard.experiment.description import Description
from steelyard.experiment.loading import build
from steelyard.settings import Section, change, parse, validated


class Scene(Section):
    """One comparison of a suite: an experiment of its own, made from one that scenes share."""

    about: str
    """What is the matter with its clients, in a line."""
    base: str
    """Which of the suite's experiments it changes."""
    changes: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Sections with the fields that differ; a list, such as flaws, stands for the whole section."""


class Suite(Section):
    """The scenes of the arena, as a file holds them; the same version is the same file, to the byte."""

    name: str
    sha256: str
    """Of the file's bytes, by which an archive is known to be of this suite."""
    version: Annotated[int, Field(ge=1)]
    about: str
    baseline: str
    """The rule that a candidate is held against."""
    rivals: tuple[str, ...]
    """Every rule that runs beside the candidate, the baseline among them."""
    margin: Annotated[float, Field(gt=0)]
    """Rules that differ by less are equal."""
    choose: tuple[int, ...]
    report: tuple[int, ...]
    bases: dict[str, dict[str, Any]]
    scenes: dict[str, Scene]

    def experiment(self, scene: str, changes: Sequence[str] = ()) -> Description:
        """Return the experiment of a scene, with further changes such as "rounds.count=1"; its rules are not set."""
        chosen = self.scenes[scene]
        document = copy.deepcopy(self.bases[chosen.base])
        for section, fields in chosen.changes.items():
            both = isinstance(fields, dict) and isinstance(document.get(section), dict)
            document[section] = {**document[section], **cast("dict[str, Any]", fields)} if both else fields
        for assignment in changes:
            change(document, assignment)
        return build(document, f"scene {scene}")

    def chosen(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the scenes of these names in the suite's order; all of them where none is named."""
        for name in names:
            if name not in self.scenes:
                raise UserError(
                    f"--scenes: got {brief(name)}{nearest(name, self.scenes)}; allowed: {listed(self.scenes)}"
                )
        return tuple(name for name in self.scenes if not names or name in names)


def suites() -> list[str]:
    """Return the names of the suites that come with the package."""
    folder = resources.files("steelyard.arena")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_suite(name: str) -> Suite:
    """Return a suite by name."""
    if name not in suites():
        raise UserError(f"--suite: got {brief(name)}{nearest(name, suites())}; allowed: {listed(suites())}")
    text = resources.files("steelyard.arena").joinpath(f"{name}.toml").read_bytes()
    known = {"name": name, "sha256": hashlib.sha256(text).hexdigest()}
    return validated(Suite, {**parse(text.decode(), name), **known}, f"suite {name}")
