"""Whether a run's folder is what its run wrote: the chain, the signatures, and what can be computed again from it.

Where `chain.check` stops at the first round that differs, this goes on: each round is held against the head that was
written before it, so that every change is named in its own round, and by the marks in its own client.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.base import files
from steelyard.base.errors import UserError, brief, in_words
from steelyard.base.processor import in_words as in_words_of
from steelyard.base.processor import same_kind
from steelyard.contributions.document import Contributions
from steelyard.experiment.description import Description, stored_settings
from steelyard.experiment.loading import RecordedDescription, read_experiment
from steelyard.experiment.resuming import changed_since, versions
from steelyard.learning.records import RecordNoise
from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.ledger import Ledger
from steelyard.proof.signing import Keys
from steelyard.report.recomputing import look_at_updates
from steelyard.runs.chain import (
    Checked,
    Link,
    Records,
    chain_rows,
    checked,
    checkpoint_problem,
    one_moment,
)
from steelyard.runs.checkpoint import kept_checkpoints
from steelyard.runs.columns import Cohorts, read_cohorts, read_tested, runs_of
from steelyard.runs.database import Reader, reading
from steelyard.runs.facts import Promise, RunFacts, closing_problem, last_head, newest_round
from steelyard.runs.signatures import Finding, Findings, Signatures
from steelyard.weighing.rule import Rule, WeighingSettings
from steelyard.weighing.scores import parse_priority


def _look_at_rounds(db: Reader, folder: Path, found: Findings, keys: Keys | None) -> Checked:
    """Hold every round, checkpoint, line of the ledger and signature against the chain, in one walk.

    Signatures are checked by the keys in the folder, or by those that the checker trusts.
    """
    with one_moment(db):
        rows = chain_rows(db)
        sealed = [row for row in rows if row.head is not None]
        records, signatures = Records(db), Signatures(db, found, keys)
        for one in records.links(sealed):
            _look_at_round(records, one, found)
            signatures.add(one.round, one.statements)
        found.differ = {finding.round for finding in found.changed}
        signatures.look()
        shallow = checked(db, folder, rows, checkpoint_problem(db, sealed) if sealed else "")
        _look_at_the_end(db, found, keys)
    if not sealed:
        found.skip("it has no head yet: no checkpoint was written")
        return shallow
    # A checkpoint cannot follow a chain that is known to differ.
    if shallow.problem and not (found.differ and "checkpoint" in shallow.problem):
        found.change(shallow.problem)
    found.checked["chain"] = f"{len(sealed)} rounds, as written" if not found.differ else f"{len(sealed)} rounds"
    return shallow


def _look_at_the_end(db: Reader, found: Findings, keys: Keys | None) -> None:
    """Hold what stands beside the rounds against the closing record, and say which rounds the chain does not hold."""
    last, newest = last_head(db)[0], newest_round(db)
    if problem := closing_problem(db):
        found.closed = False
        found.change(problem)
    elif newest > last >= 0:
        words = "not in the chain yet: a resume runs them again"
        found.checked["rounds after the last checkpoint"] = f"up to {newest}, {words}"
        if keys is not None:
            found.skip(f"rounds after {last}, up to {newest}, have no head that the server signed")


def _look_at_round(records: Records, one: Link, found: Findings) -> None:
    """Note what is not as it was written: by client where the marks say whose, else of the whole round."""
    if gap := one.round != one.expected:
        found.change(f"missing from the chain: round {one.round} cannot be compared with it", one.expected)
    changes = list(records.changes(one.round))
    for federation, client, what in changes:
        found.change(f"{what} under {federation} is not as it was written", one.round, client)
    if not (gap or one.whole or changes):
        general = "its rules, its seeds or its salt" if one.round == 0 else "its figures, its models or its head"
        found.change(f"{general} are not as they were written", one.round)


SAME_EPSILON = 1e-6
"""An ε is the same up to this share: it is found by bisection."""
_TOGETHER = "all rules together"
TOLERANCE = 1e-12
"""Weights are the same up to this on every processor: they are computed in float64, whose rounding is 2e-16."""
_OF = "WHERE federation = ?"
WHOLE, CHANGED, UNCHECKED = 0, 1, 2
"""Exit codes of `steelyard verify`."""


@dataclass(frozen=True)
class Verification:
    """The answer of `steelyard verify`."""

    run: str
    head: str
    """After the last round that has one; empty before the first checkpoint."""
    round: int
    closing: str
    """The hash of the record that closes the run; what was kept of it elsewhere is held against this."""
    found: Findings

    @property
    def code(self) -> int:
        """What the command ends with: 0 intact, 1 modified, 2 not all can be checked."""
        if self.found.changed:
            return CHANGED
        return UNCHECKED if self.found.unchecked else WHOLE

    @property
    def verdict(self) -> str:
        """The answer in words."""
        return ("intact", "MODIFIED", "cannot be checked")[self.code]

    def document(self) -> VerificationJson:
        """Return it for programs."""
        return {
            "run": self.run,
            "verdict": self.verdict.lower(),
            "head": self.head,
            "round": self.round,
            "closing": self.closing,
            "changed": [_found(finding) for finding in self.found.changed],
            "unchecked": [_found(finding) for finding in self.found.unchecked],
            "checked": self.found.checked,
        }

    def lines(self) -> list[str]:
        """Return it for people: the verdict, what differs, what cannot be checked, what was looked at."""
        shown = [f"{self.run}: {self.verdict}"]
        shown += [f"  final hash (round {self.round}):", f"  {self.closing}"] if self.closing else []
        shown += [f"  modified: {finding.line()}" for finding in self.found.changed]
        shown += [f"  cannot be checked: {finding.line()}" for finding in self.found.unchecked]
        return [*shown, *(f"  {name}: {words}" for name, words in self.found.checked.items())]


def _made_on(info: Mapping[str, str]) -> str:
    """Name the processor that made a run; what is checked allows as much whatever a run says of it."""
    here = versions()
    other = "" if same_kind(info, here) else f"; checked on {in_words_of(here)}: no check depends on it"
    return f"{in_words_of(info)}{other}"


def _found(finding: Finding) -> FoundJson:
    return {"what": finding.what, "round": finding.round, "client": finding.client}


def verify(folder: Path, keys: Path | None = None, head: str | None = None, prefix: str | None = None) -> Verification:
    """Check a run's folder with nothing but the folder, and public keys where they are given.

    `head` is the final hash of the run that was kept elsewhere; `prefix` the head of any round, for a run that has gone
    on since.
    """
    trusted = None if keys is None else Keys.read(keys)
    kept = {
        name: _hash(f"--{name}", given) for name, given in (("head", head), ("prefix", prefix)) if given is not None
    }
    files.check_run(folder)
    found = Findings()
    with reading(folder) as db:
        chain = _look_at_rounds(db, folder, found, trusted)
        _look_at_kept(db, chain, kept, found)
        _look_at_models(db, folder, found)
        facts = db.facts()
        ((later,),) = db.execute("SELECT COUNT(*) FROM contributions WHERE source != 'run'").fetchall()
    if later:
        found.checked["contributions"] = f"rows found out after the run: {later}; not in the chain, not checked"
    for line in facts.differed[1:]:  # the first stands for the closing record
        found.change(line)
    if accepted := [*facts.accepted, *facts.differed]:
        found.checked["accepted when it continued"] = "; ".join(accepted)
    if (said := changed_since(folder, facts)) is not None:
        found.change(said)
    try:
        experiment = read_experiment(folder)
        with reading(folder) as db:
            found.checked["made on"] = _made_on(facts.others)
            ledger = _look_at_epsilon(folder, facts.privacy, found)
            rules = db.rows("federations", ("id", "name", "settings"), "ORDER BY name")
            if ledger is not None and (records := experiment.record_noise()) is not None:
                _look_at_batches(db, ledger, records, {row[1]: row[0] for row in rules}, facts, found)
            if counted := sum(_look_at_rule(db, experiment, *rule, found=found) for rule in rules):
                same = "differences are named above" if any("weight" in f.what for f in found.changed) else "the same"
                words = f"{counted} rounds computed again from criteria and rule"
                found.checked["weights"] = f"{words}, {same} (to {TOLERANCE:g})"
            look_at_updates(db, folder, experiment, found)
    except UserError as error:
        # A change that is named already may leave columns that cannot be read: the rest was looked at.
        if not found.changed:
            raise
        found.skip(str(error))
    return Verification(str(folder), chain.head, chain.round, chain.closing, found)


def _hash(option: str, given: str) -> str:
    """Return a hash that was kept elsewhere as runs write it; anything else is a mistake of who calls."""
    if not re.fullmatch("[0-9a-f]{64}", given.lower()):
        raise UserError(f"{option}: got {brief(given)}; allowed: 64 hexadecimal digits, as the run printed them")
    return given.lower()


def _look_at_kept(db: Reader, chain: Checked, kept: Mapping[str, str], found: Findings) -> None:
    """Hold the run against the hashes that somebody kept elsewhere."""
    head, prefix = kept.get("head"), kept.get("prefix")
    if head is not None and head != chain.closing:
        found.change(f"its final hash is not {head} but {chain.closing or 'missing'}")
    elif head is not None:
        found.checked["--head"] = "all that is in the chain and the closing record"
        if (newest := newest_round(db)) > chain.round:
            found.change(f"round {newest} stands after the end that was kept, which is round {chain.round}")
    if prefix is not None:
        row = db.execute("SELECT round FROM chain WHERE head = ?", (prefix,)).fetchone()
        if row is None:
            found.change(f"no round has the head {prefix}")
        else:
            found.checked["--prefix"] = f"rounds 0 to {row[0]}; nothing that came after them"


def _look_at_epsilon(folder: Path, promise: Promise | None, found: Findings) -> Ledger | None:
    """Add up the privacy ledger again and hold what the run says of it against the sum; returns the ledger."""
    path = folder / files.LEDGER
    if promise is None:
        return None
    if not files.is_file(path):
        found.change(f"{files.LEDGER} is gone, so that its ε cannot be added up")
        return None
    ledger = Ledger(path)
    said = {**promise.epsilon, _TOGETHER: promise.together}
    for name, epsilon in said.items():
        account = ledger.together() if name == _TOGETHER else ledger.account(name)
        again = account.epsilon(promise.delta)
        if not math.isclose(epsilon, again, rel_tol=SAME_EPSILON, abs_tol=SAME_EPSILON):
            found.change(f"ε {epsilon:.6g} of {in_words(name)}, where its ledger adds up to {again:.6g}")
    words = f"added up again from {len(ledger.charges)} lines of {files.LEDGER}"
    for name, clients in promise.clients.items():
        for client, epsilon in clients.items():
            again = spent(ledger.account(name).of(client), promise.delta)
            if not math.isclose(epsilon, again, rel_tol=SAME_EPSILON, abs_tol=SAME_EPSILON):
                found.change(
                    f"ε {epsilon:.6g} under {in_words(name)}, where its ledger adds up to {again:.6g}", None, client
                )
    found.checked["ε"] = f"{words}, differences are named above" if any("ε" in f.what for f in found.changed) else words
    return ledger


def _look_at_batches(
    db: Reader, ledger: Ledger, records: RecordNoise, rules: Mapping[str, int], facts: RunFacts, found: Findings
) -> None:
    """Hold the batches that were charged against the samples of each client that answered in a round.

    Simulated clients with a flaw may claim another number of samples than they train on.
    """
    charged: dict[tuple[str, int, str], list[tuple[Release, int]]] = {}
    for charge in ledger.charges:
        for client in charge.clients or ():
            charged.setdefault((charge.federation, charge.round, client), []).append((charge.release, charge.count))
    flawed = {name for clients in facts.flaws.values() for name in clients}
    answers = 0
    for name, key in rules.items():
        cohorts = read_cohorts(db, key, f"{_OF} ORDER BY round")
        for round, client, samples in zip(
            cohorts.round.tolist(), cohorts.client.tolist(), cohorts.samples.tolist(), strict=True
        ):
            if (who := cohorts.clients[client]) in flawed or round in found.differ:
                continue
            answers += 1
            release, steps = records.release(samples)
            lines = charged.get((name, round, who), [])
            if not any(_covers(line, release) and count == steps for line, count in lines):
                found.change(
                    f"no line of {files.LEDGER} for {steps} batches of {samples} samples under {in_words(name)}",
                    round,
                    who,
                )
    found.checked["batches"] = f"{answers} updates held against their samples and the lines of {files.LEDGER}"


def _covers(charged: Release, release: Release) -> bool:
    """Whether a line charges at least this release; noise that a budget asks for is found up to a rounding."""
    same = (charged.sampling, charged.mechanism) == (release.sampling, release.mechanism)
    return same and math.isclose(charged.rate, release.rate) and charged.noise <= release.noise * (1 + SAME_EPSILON)


def _look_at_models(db: Reader, folder: Path, found: Findings) -> None:
    """Hold the models of the checkpoints against the digests of their rounds."""
    rounds: list[str] = []
    if not found.closed:
        return
    for round, restored in kept_checkpoints(db, folder):
        if isinstance(restored, UserError):
            found.change(str(restored), round)
            continue
        models = list(restored.models(db))
        for name, of, same in models:
            if not same:
                found.change(f"the model of {in_words(name)} is not the one that it ended with", of)
        rounds += [str(round)] if models else []
    if rounds:
        found.checked["models"] = f"of the checkpoints after round {' and '.join(reversed(rounds))}, by their digests"


def _look_at_rule(db: Reader, experiment: Description, key: int, federation: str, text: str, *, found: Findings) -> int:
    """Compute a rule's weights and accuracies again, but not in rounds that differ: nothing follows from those.

    Returns in how many rounds there were weights to compute.
    """
    name, every = in_words(federation), experiment.resolved().store.clients_every
    columns = ("round", "accuracy", "priority", "kept_old", "answered")
    rows = db.rows("rounds", columns, f"{_OF} AND round <= ? ORDER BY round", key, last_head(db)[0])
    rounds = {row[0]: _Round(*row) for row in rows if row[0] not in found.differ}
    cohorts = read_cohorts(db, key, f"{_OF} ORDER BY round")
    weighed = {round: len(clients) for round, _, clients in cohorts.by_round()}
    for one in rounds.values():
        there = weighed.get(one.round, 0)
        if there != one.answered and (there or one.round % every == 0):
            found.change(f"{one.answered} clients answered under {name}, and {there} were weighed", one.round)
    settings = stored_settings(text)
    reason = "its settings are not of this version" if settings is None else _not_by_criteria(settings, experiment)
    counted = 0
    if settings is None or reason:
        found.checked[f"weights of {name}"] = f"not computed again: {reason}"
    else:
        counted = _compared(cohorts, Rule(settings), rounds, name, found)
    if isinstance(experiment, RecordedDescription) or experiment.rounds.leading is not None:
        return counted  # an app may say another accuracy; of a measure only the last round's sums are kept
    tested = read_tested(db, key, f"{_OF} ORDER BY round")
    numbers, at = runs_of(tested.round)
    means = np.bincount(at, tested.score * tested.samples) / np.bincount(at, tested.samples)
    again = dict(zip(numbers.tolist(), means.tolist(), strict=True))
    for one in rounds.values():
        expected = again.get(one.round, math.nan)
        if not np.isclose(math.nan if one.accuracy is None else one.accuracy, expected, atol=TOLERANCE, equal_nan=True):
            said = "no accuracy" if one.accuracy is None else f"accuracy {one.accuracy:.6g}"
            found.change(f"{said} under {name}, where the clients' tests give {expected:.6g}", one.round)
    return counted


class _Round(NamedTuple):
    """What a round of a rule says of its weighing and its test."""

    round: int
    accuracy: float | None
    priority: str | None
    kept_old: int
    answered: int


def _compared(cohorts: Cohorts, rule: Rule, rounds: Mapping[int, _Round], name: str, found: Findings) -> int:
    """Compare the weights of each round with what the rule makes of its criteria; returns the number of rounds."""
    counted = 0
    for round, entries, clients in cohorts.by_round():
        raw, weights = cohorts.raw[entries], cohorts.weight[entries]
        if round not in rounds:
            continue
        if not np.isfinite(raw).all() or not np.isfinite(weights).all():
            found.skip(f"its criteria or weights under {name} are not known", round)
            continue
        order = rounds[round].priority
        position = parse_priority(order, rule.names) if order and rule.ordered else None
        try:
            again = rule.weigh(raw, position, clients=clients)
        except (UserError, ValueError, FloatingPointError) as error:
            found.change(f"its criteria under {name} cannot be weighted: {error}", round)
            continue
        counted += 1
        wanted = again.weights
        if rounds[round].kept_old:
            wanted = np.zeros(len(clients))
            if rule.settings.when_zero != "keep" or not (again.uniform or len(again.all_zero) == len(rule.names)):
                found.change(f"it kept the old model under {name}, where criteria and rule give weights", round)
        for at in np.flatnonzero(np.abs(wanted - weights) > TOLERANCE).tolist():
            said = f"weight {weights[at]:.6g} under {name}, where criteria and rule give {wanted[at]:.6g}"
            found.change(said, round, clients[at])
    return counted


def _not_by_criteria(settings: WeighingSettings, experiment: Description) -> str:
    """Say why a rule's weights do not follow from stored criteria alone; empty where they do."""
    if experiment.privacy is not None and experiment.privacy.central is not None:
        return "central noise decides what each update counts"
    if experiment.weighed_beside:
        return experiment.weighed_beside
    if settings.trained_by == "server":
        return "no client is weighted"
    if settings.policy is not None and not settings.policy.of_measures:
        return "the policy looks at updates or remembers rounds"
    if settings.fit is not None:
        return "weights are fitted to the server's validation set"
    if settings.defence is not None:
        return "a robust rule decides what each update counts"
    if settings.bound is not None and settings.plugins:
        return "it would run code that the rule names"
    return ""


class FoundJson(TypedDict):
    """One thing that is not as it was written, or cannot be checked."""

    what: str
    round: int | None
    client: str | None


class VerificationJson(TypedDict):
    """Whether a run's folder is what its run wrote."""

    run: str
    verdict: str
    head: str
    round: int
    closing: str
    changed: list[FoundJson]
    unchecked: list[FoundJson]
    checked: dict[str, str]


class RecordedSite(TypedDict):
    """What a run knows of one client: training rows, rows by class, flaws, rounds, mean weight."""

    client: str
    rows: int | None
    labels: list[int]
    flaws: list[str]
    rounds: int
    weight: float | None


class Record(TypedDict):
    """A run to hand over; what it does not know it says in words."""

    name: str
    purpose: str
    rule: str
    recommended: bool
    """Whether it is the rule that the comparison recommends."""
    algorithm: str
    why: list[str]
    settings: object
    """As the run stored them."""
    beside: list[str]
    rounds: int
    measure: str
    result: float | None
    sites: list[RecordedSite]
    contributions: Contributions | str
    privacy: list[str]
    attacks: list[str]
    findings: list[str]
    """What `steelyard check` finds in the data."""
    notes: str
    versions: dict[str, str]
    hashes: dict[str, str]
    verified: dict[str, str]
    not_covered: str
