"""Whether a run's folder is what its run wrote: the chain, the signatures, and what can be computed again from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.base import files
from steelyard.base.errors import UserError, in_words
from steelyard.base.processor import in_words as in_words_of
from steelyard.base.processor import same_kind
from steelyard.experiment.continuing import changed_since
from steelyard.experiment.federations import stored_settings
from steelyard.experiment.loading import read_experiment
from steelyard.experiment.recorded import RecordedDescription
from steelyard.experiment.run_notes import versions
from steelyard.proof.signing import model_digest
from steelyard.report.documents.proof import FoundJson, VerificationJson
from steelyard.report.recomputing import look_at_updates
from steelyard.runs.checkpoint import kept_checkpoints
from steelyard.runs.columns import Cohorts
from steelyard.runs.database import reading
from steelyard.runs.history import History
from steelyard.runs.verifying import Finding, Findings, Keys, look_at_rounds
from steelyard.weighing.rule import Rule, WeighingSettings, parse_priority

TOLERANCE = 1e-12
"""Weights are the same up to this on every processor: they are computed in float64, whose rounding is 2e-16."""
_OF = "WHERE federation = ? ORDER BY round"
WHOLE, CHANGED, UNCHECKED = 0, 1, 2
"""Exit codes of `steelyard verify`."""


@dataclass(frozen=True)
class Verification:
    """The answer of `steelyard verify`."""

    run: str
    head: str
    round: int
    found: Findings

    @property
    def code(self) -> int:
        """What the command ends with: 0 whole, 1 changed, 2 not all can be checked."""
        if self.found.changed:
            return CHANGED
        return UNCHECKED if self.found.unchecked else WHOLE

    @property
    def verdict(self) -> str:
        """The answer in words."""
        return ("whole", "CHANGED", "cannot be checked")[self.code]

    def document(self) -> VerificationJson:
        """Return it for programs."""
        return {
            "run": self.run,
            "verdict": self.verdict.lower(),
            "head": self.head,
            "round": self.round,
            "changed": [_found(finding) for finding in self.found.changed],
            "unchecked": [_found(finding) for finding in self.found.unchecked],
            "checked": self.found.checked,
        }

    def lines(self) -> list[str]:
        """Return it for people: the verdict, what differs, what cannot be checked, what was looked at."""
        after = f"; head after round {self.round}: {self.head}" if self.head else ""
        shown = [f"{self.run}: {self.verdict}{after}"]
        shown += [f"  changed: {finding.line()}" for finding in self.found.changed]
        shown += [f"  cannot be checked: {finding.line()}" for finding in self.found.unchecked]
        return [*shown, *(f"  {name}: {words}" for name, words in self.found.checked.items())]


def _made_on(info: Mapping[str, str]) -> str:
    """Name the processor that made a run; what is checked allows as much whatever a run says of it."""
    here = versions()
    other = "" if same_kind(info, here) else f"; here {in_words_of(here)}: no check above or below depends on it"
    return f"{in_words_of(info)}{other}"


def _found(finding: Finding) -> FoundJson:
    return {"what": finding.what, "round": finding.round, "client": finding.client}


def verify(folder: Path, keys: Path | None = None, head: str | None = None) -> Verification:
    """Check a run's folder with nothing but the folder, and public keys where they are given.

    `head` is one that was kept elsewhere: the chain must hold it.
    """
    trusted = None if keys is None else Keys.read(keys)
    files.check_run(folder)
    found = Findings()
    with reading(folder) as db:
        chain = look_at_rounds(db, folder, found, trusted)
        if head is not None and (head.lower(),) not in db.execute("SELECT head FROM chain").fetchall():
            found.changed.append(Finding(f"no round has the head {head[:64]}; its last is {chain.head}"))
        _look_at_models(db, folder, found)
        ((later,),) = db.execute("SELECT COUNT(*) FROM contributions WHERE source != 'run'").fetchall()
    if later:
        found.checked["contributions"] = (
            f"those found out after the run (rows: {later}) are not in the chain and were not checked"
        )
    if (said := changed_since(folder)) is not None:
        found.changed.append(Finding(said))
    try:
        history = History(folder)
        found.checked["made on"] = _made_on(history.info)
        _look_at_weights(history, found)
        look_at_updates(folder, history, found, chain.round)
    except UserError as error:
        # A change that is named already may leave columns that cannot be read: the rest was looked at.
        if not found.changed:
            raise
        found.unchecked.append(Finding(str(error)))
    return Verification(str(folder), chain.head, chain.round, found)


def _look_at_models(db: Any, folder: Path, found: Findings) -> None:
    """Hold the models of the checkpoints against the digests of their rounds."""
    query = "SELECT model FROM digests d JOIN federations f ON f.id = d.federation WHERE f.name = ? AND d.round = ?"
    rounds: list[str] = []
    for round, restored in kept_checkpoints(db, folder):
        if isinstance(restored, UserError):
            found.changed.append(Finding(str(restored), round))
            continue
        kept = {name: state for name, state in restored.states.items() if state.parameters.numel()}
        for name, state in kept.items():
            if db.execute(query, (name, state.round)).fetchone() != (model_digest(state.parameters),):
                found.changed.append(
                    Finding(f"the model of {in_words(name)} is not the one that it ended with", state.round)
                )
        rounds += [str(round)] if kept else []
    if rounds:
        found.checked["models"] = f"of the checkpoints after round {' and '.join(reversed(rounds))}, by their digests"


def _look_at_weights(history: History, found: Findings) -> None:
    """Compute the weights again from the stored criteria, by the stored rules, but not in rounds that differ."""
    folder = history.folder
    skipped = _not_by_rule_alone(folder)
    counted = 0
    reasons: dict[str, str] = {}
    with reading(folder) as db:
        rows = db.rows("federations", ("id", "name", "rule", "seed", "settings"), "ORDER BY name")
        decided = {row[0]: db.rows("rounds", ("round", "priority", "kept_old"), _OF, row[0]) for row in rows}
    for key, name, rule, seed, text in rows:
        settings = stored_settings(text)
        reason = "its settings are not of this version" if settings is None else skipped or _not_of_criteria(settings)
        if settings is None or reason:
            reasons[in_words(name)] = reason
            continue
        # Of criteria that are known to be changed no weights follow.
        orders = {r: priority for r, priority, kept_old in decided[key] if not kept_old and r not in found.differ}
        counted += _compared(history.cohorts(rule, seed), Rule(settings), orders, in_words(name), found)
    if counted:
        words = "differences are named above" if any("weight" in f.what for f in found.changed) else "the same"
        found.checked["weights"] = f"{counted} rounds computed again from criteria and rule, {words} (to {TOLERANCE:g})"
    for name, reason in reasons.items():
        found.checked[f"weights of {name}"] = f"not computed again: {reason}"


def _compared(cohorts: Cohorts, rule: Rule, orders: Mapping[int, str | None], name: str, found: Findings) -> int:
    """Compare the weights of each round with what the rule makes of its criteria; returns the number of rounds."""
    counted = 0
    for round, entries, clients in cohorts.by_round():
        raw, weights = cohorts.raw[entries], cohorts.weight[entries]
        if round not in orders or not np.isfinite(raw).all() or not np.isfinite(weights).all():
            continue
        order = orders[round]
        position = parse_priority(order, rule.names) if order and rule.ordered else None
        try:
            again = rule.weigh(raw, position, clients=clients)
        except (UserError, ValueError, FloatingPointError) as error:
            found.changed.append(Finding(f"its criteria under {name} cannot be weighed: {error}", round))
            continue
        counted += 1
        for at in np.flatnonzero(np.abs(again.weights - weights) > TOLERANCE).tolist():
            said = f"weight {weights[at]:.6g} under {name}, where criteria and rule give {again.weights[at]:.6g}"
            found.changed.append(Finding(said, round, clients[at]))
    return counted


def _not_of_criteria(settings: WeighingSettings) -> str:
    """Say why a rule's weights do not follow from stored criteria alone; empty where they do."""
    if settings.trained_by == "server":
        return "no client is weighed"
    if settings.policy is not None and not settings.policy.made().of_measures:
        return "the policy looks at updates or remembers rounds"
    if settings.fit is not None:
        return "weights are fitted to the server's rows"
    if settings.defence is not None:
        return "a robust rule decides what each update counts"
    if settings.bound is not None and settings.plugins:
        return "it would run code that the rule names"
    return ""


def _not_by_rule_alone(folder: Path) -> str:
    """Say what else than a rule goes into the weights of a run; empty where nothing does."""
    experiment = read_experiment(folder)
    if experiment.privacy is not None and experiment.privacy.central is not None:
        return "central noise decides what each update counts"
    clock = getattr(experiment, "clock", None)
    if clock is not None and clock.late == "next":
        return "late updates are discounted"
    return "another framework combined them" if isinstance(experiment, RecordedDescription) else ""
