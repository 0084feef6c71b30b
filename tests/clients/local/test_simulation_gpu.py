import threading

import pytest
import torch
from tests.clients.local import engine_cases as cases

from steelyard.clients.local.kernels import available
from steelyard.learning.augmentation import Augmentation
from steelyard.learning.models import ModelSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAIRS = [("stacked", name) for name in cases.MODELS if name != "own"]
PAIRS += [(engine, "own") for engine in ("graph", "vmap")] + [("graph", "cnn-digits"), ("auto", "mlp")]
PRECISIONS = ["float32", "tf32", "bfloat16"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("how", list(cases.TRAINING))
@pytest.mark.parametrize(("engine", "name"), PAIRS)
def test_every_engine_gives_what_the_loop_gives(engine: str, name: str, how: str) -> None:
    model, shape, classes = cases.MODELS[name]
    people = cases.population(shape, classes, bytes_=name == "cnn-digits")
    expected, start, _ = cases.trained("loop", people, model, cases.TRAINING[how], "cpu")
    found, _, clients = cases.trained(engine, people, model, cases.TRAINING[how], "cuda")
    if engine != "auto":
        assert clients.describe()["engine_choice"].partition(":")[0] == engine
    cases.assert_alike(found, expected, start, 1e-3)


def test_what_another_thread_copies_does_not_disturb_a_capture() -> None:
    model, shape, classes = cases.MODELS["cnn-digits"]
    people = cases.population(shape, classes, sizes=(200, 90, 120))
    source, ended = torch.ones(1 << 20, device="cuda"), threading.Event()

    def copy() -> None:  # as the digests of the round before are taken
        with torch.cuda.stream(torch.cuda.Stream()):
            while not ended.is_set():
                source.clone().cpu()

    beside = threading.Thread(target=copy)
    beside.start()
    try:
        found, start, _ = cases.trained("stacked", people, model, cases.TRAINING["mini"], "cuda")
    finally:
        ended.set()
        beside.join()
    expected, _, _ = cases.trained("loop", people, model, cases.TRAINING["mini"], "cpu")
    cases.assert_alike(found, expected, start, 1e-3)


@pytest.mark.parametrize("padding", ["zero", "reflect"])
@pytest.mark.parametrize("engine", ["stacked", "graph", "compiled", "vmap", "loop"])
def test_images_are_changed_as_on_the_cpu(engine: str, padding: str) -> None:
    model, shape, classes = cases.MODELS["cnn-odd"]
    people = cases.population(shape, classes, bytes_=True, augment=Augmentation(2, padding, True, (0.5, -0.5)))  # type: ignore[arg-type]
    expected, start, _ = cases.trained("loop", people, model, cases.TRAINING["mini"], "cpu")
    found, _, clients = cases.trained(engine, people, model, cases.TRAINING["mini"], "cuda")
    assert clients.describe()["engine_choice"].partition(":")[0] == engine
    cases.assert_alike(found, expected, start, 1e-3)


@pytest.mark.parametrize("engine", ["stacked", "graph"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("how", ["mini", "full"])
def test_same_seed_same_bits(engine: str, precision: str, how: str) -> None:
    model, shape, classes = cases.MODELS["cnn-digits"]
    people = cases.population(shape, classes, sizes=(200, 90, 120))
    first, _, _ = cases.trained(engine, people, model, cases.TRAINING[how], "cuda", precision)
    again, _, clients = cases.trained(engine, people, model, cases.TRAINING[how], "cuda", precision)
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.payload.models, two.payload.models)
    assert clients.describe()["device"].startswith("cuda")


@pytest.mark.parametrize("how", list(cases.OPTIMISERS))
@pytest.mark.parametrize(("engine", "name"), [("stacked", "keras"), ("graph", "own")])
def test_optimisers_give_what_the_loop_gives(engine: str, name: str, how: str) -> None:
    model, shape, classes = cases.MODELS[name]
    people = cases.population(shape, classes)
    expected, start, _ = cases.trained("loop", people, model, cases.OPTIMISERS[how], "cpu")
    found, _, clients = cases.trained(engine, people, model, cases.OPTIMISERS[how], "cuda")
    assert clients.describe()["engine_choice"].partition(":")[0] == engine
    # Both divide a gradient by its own size: what is rounding in the gradient is rounding in the step.
    cases.assert_alike(found, expected, start, 1e-2)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["SMALL", "MNIST"])
def test_each_pass_against_torchs_operators(case: str, kind: torch.dtype) -> None:
    from tests.clients.local.kernels import pass_cases

    pass_cases.passes(getattr(pass_cases, case), kind, "cuda")
    pass_cases.steps("cuda")


@pytest.mark.parametrize("how", list(cases.TRAINING))
def test_without_triton_torchs_operators_do(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "_triton", None)
    model, shape, classes = cases.MODELS["cnn-odd"]
    people = cases.population(shape, classes)
    expected, start, _ = cases.trained("loop", people, model, cases.TRAINING[how])
    found, _, _ = cases.trained("stacked", people, model, cases.TRAINING[how], "cuda")
    cases.assert_alike(found, expected, start, 1e-3)


def test_wide_networks_go_through_torchs_operators() -> None:
    training, shape = cases.TRAINING["mini"], (8, 8)
    model = ModelSettings(name="cnn", channels=(4, 72), hidden=(8,))
    people = cases.population(shape, 3)
    expected, start, _ = cases.trained("loop", people, model, training)
    found, _, _ = cases.trained("stacked", people, model, training, "cuda")
    cases.assert_alike(found, expected, start, 1e-3)


@pytest.mark.parametrize("how", list(cases.TRAINING))
def test_devices_with_less_fast_memory_take_small_tiles(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = pytest.importorskip("steelyard.clients.local.kernels.tiles")
    monkeypatch.setattr(tiles, "enough_shared_memory", lambda: False)
    model, shape, classes = cases.MODELS["cnn-digits"]
    people = cases.population(shape, classes)
    expected, start, _ = cases.trained("loop", people, model, cases.TRAINING[how])
    found, _, _ = cases.trained("stacked", people, model, cases.TRAINING[how], "cuda")
    cases.assert_alike(found, expected, start, 1e-3)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["ODD", "SMALL", "MNIST"])
def test_each_kernel_against_float64(name: str, precision: str, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.clients.local.kernels import kernel_cases

    from steelyard.clients.local.kernels import tiles

    monkeypatch.setattr(tiles, "LARGE", 1 if large else 10**9)
    case = getattr(kernel_cases, name)
    torch.manual_seed(5)
    found = {
        "first": kernel_cases.first(case, precision, "cuda", bytes_=name != "MNIST"),
        "second": kernel_cases.second(case, precision, "cuda"),
        "head": kernel_cases.head(case, precision, "cuda"),
    }
    allowed = kernel_cases.ALLOWED[precision]
    wrong = {(kernel, part): e for kernel, errors in found.items() for part, e in errors.items() if not e <= allowed}
    assert not wrong, wrong


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("samples", [10, 600])
def test_kernels_repeat_bit_for_bit(samples: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # for the reference in float64
    from dataclasses import replace

    from tests.clients.local.kernels import kernel_cases

    case = replace(kernel_cases.MNIST, samples=samples, clients=10)
    runs: list[list[dict[str, float]]] = []
    for _ in range(2):
        torch.manual_seed(6)
        parts = [kernel_cases.first(case, precision, "cuda", bytes_=False)]
        parts.append(kernel_cases.second(case, precision, "cuda"))
        if samples == 10:
            parts.append(kernel_cases.head(case, precision, "cuda", inputs=3136))
        runs.append(parts)
    # An error in float64 that is equal to the last bit stands for equal results.
    assert runs[0] == runs[1]
    assert all(e <= kernel_cases.ALLOWED[precision] for part in runs[0] for e in part.values()), runs[0]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_models_are_tested_together(precision: str) -> None:
    model, shape, classes = cases.MODELS["cnn-odd"]
    people = cases.population(shape, classes)
    found, _, clients = cases.trained("loop", people, model, cases.TRAINING["mini"])
    _, _, there = cases.trained("stacked", people, model, cases.TRAINING["mini"], "cuda", precision)
    models, rows = found[0].payload.models, torch.arange(17)
    expected = clients.evaluator.outputs(models, clients.context.population(0).dataset, rows)
    outputs = there.evaluator.outputs(models.cuda(), there.context.population(0).dataset, rows.cuda()).cpu()
    # Float32 sums in another order on the GPU; bfloat16 keeps eight bits of each number.
    assert torch.allclose(outputs, expected, atol=1e-4 if precision == "float32" else 1e-2)
