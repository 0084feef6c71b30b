"""What local training minimises: per-sample losses, divided by the number of samples and by nothing else.

AdaFed's class weights κ multiply the loss of each sample and the sum is divided by M, the number of samples, **not** by
Σκ (paper 001, Algorithm 1), so raising the weight of one class does not lower that of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from steelyard.base.errors import UserError, fault
from steelyard.base.usercode import find_code, refuse_unknown
from steelyard.learning.settings import LOSSES
from steelyard.messages.updates import LossState

PerSample = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


_OF_TASK: dict[str, tuple[str, tuple[str, ...]]] = {
    "survival": ("times to an event", ("cox",)),
    "segmentation": ("masks", ("pixel-cross-entropy", "dice")),
    "multi-label": ("several labels for a row", ("label-cross-entropy",)),
}
"""By task: what its labels are, and the losses that it alone takes, the usual one first."""


def resolve(state: LossState, classes: int, outputs: int, *, task: str | None = None, targets: int = 0) -> LossState:
    """Return the state with "auto" replaced by the loss that fits the task, and refuse one that cannot fit.

    Times to an event, masks and several labels have losses of their own; no classes: squared error; two classes and one
    output: binary cross-entropy on the logit; else cross-entropy. `targets` is how many outputs masks or labels need.
    """
    if targets and outputs != targets:
        held = _OF_TASK[task or "segmentation"][0]
        raise UserError(f"model.outputs: got {outputs} for {held}; allowed: {targets:,}, flat, a class after the other")
    name = state.name
    if name == "auto":
        name = _usual(classes, outputs, task)
    refuse_unknown(name, "training.loss", LOSSES)
    own_task = next((each for each, (_, own) in _OF_TASK.items() if name in own), None)
    if own_task != task and name in LOSSES:
        held = f"no {_OF_TASK[own_task][0]}" if own_task and not task else _OF_TASK[task or ""][0]
        allowed = f"auto, {', '.join(_OF_TASK[task][1])}" if task else f"{name} with data.task = '{own_task}'"
        raise UserError(f"training.loss: got '{name}' for data with {held}; allowed: {allowed}")
    if name == "cross-entropy" and (classes == 0 or outputs < 2):
        raise UserError(
            f"training.loss: got 'cross-entropy' for {classes} classes and {outputs} outputs; allowed: "
            "'squared-error' or 'barron' for regression, 'binary-cross-entropy' for one output"
        )
    if name == "cross-entropy" and outputs != classes:
        raise UserError(f"model.outputs: got {outputs} for {classes} classes; allowed: one output per class, {classes}")
    if name == "binary-cross-entropy" and (classes != 2 or outputs != 1):
        raise UserError(
            f"training.loss: got 'binary-cross-entropy' for {classes} classes and {outputs} outputs; allowed: "
            "2 classes and a model with 1 output"
        )
    if name in ("squared-error", "barron", "cox") and outputs != 1:
        raise UserError(f"training.loss: got '{name}' for a model with {outputs} outputs; allowed: 1 output")
    if state.class_weights is not None and len(state.class_weights) != classes:
        raise UserError(f"class weights: got {len(state.class_weights)} for {classes} classes")
    return LossState(name, state.class_weights, state.shape, state.scale)


def _usual(classes: int, outputs: int, task: str | None) -> str:
    """Return the loss that "auto" stands for."""
    if task is not None and task != "survival":
        return _OF_TASK[task][1][0]
    _check_outputs(classes, outputs)
    if classes == 0:
        return "cox" if task else "squared-error"
    return "binary-cross-entropy" if outputs == 1 else "cross-entropy"


def _check_outputs(classes: int, outputs: int) -> None:
    """Refuse a network whose number of outputs fits no loss, where nobody chose one."""
    if classes == 1:
        raise UserError("data: all labels are of one class, so nothing can be learnt; allowed: data with two or more")
    fits = {1} if classes == 0 else {1, 2} if classes == 2 else {classes}
    if outputs not in fits:
        task = f"{classes} classes" if classes else "a number to predict"
        raise UserError(f"model.outputs: got {outputs} for {task}; allowed: {' or '.join(map(str, sorted(fits)))}")


def per_sample(state: LossState) -> PerSample:
    """Return the function (outputs, labels) → one loss per sample, class weights left out.

    Use it with `weigh` for the class weights; both run under `torch.func.vmap`.
    """
    if state.name == "cross-entropy":
        return lambda outputs, labels: functional.cross_entropy(outputs, labels, reduction="none")
    if state.name == "binary-cross-entropy":
        return lambda outputs, labels: functional.binary_cross_entropy_with_logits(
            outputs.squeeze(-1), labels.to(outputs.dtype), reduction="none"
        )
    if state.name == "squared-error":
        return lambda outputs, labels: (outputs.squeeze(-1) - labels.to(outputs.dtype)).square()
    if state.name == "barron":
        shape, scale = 2.0 if state.shape is None else state.shape, 1.0 if state.scale is None else state.scale
        return lambda outputs, labels: barron(outputs.squeeze(-1) - labels.to(outputs.dtype), shape, scale)
    if state.name == "cox":
        return lambda outputs, labels: cox(outputs.squeeze(-1), labels)
    if state.name == "pixel-cross-entropy":
        return lambda outputs, labels: functional.cross_entropy(
            outputs.unflatten(-1, (-1, labels.shape[-1])), labels.long(), reduction="none"
        ).mean(dim=-1)
    if state.name == "dice":
        return dice
    if state.name == "label-cross-entropy":
        return lambda outputs, labels: functional.binary_cross_entropy_with_logits(
            outputs, labels.to(outputs.dtype), reduction="none"
        ).mean(dim=-1)
    return _checked(own(state.name), state.name)


def own(name: str) -> PerSample:
    """Return the user's function that a name such as "losses.py:per_sample" stands for."""
    return find_code(name, "training.loss", LOSSES)


def _checked(function: PerSample, name: str) -> PerSample:
    """Return the user's loss with its answers checked; it gets copies, so what it writes changes nobody's data."""

    def each(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        try:
            found = function(outputs.clone(), labels.clone())
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(
                f"training.loss: {name} cannot be called with outputs of shape {tuple(outputs.shape)} and labels of "
                f"shape {tuple(labels.shape)}: {fault(error)}"
            ) from error
        if not isinstance(found, torch.Tensor):
            raise UserError(
                f"training.loss: {name} returned {type(found).__name__}; allowed: a tensor with one loss per sample"
            )
        if found.shape != labels.shape[:1]:
            raise UserError(
                f"training.loss: {name} returned shape {tuple(found.shape)} for {len(labels)} samples; allowed: one "
                f"loss per sample, shape {tuple(labels.shape[:1])} (reduction='none' in torch's own losses)"
            )
        return found

    return each


def check_own(state: LossState, outputs: torch.Tensor, labels: torch.Tensor) -> None:
    """Refuse a loss of the user's that cannot be trained with; call it once, with a few samples, before a run."""
    if state.name in LOSSES:
        return
    leaf = outputs.detach().clone().requires_grad_()
    with torch.enable_grad():
        found = per_sample(state)(leaf, labels)
    if not (found.is_floating_point() and found.requires_grad):
        raise UserError(
            f"training.loss: {state.name} returned losses of type {found.dtype} without a gradient; allowed: losses "
            "computed from the outputs by torch"
        )
    try:
        torch.autograd.grad(found.sum(), leaf)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"training.loss: no gradient can be taken of {state.name}: {reason}") from error
    if not bool(found.detach().isfinite().all()):
        raise UserError(
            f"training.loss: {state.name} gave {found.detach().flatten()[:3].tolist()} for the first model; allowed: "
            "finite numbers"
        )


def weigh(losses: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor | None) -> torch.Tensor:
    """Multiply each sample's loss by the weight κ of its class; None stands for 1 everywhere."""
    return losses if class_weights is None else losses * class_weights[labels.long()]


def barron(error: torch.Tensor, shape: float, scale: float) -> torch.Tensor:
    """Barron's general robust loss ρ(x, α, c): α=2 squared, 1 Charbonnier, 0 Cauchy, −2 Geman-McClure, −∞ Welsch.

    Use it for regression with outliers; the smaller the shape α, the less a large error counts (Barron 2019, Eq. 13).
    """
    if not scale > 0 or math.isnan(shape):
        raise UserError(f"barron: got shape {shape} and scale {scale}; allowed: a number or -inf, and scale > 0")
    squared = (error / scale).square()
    if shape == 2:
        return 0.5 * squared
    if shape == 0:
        return torch.log1p(0.5 * squared)
    if shape == -math.inf:
        return -torch.expm1(-0.5 * squared)
    if shape == math.inf:
        return torch.expm1(0.5 * squared)
    distance = abs(shape - 2)
    # expm1 and log1p keep the formula exact near α = 0 and α = 2, where |α−2|/α · (…^{α/2} − 1) cancels.
    return (distance / shape) * torch.expm1(0.5 * shape * torch.log1p(squared / distance))


def dice(outputs: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """1 − the mean over all classes but the background of (2 Σ p g + 1) / (Σ p + Σ g + 1), for each row.

    p is the softmax over the classes of each pixel, g is 1 where the mask has the class, and 1 keeps a class that a row
    lacks from dividing by 0 (soft Dice: F. Milletari, N. Navab, S. Ahmadi: "V-Net", 3DV 2016). Use it where the
    background is most of each image. `outputs` are [rows, classes · pixels], `masks` [rows, pixels].
    """
    shares = outputs.unflatten(-1, (-1, masks.shape[-1])).softmax(dim=-2)[..., 1:, :]
    classes = torch.arange(1, shares.shape[-2] + 1, device=outputs.device)
    true = (masks[..., None, :] == classes[:, None]).to(shares.dtype)
    both, sizes = (shares * true).sum(dim=-1), shares.sum(dim=-1) + true.sum(dim=-1)
    return 1 - ((2 * both + 1) / (sizes + 1)).mean(dim=-1)


def cox(risks: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """Each sample's part of Cox's negative log partial likelihood; batches [..., n] may be stacked.

    ℓᵢ = δᵢ · (log Σ_{tⱼ ≥ tᵢ} exp ηⱼ − ηᵢ): η are the network's log risks, δᵢ is 1 where the event came (Cox 1975; ties
    as Breslow 1974). `times` holds tᵢ, with a minus where the event had not come until then; 0 is no sample, and in
    nobody's sum. The samples of a batch are held against each other, so small batches say little.
    """
    order = times.abs().argsort(dim=-1, descending=True, stable=True)
    sorted_times = times.abs().gather(-1, order)
    at_risk = risks.gather(-1, order).logcumsumexp(dim=-1)
    # Of samples with the same time the last in the order has the whole sum: the next place where the time changes.
    places = torch.arange(times.shape[-1], device=times.device).expand_as(times)
    changes = sorted_times[..., :-1] != sorted_times[..., 1:]
    ends = torch.where(torch.nn.functional.pad(changes, (0, 1), value=True), places, times.shape[-1])
    last = ends.flip(-1).cummin(dim=-1).values.flip(-1)
    back = order.argsort(dim=-1)
    sums = at_risk.gather(-1, last).gather(-1, back)
    return torch.where(times > 0, sums - risks, torch.zeros_like(risks))
