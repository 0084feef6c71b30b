"""Needs against capabilities: every need that is not met is refused in one line, and names decide nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from steelyard.data.settings import DataSettings
from steelyard.errors import UserError
from steelyard.weighing import criteria
from steelyard.weighing.criteria import CohortView, Criterion, LocalData, client_criterion, server_criterion
from steelyard.weighing.needs import NO_NEEDS, Capabilities, Needs, unmet

KNOWN = {
    "LE": Needs(task="classes", test_set=True),  # measured otherwise than the rest: never named in their place
    "VP": Needs(task="classes"),
    "VF": Needs(task="classes"),
    "VE": Needs(task="regression"),
    "DS": NO_NEEDS,
}
DIGITS = Capabilities("data.source = 'digits'", task="classes", classes=10, marks=frozenset())
REGRESSION = Capabilities("data.source = 'diabetes'", task="regression", classes=0, marks=frozenset())
USERS = Capabilities(
    "a recommender", task="ranking", classes=0, marks=frozenset(), label_counts=False, first_losses=False
)
UNKNOWN = Capabilities("data.source = 'memory'")


@pytest.mark.parametrize(
    ("needs", "available", "line"),
    [
        (
            Needs(classes=2),
            DIGITS,
            "is for 2 classes, and data.source = 'digits' has 10; allowed: data with 2 classes",
        ),
        (
            Needs(classes=2),
            REGRESSION,
            "is for 2 classes, and data.source = 'diabetes' has no classes; allowed: data with 2 classes",
        ),
        (
            Needs(task="classes"),
            REGRESSION,
            "measures classes, and data.source = 'diabetes' is a regression; allowed: VE",
        ),
        (
            Needs(task="regression"),
            DIGITS,
            "measures the error of a regression, and data.source = 'digits' has classes; allowed: VP, VF",
        ),
        (
            Needs(task="classes"),
            USERS,
            "measures classes, and a recommender ranks items; allowed: criteria for any task",
        ),
        (
            Needs(marks=("big", "sharp")),
            Capabilities("npz", marks=frozenset({"big"})),
            "needs samples marked sharp, and npz has none; allowed: a source with that mark "
            "(images, npz or csv with data.marks, or memory)",
        ),
        (
            Needs(labels=True),
            Capabilities("texts", labels=False),
            "looks at labels, and texts has none; allowed: data with labels",
        ),
        (
            Needs(test_set=True),
            Capabilities("x", lacks_test_set="and there is none; allowed: one"),
            "is measured on the server's test set, and there is none; allowed: one",
        ),
        (
            Needs(models=True),
            Capabilities("secure aggregation", models=False),
            "looks at single updates, and secure aggregation hides them; allowed: criteria that clients measure",
        ),
        (
            Needs(label_counts=True),
            USERS,
            "looks at label counts, and a recommender does not give them; allowed: criteria that do not",
        ),
        (
            Needs(first_losses=True),
            USERS,
            "looks at losses before training, and a recommender has none; allowed: criteria that do not",
        ),
        (
            Needs(expertise=True),
            DIGITS,
            "looks at users' features, and data.source = 'digits' has none; allowed: kind = 'recommend' with [kgflex]",
        ),
        (
            Needs(slopes=True),
            Capabilities("another framework", slopes=False),
            "learns from the server's rows, and another framework only tests on them; allowed: rules that do not",
        ),
        (
            Needs(layers=True),
            Capabilities("a network", layers=False),
            "looks at single layers, and a network does not name them; allowed: rules that do not",
        ),
        (
            Needs(everyone=True),
            Capabilities("x", everyone=False),
            "needs full participation, and rounds may be without some clients; allowed: rounds.fraction = 1 without "
            "rounds.select.available and clock.deadline",
        ),
        (
            Needs(client_tests=True),
            Capabilities("x", client_tests=False),
            "has clients test models in every round; allowed: partition.test with rows, rounds.evaluate_every = 1",
        ),
    ],
)
def test_a_need_that_is_not_met_is_one_line(needs: Needs, available: Capabilities, line: str) -> None:
    assert unmet(needs, available, KNOWN) == line


EVERYTHING = Needs(True, 2, ("sharp",), "classes", True, True, True, True)


@pytest.mark.parametrize("available", [UNKNOWN, Capabilities("faces", "classes", 2, frozenset({"sharp", "big"}))])
def test_what_is_offered_or_only_the_data_can_tell_is_accepted(available: Capabilities) -> None:
    assert unmet(EVERYTHING, available, KNOWN) is None
    further = Needs(slopes=True, layers=True, everyone=True, client_tests=True)
    assert unmet(further, available, KNOWN) is None
    assert unmet(Needs(expertise=True), replace(available, expertise=True), KNOWN) is None


@pytest.mark.parametrize("available", [DIGITS, REGRESSION, USERS, UNKNOWN])
def test_a_criterion_without_needs_fits_everywhere(available: Capabilities) -> None:
    assert unmet(NO_NEEDS, available, KNOWN) is None


def test_the_check_names_the_field_and_the_criterion() -> None:
    with pytest.raises(UserError, match=r"^weighing\.criteria: CB is for 2 classes"):
        criteria.check(criteria.get("CB"), DIGITS)
    criteria.check(criteria.get("CB"), UNKNOWN)
    with pytest.raises(UserError, match="allowed: VE"):
        criteria.check(criteria.get("VP"), REGRESSION)
    with pytest.raises(UserError, match="allowed: VP, VS, VF"):
        criteria.check(criteria.get("VE"), DIGITS)


def test_names_decide_nothing() -> None:
    @client_criterion("VISITS", about="user")
    def visits(local: LocalData) -> float:
        return local.user.get("visits", 0.0)

    @client_criterion("IS2")
    def second(local: LocalData) -> float:
        return 1.0

    for name, measured in (("VISITS", visits), ("IS2", second)):
        assert criteria.get(name).measure is measured
        for available in (DIGITS, REGRESSION, USERS, UNKNOWN):
            criteria.check(criteria.get(name), available)


def test_needs_of_the_built_in_criteria() -> None:
    found = {name: criteria.get(name).needs for name in ("DS", "LD", "CB", "IS", "EQ", "MD", "VP", "VS", "VF", "VE")}
    measured = Needs(models=True, test_set=True, task="classes")
    assert found == {
        "DS": NO_NEEDS,
        "LD": Needs(labels=True),
        "CB": Needs(labels=True, classes=2),
        "IS": Needs(marks=("sharp",)),
        "EQ": NO_NEEDS,
        "MD": Needs(models=True),
        "VP": measured,
        "VS": measured,
        "VF": measured,
        "VE": Needs(models=True, test_set=True, task="regression"),
    }


def test_decorators_pass_the_needs_on() -> None:
    @client_criterion(
        "NEEDY", maximum=3.0, needs_labels=True, needs_classes=3, needs_marks=["a", "b"], needs_task="classes"
    )
    def needy(local: LocalData) -> float:
        """Is needy.

        Very."""
        return 1.0

    @server_criterion(
        "GREEDY",
        about="data",
        needs_models=False,
        needs_test_set=True,
        needs_task="regression",
        needs_label_counts=True,
        needs_first_losses=True,
    )
    def greedy(view: CohortView) -> np.ndarray:
        return view.samples.astype(np.float64)

    assert criteria.get("NEEDY") == Criterion(
        "NEEDY", "client", "data", "Is needy.", needy, 3.0, Needs(True, 3, ("a", "b"), "classes")
    )
    assert criteria.get("GREEDY") == Criterion(
        *("GREEDY", "server", "data", "GREEDY", greedy),
        needs=Needs(task="regression", test_set=True, label_counts=True, first_losses=True),
        uses_claims=True,
        of_one=False,
    )


@pytest.mark.parametrize(
    ("settings", "task", "classes", "marks"),
    [
        ({"source": "digits"}, "classes", 10, set()),
        ({"source": "mnist"}, "classes", 10, set()),
        ({"source": "diabetes"}, "regression", 0, set()),
        ({"source": "leaf", "path": "x"}, "classes", None, set()),
        ({"source": "leaf", "path": "x", "classes": 62}, "classes", 62, set()),
        ({"source": "npz", "path": "x"}, "classes", None, set()),
        ({"source": "npz", "path": "x", "classes": 5, "marks": {"sharp": "s"}}, "classes", 5, {"sharp"}),
        ({"source": "npz", "path": "x", "task": "regression"}, "regression", 0, set()),
        ({"source": "images", "path": "x"}, "classes", None, None),
        ({"source": "images", "path": "x", "marks": {"young": "Young"}}, "classes", None, {"young"}),
        ({"source": "memory"}, None, None, None),
    ],
)
def test_sources_say_what_they_offer(settings: dict, task: str | None, classes: int | None, marks: set | None) -> None:
    found = DataSettings.model_validate(settings).capabilities()
    assert (found.task, found.classes, found.marks) == (task, classes, marks)
