"""AdaFed's criteria and adaptive losses, with the numbers of SPEC §5, and losses that stay as they are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.kit import assert_refused
from tests.weighing.policies.cohorts import answering

from steelyard.base.settings import validated
from steelyard.messages.payloads import ServerTest
from steelyard.messages.updates import LossState
from steelyard.weighing import criterion as registry
from steelyard.weighing.adafed import (
    LossSettings,
    barron_shape,
    class_weights,
)
from steelyard.weighing.criterion import CohortView

TEST = ServerTest(np.array([0.5, 0.25, 0.0]), np.array([[0.6, 0.2], [0.4, 0.0], [0.0, 0.0]]))


REGRESSION = ServerTest(np.zeros(2), np.zeros((2, 0)), {"mape": np.array([0.25, 3.0])})


def view(test: ServerTest) -> CohortView:
    return answering(np.array([100, 300, 50])[: len(test.accuracy)], validation=test)


def test_what_the_server_measures_on_its_own_test_set() -> None:
    """Accuracy, times size, macro F1, the geometric mean of odds over classes, and figures of one task."""
    odds = replace(TEST, by_class={"odds": np.array([[4.0, 9.0], [0.25, 1.0], [1.0, 1.0]])})
    survival, labels, masks = (
        replace(REGRESSION, errors={figure: np.array([0.25, 0.75])}) for figure in ("c_index", "macro_f1", "dice")
    )
    for name, test, expected in (
        ("VP", TEST, [0.5, 0.25, 0.0]),
        ("VS", TEST, [50.0, 75.0, 0.0]),
        ("VF", TEST, [0.4, 0.2, 0.0]),
        ("VE", REGRESSION, [0.8, 0.25]),
        ("VD", odds, [6.0, 0.5, 1.0]),
        ("VC", survival, [0.25, 0.75]),
        ("VL", labels, [0.25, 0.75]),
        ("VM", masks, [0.25, 0.75]),
    ):
        criterion = registry.get(name)
        assert (criterion.measured_by, criterion.of_one) == ("server", True)
        assert criterion.needs.test_set
        assert criterion.needs.models
        assert criterion.on_server(view(test)) == pytest.approx(expected)
    assert_refused(lambda: registry.get("VD").on_server(view(TEST)), "criterion VD", "odds ratio")
    for name, test, parts in (
        ("VP", REGRESSION, ("measures classes", "is a regression", "VE")),
        ("VP", survival, ("times to an event", "VC")),
        ("VF", masks, ("has masks", "VM")),
        ("VE", TEST, ("has classes", "VP")),
        ("VC", labels, ("several labels", "VL")),
    ):
        assert_refused(lambda n=name, t=test: registry.get(n).on_server(view(t)), name, *parts)


def test_class_weights_of_the_paper() -> None:
    # 10 / 11 written with six decimals.
    assert class_weights(np.array([0.0, 1.0, 0.4])) == pytest.approx([10.0, 0.909091, 2.0], abs=5e-7)
    assert class_weights(np.array([0, 1]), 1).tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    ("adapt", "expected"),
    [
        ("class-f1", (1 / 0.7, 1 / 0.3)),
        ("class-precision", (1 / 0.6, 1 / 1.1)),
    ],
)
def test_the_loss_follows_any_metric_of_the_classes(adapt: str, expected: tuple[float, float]):
    metrics = {"precision": [0.5, 1.0]}
    test = ServerTest(np.array([0.5]), np.array([[0.6, 0.2]]), by_class={k: np.array([v]) for k, v in metrics.items()})
    rule = LossSettings(adapt=adapt)
    assert rule.after(rule.first("auto"), test).class_weights == pytest.approx(expected)
    assert rule.first("auto") == LossState("auto", None)
    assert_refused(lambda: rule.after(rule.first("auto"), REGRESSION), "weighing.loss.adapt", f"'{adapt}'", "barron")


def test_barron_shape_follows_the_tails():
    assert barron_shape(math.sqrt(math.pi / 2), 1.0) == pytest.approx(2.0)
    assert barron_shape(math.sqrt(2), 1.0) == pytest.approx(1.0)
    assert barron_shape(1.0, 1.0) == 2.0
    assert barron_shape(5.0, 1.0) == -2.0
    assert barron_shape(5.0, 1.0, lowest=0.0) == 0.0
    assert barron_shape(0.0, 0.0) == 2.0
    assert barron_shape(math.nan, 1.0) == 2.0


@pytest.mark.parametrize(
    ("mae", "asked", "scale"),
    [(0.5, False, 3.0), (0.5, True, 0.5 * math.sqrt(math.pi / 2)), (math.inf, True, 3.0), (0.0, True, 3.0)],
)
def test_the_scale_follows_real_errors_only_if_asked(mae, asked, scale):
    errors = {"rmse": np.array([9.0 * mae]), "mae": np.array([mae])}
    rule = LossSettings(adapt="barron", scale=3.0, adapt_scale=asked, lowest=0.5)
    after = rule.after(rule.first("auto"), ServerTest(np.zeros(1), np.zeros((1, 0)), errors))
    assert rule.first("auto") == LossState("barron", None, 2.0, 3.0)
    assert (after.name, after.scale) == ("barron", pytest.approx(scale))
    assert_refused(lambda: rule.after(after, TEST), "weighing.loss.adapt", "'barron'", "class-f1")
    assert after.shape == (0.5 if math.isfinite(mae) and mae > 0 else 2.0)


def test_settings_name_the_loss() -> None:
    plain = LossSettings(adapt="none", shape=0.5, scale=3.0)
    assert (plain.adapts, plain.first("auto")) == (False, LossState("barron", shape=0.5, scale=3.0))
    adapted = LossSettings(epsilon=0.5)
    assert adapted.adapts
    assert adapted.after(adapted.first("cross-entropy"), TEST) == LossState("cross-entropy", (1 / 1.1, 1 / 0.7))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"adapt": "class-f1", "scale": 3.0}, "scale"),
        ({"adapt": "barron", "epsilon": 0.2}, "epsilon"),
    ],
)
def test_a_parameter_of_the_other_loss_is_refused(given: dict[str, object], named: str) -> None:
    assert_refused(lambda: validated(LossSettings, given, "weighing.loss"), named)
