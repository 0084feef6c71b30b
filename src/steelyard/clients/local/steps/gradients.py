"""A piece of hand-derived training steps: the gradient of the loss at the outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from steelyard.learning import losses
from steelyard.messages.updates import LossState

OutputGradient = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(outputs [..., n, o], labels [..., n], weights [..., n]) → (gradient [..., n, o], loss of each sample [..., n])."""

SHORT, MANY = 32, 4096
"""Up to so many classes, and from so many numbers on, log softmax on the CPU goes by columns."""


def output_gradient(loss: LossState) -> OutputGradient:
    """Return the function that gives d(Σ weight · loss)/d outputs, and each sample's unweighted loss.

    The weights hold κ of the sample's class over the number of samples of the step; 0 marks padding. The losses of
    the papers have closed forms; any other goes through autograd, on the outputs alone.
    """
    closed = {
        "cross-entropy": _cross_entropy,
        "binary-cross-entropy": _binary_cross_entropy,
        "squared-error": _squared_error,
    }
    # Cox holds the samples of a batch against each other: the clients of a stack stay apart.
    other = _through_autograd(losses.per_sample(loss), apart=loss.name == "cox")
    return closed.get(loss.name, other)


def _cross_entropy(
    outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logs = _log_softmax(outputs)
    each = logs.gather(-1, labels[..., None]).squeeze(-1).neg_()
    classes = torch.arange(outputs.shape[-1], device=outputs.device)
    return logs.exp_().sub_((labels[..., None] == classes).to(logs.dtype)).mul_(weights[..., None]), each


def _log_softmax(outputs: torch.Tensor) -> torch.Tensor:
    """log softmax over the last axis; on the CPU a short last axis goes several times faster when it stands first."""
    if outputs.is_cuda or outputs.shape[-1] > SHORT or outputs.numel() < MANY:
        return torch.log_softmax(outputs, dim=-1)
    upright = outputs.reshape(-1, outputs.shape[-1]).t()
    return torch.log_softmax(upright, dim=0).t().contiguous().view(outputs.shape)


def _binary_cross_entropy(
    outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits, target = outputs.squeeze(-1), labels.to(outputs.dtype)
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return torch.sigmoid(logits).sub_(target).mul_(weights)[..., None], each


def _squared_error(
    outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    gap = outputs.squeeze(-1) - labels.to(outputs.dtype)
    return (2 * gap * weights)[..., None], gap.square()


def _through_autograd(each_of: losses.PerSample, *, apart: bool) -> OutputGradient:
    def gradient(
        outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            leaf = (outputs.detach().clone() if apart else outputs.detach().flatten(0, -2)).requires_grad_()
            each = each_of(leaf, labels.reshape(*leaf.shape[:-1], *labels.shape[weights.dim() :]))
            # A product with weight 0 would carry a nan of padding into the sum; where() does not.
            share = weights.reshape(each.shape)
            total = torch.where(share > 0, each * share, torch.zeros_like(each)).sum()
            (slope,) = torch.autograd.grad(total, leaf)
        return slope.view_as(outputs), each.detach().view_as(weights)

    return gradient
