"""CKKS on a grid: sums come out exact, so that the noise of ciphertexts is told to nobody.

Where TenSEAL is missing, a stand-in that hides nothing shows what is done around it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from steelyard.privacy.fixed_point import Grid

SLOTS = 4096


class Context:
    """TenSEAL's keys, which here are none."""

    def __init__(self, scheme: str, *, poly_modulus_degree: int, coeff_mod_bit_sizes: list[int]) -> None:
        self.asked = (scheme, poly_modulus_degree, coeff_mod_bit_sizes)
        self.global_scale, self.secret = 0.0, True

    def copy(self) -> Context:
        made = Context(self.asked[0], poly_modulus_degree=self.asked[1], coeff_mod_bit_sizes=self.asked[2])
        made.global_scale = self.global_scale
        return made

    def make_context_public(self) -> None:
        self.secret = False

    def has_secret_key(self) -> bool:
        return self.secret


class Vector:
    """Numbers in the open, which come back with a noise like that of a ciphertext."""

    def __init__(self, context: Context, numbers: list[float]) -> None:
        assert 0 < len(numbers) <= SLOTS
        self.context, self.numbers = context, numbers

    def __iadd__(self, other: Vector) -> Vector:
        self.numbers = [one + two for one, two in zip(self.numbers, other.numbers, strict=True)]
        return self

    def serialize(self) -> bytes:
        return json.dumps(self.numbers).encode()

    def decrypt(self) -> list[float]:
        if not self.context.secret:
            raise ValueError("the current context of the tensor doesn't hold a secret_key")
        return [number + 2.0**10 / self.context.global_scale for number in self.numbers]


STAND_IN = SimpleNamespace(
    SCHEME_TYPE=SimpleNamespace(CKKS="ckks"),
    context=Context,
    ckks_vector=Vector,
    ckks_vector_from=lambda context, text: Vector(context, json.loads(text)),
)


@pytest.fixture(scope="module", params=["TenSEAL", "stand-in"])
def ckks(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    name = "steelyard.privacy.ckks"
    if request.param == "TenSEAL":
        pytest.importorskip("tenseal")
        yield importlib.import_module(name)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tenseal", STAND_IN)  # type: ignore[arg-type]
        patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module(name)
        sys.modules.pop(name)


@pytest.fixture(scope="module")
def keys(ckks: ModuleType) -> Any:
    return ckks.CkksKeys(Grid.of(16.0, 20))


def test_the_parameters_are_those_that_the_grid_is_made_for(ckks: ModuleType, keys: Any):
    assert ckks.SLOTS == SLOTS
    assert keys._context.global_scale == 2.0**49
    if ckks.tenseal is STAND_IN:
        assert keys._context.asked == ("ckks", 8192, [60, 60])


def test_the_sum_of_a_cohort_is_exactly_the_sum_of_its_numbers_on_the_grid(keys: Any):
    rng = np.random.default_rng(0)
    rows = [rng.uniform(-16, 16, SLOTS + 100) for _ in range(20)]
    total = keys.decrypt(keys.public.add([keys.encrypt(row) for row in rows]))
    exact = np.sum([keys.grid.onto(row) for row in rows], axis=0)  # dyadic numbers: float sums of them are exact
    assert total.tolist() == exact.tolist()


def test_the_raw_decryption_is_not_exact_so_rounding_is_what_makes_it(ckks: ModuleType, keys: Any):
    """What must not be told: without rounding, the noise of the ciphertext is in the result."""
    values = keys.grid.onto(np.random.default_rng(1).uniform(-1, 1, 64))
    (cipher,) = keys.encrypt(values)
    raw = np.array(ckks.tenseal.ckks_vector_from(keys._context, cipher).decrypt())
    assert 0 < np.abs(raw - values).max() < 2.0 ** -(keys.grid.places + 4)
    assert keys.decrypt([cipher]).tolist() == values.tolist()


def test_what_lies_between_the_points_is_not_told(ckks: ModuleType, keys: Any):
    step = 2.0**-keys.grid.places
    for numbers in ([step / 2] * 8, [0.0, 3.74 * step]):
        off = ckks.tenseal.ckks_vector(keys._context, numbers).serialize()
        with pytest.raises(ValueError) as found:  # noqa: PT011
            keys.decrypt([off])
        assert str(found.value) == (
            "ciphertexts: their sum lies between the points of the grid; allowed: sums of a cohort"
        )
    near = ckks.tenseal.ckks_vector(keys._context, [-0.24 * step, 3.76 * step]).serialize()
    assert keys.decrypt([near]).tolist() == [0.0, 4 * step]


def test_the_server_adds_and_cannot_read(ckks: ModuleType, keys: Any):
    assert not keys.public.context.has_secret_key()
    (total,) = keys.public.add([keys.encrypt(np.ones(3)), keys.encrypt(np.ones(3))])
    with pytest.raises(ValueError, match="secret"):
        ckks.tenseal.ckks_vector_from(keys.public.context, total).decrypt()
    assert keys.decrypt([total]).tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError):  # noqa: PT011
        keys.public.add([keys.encrypt(np.ones(3)), keys.encrypt(np.ones(SLOTS + 1))])
