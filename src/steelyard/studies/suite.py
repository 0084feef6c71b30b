"""A suite: frozen scenes, rivals with frozen settings, the seeds that choose and those that report; a file of data."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Annotated, Any, cast

from pydantic import Field

from steelyard.base.errors import MachineError, UserError, brief, listed, nearest
from steelyard.base.settings import Section, change, parse, validated
from steelyard.data import DataSettings
from steelyard.experiment.description import Description, FederationSettings
from steelyard.experiment.loading import build

NOT_WHOLE = ", not the whole suite"
"""The end of a table's title, where scenes or seeds were left out or fields changed."""


class Scene(Section):
    """One comparison of a suite: an experiment of its own, made from one that scenes share."""

    about: str
    """What is the matter with its clients, in a line."""
    base: str
    """Which of the suite's experiments it changes."""
    changes: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Sections with the fields that differ; a list, such as flaws, stands for the whole section."""


class Tuning(Section):
    """How settings are chosen: on how many of the seeds for choosing, how many settings a rule, and which of rivals."""

    seeds: Annotated[int, Field(ge=1)]
    budget: Annotated[int, Field(ge=1)]
    """The most settings that one rule may try, a candidate too."""
    settings: dict[str, tuple[str, ...]]
    """By rival: what was tried; one of each is among the suite's rivals."""


class Suite(Section):
    """The scenes of the arena, as a file holds them; the same version is the same file, to the byte."""

    name: str
    sha256: str
    """Of the bytes of the file, after those of one that it extends; an archive is known by it to be of this suite."""
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
    held_out: tuple[int, ...]
    """Seeds for --until-decided, which open once: see `openings`."""
    batch: Annotated[int, Field(ge=1)]
    """How many of them are run before the next look."""
    tuning: Tuning
    replay: str = ""
    """The scene of which a part is run anew when an archive is checked, client after client on a CPU; default: the
    first with figures. A suite of large networks names a quick one."""
    bases: dict[str, dict[str, Any]]
    scenes: dict[str, Scene]

    def experiment(self, scene: str, changes: Sequence[str] = ()) -> Description:
        """Return the experiment of a scene, with further changes such as "rounds.count=1"; its rules are not set."""
        chosen = self.scenes[scene]
        document = copy.deepcopy(_over(self.bases[chosen.base], chosen.changes))
        for assignment in changes:
            change(document, assignment)
        return build(document, f"task {scene}")

    def comparison(
        self, scene: str, rules: Mapping[str, FederationSettings], seed: int, changes: Sequence[str] = ()
    ) -> Description:
        """Return the experiment of a scene with these rules and a first seed."""
        return self.experiment(scene, changes).changed({"seed": seed}, rules=rules, where=f"task {scene}")

    def chosen(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the scenes of these names in the suite's order; all of them where none is named."""
        for name in names:
            if name not in self.scenes:
                raise UserError(
                    f"--scenes: got {brief(name)}{nearest(name, self.scenes)}; allowed: {listed(self.scenes)}"
                )
        return tuple(name for name in self.scenes if not names or name in names)

    def check_data(self, scenes: Sequence[str], changes: Sequence[str] = ()) -> None:
        """Read the data of these scenes, each once, so that what is missing is said before hours of the first ones."""
        # For speed of start: a suite is also read for its names alone.
        from steelyard.data.scaling import load
        from steelyard.experiment.learning import LearningDescription

        seen: list[DataSettings] = []
        problems: dict[str, UserError] = {}
        for name in scenes:
            experiment = self.experiment(name, changes)
            assert isinstance(experiment, LearningDescription), "no suite has recommenders"
            if experiment.data in seen:
                continue
            seen.append(experiment.data)
            try:
                load(experiment.data)
            except UserError as error:
                problems[name] = error
        if problems:
            (first, error), *others = problems.items()
            also = f"; nor can those of task {listed([name for name, _ in others])} be read" if others else ""
            raise MachineError(f"task {first}: {error}{also}")


def suites() -> list[str]:
    """Return the names of the suites that come with the package."""
    folder = resources.files("steelyard.studies") / "suites"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_suite(name: str) -> Suite:
    """Return a suite by name."""
    if name not in suites():
        raise UserError(f"--suite: got {brief(name)}{nearest(name, suites())}; allowed: {listed(suites())}")
    document, text = _document(name)
    known = {"name": name, "sha256": hashlib.sha256(text).hexdigest()}
    return validated(Suite, {**document, **known}, f"suite {name}")


def _document(name: str) -> tuple[dict[str, Any], bytes]:
    """Return what a suite's file holds over the one that it extends, and the bytes of both."""
    text = resources.files("steelyard.studies").joinpath("suites", f"{name}.toml").read_bytes()
    document = parse(text.decode(), name)
    if (base := document.pop("extends", None)) is None:
        return document, text
    below, other = _document(str(base))
    return _over(below, document), other + text


def _over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with the fields of another put over its own, tables inside it alike."""
    found = dict(below)
    for key, value in above.items():
        inner = found.get(key)
        both = isinstance(inner, dict) and isinstance(value, dict)
        found[key] = _over(cast("dict[str, Any]", inner), cast("dict[str, Any]", value)) if both else value
    return found
