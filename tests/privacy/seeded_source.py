"""Noise that can be drawn again, for tests of what is made from it."""

from __future__ import annotations

import numpy as np

from steelyard.privacy.noise import Words


class SeededSource:
    """Words from a seed; noise of it protects nobody."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(seed))

    def words(self, count: int) -> Words:
        return self._generator.integers(0, 2**64, size=count, dtype=np.uint64)
