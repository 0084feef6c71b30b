"""What FPL sends: the thesis' communication cost in vectors, and what really travels in vectors and bytes."""

from __future__ import annotations

from dataclasses import dataclass

ID_BYTES = 4
NUMBER_BYTES = 4


def row_bytes(factors: int) -> int:
    """Return the size of one row as sent: an item's 32-bit number, its factors and its bias as 32-bit floats."""
    return ID_BYTES + NUMBER_BYTES * (factors + 1)


def rounds_per_epoch(interactions: int, users: int, triples: int) -> int:
    """Return rpe so that users · T · rpe ≈ R⁺ (§4.5.2), at least 1."""
    return max(1, round(interactions / (users * triples)))


@dataclass(frozen=True)
class Cost:
    """The communication cost of a configuration, as the thesis counts it (§4.6.4)."""

    users: float
    """|U⁻|: users per round."""
    items: int
    triples: float
    """T per user and round."""
    rounds_per_epoch: float
    share: float
    """π"""

    @property
    def per_epoch(self) -> float:
        """CCE = rpe · |U⁻| · (|I| + T (1 + π)), in vectors both ways."""
        return self.rounds_per_epoch * self.users * (self.items + self.triples * (1 + self.share))

    def total(self, epochs: int) -> float:
        """TCC = CCE · epochs."""
        return self.per_epoch * epochs


def cost(mode: str, users: int, items: int, interactions: int, share: float) -> Cost:
    """Return the cost of one of the four configurations; T and rpe are R⁺/|U| unrounded, as in the thesis' table."""
    each = interactions / users
    triples = each if mode.endswith("+") else 1.0
    cohort = 1 if mode.startswith("s") else users
    return Cost(cohort, items, triples, interactions / (cohort * triples), share)


@dataclass(frozen=True)
class Traffic:
    """What has travelled: rows of the shared table down to users and up from them, and their bytes."""

    down_vectors: int = 0
    up_vectors: int = 0
    down_bytes: int = 0
    up_bytes: int = 0

    def plus(self, *, down: int, up: int, width: int) -> Traffic:
        """Add a round; the table goes down whole and in order, so its rows need no numbers."""
        return Traffic(
            self.down_vectors + down,
            self.up_vectors + up,
            self.down_bytes + down * (width - ID_BYTES),
            self.up_bytes + up * width,
        )

    def numbers(self) -> tuple[int, int, int, int]:
        """Return the four counts, for a checkpoint."""
        return self.down_vectors, self.up_vectors, self.down_bytes, self.up_bytes

    @property
    def vectors(self) -> int:
        """All vectors both ways: what TCC estimates."""
        return self.down_vectors + self.up_vectors

    def __str__(self) -> str:
        return (
            f"{self.vectors:,} vectors ({self.down_vectors:,} down, {self.up_vectors:,} up), "
            f"{self.down_bytes + self.up_bytes:,} bytes"
        )
