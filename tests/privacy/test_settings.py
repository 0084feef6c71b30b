"""[privacy]: what goes together, and what does not in one line."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from steelyard.errors import UserError
from steelyard.privacy import requirements
from steelyard.privacy.settings import AggregationSettings, PrivacySettings, check_delta

CENTRAL = {"clip": 1.0, "noise": 1.0}
COHORT = {**CENTRAL, "weights": "cohort", "cohorts": "public"}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {},
            "central: missing, and so are local and aggregation; allowed: one of the three, or local with aggregation",
        ),
        (
            {"central": CENTRAL, "local": CENTRAL},
            "local: given together with central; allowed: one of the two, since either adds enough noise",
        ),
        (
            {"central": CENTRAL, "aggregation": {}},
            "central: given together with aggregation, but the server would have to clip single updates, which "
            "aggregation hides; allowed: one of the two, or local with aggregation",
        ),
        (
            {"central": {"clip": 1.0}},
            "central.noise: missing, and so is budget.epsilon; allowed: at least one of the two",
        ),
        ({"local": {"clip": 1.0}}, "local.noise: missing, and so is budget.epsilon; allowed: at least one of the two"),
        (
            {"local": CENTRAL, "criteria_noise": 1.0},
            "criteria_noise: given, but criteria are not charged; allowed: only with criteria = 'charged'",
        ),
        (
            {"local": CENTRAL, "criteria": "public", "criteria_bounds": {"DS": 1.0}},
            "criteria_bounds: given, but criteria are not charged; allowed: only with criteria = 'charged'",
        ),
        (
            {"local": CENTRAL, "criteria_mechanism": "laplace"},
            "criteria_mechanism: given, but criteria are not charged; allowed: only with criteria = 'charged'",
        ),
        (
            {"local": CENTRAL, "criteria": "charged", "criteria_mechanism": "exponential"},
            "criteria_levels: missing, and 'exponential' tells one of a few values; allowed: 2 to 1001, 2 for a yes or "
            "no",
        ),
        (
            {"local": CENTRAL, "criteria": "charged", "criteria_mechanism": "laplace", "criteria_levels": 3},
            "criteria_levels: given with criteria_mechanism = 'laplace', which tells any number; allowed only with "
            "'exponential' and 'randomised-response'",
        ),
        (
            {"central": {**CENTRAL, "weights": "cohort"}},
            "central.cohorts: got 'secret' with weights = 'cohort'; a client that takes part then changes all weights, "
            "so that a secret cohort saves no budget; allowed: 'public', or weights = 'own'",
        ),
        (
            {"central": {**COHORT, "references": {"DS": 5.0}}},
            "central.references: given with weights = 'cohort'; allowed only with weights = 'own'",
        ),
        (
            {"central": CENTRAL, "criteria": "charged"},
            "criteria: got 'charged' with central.weights = 'own', where a criterion changes only its own client's "
            "weight and is not released; allowed: leave privacy.criteria out, or central.weights = 'cohort'",
        ),
    ],
)
def test_what_does_not_go_together_is_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError) as found:
        PrivacySettings.model_validate(given)
    (error,) = found.value.errors()
    assert error["msg"] == f"Value error, {line}"


@pytest.mark.parametrize(
    ("given", "noise"),
    [
        ({"central": CENTRAL}, True),
        ({"central": {"clip": 1.0}, "budget": {"epsilon": 1.0}}, True),
        ({"central": {**CENTRAL, "cohorts": "public"}}, True),
        ({"central": {**CENTRAL, "references": {"DS": 5.0}}}, True),
        ({"central": COHORT, "criteria": "charged", "criteria_bounds": {"DS": 1.0}}, True),
        ({"local": CENTRAL, "criteria": "charged", "criteria_noise": 2.0}, True),
        ({"local": CENTRAL, "aggregation": {}}, True),
        ({"aggregation": {}}, False),
    ],
)
def test_what_goes_together(given: dict[str, Any], noise: bool) -> None:
    assert PrivacySettings.model_validate(given).noise is noise


def test_a_delta_of_one_over_the_clients_guarantees_nothing() -> None:
    check_delta("delta", 0.0099, 100, "more")
    check_delta("delta", 0.5, 0, "more")
    with pytest.raises(UserError) as found:
        check_delta("delta", 0.01, 100, "more = true")
    assert str(found.value) == (
        "delta: got 0.01 with 100 clients, where publishing all data of one client drawn at random would still "
        "satisfy the guarantee; allowed: below 0.01, or more = true"
    )


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"kind": "paillier", "threshold": 0.7}, "threshold: given with kind = 'paillier'; allowed only with secure"),
        ({"kind": "ckks", "bits": 32}, "bits: given with kind = 'ckks'; allowed only with secure, paillier"),
        ({"key_bits": 3072}, "key_bits: given with kind = 'secure'; allowed only with paillier"),
        (
            {"kind": "paillier", "key_bits": 3000},
            "key_bits: got 3000; allowed: a multiple of 256, such as 3072",
        ),
    ],
)
def test_a_field_of_another_kind_of_aggregation(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError) as found:
        AggregationSettings.model_validate(given)
    assert found.value.errors()[0]["msg"] == f"Value error, {line}"


def test_defaults_of_aggregation_and_how_many_must_stay() -> None:
    plain = AggregationSettings()
    assert (plain.word_bits, plain.modulus_bits) == (32, 3072)
    assert AggregationSettings(bits=64).word_bits == 64
    assert AggregationSettings(kind="paillier", key_bits=2048).modulus_bits == 2048
    # Two thirds, rounded up; more than half; at least two.
    assert [plain.least(count) for count in (1, 2, 3, 4, 9, 10, 100)] == [2, 2, 2, 3, 6, 7, 67]
    assert AggregationSettings(threshold=0.51).least(10) == 6
    assert AggregationSettings(threshold=0.5000000000001).least(10) == 6
    assert AggregationSettings(threshold=1.0).least(10) == 10
    # 0.7 · 10 is 7.000000000000001 at worst, and 7 are enough.
    assert AggregationSettings(threshold=0.7).least(10) == 7


def test_a_package_that_is_missing_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements.check_installed(AggregationSettings())
    requirements.check_accounting()
    missing = ("tenseal", "dp_accounting")
    monkeypatch.setattr(requirements, "find_spec", lambda name: None if name in missing else name)
    with pytest.raises(UserError) as found:
        requirements.check_accounting()
    assert str(found.value) == (
        "privacy: a budget needs the package dp-accounting, which is not installed; pip install 'steelyard[privacy]'"
    )
    requirements.check_installed(AggregationSettings(kind="paillier"))
    with pytest.raises(UserError) as found:
        requirements.check_installed(AggregationSettings(kind="ckks"))
    assert str(found.value) == (
        "privacy.aggregation.kind: 'ckks' needs tenseal, which is not installed; pip install 'steelyard[encryption]'"
    )
