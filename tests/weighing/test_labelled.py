"""Measures of many clients at once give what each client measures of itself."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.weighing.criteria import Labelled, LocalData, get


@given(st.lists(st.lists(st.integers(0, 6), max_size=12), min_size=1, max_size=8))
def test_at_once_or_one_by_one(clients: list[list[int]]) -> None:
    flat = np.array([label for labels in clients for label in labels], dtype=np.int64)
    many = Labelled(flat, np.array([len(labels) for labels in clients], dtype=np.int64), 7)
    for name in ("DS", "LD"):
        criterion = get(name)
        assert criterion.of_labels is not None
        found = criterion.of_labels(many)
        assert found is not None
        alone = [criterion.on_client(LocalData("c", torch.tensor(labels, dtype=torch.int64), 7)) for labels in clients]
        assert found.tolist() == alone


def test_labels_that_are_no_classes_are_counted_client_by_client() -> None:
    criterion = get("LD")
    assert criterion.of_labels is not None
    sizes = np.array([2], dtype=np.int64)
    assert criterion.of_labels(Labelled(np.array([0.5, 1.5]), sizes, 0)) is None
    assert criterion.of_labels(Labelled(np.array([0, 9]), sizes, 7)) is None


def test_the_highest_class_is_one_less_than_their_number() -> None:
    sizes = np.array([1, 1], dtype=np.int64)
    found = Labelled(np.array([6, 0]), sizes, 7).counts()
    assert found is not None
    assert found.tolist() == [[0, 0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0]]
    assert Labelled(np.array([7, 0]), sizes, 7).counts() is None
    assert Labelled(np.array([-1, 0]), sizes, 7).counts() is None
    assert Labelled(np.array([0, 1]), sizes, 0).counts() is None
    assert Labelled(np.array([0.0, 1.0]), sizes, 7).counts() is None
