"""[weighing.policy]: weights by a rule with a name of its own, and its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator

from steelyard.base.errors import UserError, brief, listed, nearest
from steelyard.base.settings import Named, validated
from steelyard.base.usercode import POLICIES
from steelyard.weighing.policies import catalogue
from steelyard.weighing.policies.policy import Policy

if TYPE_CHECKING:
    from steelyard.weighing.rule import WeighingSettings


class PolicySettings(Named):
    """[weighing.policy]: a policy by name; its own parameters, such as `a = 0.5`, stand beside the name."""

    name: str
    """feddisco, term, afl, q-fedavg, fedlaw, fedawa, fedce, feddg-ga, shapfed, cgsv, fedscs, trust-mad,
    nvflare-adaptive; `steelyard policies` lists them with their parameters."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        self.made()
        return self

    def made(self) -> Policy:
        """Return the policy; a wrong parameter is named."""
        return validated(policy_class(self.name), self.parameters, "")


def policy_class(name: object) -> type[Policy]:
    """Return the policy of that name, or say which names there are."""
    known = catalogue.known()
    if not isinstance(name, str) or name not in known:
        close = nearest(name, known) if isinstance(name, str) else ""
        raise UserError(
            f"name: got {brief(name)}{close}; allowed: {listed(known)}; one of your own: a package that declares it "
            f"under the entry point {POLICIES}, or a criterion in a file that weighing.plugins names"
        )
    return known[name]


def policy_criteria(document: Any) -> list[str] | None:
    """Return what the policy of a rule's document is computed from; None where it names none that is known."""
    name: object = document.get("name") if isinstance(document, dict) else getattr(document, "name", None)
    known = catalogue.known()
    return list(known[name].criteria) if isinstance(name, str) and name in known else None


def check_policy(rule: WeighingSettings, policy: PolicySettings) -> None:
    """Refuse what a policy decides itself, and what cannot be made of weights that do not sum to 1."""
    made = policy.made()
    if rule.criteria != made.criteria:
        raise UserError(
            f"criteria: got {listed(rule.criteria)} with policy '{policy.name}'; allowed: leave them out, it measures "
            f"{listed(made.criteria)}"
        )
    decided = {
        "score": rule.score != "prioritized",
        "priority": rule.priority is not None,
        "normalise": rule.normalise != "share",
        "adjust": rule.adjust is not None,
        "trained_by": rule.trained_by != "clients",
    }
    for name, given in decided.items():
        if given:
            raise UserError(f"{name}: given with policy '{policy.name}', which weighs by itself; allowed: leave it out")
    robust = rule.defence is not None and rule.defence.robust
    if made.applies_to != "shares" and (robust or rule.fit is not None):
        raise UserError(
            f"{'defence' if robust else 'fit'}: given with policy '{policy.name}', whose weights do not sum to 1; "
            "allowed: leave it out"
        )
