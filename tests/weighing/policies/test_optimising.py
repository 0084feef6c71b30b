"""The steps that policies take: Adam as torch takes it, and the nearest point of the simplex as geometry says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.weighing.policies.optimising import Adam, nearest_shares, softmax

NUMBERS = st.lists(st.floats(-5, 5), min_size=1, max_size=12)


def test_adam_steps_as_torch_does() -> None:
    values = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    theirs = torch.optim.Adam([values], lr=0.05, betas=(0.5, 0.999))
    ours, found = Adam(3, (0.5, 0.999)), values.detach().numpy().copy()
    for slopes in ([1.0, -2.0, 0.0], [0.5, 0.1, 3.0], [-1.0, 0.0, 0.2]):
        values.grad = torch.tensor(slopes, dtype=torch.float64)
        theirs.step()
        found = ours.step(found, np.array(slopes), 0.05)
        assert found == pytest.approx(values.detach().numpy(), abs=1e-12)


@given(NUMBERS, st.floats(0, 0.3), st.floats(0.2, 1))
def test_nearest_shares_are_the_nearest(values: list[float], low: float, high: float) -> None:
    """The difference to the nearest point makes no acute angle with the way to any other allowed point."""
    given_values, count = np.array(values), len(values)
    found = nearest_shares(given_values, low, high)
    assert found.sum() == pytest.approx(1.0, abs=1e-9)
    if low * count >= 1 or high * count <= 1:
        assert found == pytest.approx(np.full(count, 1 / count))
        return
    assert (found >= low - 1e-12).all()
    assert (found <= high + 1e-12).all()
    others = [np.full(count, 1 / count)]
    for corner in range(count):
        # A corner of the allowed set: as much as may be to one client after another, beginning with this one.
        other, left = np.full(count, low), 1.0 - low * count
        for place in np.roll(np.arange(count), -corner):
            more = min(left, high - low)
            other[place] += more
            left -= more
        others.append(other)
    for other in others:
        assert (given_values - found) @ (other - found) <= 1e-7


@given(NUMBERS)
def test_softmax_sums_to_1_and_keeps_the_order(values: list[float]) -> None:
    found = softmax(np.array(values) * 300)
    assert found.sum() == pytest.approx(1.0)
    assert found[int(np.argmax(values))] == found.max()
