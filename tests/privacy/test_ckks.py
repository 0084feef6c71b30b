"""CKKS on a grid: sums come out exact, so that the noise of ciphertexts is told to nobody."""

from __future__ import annotations

import numpy as np
import pytest
import tenseal

from steelyard.errors import UserError
from steelyard.privacy.ckks import SLOTS, CkksKeys
from steelyard.privacy.fixed_point import Grid


@pytest.fixture(scope="module")
def keys() -> CkksKeys:
    return CkksKeys(Grid.of(16.0, 20))


def test_the_grid_by_hand():
    """Sums of twenty up to 16 are at most 320 < 2^9: 60 - 2 - 9 bits of scale, 26 of them below the grid."""
    assert Grid.of(16.0, 20) == Grid(places=23, scale=49, bound=16.0)
    assert Grid(2, 40, 16.0).onto(np.array([0.3, -0.9, 16.0])).tolist() == [0.25, -1.0, 16.0]
    with pytest.raises(ValueError, match="bound"):
        Grid(2, 40, 1.0).onto(np.array([1.1]))
    # Sums below 1 need no bits before the point.
    assert Grid.of(0.25, 3) == Grid(places=32, scale=58, bound=0.25)
    assert Grid.of(1e6, 16) == Grid(places=8, scale=34, bound=1e6)
    for clients, places in ((17, 7), (10_000, 0)):
        with pytest.raises(UserError) as found:
            Grid.of(1e6, clients)
        assert str(found.value) == (
            f"privacy.aggregation.bound: got 1e+06 with kind = 'ckks' and {clients} clients, which leaves {places} "
            "binary places and needs 8; allowed: a smaller bound"
        )


def test_the_sum_of_a_cohort_is_exactly_the_sum_of_its_numbers_on_the_grid(keys: CkksKeys):
    rng = np.random.default_rng(0)
    rows = [rng.uniform(-16, 16, SLOTS + 100) for _ in range(20)]
    total = keys.decrypt(keys.public.add([keys.encrypt(row) for row in rows]))
    exact = np.sum([keys.grid.onto(row) for row in rows], axis=0)  # dyadic numbers: float sums of them are exact
    assert total.tolist() == exact.tolist()


def test_the_raw_decryption_is_not_exact_so_rounding_is_what_makes_it(keys: CkksKeys):
    """What must not be told: without rounding, the noise of the ciphertext is in the result."""
    values = keys.grid.onto(np.random.default_rng(1).uniform(-1, 1, 64))
    (cipher,) = keys.encrypt(values)
    raw = np.array(tenseal.ckks_vector_from(keys._context, cipher).decrypt())
    assert 0 < np.abs(raw - values).max() < 2.0 ** -(keys.grid.places + 4)
    assert keys.decrypt([cipher]).tolist() == values.tolist()


def test_what_lies_between_the_points_is_not_told(keys: CkksKeys):
    half = 2.0 ** -(keys.grid.places + 1)
    off = tenseal.ckks_vector(keys._context, [half] * 8).serialize()
    with pytest.raises(ValueError, match="between the points"):
        keys.decrypt([off])


def test_the_server_adds_and_cannot_read(keys: CkksKeys):
    assert not keys.public.context.has_secret_key()
    (total,) = keys.public.add([keys.encrypt(np.ones(3)), keys.encrypt(np.ones(3))])
    with pytest.raises(ValueError, match="secret"):
        tenseal.ckks_vector_from(keys.public.context, total).decrypt()
    assert keys.decrypt([total]).tolist() == [2.0, 2.0, 2.0]
