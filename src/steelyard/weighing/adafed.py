"""AdaFed (paper 001): weights from measured performance, and a loss that adapts to where the model still fails.

A. Giuseppi, L. Della Torre, D. Menegatti, A. Pietrabissa: "AdaFed: Performance-based Adaptive Federated Learning",
Algorithm 1. In every round

    evaluate each client's model w_i on the server's test set        lines 4-6   `view.validation`
    let the evaluation determine its weight p_i                      line 7      criteria VP to VE; score "power"
    w_S ← Σ p_i w_i / Σ p_i                                          line 9      the round loop, as for every rule
    evaluate w_S, adapt the loss to how it does                      lines 10-11 the kinds of LossSettings
    send w_S and the loss to the clients                             line 12     the next Task

The criteria are measured by the server, so a client cannot lie about them, and combine with all others and with
priorities. Which rows the server weighs on and which it reports on is the partition's matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from pydantic import Field

from steelyard.base.errors import UserError, listed
from steelyard.base.settings import Kinds
from steelyard.messages.payloads import ServerTest
from steelyard.messages.updates import Floats, LossState
from steelyard.weighing.criterion import (
    Capabilities,
    CohortView,
    NeededTask,
    Needs,
    ServerMeasure,
    check,
    get,
    server_criterion,
)

# ---------------------------------------------------------------- the weights p_i (lines 4-9)


def _on_test_set(
    name: str, task: NeededTask, description: str, maximum: float | None = 1.0, *, uses_claims: bool = False
) -> Callable[[ServerMeasure], ServerMeasure]:
    needs = Needs(models=True, test_set=True, task=task)
    return server_criterion(
        name, description=description, maximum=maximum, needs=needs, uses_claims=uses_claims, of_one=True
    )


_TOLD_BY: dict[str, NeededTask] = {"c_index": "survival", "dice": "segmentation", "macro_f1": "multi-label"}


def _tested(name: str, view: CohortView) -> ServerTest:
    """Return the test of every client's model; data of another task than the criterion's are refused."""
    test = view.validation
    # Data from memory says what it is only when it is there, too late for the check of what criteria need.
    kind: NeededTask = "classes" if test.f1.shape[1] else "regression"
    for figure, task in _TOLD_BY.items():
        kind = task if figure in test.errors else kind
    check(get(name), Capabilities("this data", task=kind))
    return test


@_on_test_set("VP", "classes", "validation performance: accuracy on the server's validation set")
def validation_performance(view: CohortView) -> Floats:
    """Accuracy of the client's model on the server's test set: p_i of simulations 2 and 3 (paper 001)."""
    return _tested("VP", view).accuracy


@_on_test_set(
    "VS", "classes", "accuracy on the server's validation set times number of samples", maximum=None, uses_claims=True
)
def validation_times_size(view: CohortView) -> Floats:
    """p_i = accuracy_i × #training-data_i, as in simulation 1 (paper 001, §4.0.1)."""
    return _tested("VS", view).accuracy * view.samples


@_on_test_set("VF", "classes", "macro F1 on the server's validation set")
def validation_macro_f1(view: CohortView) -> Floats:
    """Mean over classes of F1 on the server's test set; use it where rare classes matter (paper 001, §3.1)."""
    return _tested("VF", view).f1.mean(axis=1)


@_on_test_set(
    "VD", "classes", "diagnostic odds ratio on the server's validation set, geometric mean over classes", maximum=None
)
def validation_odds(view: CohortView) -> Floats:
    """(Π_c DOR_c)^(1/C), DOR_c = TP·TN/(FP·FN) with ½ added to each of the four; 1 is chance (paper 001, §3.1).

    A. S. Glas et al.: "The diagnostic odds ratio: a single indicator of test performance" (J. Clin. Epidemiol., 2003).
    """
    odds = _tested("VD", view).by_class.get("odds")
    if odds is None:
        raise UserError("criterion VD: this server gives no odds ratio of each class; allowed: VP, VF")
    return np.exp(np.log(odds).mean(axis=1))


@_on_test_set("VE", "regression", "regression: 1/(1 + MAPE) on the server's validation set")
def validation_error(view: CohortView) -> Floats:
    """1 / (1 + MAPE): falls as the mean absolute percentage error grows (paper 001, §3.2)."""
    return 1.0 / (1.0 + np.nan_to_num(_tested("VE", view).errors["mape"], nan=np.inf))


@_on_test_set("VC", "survival", "survival: C-index on the server's validation set")
def validation_concordance(view: CohortView) -> Floats:
    """Harrell's C-index of the client's model on the server's test set: how often it orders two patients rightly."""
    return _tested("VC", view).errors["c_index"]


@_on_test_set("VM", "segmentation", "segmentation: mean Dice on the server's validation set")
def validation_dice(view: CohortView) -> Floats:
    """Mean Dice of the client's model on the server's test set: how well its masks cover the true ones."""
    return _tested("VM", view).errors["dice"]


@_on_test_set("VL", "multi-label", "several labels: macro F1 on the server's validation set")
def validation_labels(view: CohortView) -> Floats:
    """Macro F1 over the labels on the server's test set: a rare label counts like a common one."""
    return _tested("VL", view).errors["macro_f1"]


# ---------------------------------------------------------------- the loss that adapts (lines 10-12)


class LossSettings(Kinds):
    """[weighing.loss]: the loss adapts between rounds to how the new model does on the server's test set (AdaFed)."""

    told_by: ClassVar[str] = "adapt"
    usual: ClassVar[str | None] = "class-f1"
    adapts: ClassVar[bool] = True
    """Whether `after` needs the server's test of the new model."""
    adapt: str = "class-f1"
    """What the loss follows."""

    def first(self, name: str) -> LossState:
        """Return the loss of the first round, where the clients' loss is the one named."""
        return LossState(name)

    def after(self, loss: LossState, test: ServerTest) -> LossState:
        """Return the loss of the next round, from how the new model does on the server's test set."""
        raise NotImplementedError


def class_weights(metric: Floats, epsilon: float = 0.1) -> Floats:
    """κ_c = 1 / (F1_c + ε) (paper 001, §3.1): F1 = 0 gives 10, F1 = 1 gives .909091 with ε = 0.1.

    The metric may be another than F1 that is 1 at best and 0 at worst.
    """
    return 1.0 / (metric + epsilon)


class ByClass(LossSettings):
    """Cross-entropy whose class weights κ_c grow where a metric of the class is low; the first round has κ = 1.

    The paper leaves the metric open (§3.1) and takes F1 itself.
    """

    epsilon: float = Field(default=0.1, gt=0)
    """ε of κ_c = 1/(F1_c + ε), which bounds κ by 1/ε."""

    def after(self, loss: LossState, test: ServerTest) -> LossState:
        if test.f1.shape[1] == 0:
            raise UserError(f"weighing.loss.adapt: got '{self.named}' for a regression; allowed: barron")
        metric = self.named.removeprefix("class-")
        values = test.f1 if metric == "f1" else test.by_class[metric]
        return LossState(loss.name, tuple(class_weights(values[0], self.epsilon).tolist()))


class ByF1(ByClass, named="class-f1"):
    """κ_c = 1/(F1_c + ε), as in the paper."""


class ByPrecision(ByClass, named="class-precision"):
    """κ_c by the precision of the class."""


class ByRecall(ByClass, named="class-recall"):
    """κ_c by the recall of the class."""


class ByAccuracy(ByClass, named="class-accuracy"):
    """κ_c by the accuracy of the class's rows against all others."""


class ByJaccard(ByClass, named="class-jaccard"):
    """κ_c by the Jaccard index of the class."""


CLASS_METRICS = tuple(name for name, kind in LossSettings.kinds.items() if issubclass(kind, ByClass))


NORMAL_RATIO = math.sqrt(math.pi / 2)
"""RMSE / MAE of normal errors."""
LAPLACE_RATIO = math.sqrt(2)
"""RMSE / MAE of Laplace errors."""


def barron_shape(rmse: float, mae: float, lowest: float = -2.0) -> float:
    """Choose Barron's α from how heavy the tails of the errors are: a straight line in RMSE/MAE, cut to [lowest, 2].

    Normal errors (RMSE/MAE = √(π/2)) want the squared error, α = 2; Laplace errors (√2) want α = 1, which is linear
    far out; heavier tails go on down. Without errors (MAE 0) there are no tails: α = 2.
    """
    if not (math.isfinite(rmse) and math.isfinite(mae)) or mae <= 0:
        return 2.0
    heaviness = (rmse / mae - NORMAL_RATIO) / (LAPLACE_RATIO - NORMAL_RATIO)
    return min(2.0, max(lowest, 2.0 - heaviness))


class FixedBarron(LossSettings, named="none"):
    """Barron's general robust loss with shape and scale as given, to compare with; for regression."""

    adapts = False
    shape: float = Field(default=2.0, ge=-10, le=2)
    """Shape α of the first round; 2 is the squared error, 1 Charbonnier, 0 Cauchy, -2 Geman-McClure."""
    scale: float = Field(default=1.0, gt=0)
    """Scale c of the first round: the size of an error that is not yet an outlier."""

    def first(self, name: str) -> LossState:
        return LossState("barron", shape=self.shape, scale=self.scale)


class Barron(FixedBarron, named="barron"):
    """Barron's general robust loss for regression; shape α and, if asked, scale c follow the new model's errors."""

    adapts = True
    adapt_scale: bool = False
    """Whether c follows the errors down: c = √(π/2)·MAE, the deviation of normal errors with that mean, but never more
    than `scale`, since the large errors of the first rounds are bias, not noise."""
    lowest: float = Field(default=-2.0, ge=-10, le=2)
    """The least α."""

    def after(self, loss: LossState, test: ServerTest) -> LossState:
        if "mae" not in test.errors:
            raise UserError(f"weighing.loss.adapt: got 'barron' for classes; allowed: {listed(CLASS_METRICS)}")
        rmse, mae = float(test.errors["rmse"][0]), float(test.errors["mae"][0])
        scale = self.scale
        if self.adapt_scale and math.isfinite(mae) and mae > 0:
            scale = min(scale, NORMAL_RATIO * mae)
        return LossState("barron", shape=barron_shape(rmse, mae, self.lowest), scale=scale)
