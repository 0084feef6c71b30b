"""What really travels between the server and its users, in vectors and in bytes; `fpl` has the thesis' formula."""

from __future__ import annotations

from dataclasses import dataclass

ID_BYTES = 4
NUMBER_BYTES = 4


def row_bytes(factors: int) -> int:
    """Return the size of one row as sent: an item's 32-bit number, its factors and its bias as 32-bit floats."""
    return ID_BYTES + NUMBER_BYTES * (factors + 1)


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
