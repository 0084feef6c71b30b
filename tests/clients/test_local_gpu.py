import pytest
import torch
from tests.clients import engine_cases as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAIRS = [("stacked", name) for name in cases.MODELS if name != "own"]
PAIRS += [(engine, "own") for engine in ("graph", "vmap")] + [("graph", "cnn-digits"), ("auto", "mlp")]


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


@pytest.mark.parametrize("engine", ["stacked", "graph"])
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_same_seed_same_bits(engine: str, precision: str) -> None:
    model, shape, classes = cases.MODELS["cnn-digits"]
    people = cases.population(shape, classes)
    first, _, _ = cases.trained(engine, people, model, cases.TRAINING["mini"], "cuda", precision)
    again, _, clients = cases.trained(engine, people, model, cases.TRAINING["mini"], "cuda", precision)
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.payload.models, two.payload.models)
    assert clients.describe()["device"].startswith("cuda")


@pytest.mark.parametrize("how", list(cases.TRAINING))
def test_the_second_convolution_by_the_library(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from steelyard.clients.local.convolution import ConvSteps

    monkeypatch.setattr(ConvSteps, "library_from", 1)
    model, shape, classes = cases.MODELS["cnn-odd"]
    people = cases.population(shape, classes)
    expected, start, _ = cases.trained("loop", people, model, cases.TRAINING[how])
    found, _, _ = cases.trained("stacked", people, model, cases.TRAINING[how], "cuda")
    cases.assert_alike(found, expected, start, 1e-3)
