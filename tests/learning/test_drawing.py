"""Chance by name: dropout, also inside attention, LSTM and GRU, windows and flips; all else is what torch computes."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tests.clients.local.engine_cases import Reused
from tests.kit import assert_refused
from torch import nn
from torch.utils.checkpoint import checkpoint

from steelyard.base import randomness
from steelyard.data import DataSettings, in_memory
from steelyard.data.scaling import normalised
from steelyard.learning.augmentation import LAYER, Augmentation
from steelyard.learning.dropout import NamedAttention, NamedGRU, NamedLSTM, drawing, mask, name_draws, set_chance


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


def test_a_layer_that_is_called_twice_draws_twice() -> None:
    module = name_draws(Reused())
    layers, ones = drawing(module), torch.ones(20, 64)
    assert isinstance(module, Reused)
    set_chance(layers, 7, 3)
    first = module.parts(ones)
    for one, other in itertools.combinations(first, 2):
        # Half of all units are dropped, and half are alike by chance: four standard deviations are 0.056.
        assert float((one == 0).double().mean()) == pytest.approx(0.5, abs=0.056)
        assert float((one == other).double().mean()) == pytest.approx(0.5, abs=0.056)
    set_chance(layers, 7, 3)
    assert all(torch.equal(one, again) for one, again in zip(first, module.parts(ones), strict=True))


def test_what_is_computed_again_on_the_way_back_has_the_masks_of_the_way_there() -> None:
    module = name_draws(nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 1)))
    x, slopes = torch.randn(5, 64), []
    for forward in (module, lambda x: checkpoint(module, x, use_reentrant=False)):
        set_chance(drawing(module), 7, 3)
        slopes.append(torch.autograd.grad(forward(x).sum(), module.parameters()))  # type: ignore[operator]
    assert all(torch.equal(one, again) for one, again in zip(*slopes, strict=True))
    twice = checkpoint(lambda x: module(x + module(x)), x, use_reentrant=False).sum()  # type: ignore[union-attr]
    assert_refused(twice.backward, "a dropout layer that is called several times")


SAMPLES, TARGETS, SOURCES, HEADS = 3, 4, 5, 2


def undropped(module: nn.Module) -> nn.Module:
    """The layers that draw by name, with a rate that drops nothing."""
    named = name_draws(copy.deepcopy(module))
    for layer in drawing(named):
        layer.rate = 0.0  # type: ignore[assignment]
    return named


def attention(**options: Any) -> tuple[nn.MultiheadAttention, nn.Module]:
    """torch's attention without dropout, and ours with the same numbers."""
    torch.manual_seed(1)
    layer = nn.MultiheadAttention(8, HEADS, dropout=0.3, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)  # biases begin at 0, where nothing shows
    named = undropped(layer)
    assert type(named) is NamedAttention
    layer.dropout = 0.0
    return layer, named


def alike(mine: Any, theirs: Any) -> None:
    for own, other in zip(mine, theirs, strict=True):
        assert (own is None) == (other is None)
        assert own is None or torch.allclose(own, other, atol=1e-6, equal_nan=True)


BANNED = torch.ones(TARGETS, SOURCES, dtype=torch.bool).triu(2)
PADDED = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [True] + [False] * 4])
EACH = torch.linspace(-1, 1, SAMPLES * HEADS * TARGETS * SOURCES).view(SAMPLES * HEADS, TARGETS, SOURCES)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"attn_mask": torch.ones(TARGETS, SOURCES, dtype=torch.bool).triu(1), "is_causal": True},
    "each banned": {"attn_mask": EACH > 0.7},
    "both": {"attn_mask": BANNED, "key_padding_mask": PADDED},
    "both added": {"attn_mask": EACH, "key_padding_mask": PADDED * -2.0},
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(
    "options",
    [
        {"batch_first": True},
        {},
        {"kdim": 6, "vdim": 3, "batch_first": True, "bias": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
def test_attention_without_dropout_is_torchs(options: dict[str, Any], masks: str, training: bool) -> None:
    layer, named = (each.train(training) for each in attention(**options))
    shape = (SAMPLES, SOURCES) if options.get("batch_first") else (SOURCES, SAMPLES)
    key, value = torch.randn(*shape, options.get("kdim", 8)), torch.randn(*shape, options.get("vdim", 8))
    query = torch.randn(SAMPLES, TARGETS, 8) if options.get("batch_first") else torch.randn(TARGETS, SAMPLES, 8)
    for wanted in ({}, {"average_attn_weights": False}, {"need_weights": False}):
        alike(named(query, key, value, **MASKS[masks], **wanted), layer(query, key, value, **MASKS[masks], **wanted))


def test_attention_weights_are_dropped_by_name_for_each_sample() -> None:
    named = name_draws(nn.MultiheadAttention(8, HEADS, dropout=0.4, batch_first=True))
    x, (drop,) = torch.randn(3, 5, 8), drawing(named)
    whole = undropped(named)(x, x, x, average_attn_weights=False)[1]
    set_chance([drop], 7, 3)
    _, weights = named(x, x, x, average_attn_weights=False)
    kept = mask(drop.chance, 0, 3, HEADS * 5 * 5, 0.4).view(3, HEADS, 5, 5)
    assert torch.equal(weights, whole * kept)
    assert 0.2 < float((kept == 0).float().mean()) < 0.6


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_layers_one_at_a_time_are_torchs(kind: type[nn.LSTM | nn.GRU], first: bool, both: bool) -> None:
    torch.manual_seed(1)
    layer = kind(3, 4, 3, batch_first=first, bidirectional=both, dropout=0.3)
    named = undropped(layer)
    assert type(named) in (NamedLSTM, NamedGRU)
    layer.dropout = 0.0
    x, state = torch.randn(2, 5, 3), torch.randn(3 * (1 + both), 2 if first else 5, 4)
    for begin in (None, (state, -state) if kind is nn.LSTM else state):
        (expected, ends), (found, mine) = layer(x, begin), named(x, begin)
        alike([found], [expected])
        alike(*((mine, ends) if kind is nn.LSTM else ([mine], [ends])))


def test_what_goes_from_layer_to_layer_is_dropped_by_name() -> None:
    named = name_draws(nn.Sequential(nn.LSTM(3, 4, 2, batch_first=True, dropout=0.5)))[0]  # type: ignore[index]
    layers, (lower, upper) = drawing(named), (nn.LSTM(3, 4, batch_first=True), nn.LSTM(4, 4, batch_first=True))
    numbers = dict(named.named_parameters())
    for depth, layer in enumerate((lower, upper)):
        layer.load_state_dict({name: numbers[name.replace("_l0", f"_l{depth}")] for name in layer.state_dict()})
    x = torch.randn(2, 5, 3)
    set_chance(layers, 7, 3)
    kept = mask(layers[0].chance, 0, 2, 5 * 4, 0.5).view(2, 5, 4)
    assert torch.allclose(named(x)[0], upper(lower(x)[0] * kept)[0], atol=1e-6)


def test_what_stays_torchs() -> None:
    attention = nn.MultiheadAttention(8, 2, dropout=0.1, add_bias_kv=True)
    module = nn.ModuleList([attention, nn.MultiheadAttention(8, 2), nn.LSTM(3, 4, 2, dropout=0.1, proj_size=2)])
    kinds = [type(layer) for layer in module]
    assert [type(layer) for layer in name_draws(module)] == kinds  # type: ignore[attr-defined]
    assert not drawing(module)


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


def data(**given: object) -> DataSettings:
    return DataSettings(**{"source": "memory", **given})  # type: ignore[arg-type]


def test_black_is_what_a_pixel_of_0_becomes() -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 2, 5, 5)).astype(np.uint8)
    images[0, :, 0, 0] = 0
    given = data(augment={"pad": 1, "mean": [0.5, 0.25], "deviation": [0.5, 0.125]})
    found = normalised(in_memory(images, [0, 1] * 3), given)
    assert found.augment == Augmentation(1, black=(-1, -2))
    expected = (images / 255 - np.array([0.5, 0.25])[:, None, None]) / np.array([0.5, 0.125])[:, None, None]
    assert found.features.numpy() == pytest.approx(expected, abs=1e-6)
    measured = normalised(in_memory(images, [0, 1] * 3), data(normalise="standard", augment={"pad": 1}))
    assert measured.augment is not None
    assert measured.augment.black == pytest.approx(measured.features[0, :, 0, 0].tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("shape", "given", "said"),
    [
        ((3, 4), {"augment": {"flip": True}}, ("data.augment", (3, 4))),
        ((1, 4, 6), {"augment": {"pad": 4, "padding": "reflect"}}, ("data.augment.pad", 4, "4×6")),
        ((3, 4, 4), {"augment": {"mean": [1, 1], "deviation": [1, 1]}}, ("data.augment", 2, "3 channels")),
        ((3, 4, 4), {"augment": {"mean": [0.5]}}, ("augment.deviation", 0)),
        ((3, 4, 4), {"normalise": "standard", "augment": {"mean": [1], "deviation": [1]}}, ("normalise", "standard")),
    ],
)
def test_what_contradicts_itself_or_the_images_is_refused(
    shape: tuple[int, ...], given: dict[str, object], said: tuple[object, ...]
) -> None:
    assert_refused(lambda: normalised(in_memory(np.zeros((4, *shape)), [0, 1, 0, 1]), data(**given)), *said)
