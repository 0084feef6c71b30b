"""One matrix for a cohort: answers are copied in as they arrive, whoever is left out, and never after the end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.algorithms.scaffold import CHANGE, Scaffold
from steelyard.clients.flower.forms import Refused
from steelyard.clients.flower.payloads import CohortRows
from steelyard.messages import Task, Updates
from steelyard.update_payloads import DenseModels


def part(clients: list[str]) -> Updates:
    """Each client's model is its number, three times; its vector the opposite."""
    models = torch.tensor([[float(name[1:])] * 3 for name in clients]).reshape(-1, 3)
    counts = np.ones(len(clients), dtype=np.int64)
    named = {CHANGE: -models}
    return Updates("f", 1, tuple(clients), counts, {}, np.zeros(len(clients)), DenseModels(models), vectors=named)


def cohort(*clients: str) -> CohortRows:
    return CohortRows(Task("f", 0, 1, clients, torch.zeros(3), algorithm=Scaffold()))


@settings(max_examples=50)
@given(st.permutations([f"c{i}" for i in range(8)]), st.integers(1, 7), st.sets(st.integers(0, 7)))
def test_models_stand_in_the_order_of_their_clients(order: list[str], cut: int, missing: set[int]):
    rows = cohort(*(f"c{i}" for i in range(8)))
    answered = [name for name in order if int(name[1:]) not in missing]
    for piece in (answered[:cut], answered[cut:]):
        left = rows.put(part(piece))
        assert left.clients == tuple(piece)
        assert len(left.payload.models) == 0  # type: ignore[attr-defined]
        assert left.vectors == {}
    joined, vectors = rows.joined(sorted(answered))
    assert joined.models.tolist() == [[float(name[1:])] * 3 for name in sorted(answered)]
    assert vectors[CHANGE].tolist() == [[-float(name[1:])] * 3 for name in sorted(answered)]


def test_an_answer_after_the_end_writes_over_nobody():
    rows = cohort("c1", "c2")
    rows.put(part(["c2"]))
    joined = rows.joined(["c2"])[0].models
    with pytest.raises(Refused, match="came after the deadline"):
        rows.put(part(["c1"]))
    assert joined.tolist() == [[2.0, 2.0, 2.0]]
