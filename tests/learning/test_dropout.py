"""Dropout by name: the words of `randomness`, the right share of units, however many clients there are."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.clients.local import engine_cases as cases
from torch import nn
from torch.utils.checkpoint import checkpoint

from steelyard import randomness
from steelyard.errors import UserError
from steelyard.learning import dropout
from steelyard.learning.drawing_layers import name_draws
from steelyard.learning.dropout import NamedDropout, drawing, mask, set_chance
from steelyard.learning.models import ModelSettings


def test_words_are_those_of_randomness() -> None:
    keys = randomness.stream_keys(3, 5, ["a", "b"], "layers") >> np.uint64(1)
    positions = np.array([[0, 1, 2**40 + 7], [5, 2**62, 9]], dtype=np.uint64)
    expected = randomness.words_at(keys[:, None], positions).view(np.int64)
    found = dropout._words(torch.from_numpy(keys.view(np.int64))[:, None], torch.from_numpy(positions.view(np.int64)))
    assert found.tolist() == expected.tolist()


def test_a_mask_by_hand() -> None:
    key, step, layer = 12345, 6, 1
    found = mask(torch.tensor([key, step]), layer, 2, 6, 0.25)
    for sample in range(2):
        first = ((step * 256 + layer) * 65_536 + sample) * 1_048_576
        words = randomness.words(np.array([key], dtype=np.uint64), 2, first)[0].tolist()
        lanes = [(word >> (16 * lane)) & 0xFFFF for word in words for lane in range(4)]
        # As signed numbers, lanes from 2^15 on are the lowest.
        signed = [lane - 65_536 if lane >= 32_768 else lane for lane in lanes][:6]
        assert found[sample].tolist() == pytest.approx([4 / 3 if s >= 16_384 - 32_768 else 0.0 for s in signed])


@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_the_share_of_dropped_units_is_the_rate_and_the_mean_stays(rate: float) -> None:
    found = mask(torch.tensor([[99, 0], [98, 0]]), 0, 100, 501, rate)
    assert found.shape == (2, 100, 501)
    # 100,200 draws: four standard deviations of the share are 0.006.
    assert float((found == 0).double().mean()) == pytest.approx(rate, abs=0.006)
    assert float(found.double().mean()) == pytest.approx(1, abs=0.013)
    assert not torch.equal(found[0], found[1])


def test_what_has_no_room_in_a_position_is_drawn_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of 8 heads over 1,024 places has more units a sample than a position has room for."""
    chance = torch.tensor([12345, 6])
    monkeypatch.setattr(dropout, "WORD_BITS", 3)
    monkeypatch.setattr(dropout, "SAMPLE_BITS", 1)
    room = dropout.LANES << 3
    many = torch.stack([mask(chance, layer, 4, 3 * room, 0.5) for layer in (*range(3), *range(dropout.LAYERS, 259))])
    pieces = many.view(6 * 4 * 3, room)
    assert len(torch.unique(pieces, dim=0)) == len(pieces), "no two parts of layers, samples or units are alike"
    assert torch.equal(mask(chance, 0, 2, room, 0.5), many[0, :2, :room]), "what has room stays where it was"
    assert pieces.eq(0).float().mean() == pytest.approx(0.5, abs=0.05)


def test_a_mask_does_not_depend_on_what_else_is_drawn() -> None:
    together = mask(torch.tensor([[7, 3], [8, 3], [7, 4]]), 1, 9, 21, 0.5)
    assert torch.equal(mask(torch.tensor([8, 3]), 1, 9, 21, 0.5), together[1])
    assert torch.equal(mask(torch.tensor([8, 3]), 1, 4, 21, 0.5), together[1, :4])
    assert not torch.equal(together[0], together[2])
    assert not torch.equal(mask(torch.tensor([8, 3]), 0, 9, 21, 0.5), together[1])


class Reused(nn.Module):
    """One layer of dropout in three places, two of them of one width, as many networks have it."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.other = nn.Dropout(0.5), nn.Dropout(0.5)
        self.dense = nn.Linear(3 * 64, 10)

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.drop(x), self.drop(x), self.other(x)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(torch.cat(self.parts(x.flatten(1)), dim=1))


def test_a_layer_that_is_called_twice_draws_twice() -> None:
    module = name_draws(Reused())
    layers, ones = drawing(module), torch.ones(20, 64)
    assert isinstance(module, Reused)
    set_chance(layers, 7, 3)
    first = module.parts(ones)
    for one, other in itertools.combinations(first, 2):
        # Half of all units are alike by chance: four standard deviations are 0.056.
        assert float((one == other).double().mean()) == pytest.approx(0.5, abs=0.056)
    set_chance(layers, 7, 3)
    assert all(torch.equal(one, again) for one, again in zip(first, module.parts(ones), strict=True))


@pytest.mark.parametrize("engine", ["threads", "vmap:3"])
def test_loop_and_stack_draw_alike_for_a_layer_that_is_called_twice(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path))
    people, model = cases.population((8, 8), 10), ModelSettings(name=Reused)  # type: ignore[arg-type]
    expected, start, _ = cases.trained("loop", people, model, cases.TRAINING["mini"])
    found, _, clients = cases.trained(engine, people, model, cases.TRAINING["mini"])
    assert clients.describe()["engine_choice"] == engine
    cases.assert_alike(found, expected, start, 1e-5)


def test_what_is_computed_again_on_the_way_back_has_the_masks_of_the_way_there() -> None:
    module = name_draws(nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 1)))
    x, slopes = torch.randn(5, 64), []
    for forward in (module, lambda x: checkpoint(module, x, use_reentrant=False)):
        set_chance(drawing(module), 7, 3)
        slopes.append(torch.autograd.grad(forward(x).sum(), module.parameters()))  # type: ignore[operator]
    assert all(torch.equal(one, again) for one, again in zip(*slopes, strict=True))
    set_chance(drawing(module), 7, 3)
    with pytest.raises(UserError, match="a dropout layer that is called several times"):
        checkpoint(lambda x: module(x + module(x)), x, use_reentrant=False).sum().backward()


def test_units_of_any_shape_are_dropped_by_a_module_of_ones_own() -> None:
    module = NamedDropout()
    set_chance([module], 7, 3)
    found = module.dropped(torch.ones(4, 3, 5, 2), 2, 0.5)
    assert torch.equal(found.flatten(1), mask(module.chance, 2, 4, 30, 0.5))
    assert module.eval().dropped(found, 2, 0.5) is found
