"""Dropout inside attention, LSTM and GRU is drawn by name; all else is what torch computes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.clients.local import engine_cases as cases
from tests.clients.local.engine_cases import Encoded
from torch import nn

from steelyard.clients.local import ComputeSettings, Simulation
from steelyard.learning.drawing_layers import NamedAttention, NamedGRU, NamedLSTM, name_draws
from steelyard.learning.dropout import DropoutLayer, drawing, mask, set_chance
from steelyard.learning.models import ModelSettings
from steelyard.messages import Task

SAMPLES, TARGETS, SOURCES, HEADS = 3, 4, 5, 2


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "cache"))


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
    "banned": {"attn_mask": BANNED},
    "causal": {"attn_mask": torch.ones(TARGETS, SOURCES, dtype=torch.bool).triu(1), "is_causal": True},
    "added": {"attn_mask": torch.linspace(-1, 1, TARGETS * SOURCES).view(TARGETS, SOURCES)},
    "each": {"attn_mask": EACH},
    "each banned": {"attn_mask": EACH > 0.7},
    "padded": {"key_padding_mask": PADDED},
    "both": {"attn_mask": BANNED, "key_padding_mask": PADDED},
    "both added": {"attn_mask": EACH, "key_padding_mask": PADDED * -2.0},
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(
    "options",
    [
        {"batch_first": True},
        {},
        {"kdim": 6, "vdim": 3, "batch_first": True},
        {"bias": False},
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


@pytest.mark.parametrize("first", [False, True])
def test_gradients_of_self_attention_are_torchs(first: bool) -> None:
    layer, named = attention(batch_first=first)
    x, slope = torch.randn(3, 4, 8, requires_grad=True), torch.randn(3, 4, 8)
    theirs = torch.autograd.grad(layer(x, x, x)[0], [x, *layer.parameters()], slope)
    alike(torch.autograd.grad(named(x, x, x)[0], [x, *named.parameters()], slope), theirs)
    one = torch.randn(4, 8)  # no batch
    alike(named(one, one, one), layer(one, one, one))


@pytest.mark.parametrize("need_weights", [False, True])
def test_where_nothing_may_be_looked_at_attention_is_torchs(need_weights: bool) -> None:
    layer, named = attention(batch_first=True)
    x, padded = torch.randn(2, 3, 8), torch.tensor([[True] * 3, [False] * 3])
    given = {"key_padding_mask": padded, "need_weights": need_weights}
    alike(named(x, x, x, **given), layer(x, x, x, **given))
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        named(x, x, x, is_causal=True)


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


@pytest.mark.parametrize("first", [False, True])
def test_what_goes_from_layer_to_layer_is_dropped_by_name(first: bool) -> None:
    named = name_draws(nn.Sequential(nn.LSTM(3, 4, 2, batch_first=first, dropout=0.5)))[0]  # type: ignore[index]
    layers, (lower, upper) = drawing(named), (nn.LSTM(3, 4, batch_first=True), nn.LSTM(4, 4, batch_first=True))
    numbers = dict(named.named_parameters())
    for depth, layer in enumerate((lower, upper)):
        layer.load_state_dict({name: numbers[name.replace("_l0", f"_l{depth}")] for name in layer.state_dict()})
    x = torch.randn(2, 5, 3)
    set_chance(layers, 7, 3)
    kept = mask(layers[0].chance, 0, 2, 5 * 4, 0.5).view(2, 5, 4)
    found = named(x if first else x.transpose(0, 1))[0]
    assert torch.allclose(found if first else found.transpose(0, 1), upper(lower(x)[0] * kept)[0], atol=1e-6)


def test_what_stays_torchs() -> None:
    class Own(nn.MultiheadAttention):
        pass

    module = nn.ModuleList(
        [
            Own(8, 2, dropout=0.1),
            nn.MultiheadAttention(8, 2),
            nn.MultiheadAttention(8, 2, dropout=0.1, add_bias_kv=True),
            nn.MultiheadAttention(8, 2, dropout=0.1, add_zero_attn=True),
            nn.LSTM(3, 4, 2),
            nn.LSTM(3, 4, 2, dropout=0.1, proj_size=2),
        ]
    )
    kinds = [type(layer) for layer in module]
    assert [type(layer) for layer in name_draws(module)] == kinds  # type: ignore[attr-defined]
    assert not drawing(module)


class Translated(nn.Module):
    """Encoder and decoder, [places, samples, width], the decoder looks at nothing that comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(8, 2, 1, 1, 16, dropout=0.2)
        self.dense = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)
        future = nn.Transformer.generate_square_subsequent_mask(len(x), device=x.device)
        return self.dense(self.both(x, x, tgt_mask=future, tgt_is_causal=True).mean(dim=0))


PEOPLE = cases.population((8, 8), 10, sizes=(9, 6, 4))


@pytest.mark.parametrize("network", [Encoded, Translated])
def test_loop_threads_and_stack_draw_alike_and_the_same_bits_twice(network: type[nn.Module]) -> None:
    model, training = ModelSettings(name=network), cases.TRAINING["mini"]  # type: ignore[arg-type]
    expected, start, _ = cases.trained("loop", PEOPLE, model, training)
    again, _, _ = cases.trained("loop", PEOPLE, model, training)
    assert torch.equal(again[0].payload.models, expected[0].payload.models)
    for engine in ("threads", "vmap:2"):
        found, _, clients = cases.trained(engine, PEOPLE, model, training)
        assert clients.describe()["engine_choice"] == engine
        cases.assert_alike(found, expected, start, 1e-4)
    still, _, _ = cases.trained("loop", PEOPLE, ModelSettings(name=lambda: _without(network())), training)  # type: ignore[arg-type]
    apart = still[0].payload.models - expected[0].payload.models
    assert float(torch.linalg.vector_norm(apart)) > 1e-2


def _without(module: nn.Module) -> nn.Module:
    """Leaves the dropout of torch's layers as it is, and that inside attention and recurrent layers out."""
    for layer in module.modules():
        if isinstance(layer, nn.MultiheadAttention | nn.LSTM | nn.GRU):
            layer.dropout = 0.0
    return module


@pytest.mark.parametrize("engine", ["loop", "vmap:2"])
def test_a_later_round_has_the_same_bits_whatever_was_trained_before(engine: str) -> None:
    model = ModelSettings(name=Encoded)  # type: ignore[arg-type]
    _, start, clients = cases.trained(engine, PEOPLE, model, cases.TRAINING["mini"])
    task = Task("plain", 0, 5, tuple(clients.names(0)), start)
    fresh = Simulation(
        {0: PEOPLE}, model, cases.TRAINING["mini"], ComputeSettings(engine=engine, device="cpu", threads=2)
    )
    assert torch.equal(clients.train([task])[0].payload.models, fresh.train([task])[0].payload.models)


# What torch says of its own nested tensors.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_encoders_test_as_torchs_do() -> None:
    """With the fast path that torch takes where no gradient is wanted, nested where there is padding."""
    module = Encoded().eval()
    named, x = name_draws(copy.deepcopy(module)), torch.randn(3, 8, 8)
    assert named.state_dict().keys() == module.state_dict().keys()
    assert sum(isinstance(layer, DropoutLayer) for layer in drawing(named)) == 4 + 1 + 1
    for without in (torch.no_grad, torch.enable_grad):
        with without():
            assert torch.allclose(named(x), module(x), atol=1e-6)
