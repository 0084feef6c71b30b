"""Which promises cannot be kept together with what an experiment asks for: refused before the run, with the reason.

The description of an experiment says in plain words what a rule asks for (`Asked`), since rules and criteria stand
above this room; every check below is one sentence that says why.
"""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.errors import UserError
from steelyard.privacy.settings import PrivacySettings


@dataclass(frozen=True)
class AskedCriterion:
    """One criterion of a rule, as far as privacy is concerned."""

    name: str
    measured_by: str = "client"
    """Who measures it: "client" or "server"."""
    of_models: bool = False
    """Whether the server looks at single updates for it."""
    own: bool = True
    """Whether it is known to follow from the client's own data and update alone, never from other clients'."""
    of_devices: bool = False
    """Whether it tells of the training data of a round (a loss, a distance), so that nobody can know it beforehand."""
    most: float | None = None
    """The largest value that it can have; None where only the data can tell."""


@dataclass(frozen=True)
class Asked:
    """What one rule of an experiment asks for."""

    rule: str
    criteria: tuple[AskedCriterion, ...] = ()
    clients_train: bool = True
    """False for the control that trains on the server's rows alone."""
    normalise: str = "share"
    adjust: bool = False
    fit: bool = False
    defence: str = ""
    """The robust rule; empty for the plain weighted sum."""
    bound: bool = False
    """Whether what clients say is cut at a multiple of the cohort's median."""
    capped: bool = False
    """Whether no client's weight can pass a cap that is known beforehand."""


def check_combination(privacy: PrivacySettings | None, asked: Asked) -> None:
    """Refuse a rule under which what [privacy] promises could not be kept; call it for each before any data is read."""
    if privacy is None or not asked.clients_train:
        return
    if privacy.central is not None:
        _check_central(privacy, asked)
    if privacy.local is not None:
        _check_local(privacy, asked)
    if privacy.aggregation is not None:
        _check_aggregation(asked)


def _refuse(asked: Asked, field: str, why: str, allowed: str) -> None:
    raise UserError(f"{field}: rule '{asked.rule}' {why}; allowed: {allowed}")


def _check_central(privacy: PrivacySettings, asked: Asked) -> None:
    assert privacy.central is not None
    if not asked.capped:
        _refuse(
            asked,
            "weighing.max_weight",
            "gives weights without a cap, and the noise of privacy.central must cover the largest one",
            "max_weight or max_shares",
        )
    if asked.defence:
        _refuse(
            asked,
            "weighing.defence",
            f"combines by '{asked.defence}', which may follow any single update, so that no noise covers it",
            "no defence (privacy.central clips already), or privacy.local",
        )
    if asked.fit:
        _refuse(
            asked,
            "weighing.fit",
            "fits weights to single updates, which then decide about the weights of all others",
            "without it, or privacy.local",
        )
    if asked.adjust:
        _refuse(
            asked,
            "weighing.adjust",
            "tests many weightings of the same updates, and privacy.central would have to pay for each of them",
            "a fixed order, or privacy.local",
        )
    for criterion in asked.criteria:
        if not criterion.own:
            _refuse(
                asked,
                "weighing.criteria",
                f"uses {criterion.name}, which is measured by the server from a whole cohort, so that one client moves "
                "the weights of others beyond any bound",
                "criteria that follow from a client alone, or privacy.local",
            )
    if privacy.central.weights == "own":
        _check_own_weights(privacy, asked)
    else:
        _check_releases(privacy, asked, asked.criteria)


def _check_own_weights(privacy: PrivacySettings, asked: Asked) -> None:
    assert privacy.central is not None
    if asked.normalise == "rank":
        _refuse(asked, "weighing.normalise", "ranks clients by one another", "share or max, or weights = 'cohort'")
    if asked.bound:
        _refuse(
            asked,
            "weighing.bound",
            "cuts criteria at the cohort's median, which follows from other clients",
            "without it (max_weight bounds each client), or privacy.central.weights = 'cohort'",
        )
    for criterion in asked.criteria:
        if criterion.name not in privacy.central.references and criterion.name != "EQ":
            _refuse(
                asked,
                f"privacy.central.references.{criterion.name}",
                "needs a typical value to weigh a client by itself, known beforehand and not measured on the clients",
                "a number, or privacy.central.weights = 'cohort'",
            )


def _check_local(privacy: PrivacySettings, asked: Asked) -> None:
    told = tuple(criterion for criterion in asked.criteria if criterion.measured_by == "client")
    _check_releases(privacy, asked, told)


def _check_aggregation(asked: Asked) -> None:
    """Refuse what looks at single updates, or would take several sums of the same ones."""
    if asked.defence:
        _refuse(
            asked,
            "weighing.defence",
            f"combines by '{asked.defence}', which looks at single updates, and privacy.aggregation hides them",
            "no defence (weighing.bound and weighing.max_weight work)",
        )
    if asked.fit:
        _refuse(
            asked,
            "weighing.fit",
            "fits weights to single models, and privacy.aggregation hides them",
            "weights from criteria alone",
        )
    if asked.adjust:
        _refuse(
            asked,
            "weighing.adjust",
            "tries several weightings of the same updates, and each sum would be one more equation from which the "
            "server could solve for single updates, which privacy.aggregation hides",
            "a fixed order",
        )
    for criterion in asked.criteria:
        if criterion.of_models:
            _refuse(
                asked,
                "weighing.criteria",
                f"uses {criterion.name}, which the server measures on single models, and privacy.aggregation hides "
                "them",
                "criteria that clients measure, such as DS and LD",
            )


def _check_releases(privacy: PrivacySettings, asked: Asked, told: tuple[AskedCriterion, ...]) -> None:
    """Refuse criteria that would be told without being declared public or charged."""
    told = tuple(criterion for criterion in told if criterion.name != "EQ")
    if not told:
        return
    if privacy.criteria is None:
        _refuse(
            asked,
            "privacy.criteria",
            f"tells {', '.join(criterion.name for criterion in told)} of each client, which is a release too",
            "'charged' or 'public'",
        )
    for criterion in told:
        if privacy.criteria == "public" and criterion.of_devices:
            _refuse(
                asked,
                "privacy.criteria",
                f"uses {criterion.name}, which comes out of this round's training and cannot be public beforehand",
                "'charged', or criteria of the data such as DS",
            )
        if privacy.criteria == "charged" and criterion.most is None and criterion.name not in privacy.criteria_bounds:
            _refuse(
                asked,
                f"privacy.criteria_bounds.{criterion.name}",
                "charges a criterion that has no largest value, and noise must cover the whole range",
                "a number",
            )
