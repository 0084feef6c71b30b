import numpy as np
import pytest
import torch

from steelyard.learning.evaluation import (
    accuracy,
    by_class,
    concordance,
    confusion,
    dice,
    errors,
    f1,
    label_f1,
    predictions,
)


def test_confusion_accuracy_f1_by_hand() -> None:
    labels = torch.tensor([0, 0, 1, 1, 1])
    predictions = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 0, 0, 0]])
    counts = confusion(predictions, labels, 3)
    assert counts[0].tolist() == [[1, 1, 0], [1, 2, 0], [0, 0, 0]]
    assert accuracy(counts).tolist() == [0.6, 0.4]
    # class 0: 2·1/(2·1+1+1); class 1: 2·2/(4+1+1); class 2 neither tested nor predicted
    assert f1(counts)[0].tolist() == pytest.approx([0.5, 2 / 3, 0.0])
    assert f1(counts)[1].tolist() == pytest.approx([4 / 7, 0.0, 0.0])


def test_predictions() -> None:
    assert predictions(torch.tensor([[0.1, 0.9], [2.0, 1.0]]), 2).tolist() == [1, 0]
    assert predictions(torch.tensor([[-0.1], [2.0]]), 2).tolist() == [0, 1]
    assert predictions(torch.tensor([[-0.5], [2.0]]), 0).tolist() == [-0.5, 2.0]


def test_errors_by_hand() -> None:
    found = errors(torch.tensor([[1.0, 3.0, 1.0]]), torch.tensor([2.0, 2.0, 0.0]))
    assert found["mape"].tolist() == [0.5]  # the target 0 is left out
    assert found["mae"].tolist() == [1.0]
    assert found["rmse"].tolist() == [1.0]


def test_nothing_tested_scores_zero() -> None:
    assert accuracy(np.zeros((1, 2, 2), dtype=np.int64)).tolist() == [0.0]


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
    times = torch.tensor([5.0, 3, -3, 8, 1, -8, -2, 3, -6, 1.5])
    risks = torch.tensor([0.3, -0.2, 1.1, -0.7, 0.9, 0.9, -1.3, 0.4, 0.3, 0.3])
    # lifelines 0.30.3, concordance_index(times, -risks, came); the second model turns the order round.
    found = concordance(torch.stack([risks, -risks]), times)
    assert found.tolist() == pytest.approx([0.5483870967741935, 1 - 0.5483870967741935], abs=1e-12)


def test_the_c_index_by_hand() -> None:
    # Patient 0 died first, 1 was last seen at 2, 2 died at 3: known are 0 before 1 and 0 before 2, not 1 before 2.
    times = torch.tensor([1.0, -2.0, 3.0])
    risks = torch.tensor([[3.0, 2.0, 1.0], [2.0, 3.0, 1.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    assert concordance(risks, times).tolist() == [1.0, 0.5, 0.5, 0.0]
    # Nobody's event is known to have come first.
    assert concordance(risks[:, :2], torch.tensor([-1.0, -2.0])).tolist() == [0.5, 0.5, 0.5, 0.5]


def test_dice_of_masks_by_hand() -> None:
    masks = torch.tensor([[0, 1, 1, 2], [0, 0, 0, 0], [1, 1, 0, 0]])
    predicted = torch.tensor([[0, 1, 2, 2], [0, 0, 0, 0], [2, 2, 0, 0]])
    outputs = torch.nn.functional.one_hot(predicted, 3).transpose(1, 2).flatten(1).float()
    # Both classes 2·1/3; nothing there and nothing found; class 1 and class 2 both missed.
    assert dice(outputs[None], masks)[0].tolist() == pytest.approx([2 / 3, 1.0, 0.0])


def test_f1_of_several_labels_by_hand() -> None:
    labels = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]])
    predicted = torch.tensor([[[1, 0, 0], [0, 1, 0], [0, 1, 0]], [[0, 0, 0], [0, 0, 0], [0, 0, 0]]])
    found = label_f1(predicted, labels)
    # Label 0: 2·1/3; label 1: 2·1/3; label 2 is nowhere. All together 2·2/6.
    assert found["macro_f1"].tolist() == pytest.approx([2 / 3, 0.0])
    assert found["micro_f1"].tolist() == pytest.approx([4 / 6, 0.0])
    assert label_f1(torch.zeros(1, 2, 3), torch.zeros(2, 3))["macro_f1"].tolist() == [1.0]
