"""Messages of ranks come out as they were put in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.clients.ranks.one_process import travelled

NUMBERS = arrays.arrays(
    dtype=st.sampled_from(["<f4", "<f8", "<i8", "|b1", "|u1"]),
    shape=arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
WORDS = st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats() | st.text(max_size=8)
CONTENTS = st.recursive(
    WORDS | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=8,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(part, right[name]) for name, part in left.items())
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    return type(left) is type(right) and left == right


@given(CONTENTS)
def test_what_is_sent_arrives(content: Any) -> None:
    assert same(content, travelled(content))


def test_tensors_and_large_arrays_arrive_too() -> None:
    large = torch.arange(600_000, dtype=torch.float32).reshape(2, -1)
    found = travelled({"large": large, "small": large[:, :3], "strided": large.T[:5], "none": large[:0]})
    assert torch.equal(found["large"], large)
    assert torch.equal(found["small"], large[:, :3])
    assert torch.equal(found["strided"], large.T[:5])
    assert found["none"].shape == (0, 300_000)


def test_what_was_sent_is_not_changed_by_what_arrived() -> None:
    sent = np.arange(3.0)
    travelled([sent])[0][:] = 7
    assert sent.tolist() == [0, 1, 2]
