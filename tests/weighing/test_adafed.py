"""AdaFed's criteria and adaptive losses, with the numbers of SPEC §5."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from steelyard.errors import UserError
from steelyard.messages import LossState
from steelyard.update_payloads import ServerTest
from steelyard.weighing import criteria as registry
from steelyard.weighing.adafed import BarronLoss, ClassLoss, LossSettings, barron_shape, class_weights, loss_rule
from steelyard.weighing.criteria import CohortView
from steelyard.weighing.rule import Rule, WeighingSettings, label

TEST = ServerTest(np.array([0.5, 0.25, 0.0]), np.array([[0.6, 0.2], [0.4, 0.0], [0.0, 0.0]]))
REGRESSION = ServerTest(np.zeros(2), np.zeros((2, 0)), {"mape": np.array([0.25, 3.0])})


def view(test: ServerTest) -> CohortView:
    return CohortView(np.array([100, 300, 50])[: len(test.accuracy)], lambda: np.zeros(3), lambda: test)


def test_performance_is_measured_by_the_server_on_its_own_test_set():
    for name in ("VP", "VS", "VF", "VD", "VE", "VC", "VM", "VL"):
        criterion = registry.get(name)
        assert criterion.measured_by == "server"
        assert criterion.needs.test_set
        assert criterion.needs.models


def test_accuracy_times_size_macro_f1_and_error():
    assert registry.get("VP").on_server(view(TEST)).tolist() == [0.5, 0.25, 0.0]
    assert registry.get("VS").on_server(view(TEST)).tolist() == [50.0, 75.0, 0.0]
    assert registry.get("VF").on_server(view(TEST)) == pytest.approx([0.4, 0.2, 0.0])
    assert registry.get("VE").on_server(view(REGRESSION)) == pytest.approx([0.8, 0.25])


def test_the_odds_ratio_is_a_geometric_mean_over_classes():
    test = replace(TEST, by_class={"odds": np.array([[4.0, 9.0], [0.25, 1.0], [1.0, 1.0]])})
    assert registry.get("VD").on_server(view(test)) == pytest.approx([6.0, 0.5, 1.0])
    with pytest.raises(UserError, match="criterion VD: this server gives no odds ratio"):
        registry.get("VD").on_server(view(TEST))


@pytest.mark.parametrize(("name", "figure"), [("VC", "c_index"), ("VM", "dice"), ("VL", "macro_f1")])
def test_a_criterion_of_one_task_is_its_figure(name: str, figure: str):
    test = replace(REGRESSION, errors={figure: np.array([0.25, 0.75]), "further": np.array([3.0, 4.0])})
    assert registry.get(name).on_server(view(test)) == pytest.approx([0.25, 0.75])
    with pytest.raises(UserError, match=f"criterion {name}: measures .* and this data has none"):
        registry.get(name).on_server(view(REGRESSION))


def test_a_criterion_for_classes_refuses_a_regression_and_the_other_way_round():
    with pytest.raises(UserError, match="criterion VP: measures classes"):
        registry.get("VP").on_server(view(REGRESSION))
    with pytest.raises(UserError, match="criterion VE"):
        registry.get("VE").on_server(view(TEST))


def test_the_order_of_times_has_a_criterion_of_its_own():
    ordered = np.array([0.75, 0.5])
    survival = ServerTest(np.zeros(2), np.zeros((2, 0)), {"c_index": ordered})
    assert registry.get("VC").on_server(view(survival)).tolist() == [0.75, 0.5]
    with pytest.raises(UserError, match=r"criterion VP: measures classes, and this data has times to an event; .* VC$"):
        registry.get("VP").on_server(view(survival))
    with pytest.raises(UserError, match=r"criterion VC: .*; allowed: VP, VE$"):
        registry.get("VC").on_server(view(TEST))


def test_powers_of_accuracy_sharpen_the_weights_whatever_the_normalisation():
    raw = np.array([[0.9], [0.6], [0.3]])
    for power, expected in ((1, [0.5, 1 / 3, 1 / 6]), (2, [9 / 14, 4 / 14, 1 / 14]), (3, [27 / 36, 8 / 36, 1 / 36])):
        rule = Rule(WeighingSettings(criteria=("VP",), score="power", power=power))
        assert rule.weigh(raw).weights == pytest.approx(expected)


def test_performance_joins_priorities_with_other_criteria():
    rule = Rule(WeighingSettings(criteria=("VP", "DS")))
    # VP .75 .25, DS .2 .8: f = .75 + .75·.2 = .9 and .25 + .25·.8 = .45.
    assert rule.weigh(np.array([[0.6, 10], [0.2, 40]])).weights == pytest.approx([2 / 3, 1 / 3])


def test_class_weights_of_the_paper():
    # 10 / 11 written with six decimals.
    assert class_weights(np.array([0.0, 1.0, 0.4])) == pytest.approx([10.0, 0.909091, 2.0], abs=5e-7)


def test_the_loss_starts_with_equal_classes_and_follows_f1():
    rule = ClassLoss("auto", 0.1)
    assert rule.adapts
    assert rule.first() == LossState("auto", None)
    after = rule.after(rule.first(), TEST)
    assert after.class_weights == pytest.approx((1 / 0.7, 1 / 0.3))
    with pytest.raises(UserError, match="barron"):
        rule.after(after, REGRESSION)


@pytest.mark.parametrize(
    ("adapt", "expected"),
    [
        ("class-f1", (1 / 0.7, 1 / 0.3)),
        ("class-recall", (1 / 0.9, 1 / 0.1)),
        ("class-precision", (1 / 0.6, 1 / 1.1)),
        ("class-accuracy", (1 / 0.85, 1 / 0.85)),
        ("class-jaccard", (1 / 0.35, 1 / 0.2)),
    ],
)
def test_the_loss_follows_any_metric_of_the_classes(adapt: str, expected: tuple[float, float]):
    metrics = {"recall": [0.8, 0.0], "precision": [0.5, 1.0], "accuracy": [0.75, 0.75], "jaccard": [0.25, 0.1]}
    test = ServerTest(np.array([0.5]), np.array([[0.6, 0.2]]), by_class={k: np.array([v]) for k, v in metrics.items()})
    rule = loss_rule(LossSettings(adapt=adapt))
    assert rule.after(rule.first(), test).class_weights == pytest.approx(expected)
    with pytest.raises(UserError, match=f"got '{adapt}' for a regression; allowed: barron"):
        rule.after(rule.first(), REGRESSION)


def test_barron_shape_follows_the_tails():
    assert barron_shape(math.sqrt(math.pi / 2), 1.0) == pytest.approx(2.0)
    assert barron_shape(math.sqrt(2), 1.0) == pytest.approx(1.0)
    assert barron_shape(1.0, 1.0) == 2.0
    assert barron_shape(5.0, 1.0) == -2.0
    assert barron_shape(5.0, 1.0, lowest=0.0) == 0.0
    assert barron_shape(0.0, 0.0) == 2.0
    assert barron_shape(math.nan, 1.0) == 2.0


def test_barron_loss_adapts_shape_and_if_asked_scale():
    test = ServerTest(np.zeros(1), np.zeros((1, 0)), {"rmse": np.array([math.sqrt(2) * 40]), "mae": np.array([40.0])})
    fixed = BarronLoss(scale=30.0)
    assert fixed.first() == LossState("barron", None, 2.0, 30.0)
    after = fixed.after(fixed.first(), test)
    assert (after.name, after.scale) == ("barron", 30.0)
    assert after.shape == pytest.approx(1.0)
    moving = BarronLoss(scale=60.0, adapt_scale=True).after(fixed.first(), test)
    assert moving.scale == pytest.approx(40 * math.sqrt(math.pi / 2))
    assert BarronLoss(scale=30.0, adapt_scale=True).after(fixed.first(), test).scale == 30.0
    with pytest.raises(UserError, match="class-f1"):
        fixed.after(after, TEST)


def test_faults_of_the_loss_are_one_line():
    with pytest.raises(UserError) as found:
        ClassLoss().after(LossState(), REGRESSION)
    assert str(found.value) == "weighing.loss.adapt: got 'class-f1' for a regression; allowed: barron"
    with pytest.raises(UserError) as found:
        BarronLoss().after(LossState(), TEST)
    assert str(found.value) == (
        "weighing.loss.adapt: got 'barron' for classes; allowed: class-f1, class-precision, class-recall, "
        "class-accuracy, class-jaccard"
    )


def test_the_named_loss_and_epsilon_are_used():
    after = ClassLoss("cross-entropy", 0.5).after(LossState(), TEST)
    assert after == LossState("cross-entropy", (1 / 1.1, 1 / 0.7))
    assert class_weights(np.array([0, 1]), 1).tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    ("mae", "asked", "scale"),
    [(0.5, False, 3.0), (0.5, True, 0.5 * math.sqrt(math.pi / 2)), (0.0, True, 3.0), (math.inf, True, 3.0)],
)
def test_the_scale_follows_real_errors_only_if_asked(mae, asked, scale):
    errors = {"rmse": np.array([9.0 * mae]), "mae": np.array([mae])}
    rule = BarronLoss(scale=3.0, adapt_scale=asked, lowest=0.5)
    after = rule.after(rule.first(), ServerTest(np.zeros(1), np.zeros((1, 0)), errors))
    assert after.scale == pytest.approx(scale)
    assert after.shape == (0.5 if math.isfinite(mae) and mae > 0 else 2.0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"adapt": "class-f1", "scale": 3.0}, "scale"),
        ({"adapt": "none", "lowest": 0.0}, "lowest"),
        ({"adapt": "barron", "epsilon": 0.2}, "epsilon"),
    ],
)
def test_a_parameter_of_the_other_loss_is_refused(given, named):
    with pytest.raises(ValueError, match=named):
        LossSettings(**given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"criteria": ["DS"]}, "DS"),
        ({"criteria": ["DS", "LD", "MD"], "priority": "LD>DS>MD", "adjust": {}}, "online(LD>DS>MD)"),
        ({"criteria": ["DS", "LD"], "adjust": {"strategy": "bandit", "budget": 7}}, "bandit(DS>LD)@7"),
        ({"criteria": ["VP"], "loss": {}}, "VP+class-f1"),
        ({"criteria": ["VP"], "score": "power", "power": 2}, "power(VP)^2"),
        ({"criteria": ["VP"], "loss": {}, "name": "AdaFed"}, "AdaFed"),
    ],
)
def test_rules_are_named_by_what_they_do(given, expected):
    assert label(WeighingSettings.model_validate(given)) == expected


@pytest.mark.parametrize("given", [{"criteria": ["DS"]}, {"criteria": ["DS", "LD"], "score": "mean"}])
def test_adjusting_needs_an_order_to_adjust(given):
    with pytest.raises(ValueError, match="adjust: given with score"):
        WeighingSettings.model_validate({**given, "adjust": {}})
