"""A privacy guarantee that cannot hold is refused before any data is read, in one sentence that says why."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.errors import UserError
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import build
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
        (CENTRAL, {"min_weight": 0.05}, r"weighing\.min_weight: .* has floors, which .* other clients pay for"),
        (CENTRAL, {"floors": {"a": 0.05}}, r"weighing\.floors: .* names clients"),
        ({"central": {"clip": 1.0, "noise": 1e-300}}, {}, r"privacy\.central\.noise: .*0\.001"),
        ({"local": {"clip": 1.0, "noise": 1e7}}, {}, r"privacy\.local\.noise: .*1000000"),
        (
            {"central": {"clip": 1.0, "noise": 1.0, "references": {"DS": 100.0, "Ds": 1.0}}},
            {},
            r"privacy\.central\.references: got 'Ds', which is no criterion; allowed: .*DS, ",
        ),
        (
            {**COHORT, "criteria": "charged", "criteria_bounds": {"DS": 500.0, "size": 1.0}},
            {},
            r"privacy\.criteria_bounds: got 'size', which is no criterion",
        ),
        (CENTRAL, {"criteria": ["LD"]}, r"privacy\.central\.references\.LD: .* typical value"),
        (COHORT, {}, r"privacy\.criteria: .* tells DS of each client"),
        ({**COHORT, "criteria": "public"}, {"criteria": ["MD"]}, r"privacy\.criteria: .* cannot be public beforehand"),
        ({**COHORT, "criteria": "charged"}, {}, r"privacy\.criteria_bounds\.DS: .* no largest value"),
        (LOCAL, {}, r"privacy\.criteria: .* tells DS of each client"),
        ({}, {}, r"privacy\.central: missing, and so are local and aggregation"),
        ({**CENTRAL, **LOCAL}, {}, r"privacy.*local: given together with central"),
        ({"central": {"clip": 1.0}}, {}, r"central\.noise: missing, and so is budget\.epsilon"),
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


HIDDEN: dict[str, Any] = {"aggregation": {"kind": "secure"}}
POISSON = {"sampling": "poisson", "fraction": 0.5}


@pytest.mark.parametrize(
    ("privacy", "rounds", "line"),
    [
        (HIDDEN, POISSON, r"rounds\.min_clients: got 1 .* a cohort of one or two clients"),
        (HIDDEN, {**POISSON, "min_clients": 2}, r"rounds\.min_clients: got 2"),
        # 16 bits: a cohort of the 10 expected clients would fit, one of all 20 does not.
        (
            {"aggregation": {"bits": 16, "bound": 8.0}},
            {**POISSON, "min_clients": 3},
            r"privacy\.aggregation\.bound: got 8 with bits = 16 and 20 clients",
        ),
    ],
)
def test_rounds_that_cannot_keep_a_promise_are_refused(
    privacy: dict[str, Any], rounds: dict[str, Any], line: str
) -> None:
    document = {"privacy": privacy, "rounds": rounds, "weighing": {"max_shares": 2.0}, "partition": {"clients": 20}}
    with pytest.raises(UserError, match=line) as raised:
        validated(LearningDescription, document, "experiment")
    assert "\n" not in str(raised.value)
    assert "allowed:" in str(raised.value)


@pytest.mark.parametrize(
    ("privacy", "rounds"),
    [
        (HIDDEN, {**POISSON, "min_clients": 3}),
        ({"aggregation": {"bits": 16, "bound": 8.0}}, {"fraction": 0.25}),
        ({**CENTRAL, "budget": {"accountant": "pld"}}, POISSON),
        ({**CENTRAL, "budget": {"accountant": "rdp"}}, {}),
        ({**CENTRAL, "budget": {"accountant": "pld"}}, {"sampling": "fixed"}),
        ({**COHORT, "criteria": "public", "budget": {"accountant": "pld"}}, {}),
    ],
)
def test_rounds_that_can_are_allowed(privacy: dict[str, Any], rounds: dict[str, Any]) -> None:
    document = {"privacy": privacy, "rounds": rounds, "weighing": {"max_shares": 2.0}, "partition": {"clients": 20}}
    assert validated(LearningDescription, document, "experiment").privacy is not None


def test_a_recommender_promises_no_hidden_updates() -> None:
    document = {"kind": "recommend", "interactions": {"path": "ratings.csv"}, "privacy": HIDDEN}
    with pytest.raises(UserError, match=r"privacy\.aggregation: .* rows of single items"):
        build(document, "experiment")


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
