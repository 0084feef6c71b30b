"""From the weights and updates of a cohort to the new model, by the robust rule that a run names.

A rule that needs only inner products gives coefficients, and the new model is Θ + Σ c_a u_a; one that looks at each
parameter by itself goes over the matrix of models, some parameters at a time. Several weightings of one cohort (the
candidates of online adjustment) share what does not depend on weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from steelyard.base.errors import UserError, listed
from steelyard.base.settings import Kinds
from steelyard.base.tallies import quotient
from steelyard.messages.payloads import Floats, SingleModels

if TYPE_CHECKING:
    import torch  # only for annotations: settings are read without waiting for torch

# ---------------------------------------------------------------- geometry
#
# The updates of a cohort as a robust rule sees them: their inner products, and sums of them.
#
# Most robust rules only stretch, drop and add updates u_a = Θ_a − Θ, so all they need is the Gram matrix G = ⟨u_a,
# u_b⟩, and their result is a vector of coefficients c: the new model is Θ + Σ c_a u_a. That costs one product,
# whatever the number of steps a rule takes.


def distances(gram: Floats) -> Floats:
    """Return ‖u_a − u_b‖ of all pairs: [clients, clients]."""
    squares = np.diag(gram)
    return np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2.0 * gram, 0.0))


def lengths(gram: Floats) -> Floats:
    """Return ‖u_a‖ of every client."""
    return np.sqrt(np.maximum(np.diag(gram), 0.0))


def distances_to(gram: Floats, coefficients: Floats) -> Floats:
    """Return ‖u_a − v‖ of every client to the point v = Σ c_b u_b."""
    products = gram @ coefficients
    squares = np.diag(gram) - 2.0 * products + coefficients @ products
    return np.sqrt(np.maximum(squares, 0.0))


def hostile_count(clients: int, share: float) -> int:
    """Return how many of a cohort may be hostile: the share, rounded up, but always fewer than half."""
    return min(int(np.ceil(share * clients - 1e-9)), max(0, (clients - 1) // 2))


def shares(weights: Floats) -> Floats:
    """Return the weights divided by their sum; equal ones where all are 0."""
    total = weights.sum()
    return weights / total if total > 0 else np.full(len(weights), 1.0 / max(len(weights), 1))


HALF = 1e-9
"""So near to one half of the weight counts as one half: sums of weights round."""


# ---------------------------------------------------------------- adaptive norm clipping
#
# Adaptive norm clipping: no update counts longer than a radius that follows the cohort.
#
#     Θ ← Θ + Σ w_a · min(1, r/‖u_a‖) · u_a        r = the q-quantile of ‖u_a‖ over the cohort
#
# Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan: "Can You Really Backdoor Federated Learning?" (2019) clips to a fixed
# radius; G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy: "Differentially Private Learning with Adaptive Clipping"
# (NeurIPS 2021) lets the radius follow a quantile of the lengths. Here the server sees the lengths, so it takes the
# quantile itself; it is not weighted, since a client that claims a large weight must not move the radius.


LEAST = 1e-30
"""Below this, coefficients times weights come near to where float32 rounds them, up too."""


def radius_of(lengths: Floats, quantile: float = 0.5, smooth: float = 0.0, before: float | None = None) -> float:
    """Return this round's radius: r = q^(1−s) · r_before^s, with q the quantile of the lengths."""
    found = float(np.quantile(lengths, quantile)) if len(lengths) else 0.0
    if before is None or before <= 0:
        return found
    return float(found ** (1.0 - smooth) * before**smooth)


def factors(lengths: Floats, radius: float) -> Floats:
    """Return min(1, r/‖u_a‖) of every client, 0 where float32 rounds it; an update of length 0 stays."""
    found = np.minimum(1.0, quotient(radius, lengths, 1.0))
    return np.where(found < LEAST, 0.0, found)


def clipped(weights: Floats, lengths: Floats, radius: float) -> Floats:
    """Return the coefficients of the updates: the weights, each times how much of its update is left."""
    return weights * factors(lengths, radius)


# ---------------------------------------------------------------- multi-Krum
#
# Multi-Krum: only the clients whose updates lie nearest to those of the others are combined.
#
# P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer: "Machine Learning with Adversaries: Byzantine Tolerant
# Gradient Descent" (NeurIPS 2017). With f hostile of n, a score is the mean squared distance to the n − f − 1 nearest,
# the number of honest clients beside itself (the paper takes one fewer); the n − f best scores are kept, with their
# weights.


def nearest_to_others(gram: Floats, hostile: int) -> np.ndarray:
    """Return the positions of the n − f clients with the best scores, ascending; of equal ones the earlier."""
    count = len(gram)
    nearest = np.sort(np.square(distances(gram)))[:, 1 : count - hostile]
    scores = nearest.mean(axis=1) if nearest.shape[1] else np.zeros(count)
    return np.sort(np.argsort(scores, kind="stable")[: count - hostile])


def multi_krum(weights: Floats, gram: Floats, share: float) -> Floats:
    """Return the coefficients: the weights of those chosen, brought back to a sum of 1; the others get 0."""
    kept = nearest_to_others(gram, hostile_count(len(gram), share))
    found = np.zeros(len(weights))
    found[kept] = shares(weights[kept])
    return found


# ---------------------------------------------------------------- the geometric median
#
# The geometric median of the updates: the point with the least weighted sum of distances, by Weiszfeld's steps.
#
#     β_a = w_a / max(ν, ‖u_a − z‖)        z ← Σ β_a u_a / Σ β_a        from the clipped mean
#
# K. Pillutla, S. M. Kakade, Z. Harchaoui: "Robust Aggregation for Federated Learning" (IEEE TSP 2022), the smoothed
# Weiszfeld algorithm. Half of the weight can be hostile, and a hostile update pulls no harder for being long. The start
# is the mean of updates clipped to their median length: not 0, since a free rider's update is 0 and from a point where
# an update lies the steps hardly move away; and not the mean, which a huge update takes too far to come back in a few
# steps.


def geometric_median(weights: Floats, gram: Floats, steps: int, least_distance: float) -> Floats:
    """Return the coefficients of the geometric median after some steps."""
    sizes = lengths(gram)
    point = clipped(shares(weights), sizes, radius_of(sizes))
    for _ in range(steps):
        point = shares(weights / np.maximum(distances_to(gram, point), least_distance))
    return point


# ---------------------------------------------------------------- FLTrust
#
# FLTrust: an update counts as far as it points where the server's own update points, and at the server's length.
#
#     TS_a = max(0, cos(u_a, u_0))        Θ ← Θ + Σ w_a TS_a (‖u_0‖/‖u_a‖) u_a / Σ w_a TS_a
#
# X. Cao, M. Fang, J. Liu, N. Z. Gong: "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping" (NDSS
# 2021). u_0 is what the server gets by training on its root data, the rows that it weighs on. The paper's weights are
# equal.


def fltrust(weights: Floats, lengths: Floats, products: Floats, root_length: float) -> Floats:
    """Return the coefficients from ‖u_a‖, ⟨u_a, u_0⟩ and ‖u_0‖; all 0, which keeps the old model, where none agrees."""
    scale = lengths * root_length
    trusted = weights * np.maximum(quotient(products, scale, 0.0), 0.0)
    if trusted.sum() <= 0:
        return np.zeros(len(weights))
    trusted /= trusted.sum()
    return quotient(trusted * root_length, lengths, 0.0)


# ---------------------------------------------------------------- nearest-neighbour mixing
#
# Nearest-neighbour mixing: every update becomes the mean of its n − f nearest ones, before a robust rule looks at it.
#
# Y. Allouah, S. Farhadkhani, R. Guerraoui, N. Gupta, R. Pinot, J. Stephan: "Fixing by Mixing: A Recipe for Optimal
# Byzantine ML under Heterogeneity" (AISTATS 2023). Honest clients with different data then look alike, hostile ones far
# away are drawn in or left out.


def mixing(gram: Floats, share: float) -> Floats:
    """Return the matrix M whose row a averages the n − f updates nearest to u_a, itself included: y = M u."""
    count = len(gram)
    kept = count - hostile_count(count, share)
    away = distances(gram)
    np.fill_diagonal(away, -1.0)  # itself first, also beside others that lie at the same point
    nearest = np.argsort(away, kind="stable")[:, :kept]
    mixed = np.zeros((count, count))
    np.put_along_axis(mixed, nearest, 1.0 / max(kept, 1), axis=1)
    return mixed


# ---------------------------------------------------------------- coordinate-wise median and trimmed mean
#
# Coordinate-wise median and trimmed mean, with weights: each parameter by itself, sorted over the clients.
#
# D. Yin, Y. Chen, K. Ramchandran, P. Bartlett: "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
# Rates" (ICML 2018). With weights, a client counts as much as its weight on the way from 0 to 1 along the sorted
# values: the median is the value at one half, the trimmed mean the mean of what lies between β and 1 − β. Equal weights
# give the paper's rules, β = f/n the mean without the f least and the f greatest.


def median(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted median of values [clients, parameters]; where half the weight ends between two, their mean.

    `weights` [clients] are float64 and sum to 1.
    """
    ordered, order = values.sort(dim=0)
    reached = weights[order].cumsum(dim=0)
    low = (reached < 0.5 - HALF).sum(dim=0)
    high = (reached <= 0.5 + HALF).sum(dim=0)
    # A client without weight between the two is no neighbour of the middle.
    return (ordered.gather(0, low[None])[0] + ordered.gather(0, high[None])[0]) / 2


def trimmed_mean(values: torch.Tensor, weights: torch.Tensor, share: float) -> torch.Tensor:
    """Return the mean of what is left of values [clients, parameters] without this share of the weight at each end."""
    ordered, order = values.sort(dim=0)
    mine = weights[order]
    ends = mine.cumsum(dim=0)
    begins = ends - mine
    left = (ends.clamp(max=1.0 - share) - begins.clamp(min=share)).clamp_(min=0.0)
    return ((left * ordered.double()).sum(dim=0) / left.sum(dim=0)).to(values.dtype)


# ---------------------------------------------------------------- the spectral check
#
# The spectral check: who stands out along the direction in which the clipped updates differ most is left out.
#
#     v_a = min(1, r/‖u_a‖) u_a,   r the median of ‖u_a‖
#     s_a = ⟨v_a − v̄, d⟩²,   d the first principal direction of the v_a;   the greatest s_a are left out
#     the same again with those who are left, until n − f are
#     Θ ← Θ + m Σ w_a v_a over those,   m = min(1/Σ w_a, n/(n − f))
#
# V. Shejwalkar, A. Houmansadr: "Manipulating the Byzantine" (NDSS 2021), divide-and-conquer (DnC) over all parameters,
# which the Gram matrix holds exactly; the paper samples parameters to save memory, and leaves out f along one
# direction. Malicious clients who push together make that direction theirs, unless one honest client with odd data has
# it; so it is looked for anew. The paper clips nothing, so that one huge update takes the direction and hides updates
# of any length behind it. Clipped, k < n/2 malicious clients of weight at most c each add at most k c r n/(n − f) to
# the step, whatever they send, and r is no longer than some honest update.


PASSES = 8
"""In so many passes at most the f clients are left out, the same number in each; up to 8, one by one."""


def spectral_scores(gram: Floats) -> Floats:
    """Return s_a of every client: with H the centring matrix, λ₁ x_a² of the first eigenpair (λ₁, x) of H G H."""
    count = len(gram)
    centring = np.eye(count) - 1.0 / max(count, 1)
    values, vectors = np.linalg.eigh(centring @ gram @ centring)
    return np.maximum(values[-1], 0.0) * np.square(vectors[:, -1])


def spectral(weights: Floats, gram: Floats, share: float) -> Floats:
    """Return the coefficients: the weights of those kept times how much of their updates is left; the others get 0.

    Weights are brought back towards a sum of 1, but none grows by more than n/(n − f): else few who are kept would
    have the weight of all.
    """
    count = len(weights)
    sizes = lengths(gram)
    left = factors(sizes, radius_of(sizes))
    products = gram * np.outer(left, left)
    hostile = hostile_count(count, share)
    passes = min(PASSES, hostile)
    kept = np.arange(count)
    for number in range(passes):
        scores = spectral_scores(products[np.ix_(kept, kept)])
        goes = hostile * (number + 1) // passes - hostile * number // passes
        kept = np.sort(kept[np.argsort(scores, kind="stable")[: len(kept) - goes]])
    total = float(weights[kept].sum())
    found = np.zeros(count)
    if total > 0:
        found[kept] = weights[kept] * left[kept] * min(weights.sum() / total, count / len(kept))
    return found


# ---------------------------------------------------------------- [weighing.defence]


class DefenceSettings(Kinds):
    """[weighing.defence]: how the weighted updates are combined when some clients may be hostile.

    Every rule takes the weights that the criteria gave; with equal weights each is its paper's. A rule is one class:
    its fields, and `coefficients`, or `of_parameters` where it looks at each parameter by itself.
    """

    told_by: ClassVar[str] = "rule"
    usual: ClassVar[str | None] = "clip"
    counts_hostile: ClassVar[bool] = False
    """Whether the rule must know how many clients may be hostile."""
    needs_root: ClassVar[bool] = False
    """Whether the server must train on rows of its own."""
    by_coordinate: ClassVar[bool] = False
    """Whether it looks at each parameter by itself; all others need only the inner products of the updates."""

    rule: str = "clip"
    """clip: no update longer than a radius; median, trimmed-mean: coordinate by coordinate; multi-krum: only the
    clients nearest to each other; geometric-median: the point with the least sum of distances; fltrust: as far as an
    update points where the server's own does; spectral: no update longer than the median, and without those who stand
    out where they differ most;
    none: the plain sum."""
    mix: bool = False
    """First replace every update by the mean of its nearest ones, n less the hostile: helps where clients differ."""
    hostile: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    """trimmed-mean, multi-krum, spectral, mix: the share of a cohort that may be hostile. Default 0.3."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.hostile is not None and not self.counts_hostile and not self.mix:
            allowed = listed(
                name for name, kind in self.kinds.items() if issubclass(kind, DefenceSettings) and kind.counts_hostile
            )
            raise UserError(f"hostile: given with rule = '{self.rule}'; allowed only with {allowed} or mix = true")
        return self

    @property
    def robust(self) -> bool:
        """Whether anything but the plain weighted sum is made of the updates."""
        return self.named != "none" or self.mix

    @property
    def share(self) -> float:
        """The share of a cohort that may be hostile, with its default."""
        return 0.3 if self.hostile is None else self.hostile

    def coefficients(self, weights: Floats, cohort: RobustRule) -> Floats:
        """Return c of the new model Θ + Σ c_a u_a."""
        return weights

    def of_parameters(self, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the new value of each parameter from values [clients, parameters] and weights that sum to 1."""
        raise NotImplementedError(f"{type(self).__name__}.of_parameters")

    def remembered(self, cohort: RobustRule) -> float | None:
        """Return the radius of this round where the next one leans on it."""
        return None


class Clip(DefenceSettings, named="clip"):
    """No update counts longer than a radius."""

    radius: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """clip: the radius itself; default: it adapts, see `quantile`."""
    quantile: Annotated[float, Field(gt=0, le=1)] | None = None
    """clip: the radius is this quantile of the cohort's lengths, in each round anew. Default 0.5."""
    smooth: Annotated[float, Field(ge=0, lt=1)] | None = None
    """clip: how much of last round's radius stays, s: r_t = q^(1−s) · r_(t−1)^s. Default 0."""

    @model_validator(mode="after")
    def _one_radius(self) -> Self:
        if self.radius is not None and (self.quantile is not None or self.smooth is not None):
            raise UserError(
                "radius: given together with quantile or smooth; allowed: a fixed radius, or quantile and smooth"
            )
        return self

    def coefficients(self, weights: Floats, cohort: RobustRule) -> Floats:
        return clipped(weights, lengths(cohort.gram), self.radius_in(cohort))

    def radius_in(self, cohort: RobustRule) -> float:
        """Return the radius of this round."""
        if self.radius is not None:
            return self.radius
        quantile = 0.5 if self.quantile is None else self.quantile
        return radius_of(lengths(cohort.gram), quantile, self.smooth or 0.0, cohort.radius_before)

    def remembered(self, cohort: RobustRule) -> float | None:
        return self.radius_in(cohort) if self.smooth else None


class Median(DefenceSettings, named="median"):
    """The weighted median of every parameter."""

    by_coordinate = True

    def of_parameters(self, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return median(values, weights)


class TrimmedMean(DefenceSettings, named="trimmed-mean"):
    """The mean of every parameter without the ends."""

    by_coordinate = True
    counts_hostile = True

    def of_parameters(self, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return trimmed_mean(values, weights, self.share)


class MultiKrum(DefenceSettings, named="multi-krum"):
    """The clients whose updates lie nearest to those of the others."""

    counts_hostile = True

    def coefficients(self, weights: Floats, cohort: RobustRule) -> Floats:
        return multi_krum(weights, cohort.gram, self.share)


class GeometricMedian(DefenceSettings, named="geometric-median"):
    """The point with the least sum of distances to the updates."""

    steps: Annotated[int, Field(ge=1, le=1000)] | None = None
    """geometric-median: number of steps. Default 8."""
    least_distance: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """geometric-median: smoothing ν: nearer than this counts as this far. Default 1e-6."""

    def coefficients(self, weights: Floats, cohort: RobustRule) -> Floats:
        return geometric_median(weights, cohort.gram, self.steps or 8, self.least_distance or 1e-6)


class FLTrust(DefenceSettings, named="fltrust"):
    """As far as an update points where the server's own does."""

    needs_root = True

    def coefficients(self, weights: Floats, cohort: RobustRule) -> Floats:
        products, length = cohort.root
        return fltrust(weights, lengths(cohort.gram), products, length)


class Spectral(DefenceSettings, named="spectral"):
    """No update longer than the median, and without those who stand out where they differ most."""

    counts_hostile = True

    def coefficients(self, weights: Floats, cohort: RobustRule) -> Floats:
        return spectral(weights, cohort.gram, self.share)


class PlainSum(DefenceSettings, named="none"):
    """The weighted sum of the updates, after mixing where that is asked."""


# ---------------------------------------------------------------- a rule on a cohort


class RobustRule:
    """One robust rule on one cohort; make it once a round and combine as many weightings as you like.

    `gram_of` computes the inner products of the updates, `root_of` those with the server's own update u_0 and its
    length, `radius_before` is last round's radius, which adaptive clipping may lean on.
    """

    def __init__(
        self,
        settings: DefenceSettings,
        payload: SingleModels,
        parameters: torch.Tensor,
        gram_of: Callable[[], Floats],
        root_of: Callable[[], tuple[Floats, float]] | None = None,
        radius_before: float | None = None,
    ) -> None:
        self.settings = settings
        self.payload = payload
        self.parameters = parameters.to(payload.like.device)
        self._gram_of = gram_of
        self._root_of = root_of
        self.radius_before = radius_before

    def combine(self, weights: Floats) -> torch.Tensor:
        """Return the new model for weights [clients], or one row per candidate for [candidates, clients]."""
        rows = np.atleast_2d(weights)
        found = self._by_coordinate(rows) if self.settings.by_coordinate else self._by_product(rows)
        found = self.payload.keep_frozen(found, self.parameters)
        return found if np.ndim(weights) > 1 else found[0]

    def _by_product(self, weights: Floats) -> torch.Tensor:
        coefficients = np.stack([self.coefficients(each) for each in weights])
        sums = self.payload.combine(self.parameters, coefficients)
        return sums.addcmul_(sums.new_tensor(1.0 - coefficients.sum(axis=1))[:, None], self.parameters[None])

    def coefficients(self, weights: Floats) -> Floats:
        """Return c of the new model Θ + Σ c_a u_a; for rules that need only inner products."""
        found = self.settings.coefficients(weights, self)
        return found if self._nearest is None else self._nearest.T @ found

    @cached_property
    def _gram(self) -> Floats:
        return self._gram_of()

    @cached_property
    def _nearest(self) -> Floats | None:
        """The matrix that averages updates before the rule looks at them; None where it sees them as they are."""
        return mixing(self._gram, self.settings.share) if self.settings.mix else None

    @cached_property
    def gram(self) -> Floats:
        """Inner products of the updates as the rule sees them."""
        return self._gram if self._nearest is None else self._nearest @ self._gram @ self._nearest.T

    @property
    def root(self) -> tuple[Floats, float]:
        """Inner products with the server's own update, and its length."""
        if self._root_of is None:
            raise AssertionError("fltrust without a server that trains is refused before a run")
        products, length = self._root_of()
        return products if self._nearest is None else self._nearest @ products, length

    def _by_coordinate(self, weights: Floats) -> torch.Tensor:
        like = self.payload.like
        nearest = None if self._nearest is None else like.new_tensor(self._nearest)
        shares = [like.new_empty(0).double().new_tensor(each / each.sum()) for each in weights]
        found = like.new_empty((len(weights), len(self.parameters)))
        for span, models in self.payload.blocks():
            values = models if nearest is None else nearest @ models
            for row, mine in enumerate(shares):
                found[row, span] = self.settings.of_parameters(values, mine)
        return found
