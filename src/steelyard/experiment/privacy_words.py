"""What a rule asks for, in the plain words in which privacy is checked: privacy stands below rules and criteria."""

from __future__ import annotations

import math

from steelyard.privacy.combinations import Asked, AskedCriterion
from steelyard.weighing import criteria as registry
from steelyard.weighing.needs import Offers
from steelyard.weighing.rule import WeighingSettings, label


def asked_of(rule: WeighingSettings, offers: Offers) -> Asked:
    """Return what a rule asks for; criteria that no loaded plugin defines yet are left out and checked once it is."""
    known = registry.known()
    defence = rule.defence
    plain = defence is None or (defence.rule == "none" and not defence.mix)
    return Asked(
        rule=label(rule),
        criteria=tuple(_asked(known[name], offers) for name in rule.criteria if name in known),
        clients_train=rule.trained_by == "clients",
        normalise=rule.normalise,
        adjust=rule.adjust is not None,
        fit=rule.fit is not None,
        defence="" if plain or defence is None else defence.rule,
        bound=rule.bound is not None,
        capped=rule.max_weight is not None or rule.max_shares is not None,
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
