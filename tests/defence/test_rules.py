"""The radius that updates are clipped to: a quantile of their lengths, smoothed over the rounds."""

from __future__ import annotations

import numpy as np
import pytest

from steelyard.defence.rules import radius_of

LENGTHS = np.array([1.0, 4.0, 100.0])


def test_smoothing_gives_the_radius_before_its_share_of_the_exponent() -> None:
    # q = 4, r = 16 before, s = 0.75: 4^0.25 · 16^0.75 = 2^0.5 · 2^3.
    assert radius_of(LENGTHS, 0.5, 0.75, 16.0) == pytest.approx(2**3.5)
    assert radius_of(LENGTHS, 0.5, 0.25, 16.0) == pytest.approx(2**2.5)


def test_without_smoothing_or_a_radius_before_it_is_the_quantile() -> None:
    assert radius_of(LENGTHS, 0.5, 0.0, 16.0) == 4.0
    assert radius_of(LENGTHS, 0.5, 0.75, None) == 4.0
