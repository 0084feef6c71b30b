"""What one arena is: a suite's scenes and seeds with a candidate, kept in a file of its folder, so that it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from steelyard.arena.candidate import Candidate
from steelyard.arena.openings import opening
from steelyard.arena.suite import Suite, load_suite
from steelyard.arena.tuning import TUNING
from steelyard.base.errors import UserError, own_folder
from steelyard.base.files import ARENA_FILE, is_file
from steelyard.base.settings import validated
from steelyard.experiment.code import content_name, rename_code
from steelyard.experiment.description import Description
from steelyard.experiment.federations import FederationSettings, put_federations
from steelyard.experiment.folders import unnamed_folder
from steelyard.experiment.job_array import PART, Part
from steelyard.experiment.rule_words import parse_rules
from steelyard.sweeps.plan_file import differing, read_plan, write_plan

SCENES = "scenes"
"""The folder in an arena's folder that holds one run for each scene."""


@dataclass(frozen=True)
class Arena:
    """A candidate, and the scenes, seeds and changes with which a suite tests it."""

    suite: Suite
    candidate: Candidate
    scenes: tuple[str, ...]
    seeds: tuple[int, ...]
    changes: tuple[str, ...] = ()
    tried: Mapping[str, float] = field(default_factory=dict[str, float])
    """The settings among which the candidate was chosen, with their accuracy; empty where there was one."""
    opened: int = 0
    """--until-decided: the candidate is the so manyth that opened the held-out seeds; 0 otherwise."""
    part: Part | None = None
    """Which share of the scenes runs here."""

    @property
    def whole(self) -> bool:
        """Whether this is the suite as it is frozen: all scenes, all seeds that report, nothing changed."""
        seeds = self.suite.held_out if self.opened else self.suite.report
        return self.scenes == tuple(self.suite.scenes) and self.seeds == seeds and not self.changes

    @property
    def own(self) -> list[str]:
        """The scenes that run here: all, or those of the part."""
        return list(self.scenes) if self.part is None else self.part.share(self.scenes, "scenes")

    @property
    def batches(self) -> list[tuple[int, ...]]:
        """The seeds in the order in which they are run, up to the next look; all at once unless until decided."""
        size = self.suite.batch if self.opened else len(self.seeds)
        return [self.seeds[start : start + size] for start in range(0, len(self.seeds), size)]

    @property
    def draft(self) -> bool:
        """Whether it runs on the seeds for choosing."""
        return set(self.seeds) <= set(self.suite.choose)

    def scene(self, name: str, *, rivals: Sequence[str] = (), candidate: bool = True) -> Description:
        """Return the experiment of a scene with its rules: these rivals, else all, and the candidate.

        Until decided, only the baseline runs beside the candidate: further seeds are for the one question.
        """
        rivals = rivals or ([self.suite.baseline] if self.opened else ())
        experiment = self.suite.experiment(name, self.changes)
        rules = parse_rules(rivals or self.suite.rivals, experiment)
        if candidate:
            rules[self.candidate.label] = self.candidate.settings
        return self.suite.comparison(name, rules, self.seeds[0], self.changes)

    def rivals_of(self, name: str) -> Description:
        """Return the experiment of a scene without the candidate, for one in which it failed."""
        rules = self.scene(name).rules()
        rules.pop(self.candidate.label, None)
        return self.suite.comparison(name, rules, self.seeds[0], self.changes)

    def document(self) -> dict[str, Any]:
        """Return it as its file holds it."""
        experiment: dict[str, Any] = {}
        put_federations(experiment, {self.candidate.label: self.candidate.settings})
        return {
            "suite": self.suite.name,
            "version": self.suite.version,
            "sha256": self.suite.sha256,
            "scenes": list(self.scenes),
            "seeds": list(self.seeds),
            "changes": list(self.changes),
            "tried": dict(self.tried),
            "opened": self.opened,
            **({} if self.part is None else {PART: str(self.part)}),
            "candidate": self.candidate.label,
            "experiment": experiment,
        }


def plan(
    suite: Suite,
    candidate: Candidate,
    *,
    scenes: Sequence[str] = (),
    seeds: int | None = None,
    draft: bool = False,
    until_decided: bool = False,
    changes: Sequence[str] = (),
    tried: Mapping[str, float] | None = None,
    part: Part | None = None,
) -> Arena:
    """Return an arena; a scene that cannot be made of the suite and the changes is refused before anything runs.

    `until_decided` notes that the candidate opens the held-out seeds.
    """
    if until_decided and (draft or part is not None):
        other = "--draft" if draft else "--part"
        raise UserError(f"--until-decided: got it with {other}; allowed: one of them, as a look needs every scene")
    offered = suite.held_out if until_decided else suite.choose if draft else suite.report
    if seeds is not None and not 1 <= seeds <= len(offered):
        raise UserError(f"--seeds: got {seeds}; allowed: a whole number from 1 to {len(offered)}, the suite's seeds")
    planned = Arena(
        suite, candidate, suite.chosen(scenes), offered[:seeds], tuple(changes), tried=tried or {}, part=part
    )
    for name in planned.scenes:
        planned.scene(name, candidate=False)
    assert planned.own, "a part has a scene or is refused"
    if not until_decided:
        return planned
    # Seeds that open once are not spent on a machine that cannot run them.
    suite.check_data(planned.scenes, changes)
    described = planned.document()["experiment"]
    rename_code(described, content_name)
    return replace(planned, opened=opening(f"{suite.name} {suite.version}", described))


def is_arena(folder: Path) -> bool:
    """Whether a folder holds an arena."""
    return is_file(folder / ARENA_FILE)


def read_arena(folder: Path) -> Arena:
    """Return the arena that a folder holds; none of the code that its candidate names is run."""
    path = folder / ARENA_FILE
    return arena_of(read_plan(path), str(path))


def arena_of(document: dict[str, Any], where: str) -> Arena:
    """Return the arena that a document describes; one of another version of the suite is refused."""
    try:
        suite = load_suite(str(document["suite"]))
        if (document["version"], document["sha256"]) != (suite.version, suite.sha256):
            raise UserError(
                f"{where}: is of version {document['version']} of the suite {suite.name}, and this package has version "
                f"{suite.version}; allowed: the package that made it"
            )
        weighing = {**document["experiment"]["weighing"], "algorithm": document["experiment"]["algorithm"] or None}
        candidate = Candidate(str(document["candidate"]), validated(FederationSettings, weighing, where))
        seeds, changes = tuple(map(int, document["seeds"])), tuple(map(str, document["changes"]))
        scenes = suite.chosen(list(map(str, document["scenes"])))
        tried = {str(label): float(value) for label, value in document["tried"].items()}
        opened = int(document["opened"])
        part = Part.read(str(document[PART]), f"{where}: {PART}") if PART in document else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{where}: is cut off or changed ({error!r}); allowed: the file as it was written") from None
    if not seeds:
        raise UserError(f"{where}: names no seed; allowed: the file as it was written")
    return Arena(suite, candidate, scenes, seeds, changes, tried, opened, part)


def tuning_folder(suite: Suite, out: Path | None) -> Path:
    """Return the folder in which settings are tried: the one given, which may hold them already, else a new one."""
    if out is None:
        return unnamed_folder(suite.experiment(next(iter(suite.scenes))), "arena")
    folder = own_folder(out, "--out")
    if folder.exists() and not is_arena(folder) and any(entry.name != TUNING for entry in folder.iterdir()):
        raise UserError(f"--out: {folder} is not empty; allowed: a new folder")
    return folder


def arena_folder(arena: Arena, out: Path | None) -> Path:
    """Return the folder of an arena, new or with the same arena in it; anything else is refused.

    Scenes that the arena in it did not have yet are added to it, so that some can be run first.
    """
    base = arena.suite.experiment(arena.scenes[0])
    folder = unnamed_folder(base, "arena") if out is None else own_folder(out, "--out")
    if is_arena(folder):
        before = held = read_arena(folder)
        if held.suite == arena.suite and not (held.part or arena.part or arena.opened):
            arena = replace(arena, scenes=arena.suite.chosen([*held.scenes, *arena.scenes]))
            before = replace(held, scenes=arena.scenes)
        changed = differing(before.document(), arena.document())
        if changed is not None:
            raise UserError(f"--out: {folder} holds another arena, which differs in {changed}; allowed: a new folder")
        if held.scenes != arena.scenes:
            _write(arena, folder, [name for name in arena.own if name not in held.scenes])
    elif folder.exists() and any(entry.name != TUNING for entry in folder.iterdir()):
        raise UserError(f"--out: {folder} is not empty; allowed: a new folder, which gets one run for each scene")
    else:
        _write(arena, folder, arena.own)
    return folder


def _write(arena: Arena, folder: Path, new: Sequence[str]) -> None:
    """Write what an arena is, once the data of its new scenes are there: without them no folder is left behind."""
    arena.suite.check_data(new, arena.changes)
    write_plan(folder / ARENA_FILE, arena.document())
