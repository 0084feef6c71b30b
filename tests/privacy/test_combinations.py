"""What cannot keep its promise is refused before any data is read, in one sentence that says why."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.errors import UserError
from steelyard.experiment.learning import LearningDescription
from steelyard.settings import validated

CENTRAL = {"central": {"clip": 1.0, "noise": 1.0, "references": {"DS": 100.0}}}
COHORT = {"central": {"clip": 1.0, "noise": 1.0, "weights": "cohort", "cohorts": "public"}}
LOCAL = {"local": {"clip": 1.0, "noise": 1.0}}


def described(privacy: dict[str, Any], **weighing: Any) -> LearningDescription:
    document: dict[str, Any] = {"privacy": privacy, "weighing": {"max_shares": 2.0, **weighing}}
    return validated(LearningDescription, document, "experiment")


@pytest.mark.parametrize(
    ("privacy", "weighing", "line"),
    [
        (CENTRAL, {"max_shares": None}, r"weighing\.max_weight: .* noise of privacy\.central must cover"),
        (CENTRAL, {"defence": {"rule": "median"}}, r"weighing\.defence: .* combines by 'median'"),
        (CENTRAL, {"criteria": ["DS", "LD"], "adjust": {}}, r"weighing\.adjust: .* tests many weightings"),
        (CENTRAL, {"criteria": ["AG"]}, r"weighing\.criteria: .* uses AG, .* whole cohort"),
        (CENTRAL, {"normalise": "rank"}, r"weighing\.normalise: .* ranks clients by one another"),
        (CENTRAL, {"bound": 2.0}, r"weighing\.bound: .* cohort's median"),
        (CENTRAL, {"criteria": ["LD"]}, r"privacy\.central\.references\.LD: .* typical value"),
        (COHORT, {}, r"privacy\.criteria: .* tells DS of each client"),
        ({**COHORT, "criteria": "public"}, {"criteria": ["MD"]}, r"privacy\.criteria: .* cannot be public beforehand"),
        ({**COHORT, "criteria": "charged"}, {}, r"privacy\.criteria_bounds\.DS: .* no largest value"),
        (LOCAL, {}, r"privacy\.criteria: .* tells DS of each client"),
        ({}, {}, r"privacy\.central: missing, and every other mechanism"),
        ({**CENTRAL, **LOCAL}, {}, r"privacy.*local: given with central"),
        ({"central": {"clip": 1.0}}, {}, r"central\.noise: missing, and budget\.epsilon too"),
        ({"central": {"clip": 1.0, "noise": 1.0, "weights": "cohort"}}, {}, r"central\.cohorts: got 'secret'"),
        ({**CENTRAL, "criteria": "charged"}, {}, r"criteria: got 'charged' with central\.weights = 'own'"),
        ({**LOCAL, "criteria_noise": 1.0}, {}, r"criteria_noise: given, but criteria are not charged"),
    ],
)
def test_a_promise_that_cannot_be_kept_is_refused(privacy: dict[str, Any], weighing: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line) as raised:
        described(privacy, **weighing)
    assert "\n" not in str(raised.value)
    assert "allowed:" in str(raised.value)


@pytest.mark.parametrize(
    ("privacy", "weighing"),
    [
        (CENTRAL, {}),
        (CENTRAL, {"criteria": ["EQ"]}),
        ({**COHORT, "criteria": "public"}, {}),
        ({**COHORT, "criteria": "charged"}, {"criteria": ["MD", "LD"]}),
        ({**COHORT, "criteria": "charged", "criteria_bounds": {"DS": 500.0}}, {}),
        # With noise from the devices, whatever the server does with the answers costs nothing more.
        (LOCAL, {"criteria": ["MD", "AG"], "defence": {"rule": "median"}, "max_shares": None}),
        ({**LOCAL, "criteria": "public"}, {"criteria": ["DS", "LD"], "adjust": {}, "max_shares": None}),
        (CENTRAL, {"trained_by": "server", "max_shares": None}),
    ],
)
def test_what_can_be_kept_is_allowed(privacy: dict[str, Any], weighing: dict[str, Any]) -> None:
    document: dict[str, Any] = {"partition": {"clients": 10, "server": "fraction"}} if "trained_by" in weighing else {}
    document |= {"privacy": privacy, "weighing": {"max_shares": 2.0, **weighing}}
    assert validated(LearningDescription, document, "experiment").privacy is not None
