"""Each robust rule on numbers small enough to do by hand, and at the edges: nobody, nothing sent, ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steelyard.defence import robust
from steelyard.defence.robust import (
    Clip,
    RobustRule,
    Spectral,
    distances,
    distances_to,
    hostile_count,
    lengths,
    shares,
    spectral,
    spectral_scores,
)
from steelyard.messages.payloads import DenseModels


def gram(*updates: tuple[float, ...]) -> np.ndarray:
    matrix = np.array(updates)
    return matrix @ matrix.T


# ---------------------------------------------------------------- clipping


@pytest.mark.parametrize(
    ("sizes", "given", "radius"),
    [
        ([1, 4, 100], (), 4),
        ([1, 4, 100], (1.0,), 100),
        # q = 4, r = 16 before, s = 0.75: 4^0.25 · 16^0.75 = 2^0.5 · 2^3.
        ([1, 4, 100], (0.5, 0.75, 16.0), 2**3.5),
        ([1, 4, 100], (0.5, 0.0, 16.0), 4),
        ([1, 4, 100], (0.5, 0.5, 0.25), 1),
        # Nothing sent, now or before, or by nobody: nothing to lean on.
        ([1, 4, 100], (0.5, 0.5, 0.0), 4),
        ([], (0.5, 0.5, 16.0), 0),
    ],
)
def test_the_radius_is_a_quantile_that_leans_on_the_round_before(
    sizes: list[float], given: tuple[float, ...], radius: float
) -> None:
    assert robust.radius_of(np.array(sizes), *given) == pytest.approx(radius)
    assert robust.radius_of(np.array([4.0]), before=16.0) == 4.0


def test_an_update_is_cut_to_the_radius_and_one_of_length_0_stays() -> None:
    assert robust.factors(np.array([0.0, 0.5, 2.0, 8.0]), 2.0) == pytest.approx([1, 1, 1, 0.25])
    assert robust.factors(np.array([0.0, 8.0]), 0.0) == pytest.approx([1, 0])
    assert robust.clipped(np.array([0.5, 0.5]), np.array([1.0, 4.0]), 2.0) == pytest.approx([0.5, 0.25])


# ---------------------------------------------------------------- the nearest to each other


def test_krum_scores_by_the_mean_square_of_the_nearest_honest_ones() -> None:
    # On a line at 0, 1, 3, 4, 20. One hostile: three nearest each; scores (1+9+16), (1+4+9), (4+1+9), (16+9+1), …
    products = gram((0.0,), (1.0,), (3.0,), (4.0,), (20.0,))
    assert robust.nearest_to_others(products, 1).tolist() == [0, 1, 2, 3]
    # Two hostile: the two nearest; 1+9, 1+4, 1+4, 1+9: of the equal ones, the earlier.
    assert robust.nearest_to_others(products, 2).tolist() == [0, 1, 2]
    # At 0, 1, 3, 6, 7: 1+9, 1+4, 4+9, 9+1, 1+16: the nearest counts too.
    assert robust.nearest_to_others(gram((0.0,), (1.0,), (3.0,), (6.0,), (7.0,)), 2).tolist() == [0, 1, 3]
    # Nobody can be told from another where none is near enough to count: the first stay.
    assert robust.nearest_to_others(gram((5.0,), (6.0,)), 1).tolist() == [0]
    # Of clients without weight all count alike.
    found = robust.multi_krum(np.array([0.0, 0.0, 0.0, 1.0]), gram((0.0,), (1.0,), (2.0,), (50.0,)), 0.25)
    assert found == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_mixing_takes_each_itself_first() -> None:
    # Two at one point and one away, one hostile: two each; both at the point average themselves.
    mixed = robust.mixing(gram((1.0,), (1.0,), (5.0,)), 0.3)
    assert mixed.tolist() == [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5]]
    assert robust.mixing(gram((5.0,)), 0.3).tolist() == [[1.0]]


def test_those_who_stand_out_along_the_first_principal_direction_are_left_out() -> None:
    updates = np.array([[1.0, 0.1], [-1.0, 0.1], [0.0, -0.1], [0.0, 0.0], [10.0, 0.0]])
    centred = updates - updates.mean(axis=0)
    assert spectral_scores(gram(*updates)) == pytest.approx(np.square(centred @ np.linalg.svd(centred)[2][0]))
    weights = np.array([0.2, 0.2, 0.1, 0.5])
    found = spectral(weights, gram((1.0, 0.0), (0.9, 0.1), (1.1, 0.1), (-8.0, 0.0)), 0.25)
    # Lengths 1, 0.906, 1.105, 8: the middle is 1.052. Of the weight half is left, and none grows by more than 4/3.
    cut = np.sqrt(1.22) / 2 + 0.5
    assert found == pytest.approx([0.8 / 3, 0.8 / 3, 0.4 / 3 * cut / np.sqrt(1.22), 0])
    assert spectral(np.ones(1), np.array([[4.0]]), 0.3) == pytest.approx([1])


def test_behind_one_who_stands_out_it_is_looked_for_others() -> None:
    # Seven who agree but for the second axis, along which one with odd data stands out, and two who push together:
    # along the first principal direction alone these two lie in the middle.
    agree = [(1.0, along, 0.0) for along in (0.4, -0.4, 0.1, -0.1, 0.0, 0.3, -0.3)]
    updates = gram(*agree, (-0.2, 1.0, 0.0), (0.7, 0.0, 0.7), (0.7, 0.0, 0.7))
    assert np.flatnonzero(spectral(np.full(10, 0.1), updates, 0.3) == 0).tolist() == [7, 8, 9]


# ---------------------------------------------------------------- what colluders can move


def proposals(chance: np.random.Generator, count: int, best: np.ndarray) -> np.ndarray:
    """What colluders try next: other roles, lengths from 1e-6 to 1e30 and 0, copies, or the best so far, changed."""
    kind = chance.integers(5)
    if kind == 0:
        return best + np.linalg.norm(best, axis=1, keepdims=True) * chance.standard_normal(best.shape) / 5
    if kind == 1:
        return best * 10.0 ** chance.uniform(-2, 2, (count, 1))
    found = chance.standard_normal(best.shape) * 10.0 ** chance.uniform(-6, 30 if kind == 2 else 1, (count, 1))
    found[chance.random(count) < 0.2] = 0.0
    return np.repeat(found[:1], count, axis=0) if kind == 3 else found


@pytest.mark.parametrize(
    ("clients", "hostile", "tries"),
    [(3, 1, 2_500), (4, 1, 2_500), (7, 3, 2_500), pytest.param(20, 4, 10_000, marks=pytest.mark.slow)],
)
def test_no_update_of_colluders_found_by_a_search_moves_the_sum_beyond_the_bound(
    clients: int, hostile: int, tries: int
) -> None:
    """docs/reference/defence.md has the bound: n/(n − f) Σ w of the colluders, times an honest client's length."""
    chance = np.random.default_rng(clients)
    honest = chance.standard_normal((clients - hostile, 8)) * np.exp(chance.standard_normal((clients - hostile, 1)))
    length = float(np.sort(np.linalg.norm(honest, axis=1))[clients // 2])
    cap = 1.5 / clients
    weights = np.repeat([(1 - hostile * cap) / (clients - hostile), cap], [clients - hostile, hostile])
    theirs = slice(clients - hostile, None)
    bound = min(1.0, clients / (clients - hostile_count(clients, 0.3)) * hostile * cap) * length
    best, most = np.zeros((hostile, 8)), 0.0
    for _ in range(tries):
        tried = proposals(chance, hostile, best)
        updates = np.concatenate([honest, tried])
        products = updates @ updates.T
        found = spectral(weights, products, 0.3)
        moved = float(np.linalg.norm(found[theirs] @ tried))
        assert moved <= bound * (1 + 1e-9)
        assert np.linalg.norm(found @ updates) <= length * (1 + 1e-9), "the whole step"
        cut = robust.clipped(weights, lengths(products), robust.radius_of(lengths(products)))
        assert np.linalg.norm(cut[theirs] @ tried) <= hostile * cap * length * (1 + 1e-9)
        if moved > most:
            best, most = tried, moved
    assert most > 0.5 * bound, "the search is no formality"


def test_half_of_the_clients_are_beyond_the_bound() -> None:
    updates = np.array([[1.0, 0.0], [0.0, 1.0], [1e6, 0.0], [1e6, 0.0]])
    assert np.linalg.norm(spectral(np.full(4, 0.25), updates @ updates.T, 0.3) @ updates) > 1e5


@pytest.mark.parametrize("size", [1e3, 1e20, 3e38])
def test_what_is_as_long_as_float32_goes_moves_a_model_no_further(size: float) -> None:
    start = torch.linspace(-1, 1, 50)
    honest = 1e-4 * torch.eye(50)[:5]
    models = torch.cat([start + honest, size * torch.ones(2, 50)])
    models[-1, ::2] *= -1
    payload = DenseModels(models)
    for settings in (Spectral(rule="spectral"), Clip(rule="clip")):
        model = RobustRule(settings, payload, start, lambda: payload.gram(start)).combine(np.full(7, 1 / 7))
        assert (model - start).norm() < 1.01e-4


# ---------------------------------------------------------------- the geometric median


def test_the_geometric_median_stops_at_an_update_that_it_meets() -> None:
    # Three updates at one point: the steps reach it to within the least distance, and do not divide by 0.
    products = gram((2.0, 0.0), (2.0, 0.0), (2.0, 0.0), (0.0, 5.0))
    found = robust.geometric_median(np.full(4, 0.25), products, 50, 1e-6)
    assert found[:3].sum() == pytest.approx(1.0, abs=1e-5)
    # A millionth by default: nearer than that counts as that far. On a line 0, 0 and 1, the pulls are 1/ν and 1.
    near = robust.geometric_median(np.full(3, 1 / 3), gram((0.0,), (0.0,), (1.0,)), 2, 1e-6)
    assert 0.0 < near[2] < 2e-6
    # No step at all leaves the start: lengths 1, 2 and 8, so the last is cut to a quarter.
    start = robust.geometric_median(np.array([1.0, 1.0, 2.0]), gram((1.0,), (-2.0,), (8.0,)), 0, 1e-6)
    assert start == pytest.approx([0.25, 0.25, 0.125])


# ---------------------------------------------------------------- FLTrust


def test_fltrust_of_those_who_sent_nothing_or_have_no_weight() -> None:
    found = robust.fltrust(np.array([0.5, 0.25, 0.25]), np.array([2.0, 0.0, 4.0]), np.array([2.0, 0.0, 2.0]), 1.0)
    # Cosines 1, 0 and ½: 0.5 and 0.125 of 0.625, each brought to length 1.
    assert found == pytest.approx([0.8 / 2, 0, 0.2 / 4])
    # A server that learnt nothing trusts nobody.
    assert not robust.fltrust(np.ones(2) / 2, np.ones(2), np.zeros(2), 0.0).any()
    assert not robust.fltrust(np.array([0.0, 1.0]), np.ones(2), np.array([1.0, -1.0]), 1.0).any()
    # Small trust is trust: only the direction counts.
    assert robust.fltrust(np.array([1.0]), np.array([1e-3]), np.array([1e-6]), 1.0) == pytest.approx([1e3])


# ---------------------------------------------------------------- coordinate by coordinate


def test_medians_between_clients_and_beside_those_without_weight() -> None:
    values = torch.tensor([[1.0, 8.0], [2.0, 6.0], [4.0, 4.0], [8.0, 2.0]])
    for weights, middle in (
        ([0.25, 0.25, 0.25, 0.25], [3.0, 5.0]),
        ([0.5, 0.0, 0.0, 0.5], [4.5, 5.0]),
        ([0.1, 0.2, 0.6, 0.1], [4.0, 4.0]),
        ([0.0, 0.0, 0.0, 1.0], [8.0, 2.0]),
    ):
        assert robust.median(values, torch.tensor(weights, dtype=torch.float64)).tolist() == pytest.approx(middle)
    # Sums of weights round: ten times 0.1 reaches a half after five to within a billionth.
    tenths = torch.full((10,), 0.1, dtype=torch.float64)
    assert robust.median(torch.arange(10.0)[:, None], tenths).tolist() == pytest.approx([4.5])


def test_the_trimmed_mean_cuts_a_client_in_two() -> None:
    values = torch.tensor([[0.0], [10.0], [20.0]])
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    # Without 0.3 at both ends: 0.2 of the first, 0.2 of the second.
    found = robust.trimmed_mean(values, weights, 0.3)
    assert found.tolist() == pytest.approx([5.0])
    assert found.dtype == torch.float32
    assert robust.trimmed_mean(values, weights, 0.0).tolist() == pytest.approx([7.5])


# ---------------------------------------------------------------- the geometry below the rules


def test_distances_and_lengths_by_hand() -> None:
    products = gram((3.0, 4.0), (0.0, 0.0), (3.0, 0.0))
    assert lengths(products) == pytest.approx([5, 0, 3])
    assert distances(products) == pytest.approx(np.array([[0, 5, 4], [5, 0, 3], [4, 3, 0.0]]))
    # To the point ½·(3, 4) = (1.5, 2).
    assert distances_to(products, np.array([0.5, 0.0, 0.0])) == pytest.approx([2.5, 2.5, 2.5])
    # Rounding below 0 is a distance of 0.
    rounded = np.array([[1.0, 1.0 + 1e-12], [1.0 + 1e-12, 1.0]])
    assert distances(rounded)[0, 1] == distances_to(rounded, np.array([0.0, 1.0]))[0] == 0.0
    assert lengths(np.array([[-1e-18]])).tolist() == [0.0]


@pytest.mark.parametrize(
    ("clients", "share", "count"),
    # 0.07 · 100 is 7.000000000000001 in binary.
    [(10, 0.3, 3), (10, 0.31, 4), (10, 0.45, 4), (2, 0.4, 0), (0, 0.3, 0), (100, 0.07, 7)],
)
def test_the_hostile_are_rounded_up_but_never_half(clients: int, share: float, count: int) -> None:
    assert hostile_count(clients, share) == count


def test_shares_of_nothing_are_equal() -> None:
    assert shares(np.array([0.1, 0.3])) == pytest.approx([0.25, 0.75])
    assert shares(np.zeros(4)) == pytest.approx([0.25] * 4)
    assert len(shares(np.zeros(0))) == 0
