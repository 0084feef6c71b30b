"""What an arena tests: reading a candidate, and counting who opened the held-out seeds of a suite here."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from steelyard.algorithms.catalogue import known as algorithms
from steelyard.algorithms.catalogue import load_plugins as load_algorithms
from steelyard.base import files
from steelyard.base.errors import UserError, brief, listed
from steelyard.base.usercode import ALGORITHMS, load_code
from steelyard.experiment.description import Description, FederationSettings
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import Ask, load
from steelyard.experiment.rules import parse_rules
from steelyard.studies.suite import Suite
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
        return TypeAdapter(dict[str, list[str]]).validate_json(files.read_bytes(path, 10_000_000))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}); allowed: the file as it was") from None
