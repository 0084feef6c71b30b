"""What looks at the clients' accuracy needs clients that tell one: nodes may answer no tests at all."""

from __future__ import annotations

from steelyard.errors import UserError
from steelyard.messages import Evaluations
from steelyard.rounds.state import Federation, Plan


def check_tested(federation: Federation, plan: Plan, first: Evaluations) -> None:
    """Refuse an early stop and orders that adapt where not one client tested the first model; call it before round 1.

    Afterwards clients may come and go: a round that nobody tests changes no order and stops nothing.
    """
    if first.samples.any():
        return
    why = f" ({first.failures[0].client}: {first.failures[0].reason})" if first.failures else ""
    if plan.stop_at is not None:
        raise UserError(
            f"rounds.stop_at_target: got true, and no client tests the model{why}; allowed: false, or clients that do"
        )
    if federation.rule.settings.adjust is not None:
        raise UserError(
            f"weighing.adjust: '{federation.rule_name}' compares accuracies, and no client tests the model{why}; "
            "allowed: a fixed order, or clients that do"
        )
