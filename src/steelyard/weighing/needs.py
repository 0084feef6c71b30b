"""What a criterion needs, what a run can give, and whether the two meet; compared before any data is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from steelyard.base.errors import listed

NeededTask = Literal["classes", "regression", "survival", "segmentation", "multi-label"]
Task = NeededTask | Literal["ranking"]


@dataclass(frozen=True)
class Needs:
    """What must be there for a criterion to be measured, or a policy to weigh; a run that cannot give it refuses it."""

    labels: bool = False
    """Whether clients must have labels."""
    classes: int | None = None
    """The number of classes that it is made for; None for any number, and for criteria that look at no classes."""
    marks: tuple[str, ...] = ()
    """Attributes that every training sample must have, such as "sharp"."""
    task: NeededTask | None = None
    """The kind of task that it is made for; None for any."""
    models: bool = False
    """Whether the server must see the updates of single clients; secure aggregation hides them."""
    test_set: bool = False
    """Whether the server must hold a test set of its own."""
    label_counts: bool = False
    """Whether clients must send the server how many samples of each class they have."""
    first_losses: bool = False
    """Whether clients must measure the loss of the received model before they train: one more pass over their data."""
    slopes: bool = False
    """Whether the server must be able to learn from rows of its own: the slope of its loss."""
    layers: bool = False
    """Whether the server must know which parameters are which layer of the network."""
    everyone: bool = False
    """Whether every client must take part in every round."""
    client_tests: bool = False
    """Whether clients must test models on rows of their own in every round."""
    expertise: bool = False
    """Whether clients must be users who know which features of items drive their choices."""


NO_NEEDS = Needs()


@dataclass(frozen=True)
class Capabilities:
    """What a run can give; None where only the data can tell, which is then found out when a criterion is measured."""

    name: str
    """What gives it, for error lines: "data.source = 'digits'"."""
    task: Task | None = None
    classes: int | None = None
    """Number of classes; 0 where there are none."""
    marks: frozenset[str] | None = None
    labels: bool = True
    models: bool = True
    lacks_test_set: str = ""
    """Why the server has no rows to test on, and what is allowed; empty where it has some."""
    label_counts: bool = True
    first_losses: bool = True
    slopes: bool = True
    layers: bool = True
    everyone: bool = True
    client_tests: bool = True
    expertise: bool = False


def unmet(needs: Needs, available: Capabilities, known: Mapping[str, Needs]) -> str | None:
    """Say what of the needs is not met and what is allowed in its place, or None when everything is.

    `known` are the needs of the criteria that could be used in its place, by name.
    """
    return (
        _unmet_by_task(needs, available, known)
        or _unmet_by_rows(needs, available)
        or _lacking(needs, available)
        or None
    )


def _unmet_by_task(needs: Needs, available: Capabilities, known: Mapping[str, Needs]) -> str:
    if needs.classes is not None and available.classes not in (None, needs.classes):
        found = f"has {available.classes}" if available.classes else "has no classes"
        return (
            f"is for {needs.classes} classes, and {available.name} {found}; allowed: data with {needs.classes} classes"
        )
    if needs.task is None or available.task in (None, needs.task):
        return ""
    measures = {
        "classes": "measures classes",
        "regression": "measures the error of a regression",
        "survival": "measures the order of times to an event",
        "segmentation": "measures masks",
        "multi-label": "measures several labels of a row",
    }[needs.task]
    task = {
        "classes": "has classes",
        "regression": "is a regression",
        "survival": "has times to an event",
        "segmentation": "has masks",
        "multi-label": "has several labels for a row",
        "ranking": "ranks items",
    }[available.task]
    alike = {name: other for name, other in known.items() if other.test_set == needs.test_set}
    instead = [name for name, other in alike.items() if other.task == available.task]
    return f"{measures}, and {available.name} {task}; allowed: {listed(instead) or 'criteria for any task'}"


def _unmet_by_rows(needs: Needs, available: Capabilities) -> str:
    """Say which marks of samples, or which rows of the server, are not there."""
    for mark in needs.marks:
        if available.marks is not None and mark not in available.marks:
            return (
                f"needs samples marked {mark}, and {available.name} has none; allowed: a source with that mark "
                "(images, npz or csv with data.marks, or memory)"
            )
    lacking = needs.test_set and available.lacks_test_set
    return f"is measured on the server's test set, {available.lacks_test_set}" if lacking else ""


def _lacking(needs: Needs, available: Capabilities) -> str:
    """Say what of the needs that are either met or not is not met."""
    name = available.name
    if needs.expertise and not available.expertise:
        return f"looks at users' features, and {name} has none; allowed: kind = 'recommend' with [kgflex]"
    if needs.labels and not available.labels:
        return f"looks at labels, and {name} has none; allowed: data with labels"
    if needs.models and not available.models:
        return f"looks at single updates, and {name} hides them; allowed: criteria that clients measure"
    if needs.label_counts and not available.label_counts:
        return f"looks at label counts, and {name} does not give them; allowed: criteria that do not"
    if needs.first_losses and not available.first_losses:
        return f"looks at losses before training, and {name} has none; allowed: criteria that do not"
    if needs.slopes and not available.slopes:
        return f"learns from the server's rows, and {name} only tests on them; allowed: rules that do not"
    if needs.layers and not available.layers:
        return f"looks at single layers, and {name} does not name them; allowed: rules that do not"
    if needs.everyone and not available.everyone:
        return (
            "needs full participation, and rounds may be without some clients; allowed: rounds.fraction = 1 "
            "without rounds.select.available and clock.deadline"
        )
    if needs.client_tests and not available.client_tests:
        return "has clients test models in every round; allowed: partition.test with rows, rounds.evaluate_every = 1"
    return ""
