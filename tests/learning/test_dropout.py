"""Dropout by name: the words of `randomness`, the right share of units, however many clients there are."""

import numpy as np
import pytest
import torch

from steelyard import randomness
from steelyard.learning import dropout
from steelyard.learning.dropout import mask


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


def test_a_mask_does_not_depend_on_what_else_is_drawn() -> None:
    together = mask(torch.tensor([[7, 3], [8, 3], [7, 4]]), 1, 9, 21, 0.5)
    assert torch.equal(mask(torch.tensor([8, 3]), 1, 9, 21, 0.5), together[1])
    assert torch.equal(mask(torch.tensor([8, 3]), 1, 4, 21, 0.5), together[1, :4])
    assert not torch.equal(together[0], together[2])
    assert not torch.equal(mask(torch.tensor([8, 3]), 0, 9, 21, 0.5), together[1])
