"""The privacy guarantee of a run: made ready for the loop, and what the run's record and its notes say of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.base import files
from steelyard.base.errors import UserError, listed
from steelyard.experiment.checks import released_by_clients
from steelyard.privacy.accounting import check_accounting
from steelyard.privacy.clipping import DeviceNoise
from steelyard.privacy.ledger import Ledger
from steelyard.privacy.planning import device_noise
from steelyard.privacy.settings import PrivacySettings
from steelyard.runs.facts import Promise

if TYPE_CHECKING:
    from steelyard.clients.protocol import Clients
    from steelyard.experiment.description import Description
    from steelyard.rounds.private import PrivateRounds
    from steelyard.rounds.state import Federation, Plan, RoundState, States
    from steelyard.weighing.criterion import Criterion


def criteria_bounds(privacy: PrivacySettings, criteria: Sequence[Criterion], classes: int | None) -> dict[str, float]:
    """Return the largest values of criteria that noise must cover: as given, or what the criterion itself allows."""
    found = {each.name: privacy.criteria_bounds.get(each.name, each.most(classes)) for each in criteria}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def noise_of_devices(
    privacy: PrivacySettings, criteria: Sequence[Criterion], classes: int | None, rounds: int
) -> DeviceNoise:
    """Return what devices do to their answers; the same on a node as in a simulation."""
    measured = released_by_clients(privacy, criteria)
    noise = 0.0 if privacy.records is not None else device_noise(privacy, rounds, len(measured))
    return DeviceNoise(privacy, noise, criteria_bounds(privacy, measured, classes))


def private_rounds(
    experiment: Description, plan: Plan, federations: Sequence[Federation], clients: Clients
) -> PrivateRounds | None:
    """Return what keeps an experiment's guarantee; None where it gives none. Its ledger is opened with the folder."""
    privacy = experiment.privacy
    if privacy is None or not privacy.noise:
        return None
    # For speed of start: rounds import torch.
    from steelyard.rounds.private import PrivateRounds

    check_accounting()
    criteria = {each.name: each for federation in federations for each in federation.rule.criteria}
    private = PrivateRounds(
        privacy,
        plan,
        bounds=criteria_bounds(privacy, list(criteria.values()), experiment.capabilities().classes),
        device_criteria=len(released_by_clients(privacy, list(criteria.values()))),
        records=experiment.record_noise(),
        samples=clients.samples,
    )
    private.prepare(federations, {federation.seed: clients.names(federation.seed) for federation in federations})
    return private


def open_ledger(folder: Path, *, begun: bool) -> Ledger:
    """Return the ledger in a run's folder.

    A run that has begun and has lost its ledger is refused: nobody could say any more what it has released.
    """
    path = folder / files.LEDGER
    if begun and not files.is_file(path):
        raise UserError(
            f"{path}: the ledger of this run is gone, so what it has released is unknown; allowed: the file as it was"
        )
    return Ledger(path)


def remaining(
    states: dict[str, RoundState], federations: Sequence[Federation], private: PrivateRounds | None
) -> dict[str, RoundState]:
    """Return the states of a resumed run; a federation whose budget allows no further round is at its end."""
    if private is None or not states:
        return states
    ended = [f.name for f in federations if not private.affords(f, (states[f.name].round + 1,))]
    return {name: replace(state, finished=state.finished or name in ended) for name, state in states.items()}


def guarantee_record(private: PrivateRounds, federations: Sequence[Federation], states: States) -> Promise:
    """Return what was guaranteed and what was spent, as a run's record keeps it."""
    settings, kept = private.settings, [f for f in federations if f.rule.settings.trained_by == "clients"]
    section, source = settings.noisy, settings.source
    assert section is not None
    assert source is not None
    return Promise(
        model=source,
        delta=private.delta,
        budget=settings.budget.epsilon,
        accountant="pld",
        clip=section.clip,
        noise={f.name: private.noise(f.name) for f in kept},
        epsilon={f.name: private.epsilon(f.name) for f in kept},
        clients={f.name: private.by_client(f.name) for f in kept} if source == "records" else {},
        together=private.ledger.together().epsilon(private.delta),
        neighbours=private.neighbours,
        charges=len(private.ledger.charges),
        ended={f.name: states[f.name].round for f in kept if _ended(private, f, states[f.name])},
        notes=guarantee_notes(settings, [name for f in kept for name in f.rule.names]),
    )


def _ended(private: PrivateRounds, federation: Federation, state: RoundState) -> bool:
    """Whether the budget ended a federation before its last planned round."""
    rests = state.finished and not state.ended and state.round < private.plan.rounds
    return rests and not private.affords(federation, (state.round + 1,))


def guarantee_notes(privacy: PrivacySettings, criteria: Sequence[str]) -> list[str]:
    """Return what a reader must know of a guarantee: what it rests on, and what it does not cover."""
    notes: list[str] = []
    names = listed(dict.fromkeys(name for name in criteria if name != "EQ"))
    if privacy.criteria == "public" and names:
        notes.append(f"criteria ({names}) are declared public: the guarantee does not cover them")
    if privacy.criteria == "charged" and names:
        notes.append(f"criteria ({names}) carry noise and are charged to the budget")
    if privacy.aggregation is not None:
        kind = "masks" if privacy.aggregation.kind == "secure" else privacy.aggregation.kind
        notes.append(
            f"updates are hidden by {kind}: the server sees their weighted sum, and criteria and losses in the open"
        )
    if privacy.central is not None:
        notes.append("the server is trusted, and so is this run's folder: it holds figures of single clients")
    if privacy.records is not None:
        notes.append("how many samples each client has, and what [data] makes of columns, counts as known")
    if privacy.noise:
        notes.append("scores that clients report of their test rows are not covered by the guarantee")
    return notes


def ended_early(promise: Promise, rounds: int) -> list[str]:
    """Return a line for each federation that its budget ended before the last planned round."""
    return [
        f"{name}: stopped after round {round} of {rounds}: another round would pass the budget (ε "
        f"{promise.epsilon[name]:.4g} of {promise.budget:g} spent at δ = {promise.delta:g})"
        for name, round in promise.ended.items()
    ]
