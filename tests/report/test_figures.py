import numpy as np
import pytest

from steelyard.report.figures import jain, rounds_to_target, worst_tenth

SCORES = np.array([[0.1, 0.2, 0.3], [0.9, 0.2, 0.3], [0.9, 0.8, 0.95], [0.5, 0.5, 0.5]])
ROUNDS = np.array([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("target", "share", "expected"),
    [(0.9, 0.1, 2), (0.9, 1 / 3, 2), (0.9, 0.5, 3), (0.9, 1.0, None), (0.8, 1.0, 3), (0.3, 0.3, 1), (0.99, 0.1, None)],
)
def test_rounds_to_target_by_hand(target: float, share: float, expected: int | None) -> None:
    assert rounds_to_target(ROUNDS, SCORES, target, share) == expected


def test_the_share_is_not_rounded_up_by_binary_fractions() -> None:
    # 0.3 · 10 must ask for 3 devices, not 4.
    scores = np.array([[1.0] * 3 + [0.0] * 7])
    assert rounds_to_target(np.array([1]), scores, 0.5, 0.3) == 1
    assert rounds_to_target(np.array([1]), scores, 0.5, 0.31) is None


def test_worst_tenth_is_the_mean_of_the_worst() -> None:
    assert worst_tenth(np.arange(20) / 20) == pytest.approx(0.025)
    assert worst_tenth(np.array([0.4, 0.6])) == 0.4
    assert np.isnan(worst_tenth(np.zeros(0)))


def test_jain() -> None:
    assert jain(np.array([0.5, 0.5, 0.5])) == pytest.approx(1)
    assert jain(np.array([1.0, 0, 0, 0])) == pytest.approx(0.25)
