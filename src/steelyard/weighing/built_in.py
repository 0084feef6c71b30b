"""The built-in criteria of the papers and their kin: DS, LD, CB, LE, IS, CR on the client, EQ and MD on the server."""

from __future__ import annotations

import math

import numpy as np

from steelyard.base.errors import UserError
from steelyard.messages.updates import Counts, Floats
from steelyard.weighing.criteria import CohortView, Labelled, LocalData, client_criterion, server_criterion

FEW_LABELS = 2048
"""Up to here a Python set counts labels faster than a tensor operation; a round may measure thousands of clients."""


def _distinct(many: Labelled) -> Floats | None:
    counts = many.counts()
    return None if counts is None else (counts > 0).sum(axis=1).astype(np.float64)


@client_criterion(
    "DS", description="dataset size: number of training samples", of_labels=lambda many: many.sizes.astype(np.float64)
)
def dataset_size(local: LocalData) -> float:
    """Number of training samples (papers 000, 003)."""
    return float(len(local.labels))


@client_criterion(
    "LD",
    description="label diversity: number of distinct labels",
    needs_labels=True,
    of_labels=_distinct,
    at_most_classes=True,
)
def label_diversity(local: LocalData) -> float:
    """Number of distinct labels among the training samples (papers 000, 003), or of classes in masks."""
    if local.labels.ndim > 1 and local.labels.is_floating_point():
        return float((local.labels > 0).any(dim=0).sum())  # of several labels: how many some row has
    if local.labels.ndim == 1 and len(local.labels) <= FEW_LABELS:
        return float(len(set(local.labels.tolist())))
    return float(len(local.labels.unique()))


@client_criterion(
    "CB",
    description="class balance: rarer class over commoner class (two classes)",
    maximum=1.0,
    needs_labels=True,
    needs_classes=2,
)
def class_balance(local: LocalData) -> float:
    """min(#pos, #neg) / max(#pos, #neg); 0 for a client that holds one class only (paper 000)."""
    positive = int((local.labels > 0).sum())
    negative = len(local.labels) - positive
    return min(positive, negative) / max(positive, negative, 1)


def _entropies(many: Labelled) -> Floats | None:
    counts = many.counts()
    return None if counts is None else _entropy(counts, many.classes)


def _entropy(counts: Counts, classes: int) -> Floats:
    shares = counts / np.maximum(counts.sum(axis=-1, keepdims=True), 1)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.clip(-(shares * logs).sum(axis=-1) / math.log(max(classes, 2)), 0.0, 1.0)


@client_criterion(
    "LE",
    description="label entropy: how evenly the classes are held, from 0 (one class) to 1 (all alike)",
    maximum=1.0,
    needs_labels=True,
    needs_task="classes",
    of_labels=_entropies,
)
def label_entropy(local: LocalData) -> float:
    """−Σ_c p_c ln p_c / ln C over the client's labels: class balance for any number of classes."""
    counts = np.bincount(np.asarray(local.labels, dtype=np.int64), minlength=max(local.classes, 1))
    return float(_entropy(counts, local.classes))


def _mean(marks: Floats) -> float:
    return float(np.mean(marks)) if len(marks) else 0.0


@client_criterion(
    "IS", description="image sharpness: share of samples marked sharp", maximum=1.0, needs_marks=("sharp",)
)
def image_sharpness(local: LocalData) -> float:
    """Fraction of the training samples marked sharp; CelebA: not `Blurry` (paper 000)."""
    return _mean(local.marks["sharp"])


@client_criterion(
    "CR",
    description="completeness of records: share of input cells that are filled",
    maximum=1.0,
    needs_marks=("complete",),
)
def completeness(local: LocalData) -> float:
    """Mean share of the inputs of a training sample that are not empty; tables mark each row with its share."""
    return _mean(local.marks["complete"])


@client_criterion(
    "EX",
    about="user",
    description="expertise: number of features that tell a user's items from others beyond chance (KGFlex)",
    needs_expertise=True,
)
def expertise(local: LocalData) -> float:
    """Number of features with an information gain that chance reaches once in a thousand (thesis chapter 6)."""
    return local.user["expertise"]


@server_criterion(
    "EQ", about="data", description="equal say: 1 for every client", needs_models=False, of_one=True, maximum=1.0
)
def equal_say(view: CohortView) -> Floats:
    """1 for every client: plain averaging, or the plain sum of FPL."""
    return np.ones(len(view.samples))


@server_criterion(
    "MD",
    description="model divergence: 1/sqrt(distance from the global model + 1)",
    needs_models=True,
    of_one=True,
    maximum=1.0,
)
def model_divergence(view: CohortView) -> Floats:
    """1 / √(‖Θ − Θ_a‖₂ + 1), the norm over all parameters together (papers 000, 003)."""
    return 1.0 / np.sqrt(view.divergence + 1.0)


@server_criterion("UL", description="update length: distance from the global model", needs_models=True, of_one=True)
def update_length(view: CohortView) -> Floats:
    """‖Θ_a − Θ‖₂ over all parameters together; several policies of others start from it."""
    return view.divergence


@server_criterion(
    "LB",
    about="data",
    description="loss before training: that of the received model on the client's rows",
    needs_models=False,
    needs_first_losses=True,
    of_one=True,
)
def loss_before(view: CohortView) -> Floats:
    """F_a(Θ), as the client says; more weight to high ones is what fair rules do."""
    return np.asarray(view.first_losses)


@server_criterion(
    "LA",
    about="data",
    description="loss of the client's last local epoch",
    needs_models=False,
    needs_first_losses=True,
    of_one=True,
)
def loss_after(view: CohortView) -> Floats:
    """The mean training loss of the last local epoch, as the client says; asked for beside LB."""
    if view.losses is None:
        raise UserError("criterion LA: clients do not send their losses; allowed: criteria that do not need it")
    return view.losses


@server_criterion(
    "KL",
    about="data",
    description="label skew: KL divergence of the client's labels from an even spread",
    needs_models=False,
    needs_task="classes",
    needs_label_counts=True,
    of_one=True,
)
def label_skew(view: CohortView) -> Floats:
    """Σ_c p_c ln(p_c C): 0 for labels that are spread evenly, ln C for one label only."""
    counts = np.asarray(view.label_counts)
    return np.maximum(np.log(max(counts.shape[1], 1)) * (1.0 - _entropy(counts, counts.shape[1])), 0.0)
