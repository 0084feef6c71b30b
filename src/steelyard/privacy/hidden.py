"""Updates that the server never sees: it knows whose they are, and may learn one weighted sum of them.

What a cohort adds exactly are fixed-point numbers in a ring, or points of a grid for CKKS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from math import ceil, log2
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError, first_names
from steelyard.messages.payloads import Payload, Summed
from steelyard.messages.updates import Floats
from steelyard.privacy.settings import FEWEST, AggregationSettings

if TYPE_CHECKING:
    import torch  # only for annotations


Words = NDArray[np.unsignedinteger[Any]]
"""Numbers modulo 2^bits; arrays of them add and subtract with the wrap-around that a ring has."""
FEWEST_PLACES = 8
"""With fewer binary places than these an update of ordinary size is mostly rounding."""
MODULUS_BITS = 60
"""Bits of the modulus in which sums must fit."""
_HEADROOM = 2
_NOISE_BITS = 26
"""The step of the grid is this many bits above the scale's unit; noise of a thousand clients has about 18."""


@dataclass(frozen=True)
class FixedPoint:
    """How a cohort writes its weighted updates: x as round(x · 2^places), modulo 2^bits.

    Make it with `of`; both sides compute the same one from what both know.
    """

    bits: int
    places: int
    bound: float
    clients: int

    @classmethod
    def of(cls, bits: int, bound: float, clients: int) -> FixedPoint:
        """Return the most precise encoding in which no sum overflows; refuses one that is left with no precision.

        Each of n clients sends |w·Δ| ≤ bound, since weights are at most 1, rounded to a step of 2^-places. Their sum
        is at most n·(bound·2^places + 1), and that must stay below 2^(bits-1), where negative numbers begin.
        """
        # In fractions: a float rounds 2^63 - 1 up, and then the largest sum is one too many.
        largest = Fraction(2 ** (bits - 1) - 1, clients) - 1
        places = max(1, largest // Fraction(bound)).bit_length() - 1
        if places < FEWEST_PLACES:
            wider = next((f"bits = {more}" for more in (32, 64) if more > bits), "a smaller cohort")
            raise UserError(
                f"privacy.aggregation.bound: got {bound:g} with bits = {bits} and {clients} clients, which leaves "
                f"{places} binary places and needs {FEWEST_PLACES}; allowed: {wider}, or a smaller bound"
            )
        # 52: beyond that a float has no digits to write.
        return cls(bits, min(places, 52), bound, clients)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Unsigned words of this many bits, little-endian."""
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def step(self) -> float:
        """The difference between neighbouring numbers; a client's rounding error is at most half of it."""
        return 2.0**-self.places

    def encode(self, values: NDArray[np.floating[Any]]) -> Words:
        """Return numbers as words; refuses (ValueError) what is beyond the bound or no number."""
        return _in_steps(values, self.bound, self.places).astype(np.int64).astype(self.dtype)

    def decode(self, words: Words) -> NDArray[np.float64]:
        """Return the numbers, negative ones too, that words of a sum stand for."""
        signed = words.astype(self.dtype).view(f"<i{self.bits // 8}")
        return signed * self.step


@dataclass(frozen=True)
class Grid:
    """Where numbers lie that CKKS adds: fine enough to learn, coarse beside the scheme's noise.

    Multiples of 2^-places, in ciphertexts of scale 2^scale; both sides know it."""

    places: int
    scale: int
    bound: float

    @classmethod
    def of(cls, bound: float, clients: int) -> Grid:
        """Return the finest grid for sums of so many clients with |w·Δ| ≤ bound each."""
        scale = MODULUS_BITS - _HEADROOM - ceil(log2(max(1.0, bound * clients)))
        places = scale - _NOISE_BITS
        if places < FEWEST_PLACES:
            raise UserError(
                f"privacy.aggregation.bound: got {bound:g} with kind = 'ckks' and {clients} clients, which leaves "
                f"{max(places, 0)} binary places and needs {FEWEST_PLACES}; allowed: a smaller bound"
            )
        return cls(places, scale, bound)

    def onto(self, values: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Return numbers moved to the nearest point of the grid; those beyond the bound are refused (ValueError)."""
        return _in_steps(values, self.bound, self.places) * 2.0**-self.places


def _in_steps(values: NDArray[np.floating[Any]], bound: float, places: int) -> NDArray[np.float64]:
    """Return numbers as whole multiples of 2^-places, the nearest ones; those beyond the bound are refused."""
    if not (np.abs(values) <= bound).all():  # A comparison with NaN is false.
        raise ValueError(f"values: beyond the bound of {bound:g}; allowed: up to it")
    return np.rint(np.asarray(values, dtype=np.float64) * 2.0**places)


_BLOCK = 1 << 18


class BeyondBound(UserError):
    """An opened sum is larger than its clients may make it: one of them sent what it must not, and it is not used."""


class Summing(Protocol):
    """What sums the updates of a cohort without showing one: an exchange with the clients that hold them."""

    def sum(self, clients: Sequence[str], weights: Floats) -> Summed:
        """Return Σ w·Δ of these clients, or of those of them that stay; called once a round."""
        ...


@dataclass(eq=False)
class HiddenUpdates(Payload):
    """The payload of a cohort under [privacy.aggregation]; all that can be done with it is one sum.

    A second sum of the same updates under other weights would be a second equation about them, so there is none.
    """

    clients: tuple[str, ...]
    summing: Summing
    settings: AggregationSettings
    summed: Summed | None = None
    """What came out, once `aggregate` was called."""

    def aggregate(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        """Return Θ + Σ w·Δ / Σ w over the clients that stayed to the end.

        Where a client drops out after the weights were given, its weight goes to the others in proportion. Raises
        `BeyondBound` for a sum that honest clients cannot have.
        """
        import torch  # Late for speed of start.

        if self.summed is not None or weights.ndim != 1:
            raise UserError(
                "privacy.aggregation: a second weighted sum of the same updates was asked for, and from several such "
                "sums single updates can be solved; allowed: one sum in a round"
            )
        check_weights(self.clients, weights, self.settings)
        self.summed = self.summing.sum(self.clients, weights)
        stayed = set(self.summed.clients)
        whole = sum(weight for name, weight in zip(self.clients, weights.tolist(), strict=True) if name in stayed)
        check_sum(self.summed, whole, self.settings)
        # Weights that sum to 1 up to rounding are those that were given, so that nothing is divided twice.
        step = self.summed.total if abs(whole - 1) < 1e-9 else self.summed.total / whole
        return parameters + torch.from_numpy(step).to(parameters.device, parameters.dtype)

    def combine(self, parameters: torch.Tensor, weights: Floats) -> NoReturn:
        """Refuse: models of any weights would be further sums."""
        _hidden()

    def divergence(self, parameters: torch.Tensor) -> NoReturn:
        """Refuse: nobody but the client knows."""
        _hidden()

    def gram(self, parameters: torch.Tensor) -> NoReturn:
        """Refuse: nobody knows."""
        _hidden()

    def select(self, keep: Sequence[int]) -> HiddenUpdates:
        """Return the updates of some of the clients only; the others will not be asked to hide theirs."""
        return HiddenUpdates(tuple(self.clients[row] for row in keep), self.summing, self.settings, self.summed)

    def finite(self) -> NDArray[np.bool_]:
        """Return that all are: a client whose update is not takes no part, since it cannot be written down."""
        return np.ones(len(self.clients), dtype=np.bool_)

    def content(self) -> None:
        """Return None: nobody but the client knows."""


def _hidden() -> NoReturn:
    raise UserError(
        "privacy.aggregation: the server sees no single updates in this run, but something needs them; allowed: "
        "criteria, rules and defences that do not"
    )


def beyond(models: torch.Tensor, parameters: torch.Tensor, bound: float) -> list[str | None]:
    """Say of each client's model why its update cannot be hidden, or None where it can: [clients, parameters].

    Each client does this for itself; one that cannot write its update down says so and takes no part in the round,
    instead of sending something else than what it learnt.
    """
    import torch  # Late for speed of start.

    largest = torch.zeros(len(models), dtype=torch.float64)
    start = parameters.to(models.device)
    for begin in range(0, parameters.numel(), _BLOCK):
        step = models[:, begin : begin + _BLOCK].to(torch.float64) - start[begin : begin + _BLOCK].to(torch.float64)
        # amax keeps NaN, and so does maximum.
        largest = torch.maximum(largest, step.abs().amax(dim=1).cpu())
    return [
        None
        if size <= bound
        else f"its update changes a parameter by {size:.3g}; allowed: at most {bound:g} (privacy.aggregation.bound)"
        if size < float("inf")
        else "model holds NaN or infinity"
        for size in largest.tolist()
    ]


def check_weights(clients: Sequence[str], weights: Floats, settings: AggregationSettings) -> None:
    """Refuse weights under which the sum would be nearly one client's update.

    Call it when the weights are known, and again with those who stayed before their sum is opened: what dropouts leave
    may be less than what was agreed to.
    """
    if not len(weights) or not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise UserError("privacy.aggregation: a weight is missing or is not a number; allowed: numbers from 0 to 1")
    # Whoever has no weight is not in the sum, and nobody hides behind it.
    hiding = int(np.count_nonzero(weights))
    if hiding < FEWEST:
        raise UserError(
            f"privacy.aggregation: {hiding} of {len(weights)} clients have a weight, and in a sum of two each client "
            f"could compute the other's update; the sum stays hidden; allowed: at least {FEWEST} clients"
        )
    shares = weights / weights.sum()
    heaviest = int(np.argmax(shares))
    # Rounding: a cap of exactly this size must pass.
    if shares[heaviest] > settings.largest_weight + 1e-9:
        raise UserError(
            f"privacy.aggregation.largest_weight: {clients[heaviest]} would have {shares[heaviest]:.3g} of the "
            f"weight, and a sum that is nearly one update does not hide it; the sum stays hidden; allowed: at most "
            f"{settings.largest_weight:g} (set weighing.max_weight, or take larger cohorts)"
        )


def check_sum(summed: Summed, whole: float, settings: AggregationSettings) -> None:
    """Refuse a sum of updates, weighted by `whole` in all, in which a parameter moves by more than honest ones can.

    Each client has |w·Δ| ≤ w·bound and rounds to `step`, so that |Σ w·Δ| ≤ bound·Σ w + n·step/2. A sum does not
    show who sent too much.
    """
    # 1e-9: products of floats are rounded too.
    limit = settings.bound * whole * (1 + 1e-9) + len(summed.clients) * summed.step / 2
    found = np.abs(summed.total)
    if not (found <= limit).all():  # A comparison with NaN is false.
        raise BeyondBound(
            f"the hidden sum of {len(summed.clients)} clients moves a parameter by {found.max():.3g}, and "
            f"honest clients can move it by at most {settings.bound * whole:.3g} (privacy.aggregation.bound times the "
            f"sum of their weights); one or more of {first_names(summed.clients, 20)} sent too much, and the sum does "
            "not show who; it is not used"
        )


def check_cohort(settings: AggregationSettings, clients: int) -> None:
    """Refuse cohorts in which nobody could hide, and numbers of which a sum could overflow; call it before a run."""
    if clients < FEWEST:
        raise UserError(
            f"privacy.aggregation: a cohort has {clients} clients, and in a sum of two each could compute the other's "
            f"update; allowed: at least {FEWEST} (set rounds.fraction or rounds.min_clients)"
        )
    if settings.kind == "ckks":
        Grid.of(settings.bound, clients)
    else:
        FixedPoint.of(settings.word_bits, settings.bound, clients)


_NEEDED = {
    "secure": {"cryptography": "privacy"},
    "ckks": {"cryptography": "privacy", "tenseal": "encryption"},
}
"""By kind of aggregation: the modules that it cannot do without, and the extra that brings each."""


def check_installed(settings: AggregationSettings) -> None:
    """Refuse a kind of aggregation whose library is missing."""
    for module, extra in _NEEDED[settings.kind].items():
        if find_spec(module) is None:
            raise UserError(
                f"privacy.aggregation.kind: '{settings.kind}' needs {module}, which is not installed; "
                f"pip install 'steelyard[{extra}]'"
            )
