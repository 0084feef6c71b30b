"""[privacy.aggregation]: the section that lets the server learn the weighted sum of a cohort's updates and no more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from steelyard.errors import UserError, listed
from steelyard.settings import Section

AggregationKind = Literal["secure", "paillier", "ckks"]
FEWEST = 3
"""In a sum of two, each of the two could take its own part away."""

# Which field belongs to which kinds: one given for another kind is a mistake that must not pass in silence.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "threshold": ("secure",),
    "bits": ("secure", "paillier"),
    "key_bits": ("paillier",),
}


class AggregationSettings(Section):
    """[privacy.aggregation]: updates are summed so that the server sees their weighted sum only, never a single one.

    The criteria come first, from them the weights, and then each client sends its update times its weight, hidden.
    """

    kind: AggregationKind = "secure"
    """secure: masks that cancel in the sum, and survive clients that drop out; paillier, ckks: homomorphic encryption
    under a key that the clients share. secure is by far the cheapest."""
    threshold: Annotated[float, Field(gt=0.5, le=1)] | None = None
    """secure: the share of a cohort that must stay to the end; with fewer the round is given up, and fewer than that
    cannot open anything together. Default 2/3."""
    bits: Literal[16, 32, 64] | None = None
    """secure, paillier: bits of each number on the wire; more are more precise. Default 32."""
    bound: Annotated[float, Field(gt=0, le=1e6)] = 16.0
    """No parameter may change by more than this in one round: sums are sized by it. A client whose update is larger
    takes no part in that round."""
    largest_weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A client sends nothing where its share of the weight would be larger: a sum that is nearly one update does not
    hide it."""
    key_bits: Annotated[int, Field(ge=2048, le=8192)] | None = None
    """paillier: bits of the modulus. Default 3072."""

    @model_validator(mode="after")
    def _fits(self) -> AggregationSettings:
        for name, allowed in _PARAMETERS.items():
            if getattr(self, name) is not None and self.kind not in allowed:
                raise UserError(f"{name}: given with kind = '{self.kind}'; allowed only with {listed(allowed)}")
        if self.key_bits is not None and self.key_bits % 256:
            raise UserError(f"key_bits: got {self.key_bits}; allowed: a multiple of 256, such as 3072")
        return self

    @property
    def word_bits(self) -> int:
        """Bits of each number, with the default."""
        return 32 if self.bits is None else self.bits

    @property
    def modulus_bits(self) -> int:
        """Bits of a Paillier modulus, with the default."""
        return 3072 if self.key_bits is None else self.key_bits

    def least(self, clients: int) -> int:
        """Return how many of so many clients must stay to the end: more than half of them, and at least two."""
        share = 2 / 3 if self.threshold is None else self.threshold
        # 1e-9: 2/3 of 9 is 6 and not 7, whatever a float makes of it.
        return max(2, clients // 2 + 1, math.ceil(share * clients - 1e-9))
