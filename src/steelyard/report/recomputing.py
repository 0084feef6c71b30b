"""The models of a run once more, round by round, from the updates that it kept: weights @ updates, the server's step.

Every kept update and every kept model is held against its digest in the chain; then each round's model must follow from
the one before, the updates and the weights, as far as floating point goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from steelyard.base import files
from steelyard.base.errors import UserError, in_words
from steelyard.experiment.description import Description, FederationSettings, stored_settings
from steelyard.messages.algorithm import Algorithm, ServerStep, Vectors
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Floats, Updates
from steelyard.proof.signing import DIGEST_BYTES, SALT_BYTES, model_digest
from steelyard.runs.columns import read_cohorts
from steelyard.runs.database import Reader
from steelyard.runs.digests import update_digest
from steelyard.runs.kept_updates import FOLDER, KeptRound, path_of_round, read_round

if TYPE_CHECKING:
    from steelyard.runs.signatures import Findings

TOLERANCE, ROUNDED = 1e-5, 2**-8
"""Sums of float32 numbers are the same to this share of the sum of their sizes, since processors add in other orders;
the second is for updates that were kept as bfloat16."""
_OF = "WHERE federation = ?"
OF_A_STEP = 1e-3
"""What a server's optimiser makes of a sum is the same to this share of its largest change."""


@dataclass(eq=False)
class _Federation:
    """One rule and seed of a run, and how far it was computed again."""

    name: str
    algorithm: Algorithm | None
    """None where the model cannot be computed again, for this reason:"""
    reason: str
    momentum: float
    of_changes: bool
    """Whether weights are of the updates' changes, and need not sum to 1."""
    weights: Mapping[int, tuple[tuple[str, ...], Floats]]
    """By round: the clients that were weighed, and their weights."""
    kept_old: frozenset[int]
    digests: Mapping[int, tuple[str, object, object]]
    """By round: the digest of the model, those of the updates, their salts."""
    model: torch.Tensor | None = None
    """After the round before; None where it is not known."""
    tensors: Vectors | None = field(default_factory=dict[str, torch.Tensor])
    """What the server keeps; None where it is not known any more."""
    counted: int = 0

    @property
    def words(self) -> str:
        """Its name as a line for people has it."""
        return in_words(self.name)


def look_at_updates(db: Reader, folder: Path, experiment: Description, found: Findings) -> None:
    """Hold what a run kept of each round in its chain against it, and compute the models again from it."""
    written = dict(db.rows("chain", ("round", "kept"), "WHERE head IS NOT NULL ORDER BY round"))
    there = set(files.names_in(folder / FOLDER))
    if experiment.store.keep != "updates" and not there and not any(written.values()):
        return
    rounded = experiment.store.keep_as != "float32"
    share = ROUNDED if rounded else TOLERANCE
    federations = _federations(db, experiment)
    for round, sha256 in written.items():
        kept = _kept(folder, round, sha256, found)
        for one in federations:
            if round in one.digests:
                before = len(found.changed)
                _look_at_digests(one, kept, round, found, rounded)
                _follow(one, kept, round, found, share, len(found.changed) > before)
    known = {path_of_round(folder, round).name for round, sha256 in written.items() if sha256}
    for name in sorted(there - known):
        found.change(f"{folder / FOLDER / name}: the run kept no such file")
    words = "each file by its SHA-256; rounded, so no client's by its digest" if rounded else "each by its digest"
    found.checked["kept updates"] = f"{len(known)} rounds, {words}"
    for one in federations:
        words = f"not computed again: {one.reason}"
        if one.algorithm is not None:
            words = f"{one.counted} rounds computed again from kept updates and weights, the same to {share:g}"
        found.checked[f"model of {one.words}"] = words


def _kept(folder: Path, round: int, written: str | None, found: Findings) -> KeptRound:
    """Return what is there of a round's kept updates, and note where that is not what the chain says."""
    if written is None:
        found.change("no updates of it were kept, and the experiment asks for them", round)
        return KeptRound()
    try:
        kept = read_round(folder, round)
    except UserError as error:
        found.change(str(error), round)
        return KeptRound()
    if kept.sha256 != written:
        found.change(f"{path_of_round(folder, round).name} in {FOLDER} is not the file that the run kept", round)
    return kept


def _look_at_digests(one: _Federation, kept: KeptRound, round: int, found: Findings, rounded: bool) -> None:
    """Hold the updates and the model that were kept of a round against the chain."""
    if not kept.sha256:
        return  # there is none, which was said
    model, digests, salts = one.digests[round]
    if one.name not in kept.models or model_digest(kept.models[one.name]) != model:
        found.change(f"the kept model of {one.words} is not the one that the round ended with", round)
    updates = kept.updates.get(one.name)
    content = None if updates is None else updates.payload.content()
    clients = () if updates is None else updates.clients
    if round in one.weights and clients != one.weights[round][0]:
        found.change(f"the kept updates of {one.words} are not of the clients that were weighted", round)
    elif rounded or content is None or round not in one.weights:
        return  # of rounds without rows of single clients (store.clients_every) the chain has no digests
    elif not isinstance(digests, bytes) or not isinstance(salts, bytes) or len(digests) != DIGEST_BYTES * len(clients):
        found.skip(f"the chain has no digests of the updates of {one.words}", round)
    else:
        for at, (client, part) in enumerate(zip(clients, content, strict=True)):
            salt = salts[at * SALT_BYTES : (at + 1) * SALT_BYTES]
            if update_digest(salt, part) != digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]:
                found.change(f"its kept update of {one.words} is not the one of its digest", round, client)


def _follow(one: _Federation, kept: KeptRound, round: int, found: Findings, share: float, changed: bool) -> None:
    """Compute the model of a round from the one before; the next one begins with what was kept."""
    before, after, updates = one.model, kept.models.get(one.name), kept.updates.get(one.name)
    one.model = after
    if one.algorithm is None or after is None:
        return
    if round == 0:
        one.tensors = one.algorithm.start(after)
        return
    payload = None if updates is None or round not in one.weights else updates.payload.dense
    if changed or before is None or one.tensors is None or (payload is None and round not in one.kept_old):
        one.tensors = None if type(one.algorithm).step is not Algorithm.step else one.tensors
        return
    if payload is None or updates is None or round in one.kept_old:
        again, allowed = before, torch.zeros_like(before)
    else:
        again, allowed = _again(one, one.algorithm, before, updates, payload, one.weights[round][1], share)
    apart = (again - after).abs()
    if not bool(torch.isfinite(again).all()):
        one.algorithm, one.reason = None, "its step needs the cohort's share of all clients, which is not kept"
    elif bool((apart > allowed).any()):
        said = f"the model of {one.words} is up to {float(apart.max()):.3g} from what its updates and weights give"
        found.change(said, round)
    else:
        one.counted += 1


def _again(
    one: _Federation,
    algorithm: Algorithm,
    before: torch.Tensor,
    updates: Updates,
    payload: DenseModels,
    weights: Floats,
    share: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model that follows, and by how much each of its numbers may differ."""
    # What was not trained is in every model as it was, whatever a kept file says of where that lies.
    payload = DenseModels(payload.models)
    average = payload.combine(before, weights)
    sizes = torch.as_tensor(np.abs(weights), dtype=torch.float32) @ payload.models.abs()
    if one.of_changes:
        rest = float(1 - weights.sum())
        average, sizes = average + rest * before, sizes + abs(rest) * before.abs()
    allowed = share * sizes + torch.finfo(torch.float32).tiny
    if type(algorithm).step is Algorithm.step:
        return average, allowed
    assert one.tensors is not None
    given = ServerStep(
        *(before, average, weights, one.tensors, float("nan"), one.momentum),
        *(payload.models, updates.vectors, updates.steps),
    )
    again, one.tensors = algorithm.step(given)
    # What the server divides by may be small: then the rounding of a sum grows with it.
    return again, torch.full_like(allowed, OF_A_STEP * float((again - before).abs().max()) + float(allowed.max()))


def _federations(db: Reader, experiment: Description) -> list[_Federation]:
    found: list[_Federation] = []
    for key, name, text in db.rows("federations", ("id", "name", "settings"), "ORDER BY name"):
        settings = stored_settings(text)
        reason = "its settings are not of this version" if settings is None else _not_computed(settings, experiment)
        named = None if settings is None or reason else settings.algorithm or experiment.algorithm
        policy = None if settings is None else settings.policy
        cohorts = read_cohorts(db, key, f"{_OF} ORDER BY round")
        found.append(
            _Federation(
                *(name, None if named is None else named.made(), reason, experiment.momentum),
                policy is not None and policy.applies_to == "updates",
                {round: (clients, cohorts.weight[entries]) for round, entries, clients in cohorts.by_round()},
                frozenset(round for (round,) in db.rows("rounds", ("round",), f"{_OF} AND kept_old = 1", key)),
                {row[0]: row[1:] for row in db.rows("digests", ("round", "model", "updates", "salts"), _OF, key)},
            )
        )
    return found


def _not_computed(settings: FederationSettings, experiment: Description) -> str:
    """Say why a rule's model cannot be computed again from kept updates and weights; empty where it can."""
    if settings.trained_by == "server":
        return "no client trained it"
    if settings.defence is not None and settings.defence.robust:
        return "a robust rule takes more than the weighted sum"
    named = settings.algorithm or experiment.algorithm
    if named.plugins:
        return "it would run code that the run names"
    made = named.made()
    if made.factored:
        return f"{made.name} works on parts of the network, which the run's folder does not hold"
    if experiment.store.keep_as != "float32" and type(made).step is not Algorithm.step:
        return f"{made.name} continues from rounded sums of updates"
    return ""
