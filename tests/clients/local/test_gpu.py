"""On a GPU: every engine gives what the loop gives on the CPU and the same bits twice, kernels what float64 gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.clients.local import engine_cases as cases
from tests.clients.local import test_by_hand as by_hand
from tests.clients.local.engine_cases import Case

from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.clients.local import hardware
from steelyard.clients.local.engines import stacked
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("own_cache"),
]
BROUGHT = [name for name in cases.NETWORKS if name not in ("backbone", "frozen cnn")]
ANY = ("loop", "stacked/vmap", "stacked/graph")
TABLE = [
    *((f"{name}, {how}", "stacked") for name in cases.MODELS if name not in ("own", "keras") for how in cases.TRAINING),
    *((f"own, {how}", engine) for how in cases.TRAINING for engine in ("stacked/graph", "stacked/vmap")),
    *((f"cnn-digits, {how}", "stacked/graph") for how in cases.TRAINING),
    ("mlp, mini", "auto"),
    *((f"keras, {how}", "stacked/graph") for how in cases.OPTIMISERS),
    *((f"own, {how}", "stacked/graph") for how in cases.OPTIMISERS),
    *(
        (f"cnn-odd, mini, {padding}", engine)
        for padding in cases.WINDOWS
        for engine in ("stacked", "stacked/graph", "stacked/compiled", "stacked/vmap", "loop")
    ),
    *((f"{name}, {how}", engine) for name in BROUGHT for engine in ANY[1:] for how in ("mini", "adam")
      # The bias of keys has no gradient but rounding, which Adam makes as large as any.
      if (name, how) != ("encoded", "adam")),
    ("normed, heavy", "stacked/graph"), ("normed, updates", "stacked/graph"),
    # A compiler takes up to a minute for each.
    ("normed, mini", "stacked/compiled"),
    ("frozen dense, mini", "stacked/compiled"), ("encoded, mini", "stacked/compiled"),
    # Dropout inside attention and between the layers of an LSTM is ours, one layer of cuDNN at a time.
    ("encoded, mini", "loop"),
    *((f"unet, {how}", engine) for how in ("mini, pixel-cross-entropy", "full, dice") for engine in ANY),
    *((f"{name}, mini, labels", engine) for name in ("mlp", "tabular") for engine in ANY),
]  # fmt: skip


def allowed(name: str) -> float:
    """Norms and Adam divide by what may be near 0, and rounding with it; a wrong mask or step is far beyond."""
    network, how, *_ = name.split(", ")
    if network in cases.NETWORKS or network == "unet":
        return 2e-2
    return 1e-2 if how in cases.OPTIMISERS else 1e-3


@pytest.mark.parametrize(("name", "engine"), TABLE)
def test_every_engine_gives_what_the_loop_gives(name: str, engine: str) -> None:
    what = cases.case(name)
    if engine == "stacked/compiled" and name.partition(",")[0] in cases.NETWORKS:
        # Clients that are alike stay in a stack to its end, so that a compiler has one size of it to do.
        what = replace(what, people=cases.population((8, 8), 10, sizes=(15,) * 4))
    expected, start, _ = cases.trained(what)
    found, _, clients = cases.trained(what, engine, "cuda")
    assert engine == "auto" or cases.engine_of(clients) == engine
    cases.assert_alike(found, expected, start, allowed(name))


def test_each_optimisers_kernel_against_torchs_operators() -> None:
    pytest.importorskip("triton")
    from tests.clients.local import kernel_cases

    kernel_cases.steps("cuda")


ONE_STEP = TrainingSettings(learning_rate=0.02, batch_size="full")
WIDE, IMAGES = ModelSettings(name="cnn", channels=(32, 64), hidden=(64,)), (28, 28)
KERNELS = {
    "odd": replace(cases.case("cnn-odd, full"), training=ONE_STEP),
    "bytes": replace(cases.case("cnn-digits, full"), training=ONE_STEP.model_copy(update={"momentum": 0.6})),
    "few": Case(WIDE, cases.population(IMAGES, 10, (10, 8, 7)), ONE_STEP),
    "many": Case(WIDE, cases.population(IMAGES, 10, (10, 70, 40)), ONE_STEP),  # more than the dense kernels are for
    "too wide": Case(ModelSettings(name="cnn", channels=(4, 72), hidden=(8,)), cases.population(IMAGES, 10), ONE_STEP),
}
# TF32 keeps eleven bits of each number, bfloat16 eight. Where pooling or a ReLU then decides otherwise, a slope goes
# elsewhere and a client of few rows is far off: half of the clients must be this near, and in float32 all of them.
APART = {"float32": (1e-4, 1.0), "tf32": (1e-2, 0.5), "bfloat16": (5e-2, 0.5)}


@pytest.mark.parametrize("tiles", ["usual", "large", "one stage deep", "no triton"])
@pytest.mark.parametrize("precision", APART)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_give_what_the_loop_gives_and_the_same_bits_twice(
    name: str, precision: str, tiles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("steelyard.clients.local.cnn.tiles")
    if tiles == "large":
        monkeypatch.setattr(kernels, "LARGE", 1)
    elif tiles == "one stage deep":
        monkeypatch.setattr(kernels, "enough_shared_memory", lambda: False)
    elif tiles == "no triton":
        monkeypatch.setattr(hardware, "_triton", None)
    expected, start, _ = cases.trained(KERNELS[name])
    (found, _, _), (again, _, _) = (
        cases.trained(KERNELS[name], "stacked", "cuda", precision=precision) for _ in range(2)
    )
    apart, (allowed, share) = list[torch.Tensor](), APART[precision]
    for one, two, wanted in zip(found, again, expected, strict=True):
        assert torch.equal(one.payload.models, two.payload.models)
        assert one.losses == pytest.approx(wanted.losses, rel=allowed)
        wrong, moved = one.payload.models.cpu() - wanted.payload.models, wanted.payload.models - start
        apart.append(wrong.norm(dim=1) / moved.norm(dim=1))
    assert float(torch.cat(apart).quantile(share)) <= allowed


@pytest.mark.parametrize("precision", APART)
def test_all_models_are_tested_together(precision: str) -> None:
    what = cases.case("cnn-odd, mini")
    found, _, clients = cases.trained(what)
    _, _, there = cases.trained(what, "stacked", "cuda", precision=precision)
    models, rows = found[0].payload.models, torch.arange(17)
    expected = clients.context.evaluator.outputs(models, clients.context.population(0).dataset, rows)
    outputs = there.context.evaluator.outputs(models.cuda(), there.context.population(0).dataset, rows.cuda()).cpu()
    # Float32 sums in another order on the GPU; bfloat16 keeps eight bits of each number.
    assert torch.allclose(outputs, expected, atol=1e-4 if precision == "float32" else 1e-2)


@pytest.mark.parametrize("engine", ["loop", "stacked", "stacked/graph", "stacked/vmap"])
@pytest.mark.parametrize("network", ["mlp", "cnn", "norm", "cnn, plain"])
@pytest.mark.parametrize("name", ["apfl", "fedrep", "fedala", "ditto", "fedfomo"])
def test_personal_algorithms_give_what_the_loop_gives_and_the_same_bits_twice(
    name: str, network: str, engine: str
) -> None:
    found: list[list[Any]] = []
    for _ in range(2):
        clients = cases.simulated(by_hand.NETWORKS[network], engine, "cuda")
        found.append(by_hand.rounds(clients, AlgorithmSettings(name=name).made()))
        assert all(held.is_cuda for held in clients.snapshot().values())
    for ours, again, theirs in zip(*found, by_hand.by_the_loop(name, network), strict=True):
        # Some sixty steps in float32; a norm divides by what may be small, and FedFomo by short distances.
        assert ours == pytest.approx(theirs, abs=1e-2 if network == "norm" or name == "fedfomo" else 1e-3)
        assert np.array_equal(ours, again)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["mini", "adam"])
@pytest.mark.parametrize("name", ["normed", "tied"])
def test_steps_launched_together_are_the_same_bits(
    name: str, how: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = cases.case(f"{name}, {how}")
    what = replace(what, training=what.training.model_copy(update={"epochs": 5}))

    def rounds(together: int) -> list[torch.Tensor]:
        monkeypatch.setattr(stacked, "TOGETHER", together)
        clients = cases.simulated(what, "stacked/graph", "cuda", precision=precision)
        tasks = [cases.task_of(clients, round) for round in (1, 2)]
        return [clients.train([task])[0].payload.models.clone() for task in tasks]  # the buffers are used again

    for one, other in zip(rounds(8), rounds(10**9), strict=True):
        assert torch.equal(one, other)
