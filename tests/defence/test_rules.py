"""Each robust rule on numbers small enough to do by hand, and at the edges: nobody, nothing sent, ties."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from steelyard.defence import rules
from steelyard.defence.geometry import distances, distances_to, hostile_count, lengths, shares
from steelyard.defence.rules import radius_of
from steelyard.update_payloads import spans

LENGTHS = np.array([1.0, 4.0, 100.0])


def gram(*updates: tuple[float, ...]) -> np.ndarray:
    matrix = np.array(updates)
    return matrix @ matrix.T


def test_smoothing_gives_the_radius_before_its_share_of_the_exponent() -> None:
    # q = 4, r = 16 before, s = 0.75: 4^0.25 · 16^0.75 = 2^0.5 · 2^3.
    assert radius_of(LENGTHS, 0.5, 0.75, 16.0) == pytest.approx(2**3.5)
    assert radius_of(LENGTHS, 0.5, 0.25, 16.0) == pytest.approx(2**2.5)


def test_without_smoothing_or_a_radius_before_it_is_the_quantile() -> None:
    assert radius_of(LENGTHS, 0.5, 0.0, 16.0) == 4.0
    assert radius_of(LENGTHS, 0.5, 0.75, None) == 4.0


def test_a_cohort_that_sent_nothing_neither_leans_on_the_radius_before_nor_divides_by_it() -> None:
    assert radius_of(np.zeros(3), 0.5, 0.5, 16.0) == 0.0
    assert radius_of(LENGTHS, 0.5, 0.5, 0.0) == 4.0
    assert radius_of(np.zeros(0), 0.5, 0.5, 16.0) == 0.0
    # Lengths below 1 lean on it as well: √(1/4 · 1/16).
    assert radius_of(np.array([0.25]), 0.5, 0.5, 0.0625) == pytest.approx(0.125)


def test_the_radius_is_the_median_where_no_quantile_is_given() -> None:
    assert radius_of(LENGTHS) == 4.0
    assert radius_of(LENGTHS, before=16.0) == 4.0
    assert isinstance(radius_of(LENGTHS, 0.5, 0.5, 16.0), float)


def test_an_update_is_cut_to_the_radius_and_one_of_length_0_stays() -> None:
    assert rules.factors(np.array([0.0, 0.5, 2.0, 8.0]), 2.0).tolist() == [1.0, 1.0, 1.0, 0.25]
    assert rules.factors(np.array([0.0, 8.0]), 0.0).tolist() == [1.0, 0.0]
    assert rules.clipped(np.array([0.5, 0.5]), np.array([1.0, 4.0]), 2.0).tolist() == [0.5, 0.25]


def test_centred_clipping_by_hand() -> None:
    # One parameter, updates 1 and 9, equal weights, radius 2. From 0: ½·1 + ½·2 = 1.5; from there −¼ + 1 = 2.25.
    weights, products = np.array([0.5, 0.5]), gram((1.0,), (9.0,))
    for steps, value in ((1, 1.5), (2, 2.25), (3, 2.25 - 0.625 + 1.0)):
        found = rules.centred_clip(weights, products, lambda _away: 2.0, steps)
        assert found @ [1.0, 9.0] == pytest.approx(value)
    assert rules.centred_clip(weights, products, lambda _away: 2.0) @ [1.0, 9.0] == pytest.approx(2.625)


def test_krum_scores_by_the_mean_square_of_the_nearest_honest_ones() -> None:
    # On a line at 0, 1, 3, 4, 20. One hostile: three nearest each; scores (1+9+16), (1+4+9), (4+1+9), (16+9+1), …
    products = gram((0.0,), (1.0,), (3.0,), (4.0,), (20.0,))
    assert rules.chosen(products, 1).tolist() == [0, 1, 2, 3]
    # Two hostile: the two nearest; 1+9, 1+4, 1+4, 1+9: of the equal ones, the earlier.
    assert rules.chosen(products, 2).tolist() == [0, 1, 2]
    assert rules.chosen(gram((5.0,)), 0).tolist() == [0]
    # Nobody can be told from another where none is near enough to count: the first stay.
    assert rules.chosen(gram((5.0,), (6.0,)), 1).tolist() == [0]


def test_krum_of_clients_without_weight_counts_them_alike() -> None:
    products = gram((0.0,), (1.0,), (2.0,), (50.0,))
    found = rules.multi_krum(np.array([0.0, 0.0, 0.0, 1.0]), products, 0.25)
    assert found == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])


def test_the_geometric_median_stops_at_an_update_that_it_meets() -> None:
    # Three updates at one point: the steps reach it to within the least distance, and do not divide by 0.
    products = gram((2.0, 0.0), (2.0, 0.0), (2.0, 0.0), (0.0, 5.0))
    found = rules.geometric_median(np.full(4, 0.25), products, steps=50)
    assert found[:3].sum() == pytest.approx(1.0, abs=1e-5)
    # A least distance larger than all distances makes every pull the weight itself: the plain mean.
    far = rules.geometric_median(np.array([0.1, 0.2, 0.3, 0.4]), products, least_distance=1e3)
    assert far == pytest.approx([0.1, 0.2, 0.3, 0.4])
    # A millionth by default: nearer than that counts as that far. On a line 0, 0 and 1, the pulls are 1/ν and 1.
    near = rules.geometric_median(np.full(3, 1 / 3), gram((0.0,), (0.0,), (1.0,)), steps=2)
    assert 0.0 < near[2] < 2e-6


def test_the_geometric_median_starts_from_updates_cut_to_their_median_length() -> None:
    # No step at all leaves the start: lengths 1, 2 and 8, so the last is cut to a quarter.
    found = rules.geometric_median(np.array([1.0, 1.0, 2.0]), gram((1.0,), (-2.0,), (8.0,)), steps=0)
    assert found == pytest.approx([0.25, 0.25, 0.125])


def test_fltrust_of_those_who_sent_nothing_or_have_no_weight() -> None:
    found = rules.fltrust(np.array([0.5, 0.25, 0.25]), np.array([2.0, 0.0, 4.0]), np.array([2.0, 0.0, 2.0]), 1.0)
    # Cosines 1, 0 and ½: 0.5 and 0.125 of 0.625, each brought to length 1.
    assert found == pytest.approx([0.8 / 2, 0.0, 0.2 / 4])
    # A server that learnt nothing trusts nobody.
    assert rules.fltrust(np.ones(2) / 2, np.ones(2), np.zeros(2), 0.0).tolist() == [0.0, 0.0]
    assert rules.fltrust(np.array([0.0, 1.0]), np.ones(2), np.array([1.0, -1.0]), 1.0).tolist() == [0.0, 0.0]
    # Small trust is trust: only the direction counts.
    assert rules.fltrust(np.array([1.0]), np.array([1e-3]), np.array([1e-6]), 1.0) == pytest.approx([1e3])


def test_mixing_takes_each_itself_first() -> None:
    # Two at one point and one away, one hostile: two each; both at the point average themselves.
    mixed = rules.mixing(gram((1.0,), (1.0,), (5.0,)), 0.3)
    assert mixed.tolist() == [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5]]
    three = rules.mixing(gram((1.0,), (1.0,), (1.0,)), 0.3)
    assert np.diag(three).tolist() == [0.5, 0.5, 0.5]


def test_medians_between_clients_and_beside_those_without_weight() -> None:
    values = torch.tensor([[1.0, 8.0], [2.0, 6.0], [4.0, 4.0], [8.0, 2.0]])

    def median(*weights: float) -> list[float]:
        return rules.median(values, torch.tensor(weights, dtype=torch.float64)).tolist()

    assert median(0.25, 0.25, 0.25, 0.25) == [3.0, 5.0]
    assert median(0.5, 0.0, 0.0, 0.5) == [4.5, 5.0]
    assert median(0.1, 0.2, 0.6, 0.1) == [4.0, 4.0]
    assert median(1.0, 0.0, 0.0, 0.0) == [1.0, 8.0]
    assert median(0.0, 0.0, 0.0, 1.0) == [8.0, 2.0]
    # Sums of weights round: ten times 0.1 reaches a half after five to within a billionth.
    tenths = torch.arange(10.0)[:, None]
    assert rules.median(tenths, torch.full((10,), 0.1, dtype=torch.float64)).tolist() == [4.5]


def test_the_trimmed_mean_cuts_a_client_in_two() -> None:
    values = torch.tensor([[0.0], [10.0], [20.0]])
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    # Without 0.3 at both ends: 0.2 of the first, 0.2 of the second.
    found = rules.trimmed_mean(values, weights, 0.3)
    assert found.tolist() == pytest.approx([5.0])
    assert found.dtype == torch.float32
    assert rules.trimmed_mean(values, weights, 0.0).tolist() == pytest.approx([7.5])


# ---------------------------------------------------------------- the geometry below the rules


def test_distances_and_lengths_by_hand() -> None:
    products = gram((3.0, 4.0), (0.0, 0.0), (3.0, 0.0))
    assert lengths(products).tolist() == [5.0, 0.0, 3.0]
    assert distances(products).tolist() == [[0.0, 5.0, 4.0], [5.0, 0.0, 3.0], [4.0, 3.0, 0.0]]
    # To the point ½·(3, 4) = (1.5, 2).
    to = distances_to(products, np.array([0.5, 0.0, 0.0]))
    assert to == pytest.approx([2.5, 2.5, 2.5])


def test_rounding_below_0_is_a_distance_of_0() -> None:
    rounded = np.array([[1.0, 1.0 + 1e-12], [1.0 + 1e-12, 1.0]])
    assert distances(rounded)[0, 1] == 0.0
    assert distances_to(rounded, np.array([0.0, 1.0]))[0] == 0.0
    assert lengths(np.array([[-1e-18]])).tolist() == [0.0]


@pytest.mark.parametrize(
    ("clients", "share", "count"),
    [(10, 0.3, 3), (10, 0.31, 4), (10, 0.0, 0), (10, 0.45, 4), (3, 0.1, 1), (2, 0.4, 0), (1, 0.4, 0), (0, 0.3, 0)],
)
def test_the_hostile_are_rounded_up_but_never_half(clients: int, share: float, count: int) -> None:
    assert hostile_count(clients, share) == count
    assert isinstance(hostile_count(clients, share), int)


def test_binary_fractions_do_not_add_a_hostile_client() -> None:
    # 0.07 · 100 is 7.000000000000001 in binary.
    assert hostile_count(100, 0.07) == 7


def test_shares_of_nothing_are_equal() -> None:
    assert shares(np.array([1.0, 3.0])).tolist() == [0.25, 0.75]
    assert shares(np.array([0.1, 0.3])) == pytest.approx([0.25, 0.75])
    assert shares(np.zeros(4)).tolist() == [0.25] * 4
    assert len(shares(np.zeros(0))) == 0


@pytest.mark.parametrize(("at_once", "rows", "widths"), [(8, 2, [4, 4, 2]), (8, 4, [2] * 5), (8, 99, [1] * 10)])
def test_parameters_are_looked_at_in_blocks_that_fit(
    monkeypatch: pytest.MonkeyPatch, at_once: int, rows: int, widths: list[int]
) -> None:
    monkeypatch.setattr("steelyard.update_payloads.AT_ONCE", {"cpu": at_once, "cuda": 1})
    found = list(spans(10, rows))
    assert [span.stop - span.start for span in found] == widths
    assert (found[0].start, found[-1].stop) == (0, 10)
    assert all(before.stop == after.start for before, after in pairwise(found))
