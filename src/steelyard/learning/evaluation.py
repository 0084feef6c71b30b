"""How good outputs are: classes, errors of a regression, the order of survival, masks, several labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.tallies import quotient

Floats = NDArray[np.float64]


def predictions(outputs: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the predicted class (the logit's sign for one output), or the value itself for regression."""
    if classes == 0:
        return outputs.squeeze(-1)
    if outputs.shape[-1] == 1:
        return (outputs.squeeze(-1) > 0).long()
    return outputs.argmax(dim=-1)


def confusion(predicted: torch.Tensor, labels: torch.Tensor, classes: int) -> NDArray[np.int64]:
    """Return counts [..., true class, predicted class]; leading axes of `predicted` are models."""
    lead = predicted.shape[:-1]
    pairs = (labels.long() * classes + predicted.long()).reshape(-1, predicted.shape[-1])
    # One count over all models: each has cells of its own.
    cells = torch.arange(len(pairs), device=pairs.device)[:, None] * classes**2
    counts = torch.bincount((pairs + cells).flatten(), minlength=len(pairs) * classes**2)
    return counts.reshape(*lead, classes, classes).cpu().numpy()


def accuracy(counts: NDArray[np.int64]) -> Floats:
    """Return the share of right answers; 0 where nothing was tested."""
    right = np.trace(counts, axis1=-2, axis2=-1).astype(np.float64)
    total = counts.sum(axis=(-2, -1))
    return quotient(right, total, 0.0)


def f1(counts: NDArray[np.int64] | Floats) -> Floats:
    """Return F1 = 2TP / (2TP + FP + FN) of each class; 0 for a class neither tested nor predicted."""
    true = np.diagonal(counts, axis1=-2, axis2=-1).astype(np.float64)
    both = counts.sum(axis=-1) + counts.sum(axis=-2)
    return quotient(2 * true, both, 0.0)


def by_class(counts: NDArray[np.int64]) -> dict[str, Floats]:
    """Return precision TP/(TP+FP), recall TP/(TP+FN), accuracy (TP+TN)/all and jaccard TP/(TP+FP+FN) of each class.

    Use it where weights or an adaptive loss go by another metric than F1; where nothing is to be divided it is 0. With
    them goes the diagnostic odds ratio TP·TN/(FP·FN), ½ added to each of the four so that a perfect class has one too.
    """
    true = np.diagonal(counts, axis1=-2, axis2=-1).astype(np.float64)
    tested, predicted = counts.sum(axis=-1), counts.sum(axis=-2)
    total = counts.sum(axis=(-2, -1))[..., None]
    either = tested + predicted - true
    odds = (true + 0.5) * (total - either + 0.5) / ((tested - true + 0.5) * (predicted - true + 0.5))
    return {
        "precision": quotient(true, predicted, 0.0),
        "recall": quotient(true, tested, 0.0),
        "accuracy": quotient(total - either + true, total, 0.0),
        "jaccard": quotient(true, either, 0.0),
        "odds": odds,
    }


def errors(predicted: torch.Tensor, labels: torch.Tensor) -> dict[str, Floats]:
    """Return mape, mae and rmse over the last axis; nan where there is nothing to test.

    MAPE leaves out targets that are 0, where a relative error has no meaning.
    """
    target = labels.to(torch.float64)
    gap = (predicted.to(torch.float64) - target).abs()
    known = (target != 0).expand_as(gap)
    relative = torch.where(known, gap / target.abs().clamp_min(1e-300), torch.nan)
    return {
        "mape": relative.nanmean(dim=-1).cpu().numpy(),
        "mae": gap.mean(dim=-1).cpu().numpy(),
        "rmse": gap.square().mean(dim=-1).sqrt().cpu().numpy(),
    }


def jackknife(without: torch.Tensor) -> float:
    """Return the standard error of a score from its values `without` each of its n rows; NaN for fewer than two.

    √((n−1)/n · Σᵢ (θ₍ᵢ₎ − mean)²), which errs upward if at all (B. Efron and C. Stein: "The jackknife estimate of
    variance", Annals of Statistics 9(3), 1981).
    """
    count = without.shape[-1]
    if count < 2:
        return math.nan
    return math.sqrt((count - 1) / count * float((without.double() - without.double().mean()).square().sum()))


def rmse_error(predicted: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the standard error of a root mean squared error."""
    squares = (predicted.double() - labels.double()).square()
    return jackknife(((squares.sum() - squares).clamp_min(0) / max(len(squares) - 1, 1)).sqrt())


def concordance_error(risks: torch.Tensor, times: torch.Tensor) -> float:
    """Return the standard error of a C-index; without a pair to compare the index says nothing, and it is NaN."""
    right, pairs = (torch.zeros(len(times), dtype=torch.float64, device=times.device) for _ in range(2))
    for one, later, hits in _known_pairs(risks, times):
        right[later] += hits
        right[one] += hits.sum()
        pairs[later] += 1
        pairs[one] += later.sum()
    # Each pair was counted at both of its samples.
    held = pairs.sum() / 2 - pairs
    return jackknife((right.sum() / 2 - right) / held) if bool((held > 0).all()) else math.nan


def _known_pairs(risks: torch.Tensor, times: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield each sample with an event, which samples are known to have theirs later, and 1, ½ or 0 for each pair."""
    when, came = times.abs(), times > 0
    # One sample with an event after another: a table of all pairs would be too large for a large test set.
    for one in came.nonzero().flatten().tolist():
        later = (when > when[one]) | ((when == when[one]) & ~came)
        gap = risks[..., one, None] - risks[..., later]
        yield one, later, (gap.sign() + 1).to(torch.float64) / 2


def concordance(risks: torch.Tensor, times: torch.Tensor) -> Floats:
    """Return Harrell's C-index over the last axis: how often the sample at higher risk had its event first.

    A pair counts where it is known whose event came first: the earlier time is that of an event, or the times are the
    same and one is censored. Equal risks count half; without any such pair the index is 0.5, which says nothing.
    `times` are as `losses.cox` takes them. Leading axes of `risks` are models.
    """
    right, pairs = torch.zeros(risks.shape[:-1], dtype=torch.float64), 0.0
    for _, later, hits in _known_pairs(risks, times):
        right += hits.sum(dim=-1).cpu()
        pairs += float(later.sum())
    return (right / pairs).numpy() if pairs else np.full(risks.shape[:-1], 0.5)


def integrated_brier(risks: torch.Tensor, times: torch.Tensor) -> Floats:
    """Return the integrated Brier score over the last axis, over at most 100 of the times at which events came.

    Rows count by the inverse chance not to be censored, by Kaplan and Meier (Graf et al.: "Assessment and comparison of
    prognostic classification schemes for survival data", Statistics in Medicine 18, 1999). Cox's model orders risks
    alone: the curves are Breslow's. Both are of the tested rows, so that the score is a site's own, and no sums of
    sites give it. NaN where fewer than two times are known.
    """
    when, came = times.abs().double().cpu().numpy(), (times > 0).cpu().numpy()
    distinct, at = np.unique(when, return_inverse=True)
    events, all_ = np.bincount(at, came), np.bincount(at)
    there = all_[::-1].cumsum()[::-1]
    # Who has an event is gone before somebody is lost at the same time.
    free = np.cumprod(1 - (all_ - events) / np.maximum(there - events, 1))
    known = np.flatnonzero((events > 0) & (free > 0) & (distinct < when.max(initial=0)))
    if len(known) < 2:
        return np.full(risks.shape[:-1], np.nan)
    grid = known[np.unique(np.linspace(0, len(known) - 1, 100).round().astype(int))]
    before, found = distinct[grid, None] >= when, list[float]()
    for risk in risks.reshape(-1, len(when)).double().cpu().numpy():
        hazard = np.exp((risk - risk.mean()).clip(-50, 50))
        base = np.cumsum(events / np.bincount(at, hazard)[::-1].cumsum()[::-1])
        alive = np.exp(-base[grid, None] * hazard)
        dead = np.square(alive) * (before & came) / free[at].clip(1e-300)
        each = (dead + np.square(1 - alive) * ~before / free[grid, None]).mean(axis=1)
        found.append(float(np.trapezoid(each, distinct[grid]) / (distinct[grid[-1]] - distinct[grid[0]])))
    return np.array(found).reshape(risks.shape[:-1])


def dice(outputs: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Return Dice of each row's mask, from outputs [..., rows, classes · pixels] and masks [rows, pixels].

    2 |P ∩ G| / (|P| + |G|) (Dice 1945), the mean over the classes that the mask or the prediction has, class 0, the
    background, left out; 1 where both are all background.
    """
    pixels = masks.shape[-1]
    predicted = outputs.unflatten(-1, (-1, pixels)).argmax(dim=-2)
    classes = outputs.shape[-1] // pixels
    shares: list[torch.Tensor] = []
    present: list[torch.Tensor] = []
    for label in range(1, classes):
        mine, true = predicted == label, masks == label
        sizes = mine.sum(dim=-1) + true.sum(dim=-1)
        shares.append(2 * (mine & true).sum(dim=-1) / sizes.clamp_min(1))
        present.append(sizes > 0)
    counted = torch.stack(present).sum(dim=0)
    return torch.where(counted > 0, torch.stack(shares).sum(dim=0) / counted.clamp_min(1), 1.0)


def label_f1(predicted: torch.Tensor, labels: torch.Tensor) -> dict[str, Floats]:
    """Return macro and micro F1 of several labels, from [..., rows, labels].

    Macro F1 is the mean over the labels that some row has or is predicted to have, 1 where there are none; micro F1
    counts all labels together.
    """
    right, either = _label_counts(predicted, labels)
    right, either = right.sum(dim=-2), either.sum(dim=-2)
    micro = torch.where(either.sum(-1) > 0, 2 * right.sum(-1) / either.sum(-1).clamp_min(1), 1.0)
    return {"macro_f1": _macro(right, either).cpu().numpy(), "micro_f1": micro.cpu().numpy()}


def _label_counts(predicted: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each label of each row is rightly found, and how often it is there and predicted: 0, 1 or 2."""
    mine, true = predicted.to(torch.float64), labels.to(torch.float64)
    return mine * true, mine + true


def _macro(right: torch.Tensor, either: torch.Tensor) -> torch.Tensor:
    known = (either > 0).sum(dim=-1)
    shares = torch.where(either > 0, 2 * right / either.clamp_min(1), 0.0)
    return torch.where(known > 0, shares.sum(dim=-1) / known.clamp_min(1), 1.0)


def _label_f1_error(predicted: torch.Tensor, labels: torch.Tensor) -> float:
    right, either = _label_counts(predicted, labels)
    return jackknife(_macro(right.sum(dim=-2) - right, either.sum(dim=-2) - either))


Figures = Callable[[torch.Tensor, torch.Tensor], dict[str, Floats]]
FIGURES: Mapping[str, Figures] = {
    "survival": lambda risks, times: {
        "c_index": concordance(risks, times),
        "integrated_brier": integrated_brier(risks, times),
    },
    "segmentation": lambda dice, masks: {"dice": dice.to(torch.float64).mean(dim=-1).cpu().numpy()},
    "multi-label": label_f1,
}
"""By task: figures of predictions [models, rows, ...], the score first; Dice of each row counts as its prediction."""
ERRORS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], float]] = {
    "survival": concordance_error,
    "segmentation": lambda dice, masks: jackknife((dice.sum() - dice) / max(len(dice) - 1, 1)),
    "multi-label": _label_f1_error,
}
"""By task: the standard error of one model's score."""
