"""What a rule asks for, in the plain words in which privacy is checked: privacy stands below rules and criteria."""

from __future__ import annotations

import math

from steelyard.algorithms.algorithm import Algorithm
from steelyard.errors import UserError, listed
from steelyard.privacy.aggregation_settings import FEWEST, AggregationSettings
from steelyard.privacy.combinations import Asked, AskedCriterion
from steelyard.privacy.hidden import check_cohort
from steelyard.privacy.settings import PrivacySettings
from steelyard.rounds.settings import RoundSettings
from steelyard.weighing import criteria as registry
from steelyard.weighing.needs import Offers
from steelyard.weighing.rule import WeighingSettings, label


def asked_of(rule: WeighingSettings, offers: Offers) -> Asked:
    """Return what a rule asks for; criteria that no loaded plugin defines yet are left out and checked once it is."""
    known = registry.known()
    defence = rule.defence
    return Asked(
        rule=label(rule),
        criteria=tuple(_asked(known[name], offers) for name in rule.criteria if name in known),
        clients_train=rule.trained_by == "clients",
        normalise=rule.normalise,
        adjust=rule.adjust is not None,
        fit=rule.fit is not None,
        defence=defence.rule if defence is not None and defence.robust else "",
        bound=rule.bound is not None,
        capped=rule.max_weight is not None or rule.max_shares is not None,
    )


def check_cohorts(aggregation: AggregationSettings, rounds: RoundSettings, clients: int | None) -> None:
    """Refuse rounds whose cohorts could be too small to hide in, or too large for the words; `clients` where known.

    By Poisson sampling a cohort may have any size from `rounds.min_clients` to all clients.
    """
    if rounds.sampling == "poisson" and rounds.min_clients < FEWEST:
        raise UserError(
            f"rounds.min_clients: got {rounds.min_clients} with rounds.sampling = 'poisson' and privacy.aggregation, "
            "where chance may draw a cohort of one or two, in which nobody can hide; allowed: at least "
            f"{FEWEST} (a smaller cohort is then drawn again with so many), or rounds.sampling = 'fixed'"
        )
    if clients is None:
        return
    most = clients if rounds.sampling == "poisson" else rounds.cohort(clients)
    check_cohort(aggregation, most)


def check_names(privacy: PrivacySettings) -> None:
    """Refuse numbers given for criteria that there are not; call it once plugins are loaded, or where there are none.

    A wrong name would be passed over, and the promise would not be the one that was meant.
    """
    references = {} if privacy.central is None else privacy.central.references
    for field, given in (("central.references", references), ("criteria_bounds", privacy.criteria_bounds)):
        for name in given:
            if name not in registry.known():
                raise UserError(
                    f"privacy.{field}: got '{name}', which is no criterion; allowed: {listed(registry.known())}"
                )


def check_sums(privacy: PrivacySettings | None, algorithm: Algorithm) -> None:
    """Refuse an algorithm whose server needs more than one noisy or hidden sum of a round."""
    if privacy is None:
        return
    fields = {"central": privacy.central, "local": privacy.local, "aggregation": privacy.aggregation}
    field = next((name for name, section in fields.items() if section is not None), None)
    if field is None:
        return
    if algorithm.sends:
        raise UserError(
            f"privacy.{field}: {algorithm.name} has clients send {listed(algorithm.sends)} beside their models, and a "
            "second vector is a second release; allowed: an algorithm that sends models alone"
        )
    if algorithm.counts_steps and field == "local":
        raise UserError(
            f"privacy.local: the server of {algorithm.name} counts the steps of each client, which devices with noise "
            "do not report; allowed: an algorithm that counts none"
        )
    if algorithm.sees == "models" and field != "local":
        raise UserError(
            f"privacy.{field}: the server of {algorithm.name} steps from single updates, and only their sum is told; "
            "allowed: an algorithm that needs the sum alone"
        )


def _asked(criterion: registry.Criterion, offers: Offers) -> AskedCriterion:
    most = criterion.most(offers.classes)
    return AskedCriterion(
        name=criterion.name,
        measured_by=criterion.measured_by,
        of_models=criterion.needs.models,
        own=criterion.of_one,
        of_devices=criterion.measured_by == "server" and criterion.needs.models,
        most=None if math.isinf(most) else most,
    )
