"""On a GPU: every engine gives what the loop gives on the CPU and the same bits twice, kernels what float64 gives."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from tests.clients.local import engine_cases as cases
from tests.clients.local.engine_cases import Case

from steelyard.clients.local.engines import compiled, graph_buffers
from steelyard.clients.local.kernels import available
from steelyard.learning.models import ModelSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("own_cache"),
]
PRECISIONS = ["float32", "tf32", "bfloat16"]
BROUGHT = [name for name in cases.NETWORKS if name not in ("backbone", "frozen cnn")]
ANY = ("loop", "vmap", "graph")
TABLE = [
    *((f"{name}, {how}", "stacked") for name in cases.MODELS if name != "own" for how in cases.TRAINING),
    *((f"own, {how}", engine) for how in cases.TRAINING for engine in ("graph", "vmap")),
    *((f"cnn-digits, {how}", "graph") for how in cases.TRAINING),
    ("mlp, mini", "auto"),
    *((f"keras, {how}", "stacked") for how in cases.OPTIMISERS),
    *((f"own, {how}", "graph") for how in cases.OPTIMISERS),
    *(
        (f"cnn-odd, mini, {padding}", engine)
        for padding in cases.WINDOWS
        for engine in ("stacked", "graph", "compiled", "vmap", "loop")
    ),
    *((f"{name}, {how}", engine) for name in BROUGHT for engine in ("graph", "vmap") for how in ("mini", "adam")
      # The bias of keys has no gradient but rounding, which Adam makes as large as any.
      if (name, how) != ("encoded", "adam")),
    ("normed, heavy", "graph"), ("normed, updates", "graph"), ("recurrent, updates", "graph"),
    # A compiler takes up to a minute for each.
    ("normed, mini", "compiled"), ("recurrent, heavy", "compiled"), ("convolutional, mini", "compiled"),
    ("frozen dense, mini", "compiled"), ("encoded, mini", "compiled"),
    # Dropout inside attention and between the layers of an LSTM is ours, one layer of cuDNN at a time.
    ("encoded, mini", "loop"), ("recurrent, mini", "loop"),
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
    if engine == "compiled" and name.partition(",")[0] in cases.NETWORKS:
        # Clients that are alike stay in a stack to its end, so that a compiler has one size of it to do.
        what = replace(what, people=cases.population((8, 8), 10, sizes=(15,) * 4))
    expected, start, _ = cases.trained(what)
    found, _, clients = cases.trained(what, engine, "cuda")
    assert engine == "auto" or cases.engine_of(clients) == engine
    cases.assert_alike(found, expected, start, allowed(name))


def test_what_another_thread_copies_does_not_disturb_a_capture() -> None:
    what = Case(cases.MODELS["cnn-digits"][0], cases.population((8, 8), 10, sizes=(200, 90, 120)))
    source, ended = torch.ones(1 << 20, device="cuda"), threading.Event()

    def copy() -> None:  # as the digests of the round before are taken
        with torch.cuda.stream(torch.cuda.Stream()):
            while not ended.is_set():
                source.clone().cpu()

    beside = threading.Thread(target=copy)
    beside.start()
    try:
        found, start, _ = cases.trained(what, "stacked", "cuda")
    finally:
        ended.set()
        beside.join()
    cases.assert_alike(found, cases.trained(what)[0], start, 1e-3)


@pytest.mark.parametrize("engine", ["stacked", "graph"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("how", ["mini", "full"])
def test_same_seed_same_bits(engine: str, precision: str, how: str) -> None:
    people = cases.population((8, 8), 10, sizes=(200, 90, 120))
    what = Case(cases.MODELS["cnn-digits"][0], people, cases.TRAINING[how])
    (first, _, _), (again, _, clients) = (cases.trained(what, engine, "cuda", precision=precision) for _ in range(2))
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.payload.models, two.payload.models)
    assert clients.describe()["device"].startswith("cuda")


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["TINY", "IMAGES"])
def test_each_pass_against_torchs_operators(case: str, kind: torch.dtype) -> None:
    pytest.importorskip("triton")
    from tests.clients.local.kernels import kernel_cases

    kernel_cases.passes(getattr(kernel_cases, case), kind, "cuda")
    kernel_cases.steps("cuda")


@pytest.mark.parametrize("how", list(cases.TRAINING))
@pytest.mark.parametrize("lacking", ["triton", "fast memory", "room for wide networks"])
def test_where_kernels_do_not_fit_others_do(lacking: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    what = cases.case(f"cnn-digits, {how}")
    if lacking == "triton":
        what = cases.case(f"cnn-odd, {how}")
        monkeypatch.setattr(available, "_triton", None)
    elif lacking == "fast memory":
        tiles = pytest.importorskip("steelyard.clients.local.kernels.tiles")
        monkeypatch.setattr(tiles, "enough_shared_memory", lambda: False)
    else:
        what = replace(what, model=ModelSettings(name="cnn", channels=(4, 72), hidden=(8,)))
    expected, start, _ = cases.trained(what)
    cases.assert_alike(cases.trained(what, "stacked", "cuda")[0], expected, start, 1e-3)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["ODD", "SMALL", "MNIST"])
def test_each_kernel_against_float64(name: str, precision: str, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.clients.local.kernels import kernel_cases

    from steelyard.clients.local.kernels import tiles

    monkeypatch.setattr(tiles, "LARGE", 1 if large else 10**9)
    torch.manual_seed(5)
    kernel_cases.assert_near_float64(getattr(kernel_cases, name), precision, "cuda", bytes_=name != "MNIST")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("samples", [10, 600])
def test_kernels_repeat_bit_for_bit(samples: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # for the reference in float64
    from tests.clients.local.kernels import kernel_cases

    case = replace(kernel_cases.MNIST, samples=samples, clients=10)
    runs: list[dict[str, dict[str, float]]] = []
    for _ in range(2):
        torch.manual_seed(6)
        # An error in float64 that is equal to the last bit stands for equal results.
        inputs = 3136 if samples == 10 else 0
        runs.append(kernel_cases.assert_near_float64(case, precision, "cuda", bytes_=False, inputs=inputs))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_models_are_tested_together(precision: str) -> None:
    what = cases.case("cnn-odd, mini")
    found, _, clients = cases.trained(what)
    _, _, there = cases.trained(what, "stacked", "cuda", precision=precision)
    models, rows = found[0].payload.models, torch.arange(17)
    expected = clients.evaluator.outputs(models, clients.context.population(0).dataset, rows)
    outputs = there.evaluator.outputs(models.cuda(), there.context.population(0).dataset, rows.cuda()).cpu()
    # Float32 sums in another order on the GPU; bfloat16 keeps eight bits of each number.
    assert torch.allclose(outputs, expected, atol=1e-4 if precision == "float32" else 1e-2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["mini", "adam"])
@pytest.mark.parametrize("name", ["normed", "recurrent", "convolutional"])
def test_steps_launched_together_are_the_same_bits(
    name: str, how: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = cases.case(f"{name}, {how}")
    what = replace(what, training=what.training.model_copy(update={"epochs": 5}))

    def rounds(together: int) -> list[torch.Tensor]:
        monkeypatch.setattr(graph_buffers, "TOGETHER", together)
        clients = cases.simulated(what, "graph", "cuda", precision=precision)
        tasks = [cases.task_of(clients, round) for round in (1, 2)]
        return [clients.train([task])[0].payload.models.clone() for task in tasks]  # the buffers are used again

    for one, other in zip(rounds(8), rounds(10**9), strict=True):
        assert torch.equal(one, other)


def test_a_program_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    original = compiled.make_fx

    def noted(step: object, **options: object) -> object:
        made.append(step)
        return original(step, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(compiled, "make_fx", noted)
    clients = cases.simulated(
        Case(cases.of(cases.Own), cases.population((8, 8), 10, sizes=(20, 20, 20))), "compiled", "cuda"
    )
    clients.train([cases.task_of(clients)])
    assert cases.engine_of(clients) == "compiled"
    assert len(made) == 1
