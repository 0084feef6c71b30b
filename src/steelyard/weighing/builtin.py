"""The built-in criteria of the papers and their kin; AdaFed's, which test each model, are in `adafed`.

DS, LD, CB, LE, IS, CR and EX are measured by the client; EQ, MD, UL, LB, LA, KL, NP, AG, AS, GA, SV, TR, RD and MK by
the server.
"""

from __future__ import annotations

import math

import numpy as np

from steelyard.base.errors import UserError
from steelyard.base.randomness import generator
from steelyard.base.tallies import quotient
from steelyard.defence.robust import factors, lengths, radius_of
from steelyard.messages.updates import Counts, Floats
from steelyard.weighing.criterion import CohortView, Labelled, LocalData, Needs, client_criterion, server_criterion
from steelyard.weighing.shapley import Coalitions, Values, shapley_values

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
    needs=Needs(labels=True),
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
    needs=Needs(labels=True, classes=2),
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
    needs=Needs(labels=True, task="classes"),
    of_labels=_entropies,
)
def label_entropy(local: LocalData) -> float:
    """−Σ_c p_c ln p_c / ln C over the client's labels: class balance for any number of classes."""
    counts = np.bincount(np.asarray(local.labels, dtype=np.int64), minlength=max(local.classes, 1))
    return float(_entropy(counts, local.classes))


def _mean(marks: Floats) -> float:
    return float(np.mean(marks)) if len(marks) else 0.0


@client_criterion(
    "IS", description="image sharpness: share of samples marked sharp", maximum=1.0, needs=Needs(marks=("sharp",))
)
def image_sharpness(local: LocalData) -> float:
    """Fraction of the training samples marked sharp; CelebA: not `Blurry` (paper 000)."""
    return _mean(local.marks["sharp"])


@client_criterion(
    "CR",
    description="completeness of records: share of input cells that are filled",
    maximum=1.0,
    needs=Needs(marks=("complete",)),
)
def completeness(local: LocalData) -> float:
    """Mean share of the inputs of a training sample that are not empty; tables mark each row with its share."""
    return _mean(local.marks["complete"])


@client_criterion(
    "EX",
    about="user",
    description="expertise: number of features that tell a user's items from others beyond chance (KGFlex)",
    needs=Needs(expertise=True),
)
def expertise(local: LocalData) -> float:
    """Number of features with an information gain that chance reaches once in a thousand (thesis chapter 6)."""
    return local.user["expertise"]


@server_criterion(
    "EQ", about="data", description="equal weights for every client", needs=Needs(), of_one=True, maximum=1.0
)
def equal_say(view: CohortView) -> Floats:
    """1 for every client: plain averaging, or the plain sum of FPL."""
    return np.ones(len(view.samples))


@server_criterion(
    "MD",
    description="model divergence: 1/sqrt(distance from the global model + 1)",
    of_one=True,
    maximum=1.0,
)
def model_divergence(view: CohortView) -> Floats:
    """1 / √(‖Θ − Θ_a‖₂ + 1), the norm over all parameters together (papers 000, 003)."""
    return 1.0 / np.sqrt(view.divergence + 1.0)


@server_criterion("UL", description="update length: distance from the global model", of_one=True)
def update_length(view: CohortView) -> Floats:
    """‖Θ_a − Θ‖₂ over all parameters together; several policies of others start from it."""
    return view.divergence


@server_criterion(
    "LB",
    about="data",
    description="loss before training: that of the received model on the client's rows",
    needs=Needs(first_losses=True),
    of_one=True,
)
def loss_before(view: CohortView) -> Floats:
    """F_a(Θ), as the client says; more weight to high ones is what fair rules do."""
    return np.asarray(view.first_losses)


@server_criterion(
    "LA",
    about="data",
    description="loss of the client's last local epoch",
    needs=Needs(first_losses=True),
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
    needs=Needs(task="classes", label_counts=True),
    of_one=True,
)
def label_skew(view: CohortView) -> Floats:
    """Σ_c p_c ln(p_c C): 0 for labels that are spread evenly, ln C for one label only."""
    counts = np.asarray(view.label_counts)
    return np.maximum(np.log(max(counts.shape[1], 1)) * (1.0 - _entropy(counts, counts.shape[1])), 0.0)


@server_criterion(
    "NP",
    about="data",
    description="noise precision: one over the variance of the noise that protects the client's samples",
    needs=Needs(noise=True),
    uses_claims=True,
    of_one=True,
)
def noise_precision(view: CohortView) -> Floats:
    """1/σ_a², with σ_a the deviation of the noise in the client's update: of all weights these make the sum of updates
    least noisy. Of clients that train for as many epochs σ_a is nearly the same; it differs with as many steps.
    """
    return 1.0 / np.square(np.asarray(view.noise))


# ---------------------------------------------------------------- contribution
#
# Criteria that the server measures on the updates themselves: agreement with the others, and what each adds.
#
# Nobody can inflate them by what it says; `agreement` needs no data of the server, `gain` and Shapley values need its
# test set.


@server_criterion("AG", description="agreement: mean cosine of the client's update with the others', at least 0")
def agreement(view: CohortView) -> Floats:
    """max(0, mean_{b≠a} cos(Θ_a − Θ, Θ_b − Θ)): whose update points where those of the others point.

    An update of length 0 agrees with nobody; a client alone in its cohort gets 1.
    """
    gram = view.gram
    count = len(gram)
    if count < 2:
        return np.ones(count)
    norms = np.sqrt(np.diag(gram))
    cosines = quotient(gram, np.outer(norms, norms), 0.0)
    np.fill_diagonal(cosines, 0.0)
    return np.maximum(cosines.sum(axis=1) / (count - 1), 0.0)


@server_criterion(
    "AS", description="agreement with the sum of the others' updates: its cosine, at least 0", maximum=1.0
)
def agreement_with_sum(view: CohortView) -> Floats:
    """max(0, cos(Θ_a − Θ, Σ_{b≠a} (Θ_b − Θ))): long updates of others count more than in AG; 0 for one alone."""
    return np.clip(cosines_with_sum(view.gram), 0.0, 1.0)


def cosines_with_sum(gram: Floats, weights: Floats | float = 1.0) -> Floats:
    """Return cos(u_a, Σ_{b≠a} w_b u_b) of every client; 0 for one alone, and for an update of length 0."""
    own, weights = np.diag(gram), np.broadcast_to(weights, len(gram))
    whole = gram @ weights
    squares = weights @ whole - 2 * weights * whole + weights**2 * own
    scale = np.sqrt(np.maximum(own, 0.0) * np.maximum(squares, 0.0))
    return np.divide(whole - weights * own, scale, out=np.zeros_like(own), where=scale > 1e-24)


@server_criterion(
    "GA",
    description="gain: how much the server's loss grows when the client is left out, at least 0",
    needs=Needs(models=True, test_set=True),
    uses_claims=True,
)
def gain(view: CohortView) -> Floats:
    """max(0, L(Θ without a) − L(Θ)), with Θ the size-weighted mean of the cohort: leave-one-out, n + 1 tests."""
    count = len(view.samples)
    if count < 2:
        return np.ones(count)
    losses = view.test(coalition_weights(view, np.vstack([np.ones(count), 1.0 - np.eye(count)]) > 0)).losses
    return np.maximum(np.nan_to_num(losses[1:] - losses[0], nan=0.0, posinf=0.0, neginf=0.0), 0.0)


@server_criterion(
    "SV",
    description="Shapley value: how much the client lowers the server's loss, over all coalitions, at least 0",
    needs=Needs(models=True, test_set=True),
    uses_claims=True,
)
def shapley_value(view: CohortView) -> Floats:
    """max(0, φ_a), with a coalition worth the fall of the server's loss at its size-weighted mean (`contributions`)."""
    return np.maximum(contributions(view).values, 0.0)


def contributions(view: CohortView) -> Values:
    """Return the Shapley values of a cohort in units of the server's loss; more than twelve clients are sampled."""

    def worth(coalitions: Coalitions) -> Floats:
        losses = view.test(coalition_weights(view, coalitions)).losses
        # A model that explodes is worth nothing more than the largest loss among the others.
        finite = np.isfinite(losses)
        worst = float(losses[finite].max()) if finite.any() else 0.0
        return -np.where(finite, losses, worst)

    return shapley_values(len(view.samples), worth, lambda: generator(view.seed, view.round, purpose="shapley"))


def coalition_weights(view: CohortView, coalitions: Coalitions) -> Floats:
    """Return the weights [coalitions, clients] of each coalition's mean by size; nobody has none."""
    kept = coalitions * view.samples
    # Where only clients without samples are in it, they count alike.
    kept = np.where(kept.any(axis=1, keepdims=True), kept, coalitions)
    totals = kept.sum(axis=1, keepdims=True)
    return quotient(kept, totals, 0.0)


# ---------------------------------------------------------------- track record
#
# TR: a detector over rounds; whose updates keep pointing elsewhere than most is out of the weighing until they do not.
#
#     x_a = cos(u_a, Σ_{b≠a} min(1, r/‖u_b‖) u_b),   r the median of ‖u_b‖
#     z_a = (median x − x_a) / (1.4826 · median |x − median x|)
#     S_a ← min(max(0, S_a + z_a − k), 2h)        TR_a = 0 while S_a > h, else 1
#
# E. S. Page: "Continuous Inspection Schemes" (Biometrika 1954), the cumulative sum, of what lies k robust standard
# deviations below the middle of the cohort (1.4826 makes the median deviation one, for normal numbers). One odd round
# raises no alarm below h + k deviations, many odd rounds do; 2h lets a client that behaves again come back after at
# most h/k rounds with z_a = 0. k is not the textbook's 0.5: an honest client with odd data is odd in every round, and
# below k it is never charged. An alarm that hits an honest client is false: `benchmarks.guarded` counts them.


SLACK = 2.0
"""k: so many deviations below the middle are nothing odd."""
LIMIT = 5.0
"""h: the sum of what lies beyond at which the alarm goes."""
MEMORY = "TR/sums"


@server_criterion(
    "TR",
    description="track record: 0 for clients whose updates have pointed elsewhere over rounds, 1 for all others",
    maximum=1.0,
)
def track_record(view: CohortView) -> Floats:
    """0 while a client's cumulative sum of odd rounds is above the limit; sums are kept by client, in checkpoints."""
    known: dict[str, float] = view.memory.get(MEMORY, {})
    before = np.array([known.get(client, 0.0) for client in view.clients])
    sums = after(before, cosines_with_others(view.gram))
    view.remember(MEMORY, {**known, **dict(zip(view.clients, sums.tolist(), strict=True))})
    return (sums <= LIMIT).astype(np.float64)


def after(sums: Floats, cosines: Floats) -> Floats:
    """Return the cumulative sums after a round; where all agree alike nobody is odd."""
    if not len(cosines):
        return sums
    below = np.median(cosines) - cosines
    spread = 1.4826 * float(np.median(np.abs(below)))
    odd = below / spread if spread > 1e-12 else np.zeros_like(below)
    return np.clip(sums + odd - SLACK, 0.0, 2 * LIMIT)


def cosines_with_others(gram: Floats) -> Floats:
    """Return the cosine of each update with the sum of the others, none of them longer than the median length."""
    sizes = lengths(gram)
    cut = factors(sizes, radius_of(sizes))
    return cosines_with_sum(gram * np.outer(cut, cut))


# ---------------------------------------------------------------- root direction
#
# RD: how far an update points where the server's own update points, as a criterion for any rule, cap and defence.
#
#     RD_a = max(0, cos(u_a, u_0)),   u_a = Θ_a − Θ,   u_0 what the server learns this round from rows of its own
#
# X. Cao, M. Fang, J. Liu, N. Z. Gong: "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping" (NDSS
# 2021), eq. (2), the trust score. There it is the whole weight, and every update gets the length of u_0. As a
# criterion it multiplies with others, caps limit it, and the robust rule after it says how long an update may be.


@server_criterion(
    "RD",
    description="root direction: cosine of the client's update with what the server's own rows teach, at least 0",
    needs=Needs(models=True, test_set=True, slopes=True),
    of_one=True,
    maximum=1.0,
)
def root_direction(view: CohortView) -> Floats:
    """max(0, cos(Θ_a − Θ, u_0)); 0 for an update of length 0, and for all where the server has nothing to learn."""
    products, length = view.root
    return np.clip(quotient(products, view.divergence * length, 0.0), 0.0, 1.0)


# ---------------------------------------------------------------- kernel divergence
#
# MK: model divergence as the authors of papers 000 and 003 compute it, layer by layer and without biases.
#
#     MK_a = 1 / √(1/L · Σ_l ‖W_l − W_al‖₂ + 1),   W_l the kernel of layer l of L
#
# `MNIST/Server.py` of github.com/sisinflab/ClientAware-FL, beside V. W. Anelli, Y. Deldjoo, T. Di Noia, A. Ferrara:
# "Prioritized Multi-Criteria Federated Learning" (2020). The paper's own measure, MD, takes one norm over all
# parameters.


@server_criterion(
    "MK",
    description="divergence of kernels: 1/sqrt(mean of the layers' kernels' distances + 1), without biases",
    needs=Needs(models=True, layers=True),
    of_one=True,
    maximum=1.0,
)
def kernel_divergence(view: CohortView) -> Floats:
    """1 / √(mean_l ‖W_l − W_al‖₂ + 1); use it to compare with the authors' code, which gives more even weights."""
    norms = view.kernel_norms
    if not norms.shape[1]:
        raise UserError("criterion MK: the network has no kernels; allowed: a network with weights of two axes or more")
    return 1.0 / np.sqrt(norms.mean(axis=1) + 1.0)
