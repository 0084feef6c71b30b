"""Drawn images of cells: more cells are more light, a seed draws the same, and the federation can be described."""

from __future__ import annotations

import numpy as np
from benchmarks.cell_images import MOST, RULES, SCALE, cells, experiment


def test_more_cells_are_more_light_and_a_seed_draws_the_same() -> None:
    drawn = cells(1, 200)
    counts, light = drawn.labels.numpy(), drawn.features.numpy().sum(axis=(1, 2, 3))
    assert drawn.features.shape == (200, 1, 28, 28)
    assert {counts.min(), counts.max()} == {1, MOST}
    assert np.corrcoef(counts, light)[0, 1] > 0.9
    assert np.array_equal(light, cells(1, 200).features.numpy().sum(axis=(1, 2, 3)))
    assert not np.array_equal(counts, cells(2, 200).labels.numpy())


def test_all_rules_have_one_scale_and_a_share_of_the_clients_is_out_of_focus() -> None:
    described = experiment(3, 0.3)
    assert {described.weighing.name, *described.beside} == set(RULES)
    assert {each.loss.scale for each in (described.weighing, *described.beside.values())} == {SCALE}
    assert [(flaw.kind, flaw.share) for flaw in described.flaws] == [("blurred", 0.3)]
    assert experiment(3, 0.0).flaws == ()
