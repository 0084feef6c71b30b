"""Windows and flips by name: held to torch's padding image by image, drawn evenly, whatever else is drawn."""

import numpy as np
import pytest
import torch

from steelyard import randomness
from steelyard.data import DataSettings, in_memory
from steelyard.data.loading import normalised
from steelyard.errors import UserError
from steelyard.learning.augmentation import LAYER, Augmentation


def draws(key: int, step: int, sample: int, pad: int) -> tuple[int, int, bool]:
    """Row and column of the window and whether it is mirrored, from the stream's own words."""
    place = ((step * 256 + LAYER) * 65_536 + sample) * 1_048_576
    word = int(randomness.words(np.array([key], dtype=np.uint64), 1, place)[0, 0])
    down, across = ((word >> shift & 0xFFFF) * (2 * pad + 1) // 65_536 for shift in (0, 16))
    return down, across, bool(word >> 32 & 1)


@pytest.mark.parametrize(
    ("pad", "padding", "flip"), [(2, "zero", True), (3, "reflect", True), (0, "zero", True), (1, "reflect", False)]
)
def test_an_image_is_the_window_that_torch_cuts(pad: int, padding: str, flip: bool) -> None:
    torch.manual_seed(0)
    images = torch.rand(2, 5, 3, 6, 4)
    keys, step = (91, 2**62 + 5), 4
    black = (0.5, -1.0, 2.0)
    found = Augmentation(pad, padding, flip, black)(images, torch.tensor([[key, step] for key in keys]))  # type: ignore[arg-type]
    for client, key in enumerate(keys):
        for sample in range(5):
            down, across, mirrored = draws(key, step, sample, pad)
            channels = []
            for value, plane in zip(black, images[client, sample], strict=True):
                way = {"mode": "reflect"} if padding == "reflect" else {"value": value}
                wide = torch.nn.functional.pad(plane[None], (pad,) * 4, **way)[0] if pad else plane
                window = wide[down : down + 6, across : across + 4]
                channels.append(window.flip(1) if flip and mirrored else window)
            assert torch.equal(found[client, sample], torch.stack(channels))


def test_windows_and_flips_are_drawn_evenly() -> None:
    places = torch.arange(81.0).view(1, 9, 9).expand(20_000, 1, 9, 9)
    found = Augmentation(4, "reflect", flip=True)(places, torch.tensor([7, 0]))
    centre = found[:, 0, 4, 4]  # rows 0 … 8 and columns 0 … 8, each as often: four standard deviations of 1/9 are .009
    for line in (centre // 9, centre % 9):
        assert torch.bincount(line.long(), minlength=9) / 20_000 == pytest.approx(np.full(9, 1 / 9), abs=0.009)
    mirrored = (found[:, 0, 4, 3] > centre).double().mean()
    assert 0.3 < float(mirrored) < 0.7


def test_draws_do_not_depend_on_what_else_is_drawn() -> None:
    torch.manual_seed(0)
    images, change = torch.rand(6, 1, 8, 8), Augmentation(3, flip=True)
    whole = change(images, torch.tensor([5, 2]))
    assert torch.equal(change(images[:4], torch.tensor([5, 2])), whole[:4])
    both = change(images.expand(2, -1, -1, -1, -1), torch.tensor([[9, 2], [5, 2]]))
    assert torch.equal(both[1], whole)
    assert not torch.equal(both[0], whole)
    assert not torch.equal(change(images, torch.tensor([5, 3])), whole)


def data(**given: object) -> DataSettings:
    return DataSettings(**{"source": "memory", **given})  # type: ignore[arg-type]


def test_black_is_what_a_pixel_of_0_becomes() -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 2, 5, 5)).astype(np.uint8)
    images[0, :, 0, 0] = 0
    given = data(augment={"pad": 1, "mean": [0.5, 0.25], "deviation": [0.5, 0.125]})
    found = normalised(in_memory(images, [0, 1] * 3), given)
    assert found.features[0, :, 0, 0].tolist() == [-1, -2]
    assert found.augment == Augmentation(1, black=(-1, -2))
    expected = (images / 255 - np.array([0.5, 0.25])[:, None, None]) / np.array([0.5, 0.125])[:, None, None]
    assert found.features.numpy() == pytest.approx(expected, abs=1e-6)
    measured = normalised(in_memory(images, [0, 1] * 3), data(normalise="standard", augment={"pad": 1}))
    assert measured.augment is not None
    assert measured.augment.black == pytest.approx(measured.features[0, :, 0, 0].tolist(), abs=1e-6)
    plain = normalised(in_memory(images, [0, 1] * 3), data(augment={"mean": [0.5] * 2, "deviation": [1, 1]}))
    assert plain.augment is None


@pytest.mark.parametrize(
    ("shape", "given", "words"),
    [
        ((3, 4), {"flip": True}, r"data\.augment: got samples of shape \(3, 4\); allowed: images"),
        ((1, 4, 6), {"pad": 4, "padding": "reflect"}, r"data\.augment\.pad: got 4 .* 4×6; allowed: less than 4"),
        ((3, 4, 4), {"mean": [1, 1], "deviation": [1, 1]}, r"data\.augment: got 2 in mean and 2 .* of 3 channels"),
    ],
)
def test_what_does_not_fit_the_images_is_refused(shape: tuple[int, ...], given: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        normalised(in_memory(np.zeros((4, *shape)), [0, 1, 0, 1]), data(augment=given))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"augment": {"mean": [0.5]}}, r"augment\.deviation: got 0 numbers and 1 in mean; allowed: as many of each"),
        ({"augment": {"padding": "edge"}}, r"augment\.padding: got 'edge'; allowed: 'zero' or 'reflect'"),
        ({"normalise": "standard", "augment": {"mean": [1], "deviation": [1]}}, "normalise: got 'standard' together"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        data(**given)
