"""Streams that depend on their names alone, and what is drawn from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.base import randomness


def test_a_stream_is_a_function_of_its_four_words() -> None:
    first = randomness.generator(1, 2, "a", "x").random(5)
    assert np.array_equal(first, randomness.generator(1, 2, "a", "x").random(5))
    # "1" + "23" and "12" + "3" would be the same text without a separator.
    assert randomness.stream_key(1, 23) != randomness.stream_key(12, 3)
    keys = randomness.stream_keys(0, 0, ["a"], "x")
    assert np.array_equal(randomness.words(keys, 10)[:, 4:], randomness.words(keys, 6, start=4))
    for other in [(2, 2, "a", "x"), (1, 3, "a", "x"), (1, 2, "b", "x"), (1, 2, "a", "y")]:
        assert not np.array_equal(first, randomness.generator(*other).random(5))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 2**32))
def test_permutations_are_permutations_and_do_not_depend_on_the_company(size: int, count: int, seed: int) -> None:
    keys = randomness.stream_keys(seed, 1, ["a", "b", "c"], "batches")
    drawn = randomness.permutations(keys, size, count)
    assert drawn.shape == (3, count, size)
    assert (np.sort(drawn, axis=-1) == np.arange(size)).all()
    alone = randomness.permutations(randomness.stream_keys(seed, 1, ["b"], "batches"), size, count)
    assert np.array_equal(alone[0], drawn[1])


def test_permutations_are_the_stable_order_of_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = randomness.stream_keys(3, 1, ["a", "b", "c"], "batches")
    for size in (1, 2, 64, 65, 1000):
        words = randomness.words(keys, 2 * size).reshape(3, 2, size)
        assert np.array_equal(randomness.permutations(keys, size, 2), words.argsort(axis=-1, kind="stable"))
    # Words that are equal, or differ in their last bits alone, which a sort of tagged words would take for equal.
    near = np.array([[5, 4, 5, 1 << 60, 4, 7]], dtype=np.uint64)
    monkeypatch.setattr(randomness, "words", lambda keys, count: near)
    assert randomness.permutations(keys[:1], 6, 1).tolist() == [[[1, 4, 0, 2, 5, 3]]]


def test_uniforms_are_uniform() -> None:
    drawn = randomness.uniforms(randomness.stream_keys(0, 0, [str(i) for i in range(100)], "u"), 1000)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.005
    assert abs(drawn.std() - 12**-0.5) < 0.005


def test_cohorts_are_chosen_by_id_not_by_order_of_arrival() -> None:
    names = [f"client-{i:03d}" for i in range(50)]
    chosen = randomness.choose(3, 7, names, 10)
    assert chosen == randomness.choose(3, 7, list(reversed(names)), 10)
    assert len(set(chosen)) == 10
    assert chosen == sorted(chosen)
    assert chosen != randomness.choose(3, 8, names, 10)
