"""A privacy guarantee that cannot hold is refused before any data is read, in one sentence that says why."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kit import assert_refused, changed

from steelyard.base.settings import validated
from steelyard.experiment.learning import LearningDescription

ONCE = {"clip": 1.0, "noise": 1.0}
CENTRAL: dict[str, Any] = {"central": {**ONCE, "references": {"DS": 100.0}}}
COHORT = {"central": {**ONCE, "weights": "cohort", "cohorts": "public"}}
LOCAL = {"local": ONCE}
HIDDEN = {"aggregation": {"kind": "secure"}}
NARROW = {"aggregation": {"bits": 16, "bound": 8.0}}
POISSON = {"sampling": "poisson", "fraction": 0.5}


def described(privacy: dict[str, Any], weighing: dict[str, Any], rounds: dict[str, Any]) -> LearningDescription:
    usual = {"weighing": {"max_shares": 2.0}, "partition": {"clients": 20, "server": "fraction"}, "rounds": {}}
    document = changed(usual, privacy=privacy, weighing=weighing, rounds=rounds)
    return validated(LearningDescription, document, "experiment")


@pytest.mark.parametrize(
    ("field", "value", "privacy", "weighing"),
    [
        ("weighing.max_weight", "noise of privacy.central must cover", CENTRAL, {"max_shares": None}),
        ("weighing.defence", "'median'", CENTRAL, {"defence": {"rule": "median"}}),
        ("weighing.adjust", "tests many weightings", CENTRAL, {"criteria": ["DS", "LD"], "adjust": {}}),
        ("weighing.criteria", "AG", CENTRAL, {"criteria": ["AG"]}),
        ("weighing.normalise", "ranks", CENTRAL, {"normalise": "rank"}),
        ("weighing.bound", "median", CENTRAL, {"bound": 2.0}),
        ("weighing.min_weight", "floors", CENTRAL, {"min_weight": 0.05}),
        ("weighing.floors", "clients", CENTRAL, {"floors": {"a": 0.05}}),
        ("privacy.central.noise", "0.001", {"central": {"clip": 1.0, "noise": 1e-300}}, {}),
        ("privacy.central.references", "'Ds'", {"central": {**ONCE, "references": {"DS": 100.0, "Ds": 1.0}}}, {}),
        (
            *("privacy.criteria_bounds", "'size'"),
            *({**COHORT, "criteria": "charged", "criteria_bounds": {"DS": 500.0, "size": 1.0}}, {}),
        ),
        ("privacy.central.references.LD", "typical value", CENTRAL, {"criteria": ["LD"]}),
        ("privacy.criteria", "tells DS of each client", COHORT, {}),
        ("privacy.criteria", "cannot be public", {**COHORT, "criteria": "public"}, {"criteria": ["MD"]}),
        ("privacy.criteria_bounds.DS", "no largest value", {**COHORT, "criteria": "charged"}, {}),
        ("privacy.central", "missing", {}, {}),
    ],
)
def test_a_promise_that_cannot_be_kept_is_refused(
    field: str, value: str, privacy: dict[str, Any], weighing: dict[str, Any]
) -> None:
    assert_refused(lambda: described(privacy, weighing, {}), f"{field}: ", value, "allowed:")


def test_rounds_that_cannot_keep_a_promise_are_refused() -> None:
    assert_refused(lambda: described(HIDDEN, {}, {**POISSON, "min_clients": 2}), "rounds.min_clients: got 2 ")
    # 16 bits: a cohort of the 10 expected clients would fit, one of all 20 does not.
    many = {**POISSON, "min_clients": 3}
    assert_refused(
        lambda: described(NARROW, {}, many), "privacy.aggregation.bound: got 8 with bits = 16 and 20 clients"
    )


@pytest.mark.parametrize(
    ("privacy", "weighing", "rounds"),
    [
        (HIDDEN, {}, {**POISSON, "min_clients": 3}),
        (NARROW, {}, {"fraction": 0.25}),
        ({**COHORT, "criteria": "charged"}, {"criteria": ["MD", "LD"]}, {}),
        # With noise from the devices, whatever the server does with the answers costs nothing more.
        (LOCAL, {"criteria": ["MD", "AG"], "defence": {"rule": "median"}, "max_shares": None}, {}),
        (CENTRAL, {"trained_by": "server", "max_shares": None}, {}),
    ],
)
def test_what_can_be_kept_is_allowed(privacy: dict[str, Any], weighing: dict[str, Any], rounds: dict[str, Any]) -> None:
    assert described(privacy, weighing, rounds).privacy is not None
