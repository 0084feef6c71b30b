import math

import pytest
import torch

from steelyard.errors import UserError
from steelyard.learning.losses import barron, per_sample, resolve, weigh
from steelyard.messages import LossState


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


@pytest.mark.parametrize("limit", [2.0, 0.0, -math.inf])
def test_barron_is_continuous_in_its_shape(limit: float) -> None:
    x = torch.linspace(-4, 4, 41, dtype=torch.float64)
    near = -1e7 if limit == -math.inf else limit + 1e-7
    # A step of 1e-7 in the shape moves the loss by 1e-7 times its slope in the shape, which is below 10 here.
    assert torch.allclose(barron(x, near, 1.3), barron(x, limit, 1.3), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("shape", [3.0, 2.0, 1.5, 1.0, 1e-6, 0.0, -1.0, -50.0, -math.inf])
def test_barron_gradients_are_finite_everywhere(shape: float) -> None:
    x = torch.tensor([-1e3, -1.0, 0.0, 1e-20, 5.0], requires_grad=True)
    barron(x, shape, 0.7).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert x.grad[2] == 0


def test_binary_and_squared() -> None:
    binary = per_sample(LossState("binary-cross-entropy"))
    assert binary(torch.tensor([[0.0], [2.0]]), torch.tensor([1, 0])).tolist() == pytest.approx(
        [math.log(2), math.log(1 + math.exp(2))]
    )
    assert per_sample(LossState("squared-error"))(torch.tensor([[3.0]]), torch.tensor([1.0])).tolist() == [4.0]


def absolute(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.squeeze(-1) - labels).abs()


def test_own_loss(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def absolute(outputs, labels):\n    return (outputs.squeeze(-1) - labels).abs()\n")
    state = resolve(LossState(f"{file}:absolute"), 0, 1)
    assert per_sample(state)(torch.tensor([[3.0]]), torch.tensor([5.0])).tolist() == [2.0]


def test_auto_fits_the_task() -> None:
    assert resolve(LossState(), 10, 10).name == "cross-entropy"
    assert resolve(LossState(), 2, 1).name == "binary-cross-entropy"
    assert resolve(LossState(), 0, 1).name == "squared-error"


@pytest.mark.parametrize(
    ("state", "classes", "outputs", "message"),
    [
        (LossState("cross-entrpy"), 10, 10, "did you mean 'cross-entropy'"),
        (LossState("cross-entropy"), 0, 1, "training.loss"),
        (LossState("binary-cross-entropy"), 10, 10, "training.loss"),
        (LossState("squared-error"), 0, 3, "training.loss"),
        (LossState("cross-entropy", (1.0,)), 10, 10, "class weights: got 1 for 10"),
    ],
)
def test_losses_that_do_not_fit_are_refused(state: LossState, classes: int, outputs: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(state, classes, outputs)
