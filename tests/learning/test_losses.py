import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import UserError
from steelyard.learning.losses import barron, cox, dice, per_sample, resolve, weigh
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
    risks = torch.tensor([risk for _, risk in samples], dtype=torch.float64)
    found, expected = cox(risks, times), slow_cox(risks, times)
    assert torch.allclose(found, expected, atol=1e-12)
    one, other = risks.clone().requires_grad_(), risks.clone().requires_grad_()
    cox(one, times).sum().backward()
    if bool((times > 0).any()):
        slow_cox(other, times).sum().backward()
        assert torch.allclose(one.grad, other.grad, atol=1e-12)  # type: ignore[arg-type]


def test_cox_of_stacked_batches_leaves_padding_and_other_clients_alone() -> None:
    padded_times = torch.cat([TIMES[:6], torch.zeros(4, dtype=torch.float64)])
    stack = cox(torch.stack([RISKS, RISKS.flip(0)]), torch.stack([TIMES, padded_times]))
    assert torch.allclose(stack[0], slow_cox(RISKS, TIMES))
    assert torch.allclose(stack[1, :6], slow_cox(RISKS.flip(0)[:6], TIMES[:6]))
    assert not stack[1, 6:].any()


def test_times_to_an_event_go_with_cox_alone() -> None:
    assert resolve(LossState(), 0, 1, task="survival").name == "cox"
    with pytest.raises(UserError, match=r"got 'squared-error' for data with times to an event; allowed: auto, cox$"):
        resolve(LossState("squared-error"), 0, 1, task="survival")
    with pytest.raises(UserError, match=r"got 'cox' for data with no times to an event; .*task = 'survival'$"):
        resolve(LossState("cox"), 0, 1)
    with pytest.raises(UserError, match="got 'cox' for a model with 2 outputs"):
        resolve(LossState("cox"), 0, 2, task="survival")


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


def test_masks_and_several_labels_go_with_their_own_losses() -> None:
    assert resolve(LossState(), 0, 12, task="segmentation", targets=12).name == "pixel-cross-entropy"
    assert resolve(LossState("dice"), 0, 12, task="segmentation", targets=12).name == "dice"
    assert resolve(LossState(), 0, 3, task="multi-label", targets=3).name == "label-cross-entropy"
    with pytest.raises(UserError, match=r"got 'cox' for data with masks; allowed: auto, pixel-cross-entropy, dice$"):
        resolve(LossState("cox"), 0, 12, task="segmentation", targets=12)
    with pytest.raises(UserError, match=r"got 'dice' for data with no masks; .* data.task = 'segmentation'$"):
        resolve(LossState("dice"), 3, 3)
    with pytest.raises(UserError, match=r"model.outputs: got 3 for masks; allowed: 12, flat"):
        resolve(LossState(), 0, 3, task="segmentation", targets=12)
