"""Losses and scores by hand and against the papers; losses of ones own, of which every wrong kind is one line."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.clients.local import engine_cases as cases
from tests.kit import assert_refused, named

from steelyard.base.usercode import hand_over
from steelyard.learning.evaluation import (
    accuracy,
    by_class,
    concordance,
    confusion,
    errors,
    f1,
    integrated_brier,
    label_f1,
    predictions,
)
from steelyard.learning.evaluation import (
    dice as dice_scores,
)
from steelyard.learning.losses import barron, cox, dice, per_sample, resolve, weigh
from steelyard.learning.settings import TrainingSettings
from steelyard.messages.updates import LossState, Question, Updates


def test_class_weights_divide_by_samples_not_by_their_sum() -> None:
    outputs = torch.zeros(4, 2)  # every sample's cross-entropy is log 2
    labels = torch.tensor([0, 0, 0, 1])
    state = LossState("cross-entropy", (1.0, 10.0))
    each = weigh(per_sample(state)(outputs, labels), labels, torch.tensor(state.class_weights))
    assert float(each.sum() / 4) == pytest.approx(math.log(2) * (3 + 10) / 4)


@pytest.mark.parametrize(
    ("shape", "value"),
    [
        (2.0, 0.5 * 9),
        (1.0, math.sqrt(10) - 1),  # Charbonnier
        (0.0, math.log(1 + 4.5)),  # Cauchy
        (-2.0, 2 * 9 / (9 + 4)),  # Geman-McClure
        (-math.inf, 1 - math.exp(-4.5)),  # Welsch
    ],
)
def test_barron_special_cases(shape: float, value: float) -> None:
    assert float(barron(torch.tensor(3.0, dtype=torch.float64), shape, 1.0)) == pytest.approx(value)
    assert float(barron(torch.tensor(6.0, dtype=torch.float64), shape, 2.0)) == pytest.approx(value)


@pytest.mark.parametrize("shape", [2.0, 1e-6, 0.0, -1.0, -math.inf])
def test_barron_gradients_are_finite_everywhere(shape: float) -> None:
    x = torch.tensor([-1e3, 0.0, 1e-20, 5.0], requires_grad=True)
    (slope,) = torch.autograd.grad(barron(x, shape, 0.7).sum(), x)
    assert torch.isfinite(slope).all()
    assert slope[1] == 0


# Ten patients: times, a minus where the event had not come, and log risks.
TIMES = torch.tensor([5.0, 3, -3, 8, 1, -8, -2, 3, -6, 1.5], dtype=torch.float64)
RISKS = torch.tensor([0.3, -0.2, 1.1, -0.7, 0.9, 0.9, -1.3, 0.4, 0.3, 0.3], dtype=torch.float64)


def slow_cox(risks: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """Cox's loss as it is written: one sum over those at risk for each patient."""
    each = [
        torch.log(sum(torch.exp(risks[j]) for j in range(len(times)) if times[j].abs() >= times[i])) - risks[i]  # type: ignore[arg-type]
        if times[i] > 0
        else risks.new_zeros(())
        for i in range(len(times))
    ]
    return torch.stack(each)


def test_cox_gives_the_partial_likelihood_of_statsmodels() -> None:
    # statsmodels 0.15, PHReg(times, risks, status, ties="breslow").loglike([1.0])
    assert float(cox(RISKS, TIMES).sum()) == pytest.approx(11.851738689232722, abs=1e-12)


@given(
    st.lists(st.tuples(st.sampled_from([-3.0, -2.0, -1.0, 1.0, 2.0, 3.0]), st.floats(-5, 5)), min_size=1, max_size=9)
)
def test_cox_is_its_formula_with_ties_and_its_slope_too(samples: list[tuple[float, float]]) -> None:
    times = torch.tensor([time for time, _ in samples], dtype=torch.float64)
    risks = torch.tensor([risk for _, risk in samples], dtype=torch.float64).requires_grad_()
    found, expected = cox(risks, times), slow_cox(risks, times)
    assert torch.allclose(found, expected, atol=1e-12)
    if bool((times > 0).any()):
        slopes = [torch.autograd.grad(losses.sum(), risks)[0] for losses in (found, expected)]
        assert torch.allclose(*slopes, atol=1e-12)


def test_cox_of_stacked_batches_leaves_padding_and_other_clients_alone() -> None:
    padded_times = torch.cat([TIMES[:6], torch.zeros(4, dtype=torch.float64)])
    stack = cox(torch.stack([RISKS, RISKS.flip(0)]), torch.stack([TIMES, padded_times]))
    assert torch.allclose(stack[0], slow_cox(RISKS, TIMES))
    assert torch.allclose(stack[1, :6], slow_cox(RISKS.flip(0)[:6], TIMES[:6]))
    assert not stack[1, 6:].any()


def test_dice_by_hand() -> None:
    # Two rows of four pixels, classes 0 to 2; the first is sure and right, the second has class 1 where nothing is.
    masks = torch.tensor([[0, 1, 1, 2], [0, 0, 0, 0]], dtype=torch.uint8)
    sure = 60 * torch.nn.functional.one_hot(torch.tensor([[0, 1, 1, 2], [1, 0, 0, 0]]), 3).float().transpose(1, 2)
    found = dice(sure.flatten(1), masks)
    # Class 1 of the second: (0 + 1) / (1 + 0 + 1), class 2: 1 / 1.
    assert found.tolist() == pytest.approx([0.0, 1 - (0.5 + 1) / 2])


def test_each_pixel_and_each_label_counts_alike() -> None:
    chance = torch.Generator().manual_seed(1)
    outputs, masks = torch.randn(5, 3 * 4, generator=chance), torch.randint(3, (5, 4), generator=chance).to(torch.uint8)
    found = per_sample(LossState("pixel-cross-entropy"))(outputs, masks)
    slow = [
        sum(-outputs[row].view(3, 4)[:, pixel].log_softmax(0)[int(masks[row, pixel])] for pixel in range(4)) / 4
        for row in range(5)
    ]
    assert torch.allclose(found, torch.stack(slow))  # type: ignore[arg-type]
    logits, labels = torch.randn(5, 3, generator=chance), torch.randint(2, (5, 3), generator=chance).float()
    wrong = -(labels * logits.sigmoid().log() + (1 - labels) * (1 - logits.sigmoid()).log()).mean(dim=1)
    assert torch.allclose(per_sample(LossState("label-cross-entropy"))(logits, labels), wrong, atol=1e-6)


@pytest.mark.parametrize(
    ("named", "classes", "outputs", "task", "loss"),
    [
        ("auto", 10, 10, None, "cross-entropy"),
        ("auto", 2, 1, None, "binary-cross-entropy"),
        ("auto", 0, 1, None, "squared-error"),
        ("auto", 0, 1, "survival", "cox"),
        ("auto", 0, 12, "segmentation", "pixel-cross-entropy"),
        ("dice", 0, 12, "segmentation", "dice"),
        ("auto", 0, 3, "multi-label", "label-cross-entropy"),
    ],
)
def test_the_loss_fits_the_task(named: str, classes: int, outputs: int, task: str | None, loss: str) -> None:
    targets = {"targets": outputs} if task in ("segmentation", "multi-label") else {}
    assert resolve(LossState(named), classes, outputs, task=task, **targets).name == loss


@pytest.mark.parametrize(
    ("state", "classes", "outputs", "task", "said"),
    [
        (LossState("cross-entrpy"), 10, 10, None, ("training.loss", "cross-entrpy", "'cross-entropy'")),
        (LossState("cross-entropy"), 0, 1, None, ("training.loss", "cross-entropy")),
        (LossState("binary-cross-entropy"), 10, 10, None, ("training.loss", "binary-cross-entropy")),
        (LossState("cross-entropy", (1.0,)), 10, 10, None, ("class weights", "got 1 for 10")),
        (LossState("squared-error"), 0, 1, "survival", ("training.loss", "squared-error", "cox")),
        (LossState("cox"), 0, 1, None, ("training.loss", "cox", "survival")),
        (LossState("cox"), 0, 2, "survival", ("cox", "2 outputs")),
        (LossState(), 0, 3, "segmentation", ("model.outputs", 3, 12)),
    ],
)
def test_losses_that_do_not_fit_are_refused(
    state: LossState, classes: int, outputs: int, task: str | None, said: tuple[object, ...]
) -> None:
    targets = {"targets": 12} if task == "segmentation" else {}
    assert_refused(lambda: resolve(state, classes, outputs, task=task, **targets), *said)


def smoothed(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, labels, label_smoothing=0.1, reduction="none")


def test_a_loss_handed_over_from_python_is_the_one_used(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    options = "label_smoothing=0.1, reduction='none'"
    file.write_text(f"import torch\ndef loss(o, y):\n    return torch.nn.functional.cross_entropy(o, y, {options})\n")
    module = torch.nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")
    same = lambda o, y: smoothed(o, y)  # noqa: E731
    found = [train(loss).payload.models for loss in (smoothed, same, module, f"{file}:loss")]  # type: ignore[attr-defined]
    assert all(torch.equal(models, found[0]) for models in found)
    # Two functions without a name of their own do not take each other's part.
    assert hand_over(same) != hand_over(lambda o, y: 2 * smoothed(o, y))
    assert hand_over(same) == hand_over(same)


GOOD = "torch.nn.functional.cross_entropy(o, y, reduction='none')"
WRONG = [
    ("wrong signature", "def loss(o):\n    return o", "cannot be called"),
    ("a float", "def loss(o, y):\n    return 0.5", "float"),
    ("the mean", f"def loss(o, y):\n    return {GOOD}.mean()", "shape ()"),
    ("no gradient", f"def loss(o, y):\n    return {GOOD}.detach()", "without a gradient"),
    ("whole numbers", "def loss(o, y):\n    return (o.argmax(1) != y).long()", "without a gradient"),
    ("raises", "def loss(o, y):\n    raise KeyError('x')", "KeyError: 'x'"),
    ("writes what it needs", f"def loss(o, y):\n    f = {GOOD}\n    y.zero_()\n    return f", "no gradient"),
    ("nan", f"def loss(o, y):\n    return {GOOD} * float('nan')", "[nan, nan]"),
    ("not callable", "loss = 3", "'loss'"),
    ("a file that fails", "1 / 0", "ZeroDivisionError"),
]


def train(loss: object, engine: str = "loop") -> Updates:
    settings = TrainingSettings(batch_size=5, loss=loss)  # type: ignore[arg-type]
    what = cases.Case(cases.MODELS["mlp"][0], cases.population((8, 8), 10, sizes=(23, 9)), settings)
    clients = cases.simulated(what, engine)
    return clients.train([cases.task_of(clients)])[0]


@pytest.mark.parametrize(("text", "said"), named(WRONG))
def test_every_wrong_kind_of_loss_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import torch\n{text}\n")
    for engine in ("loop", "stacked"):
        assert_refused(lambda engine=engine: train(f"{file}:loss", engine), "training.loss: ", said)


def test_a_loss_that_writes_changes_nobody_s_data() -> None:
    def rude(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.cross_entropy(o.clone(), y.clone(), reduction="none")
        y.zero_()
        o.data.zero_()
        return found

    people = cases.population((8, 8), 10)
    labels, features = people.dataset.labels.clone(), people.dataset.features.clone()
    what = cases.Case(cases.MODELS["mlp"][0], people, TrainingSettings(batch_size=5, loss=rude))  # type: ignore[arg-type]
    for engine in ("loop", "stacked"):
        clients = cases.simulated(what, engine)
        task = cases.task_of(clients)
        clients.train([task])
        clients.evaluate([Question("f", 0, 1, task.parameters.repeat(2, 1))])
    assert torch.equal(people.dataset.labels, labels)
    assert torch.equal(people.dataset.features, features)


def test_confusion_accuracy_f1_by_hand() -> None:
    labels = torch.tensor([0, 0, 1, 1, 1])
    predictions = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 0, 0, 0]])
    counts = confusion(predictions, labels, 3)
    assert counts[0].tolist() == [[1, 1, 0], [1, 2, 0], [0, 0, 0]]
    assert accuracy(counts).tolist() == [0.6, 0.4]
    # class 0: 2·1/(2·1+1+1); class 1: 2·2/(4+1+1); class 2 neither tested nor predicted
    assert f1(counts)[0].tolist() == pytest.approx([0.5, 2 / 3, 0.0])
    assert f1(counts)[1].tolist() == pytest.approx([4 / 7, 0.0, 0.0])


def test_errors_by_hand() -> None:
    found = errors(torch.tensor([[1.0, 3.0, 1.0]]), torch.tensor([2.0, 2.0, 0.0]))
    assert found["mape"].tolist() == [0.5]  # the target 0 is left out
    assert found["mae"].tolist() == [1.0]
    assert found["rmse"].tolist() == [1.0]


def test_metrics_of_each_class_by_hand() -> None:
    # Rows are true classes: class 0 has 3 of 4 right, class 1 has 1 of 2, class 2 was neither tested nor predicted.
    found = by_class(np.array([[[3, 1, 0], [1, 1, 0], [0, 0, 0]]]))
    assert found["precision"][0].tolist() == [3 / 4, 1 / 2, 0]
    assert found["recall"][0].tolist() == [3 / 4, 1 / 2, 0]
    # Told from all others: class 0 is right on 3 + 1 of 6 rows, class 1 on 1 + 3, class 2 on all.
    assert found["accuracy"][0].tolist() == pytest.approx([4 / 6, 4 / 6, 1])
    assert found["jaccard"][0].tolist() == pytest.approx([3 / 5, 1 / 3, 0])
    # TP·TN/(FP·FN) of 3, 1, 1, 1, of 1, 3, 1, 1 and of 0, 6, 0, 0, each with ½ more.
    assert found["odds"][0].tolist() == pytest.approx([3.5 * 1.5 / 1.5**2, 1.5 * 3.5 / 1.5**2, 6.5 / 0.5])


def test_the_c_index_is_that_of_lifelines() -> None:
    # lifelines 0.30.3, concordance_index(times, -risks, came); the second model turns the order round.
    found = concordance(torch.stack([RISKS, -RISKS]), TIMES)
    assert found.tolist() == pytest.approx([0.5483870967741935, 1 - 0.5483870967741935], abs=1e-12)


def test_the_c_index_by_hand() -> None:
    # Patient 0 died first, 1 was last seen at 2, 2 died at 3: known are 0 before 1 and 0 before 2, not 1 before 2.
    times = torch.tensor([1.0, -2.0, 3.0])
    risks = torch.tensor([[3.0, 2.0, 1.0], [2.0, 3.0, 1.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    assert concordance(risks, times).tolist() == [1.0, 0.5, 0.5, 0.0]
    # Nobody's event is known to have come first.
    assert concordance(risks[:, :2], torch.tensor([-1.0, -2.0])).tolist() == [0.5, 0.5, 0.5, 0.5]


def test_the_integrated_brier_score_is_that_of_its_definition() -> None:
    # scikit-survival's brier_score and integrated_brier_score, term by term, on these rows as training rows too.
    times, chance = TIMES.tolist(), torch.Generator().manual_seed(3)
    when, came = [abs(time) for time in times], [time > 0 for time in times]

    def kept(moment: float, lost: bool, hazard: list[float]) -> float:
        survived = 1.0
        for step in sorted({w for w, c in zip(when, came, strict=True) if w <= moment and c != lost}):
            here = [n for n, w in enumerate(when) if w >= step and not (lost and w == step and came[n])]
            gone = sum(w == step and c != lost for w, c in zip(when, came, strict=True))
            rate = gone / sum(hazard[n] for n in here)
            survived *= 1 - rate if lost else math.exp(-rate)
        return survived

    for risks in (RISKS, torch.randn(len(times), generator=chance)):
        hazard, one = risks.double().exp().tolist(), [1.0] * len(times)
        grid = sorted({w for w, c in zip(when, came, strict=True) if c and w < max(when)})
        scores: list[float] = []
        for moment in grid:
            alive = [kept(moment, False, hazard) ** each for each in hazard]
            terms = [
                (s**2 / kept(w, True, one) if c else 0.0) if w <= moment else (1 - s) ** 2 / kept(moment, True, one)
                for s, w, c in zip(alive, when, came, strict=True)
            ]
            scores.append(sum(terms) / len(terms))
        area = sum((b - a) * (x + y) / 2 for a, b, x, y in zip(grid, grid[1:], scores, scores[1:], strict=False))
        assert float(integrated_brier(risks, TIMES)) == pytest.approx(area / (grid[-1] - grid[0]))
    assert math.isnan(float(integrated_brier(torch.zeros(2), torch.tensor([-1.0, -2.0]))))


def test_dice_of_masks_by_hand() -> None:
    masks = torch.tensor([[0, 1, 1, 2], [0, 0, 0, 0], [1, 1, 0, 0]])
    predicted = torch.tensor([[0, 1, 2, 2], [0, 0, 0, 0], [2, 2, 0, 0]])
    outputs = torch.nn.functional.one_hot(predicted, 3).transpose(1, 2).flatten(1).float()
    # Both classes 2·1/3; nothing there and nothing found; class 1 and class 2 both missed.
    assert dice_scores(outputs[None], masks)[0].tolist() == pytest.approx([2 / 3, 1.0, 0.0])


def test_f1_of_several_labels_by_hand() -> None:
    labels = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]])
    predicted = torch.tensor([[[1, 0, 0], [0, 1, 0], [0, 1, 0]], [[0, 0, 0], [0, 0, 0], [0, 0, 0]]])
    found = label_f1(predicted, labels)
    # Label 0: 2·1/3; label 1: 2·1/3; label 2 is nowhere. All together 2·2/6.
    assert found["macro_f1"].tolist() == pytest.approx([2 / 3, 0.0])
    assert found["micro_f1"].tolist() == pytest.approx([4 / 6, 0.0])
    assert label_f1(torch.zeros(1, 2, 3), torch.zeros(2, 3))["macro_f1"].tolist() == [1.0]


def test_two_classes_by_hand() -> None:
    outputs = torch.tensor([[-0.1], [2.0]])
    found = per_sample(LossState("binary-cross-entropy"))(outputs, torch.tensor([1, 0]))
    assert found.tolist() == pytest.approx([math.log(1 + math.exp(0.1)), math.log(1 + math.exp(2))])
    assert predictions(outputs, 2).tolist() == [0, 1]
    assert predictions(outputs, 0).tolist() == pytest.approx([-0.1, 2.0])
