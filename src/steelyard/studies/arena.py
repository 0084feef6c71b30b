"""What one arena is: a suite's scenes and seeds with a candidate, kept in a file of its folder, so that it goes on."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from steelyard.algorithms.catalogue import known as algorithms
from steelyard.algorithms.catalogue import load_plugins as load_algorithms
from steelyard.base import files
from steelyard.base.errors import UserError, brief, listed, own_folder
from steelyard.base.files import ARENA_FILE, is_file
from steelyard.base.settings import validated
from steelyard.base.usercode import ALGORITHMS, load_code
from steelyard.experiment.description import Description, FederationSettings, federation_label
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import Ask, content_name, load, rename_code, unnamed_folder
from steelyard.experiment.parts import PART, Part
from steelyard.experiment.rules import parse_rules
from steelyard.studies.suite import TUNING, Suite, load_suite
from steelyard.studies.sweep import differing, read_plan, write_plan
from steelyard.weighing import criterion


@dataclass(frozen=True)
class Candidate:
    """A rule with its algorithm, and the name that tables have for it."""

    label: str
    settings: FederationSettings


def read_candidates(text: str, rule: str | None, suite: Suite, ask: Ask) -> list[Candidate]:
    """Read a candidate, or several settings of one of which the best is to be chosen; as many as rivals had.

    `rule` says which rule of a file is meant, in words that may join what the file defines. `ask` is called before code
    of a file runs.
    """
    scene = next(iter(suite.scenes))
    if text.endswith(".py"):
        experiment, word = _of_code(text, rule, suite.experiment(scene), ask)
    elif text.endswith(".toml"):
        experiment, word = load(text, ask=ask), rule
        if not isinstance(experiment, LearningDescription):
            raise UserError(f"{text}: trains no model that a server weighs; allowed: an experiment of kind 'learning'")
    else:
        if rule is not None:
            raise UserError(f"--rule: got {brief(rule)} beside the rule {brief(text)}; allowed: with a file")
        experiment, word = suite.experiment(scene), text
    found = _rules(word, experiment) if word is not None else dict([next(iter(experiment.rules().items()))])
    if len(found) > suite.tuning.budget:
        raise UserError(
            f"arena: got {len(found)} rules ({listed(found)}); allowed: one, or up to {suite.tuning.budget} settings "
            "of one, as rivals had"
        )
    return [_checked(Candidate(label, settings), suite, scene) for label, settings in found.items()]


def _rules(word: str, experiment: Description) -> dict[str, FederationSettings]:
    try:
        return parse_rules([word], experiment)
    except UserError as error:
        # The words are those of `compare --rules`; here they are the candidate.
        raise UserError(str(error).replace("--rules:", "arena:", 1)) from None


def _checked(candidate: Candidate, suite: Suite, scene: str) -> Candidate:
    if candidate.label == suite.baseline:
        raise UserError(
            f"arena: got '{suite.baseline}', which candidates are held against; allowed: any other rule, such as "
            f"{listed(suite.rivals[1:])}"
        )
    known = parse_rules(suite.rivals, suite.experiment(scene))
    if candidate.label in known and known[candidate.label] != candidate.settings:
        raise UserError(
            f"arena: got another rule by the name '{candidate.label}', which one of the rivals has; allowed: another "
            "weighing.name"
        )
    return candidate


def _of_code(text: str, rule: str | None, base: Description, ask: Ask) -> tuple[Description, str]:
    """Load a file of the user's own; return an experiment that names it, and the rule that is meant."""
    path = Path(text).resolve()
    if not path.is_file():
        raise UserError(f"arena: there is no file {brief(text)}; allowed: the path of a Python file, or a rule's name")
    ask(text, {"arena": text})
    load_algorithms([str(path)])
    criterion.load_plugins([str(path)])
    module = load_code(str(path), "arena", ALGORITHMS).__name__
    mine = [name for name, made in algorithms().items() if made.__module__ == module]
    measures = [name for name, each in criterion.known().items() if getattr(each.measure, "__module__", "") == module]
    if not mine and not measures:
        raise UserError(f"{text}: defines no criterion and no algorithm; allowed: one of them, as the guide shows")
    if rule is None and len(mine) + len(measures) > 1:
        raise UserError(f"{text}: defines {listed((*mine, *measures))}; allowed: --rule with the rule that is meant")
    fields = {
        "weighing.plugins": [str(path)] if measures else [],
        "algorithm": {"name": "fedavg", **({"plugins": [str(path)]} if mine else {})},
    }
    return base.changed(fields, where=text), rule or (*mine, *measures)[0]


# Who opened the held-out seeds of a suite here.


OPENED = "opened.json"


def state_folder() -> Path:
    """Return where the list lies: $STEELYARD_STATE, else steelyard/ in the user's folder for state."""
    given = os.environ.get("STEELYARD_STATE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "steelyard"


def opening(suite: str, candidate: Mapping[str, Any]) -> int:
    """Return which candidate opens the held-out seeds of a suite, counted from 1, and note it; the same has its number.

    `candidate` is its description, with code by its content.
    """
    path = state_folder() / OPENED
    digest = hashlib.sha256(json.dumps(candidate, sort_keys=True).encode()).hexdigest()
    mine = _read(path).get(suite, [])
    if digest not in mine:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.open_lock(path.with_suffix(".lock")) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # two that open at once must not get one number
                found = _read(path)
                mine = found.setdefault(suite, [])
                if digest not in mine:
                    mine.append(digest)
                    files.write(path, f"{json.dumps(found, indent=1)}\n".encode())
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written: {error.strerror}; allowed: a writable folder (STEELYARD_STATE)"
            ) from error
    return mine.index(digest) + 1


def _read(path: Path) -> dict[str, list[str]]:
    try:
        found: Any = json.loads(files.read_bytes(path, 10_000_000))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}); allowed: the file as it was") from None
    lists = cast("dict[str, Any]", found).values() if isinstance(found, dict) else [None]
    if not all(isinstance(each, list) for each in lists):
        raise UserError(f"{path}: holds something else than who opened which seeds; allowed: the file as it was")
    return cast("dict[str, list[str]]", found)


# The arena, kept in a file of its folder.


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
        label, settings = self.candidate.label, self.candidate.settings
        named = settings if federation_label(settings) == label else settings.model_copy(update={"name": label})
        weighing = named.model_dump(mode="json", exclude_none=True)
        experiment = {"algorithm": weighing.pop("algorithm", {}), "weighing": weighing, "beside": {}}
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
