"""RD on views made by hand, and refused where no server trains."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steelyard.errors import UserError
from steelyard.update_payloads import DenseModels, ServerTest
from steelyard.weighing import criteria as registry
from steelyard.weighing.root_direction import root_direction
from steelyard.weighing.rule import Rule, WeighingSettings
from steelyard.weighing.view import CohortView

UPDATES = torch.tensor([[3.0, 0.0], [0.0, 5.0], [-1.0, 0.0], [4.0, 4.0], [0.0, 0.0]])


def view(root: torch.Tensor | None) -> CohortView:
    origin = torch.tensor([7.0, -2.0])
    payload = DenseModels(origin + UPDATES)
    return CohortView(
        samples=np.ones(5, np.int64),
        divergence_of=lambda: payload.divergence(origin),
        validation_of=lambda: ServerTest(np.zeros(0), np.zeros((0, 0))),
        root_of=None if root is None else lambda: payload.along_root(origin, origin + root),
    )


def test_it_is_the_cosine_with_what_the_server_learned_at_least_0() -> None:
    # Cosines with (2, 0): 1, 0, −1, √½; an update of length 0 has none.
    assert root_direction(view(torch.tensor([2.0, 0.0]))) == pytest.approx([1.0, 0.0, 0.0, 0.5**0.5, 0.0], abs=1e-6)


def test_where_the_server_has_nothing_to_learn_nobody_is_trusted() -> None:
    assert root_direction(view(torch.zeros(2))).tolist() == [0.0] * 5


def test_a_server_that_does_not_train_is_refused() -> None:
    with pytest.raises(UserError, match="this server has no rows to train on"):
        root_direction(view(None))


def test_caps_limit_it_as_any_other_criterion() -> None:
    raw = root_direction(view(torch.tensor([2.0, 0.0])))[:, None]
    capped = Rule(WeighingSettings(criteria=("RD",), max_shares=2.0)).weigh(raw).weights
    # Two fifths at most: both who agree reach it, and what is left goes to the others in equal parts.
    assert capped == pytest.approx([0.4, 0.2 / 3, 0.2 / 3, 0.4, 0.2 / 3])


def test_it_needs_rows_to_train_on() -> None:
    needs = registry.known()["RD"].needs
    assert needs.slopes
    assert needs.test_set
    assert needs.models
