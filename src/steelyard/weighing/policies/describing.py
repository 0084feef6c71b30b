"""A policy in words, for lists and pages: what it weighs by, what it needs, its parameters."""

from __future__ import annotations

from typing import Any, TypedDict

from steelyard.weighing import criteria as registry
from steelyard.weighing.needs import Needs
from steelyard.weighing.policies.policy import AppliesTo, Policy

WORDS = {
    "test_set": "rows at the server",
    "slopes": "a server that learns from them",
    "models": "single updates",
    "layers": "the network's layers",
    "label_counts": "label counts",
    "first_losses": "losses before training",
    "everyone": "full participation",
    "client_tests": "clients that test models",
}
"""What a need is called, in the order in which needs are listed."""


class Described(TypedDict):
    """A policy for programs, as `steelyard policies --format json` prints it."""

    name: str
    description: str
    criteria: list[str]
    needs: list[str]
    applies_to: AppliesTo
    parameters: dict[str, Any]


def described(made: type[Policy]) -> Described:
    """Return a policy in words, with its parameters' defaults."""
    return {
        "name": made.name,
        "description": (made.__doc__ or "").split("\n")[0].rstrip("."),
        "criteria": list(made.criteria),
        "needs": needs_of(made),
        "applies_to": made().applies_to,
        "parameters": {name: field.default for name, field in made.model_fields.items()},
    }


def needs_of(made: type[Policy]) -> list[str]:
    """Return what a policy and its criteria need, in words."""
    every: list[Needs] = [made.needs, *(registry.get(name).needs for name in made.criteria)]
    found = [word for need, word in WORDS.items() if any(getattr(needs, need) for needs in every)]
    tasks = {needs.task for needs in every if needs.task is not None}
    return [*found, *(f"a task with {task}" if task == "classes" else f"a {task}" for task in sorted(tasks))]
