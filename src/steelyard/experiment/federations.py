"""What one federation of an experiment is: a weighing rule and the algorithm it runs with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.base.errors import UserError, listed
from steelyard.messages.algorithm import Algorithm
from steelyard.weighing.criterion import Capabilities, unmet
from steelyard.weighing.rule import WeighingSettings
from steelyard.weighing.words import label


class FederationSettings(WeighingSettings):
    """A weighing rule and the algorithm that it runs with; use it for what stands beside the main rule."""

    algorithm: AlgorithmSettings | None = None
    """The algorithm of this rule; default: that of the experiment's [algorithm]."""


def stored_settings(text: str) -> FederationSettings | None:
    """Return a rule as a run's folder holds it; None where it is not of this version."""
    try:
        return FederationSettings.model_validate_json(text)
    except (UserError, ValueError):
        return None


def federation_label(settings: FederationSettings) -> str:
    """Name a federation: "LD>DS", "scaffold" for the algorithm with sizes as weights, "scaffold+LD>DS" for both."""
    rule, algorithm = label(settings), settings.algorithm
    if settings.name is not None or algorithm is None or algorithm.name == "fedavg":
        return rule
    return algorithm.label if rule == "DS" else f"{algorithm.label}+{rule}"


def check_algorithm(settings: FederationSettings, made: Algorithm, optimiser: str | None) -> None:
    """Refuse an algorithm that does not go with its rule or the local optimiser (None where no model is trained)."""
    if optimiser is None:
        if made.name != "fedavg":
            raise UserError(
                f"algorithm.name: got '{made.name}', but clients of this kind do not send whole models; allowed: fedavg"
            )
        return
    if settings.trained_by == "server" and made.name != "fedavg":
        raise UserError(
            f"algorithm.name: got '{made.name}' with weighing.trained_by = 'server', where no client trains; "
            "allowed: fedavg"
        )
    if optimiser not in made.optimisers:
        raise UserError(
            f"training.optimiser: got '{optimiser}', for which {made.name} is not defined; "
            f"allowed: {listed(made.optimisers)}"
        )
    policy = None if settings.policy is None else settings.policy.made()
    if policy is not None and policy.applies_to != "shares" and made.name != "fedavg":
        raise UserError(
            f"algorithm.name: got '{made.name}' with policy '{policy.name}', which decides the server's step itself; "
            "allowed: fedavg"
        )
    defence = settings.defence
    if defence is not None and defence.robust and made.listens:
        raise UserError(
            f"weighing.defence: got '{defence.rule}' with {made.name}, whose clients weigh single models themselves; "
            "allowed: no [weighing.defence], or another algorithm"
        )
    if defence is not None and defence.robust and made.sees == "models":
        raise UserError(
            f"weighing.defence: got '{defence.rule}' with {made.name}, whose server needs single updates, while a "
            "robust "
            "rule gives it one sum; allowed: no [weighing.defence], or an algorithm that needs the sum alone"
        )


def check_policy(rule: WeighingSettings, available: Capabilities, optimiser: str | None) -> None:
    """Refuse a policy whose needs an experiment does not meet; `optimiser` is None where no whole model is trained."""
    if rule.policy is None:
        return
    made = rule.policy.made()
    fault = unmet(made.needs, available, {})
    if fault is None and made.applies_to != "shares" and optimiser is None:
        fault = "changes the length of the step, and clients of this kind do not send whole models; allowed: others"
    if fault is not None:
        raise UserError(f"weighing.policy: {made.name} {fault}")


def plain(settings: WeighingSettings) -> dict[str, Any]:
    """Return a rule as it stands in an experiment file."""
    return settings.model_dump(mode="json", exclude_none=True)


def put_federations(document: dict[str, Any], found: Mapping[str, FederationSettings]) -> None:
    """Make these the federations of an experiment's document, by name, the first as its main rule."""
    (first, main), *rest = found.items()
    named = main if federation_label(main) == first else main.model_copy(update={"name": first})
    document["weighing"] = plain(named)
    document["algorithm"] = document["weighing"].pop("algorithm", {})
    document["beside"] = {name: plain(settings) for name, settings in rest}
