import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.clients.local import engine_cases as cases

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.clients.local.engines import engine_trial
from steelyard.clients.local.engines.graph import GraphEngine
from steelyard.clients.local.engines.graph_steps import GraphStep, HandDerivedStep, MappedStep
from steelyard.clients.local.engines.networks import hand_derived_steps
from steelyard.data.dataset import Population
from steelyard.learning.augmentation import Augmentation
from steelyard.learning.descent import Descent
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.messages import LossState, Task, Updates

BUILT_IN = [name for name in cases.MODELS if name != "own"]
CONVOLUTIONAL = [name for name in cases.MODELS if name.startswith("cnn")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(engine_trial, "REPEATS", 1)  # which one wins a trial is nothing to these tests


def crossed(firsts: Sequence[tuple[str, str]], ways: Sequence[str], each: int = 2) -> list[Any]:
    """Pair all with all; of each row and column one pair in `each` is a quick test, the others are slow ones."""
    return [
        pytest.param(*first, way, marks=[pytest.mark.slow] * bool((row + column) % each))
        for row, first in enumerate(firsts)
        for column, way in enumerate(ways)
    ]


def triples() -> list[Any]:
    # A convolution under vmap takes ten times as long: one network that has some, the others with -m slow.
    slow = [name for name in CONVOLUTIONAL if name != "cnn-odd"]
    found = [("vmap:4", name) for name in cases.MODELS if name not in slow]
    under = [pytest.param("vmap:4", name, how, marks=pytest.mark.slow) for name in slow for how in cases.TRAINING]
    found += [("stacked:4", name) for name in BUILT_IN] + [("fused", name) for name in CONVOLUTIONAL]
    found += [("winograd", name) for name in CONVOLUTIONAL]
    # Threads take the loop's own steps; "auto" is one of those above, found by a trial, which is slow.
    others = [(engine, name) for engine in ("threads", "auto") for name in cases.MODELS]
    return crossed(found, list(cases.TRAINING), 4) + under + crossed(others, ["mini"])


def people_of(name: str, augment: Augmentation | None = None) -> Population:
    _, shape, classes = cases.MODELS[name]
    return cases.population(shape, classes, bytes_=name == "cnn-digits", augment=augment)


@functools.cache
def by_the_loop(name: str, how: str, augment: Augmentation | None = None) -> tuple[list[Updates], torch.Tensor]:
    """What every engine is held to, and the model that training starts from."""
    training = (cases.TRAINING | cases.OPTIMISERS)[how]
    found, start, _ = cases.trained("loop", people_of(name, augment), cases.MODELS[name][0], training)
    return found, start


@pytest.mark.parametrize(("engine", "name", "how"), triples())
def test_every_engine_gives_what_the_loop_gives(engine: str, name: str, how: str) -> None:
    expected, start = by_the_loop(name, how)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, _, clients = cases.trained(engine, people_of(name), cases.MODELS[name][0], cases.TRAINING[how])
    if engine != "auto":
        assert clients.describe()["engine_choice"].partition(":")[0] == engine.partition(":")[0]
    cases.assert_alike(found, expected, start, 1e-4)


def test_the_library_may_answer_in_another_order_of_memory() -> None:
    """Without oneDNN, which a run in bfloat16 switches off where a CPU lacks it, answers are channels first."""
    expected, start = by_the_loop("cnn-odd", "full")
    with torch.backends.mkldnn.flags(enabled=False):
        found, _, _ = cases.trained("fused", people_of("cnn-odd"), cases.MODELS["cnn-odd"][0], cases.TRAINING["full"])
    cases.assert_alike(found, expected, start, 1e-4)


@pytest.mark.parametrize("how", list(cases.OPTIMISERS))
@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("threads", "keras"),
        ("vmap:4", "own"),
        ("stacked:4", "keras"),
        ("stacked:4", "cnn-digits"),
        ("stacked:4", "mlp"),
        ("fused", "cnn-digits"),
        ("fused", "cnn-odd"),
    ],
)
def test_every_engine_takes_adam_and_adadelta(engine: str, name: str, how: str) -> None:
    expected, start = by_the_loop(name, how)
    found, _, clients = cases.trained(engine, people_of(name), cases.MODELS[name][0], cases.OPTIMISERS[how])
    assert clients.describe()["engine_choice"].partition(":")[0] == engine.partition(":")[0]
    # Steps are divided by the size of the gradients, so that rounding in those near 0 counts in full.
    cases.assert_alike(found, expected, start, 5e-3)


@pytest.mark.parametrize("engine", ["loop", "threads", "stacked:2", "vmap:3", "auto"])
def test_dropout_by_name_depends_on_the_stream_alone(engine: str) -> None:
    model, shape, classes = cases.MODELS["keras"]
    training = TrainingSettings(learning_rate=0.3, batch_size=7, epochs=1)
    people = cases.population(shape, classes)
    clients = Simulation({0: people, 1: people}, model, training, ComputeSettings(engine=engine, device="cpu"))
    start = SimulationServer(clients).initial(0)

    def trained(seed: int, round: int, names: tuple[str, ...]) -> torch.Tensor:
        return clients.train([Task("f", seed, round, names, start)])[0].payload.models

    torch.manual_seed(1)
    state = torch.get_rng_state()
    together = trained(0, 3, ("c0", "c1", "c2"))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    # Alone or in a stack: the same masks; float32 sums in another order.
    assert torch.allclose(trained(0, 3, ("c1",))[0], together[1], atol=1e-6)
    assert not torch.allclose(trained(0, 4, ("c1",))[0], together[1], atol=1e-3)
    assert not torch.allclose(trained(1, 3, ("c1",))[0], together[1], atol=1e-3)


WINDOWS = Augmentation(2, "reflect", flip=True)
AUGMENTED = [("threads", "cnn-odd"), ("vmap:4", "cnn-odd"), ("stacked:4", "cnn-odd"), ("stacked:4", "keras")]
AUGMENTED += [("fused", "cnn-odd"), ("winograd", "cnn-celeba"), ("auto", "cnn-celeba"), ("vmap:4", "keras")]


@pytest.mark.parametrize(("engine", "name", "how"), crossed(AUGMENTED, ["mini", "full"]))
def test_every_engine_sees_images_changed_alike(engine: str, name: str, how: str) -> None:
    expected, start = by_the_loop(name, how, WINDOWS)
    found, _, clients = cases.trained(engine, people_of(name, WINDOWS), cases.MODELS[name][0], cases.TRAINING[how])
    if engine != "auto":
        assert clients.describe()["engine_choice"].partition(":")[0] == engine.partition(":")[0]
    cases.assert_alike(found, expected, start, 1e-4)
    plain, _ = by_the_loop(name, how)
    assert not torch.allclose(plain[0].payload.models, expected[0].payload.models, atol=1e-3)


def test_images_of_a_step_are_the_same_bits_in_loop_and_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[bytes] = set()
    original = Augmentation.__call__

    def noted(self: Augmentation, images: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
        found = original(self, images, chance)
        seen.update(image.numpy().tobytes() for image in found.reshape(-1, *found.shape[-3:]))
        return found

    monkeypatch.setattr(Augmentation, "__call__", noted)
    changes = Augmentation(2, "zero", flip=True, black=(-0.5, 0.25))
    people = cases.population((2, 8, 8), 3, sizes=(23, 9, 30, 1, 9, 16), bytes_=True, augment=changes)
    model, training = ModelSettings(name="logistic"), cases.TRAINING["updates"]
    cases.trained("loop", people, model, training)
    alone = set(seen)
    seen.clear()
    cases.trained("vmap:6", people, model, training)
    # A stack draws for the padding of short batches as well.
    assert alone <= seen
    assert len(alone) > 200


STEPS = [("hand", "cnn-digits"), ("hand", "mlp"), ("hand", "keras"), ("map", "own"), ("map", "mlp"), ("map", "keras")]


@pytest.mark.parametrize(("kind", "name", "how"), crossed(STEPS, [*cases.TRAINING, "adam"], 4))
def test_the_step_that_graphs_capture_gives_what_the_loop_gives(kind: str, name: str, how: str) -> None:
    model, shape, classes = cases.MODELS[name]
    training = (cases.TRAINING | cases.OPTIMISERS)[how]
    expected, start, clients = cases.trained("loop", cases.population(shape, classes), model, training)
    setup = clients.context.setup
    steps = hand_derived_steps(setup.module, setup.layout, "float32")

    def make_step(descent: Descent) -> GraphStep:
        return MappedStep(setup, descent) if kind == "map" else HandDerivedStep(steps, descent)  # type: ignore[arg-type]

    engine = GraphEngine(setup, make_step, "graph", 4)
    cohort, _ = clients.cohort_builder.gather(cases.tasks_of(clients.names(0), start, classes, training)[:1])
    for _ in range(2):  # the buffers are used again
        out = torch.zeros_like(expected[0].payload.models)
        losses = engine.train(cohort, out)
        # Float32 sums in another order; Adam divides by the size of the gradients, and rounding near 0 with it.
        assert torch.allclose(out, expected[0].payload.models, atol=5e-4 if how == "adam" else 2e-5)
        assert losses == pytest.approx(expected[0].losses, rel=1e-3 if how == "adam" else 1e-4)


@pytest.mark.parametrize("loss", ["barron", "own"])
def test_losses_without_a_closed_form(loss: str, tmp_path: Path) -> None:
    file = tmp_path / "pinball.py"
    file.write_text("def loss(o, y):\n    e = o.squeeze(-1) - y\n    return (0.7 * e).where(e > 0, -0.3 * e)\n")
    name = "barron" if loss == "barron" else f"{file}:loss"
    model = ModelSettings(name="cnn", channels=(2, 3), hidden=(4,))
    people = cases.population((8, 8), 0)

    def models(how: str) -> torch.Tensor:
        clients = Simulation({0: people}, model, cases.TRAINING["mini"], ComputeSettings(engine=how, device="cpu"))
        start = SimulationServer(clients).initial(0)
        task = Task("f", 0, 1, tuple(clients.names(0)), start, LossState(name, None, 0.5, 0.8))
        return clients.train([task])[0].payload.models

    expected = models("loop")
    for engine in ("threads", "stacked:4", "fused", "winograd", "vmap:4"):
        # Float32 sums in another order.
        assert torch.allclose(models(engine), expected, atol=1e-5), engine


@pytest.mark.parametrize("engine", ["threads", "stacked:4", "vmap:4"])
@pytest.mark.parametrize("how", ["mini", "full"])
def test_patients_are_held_against_those_of_their_own_client_and_batch(engine: str, how: str) -> None:
    model, people = ModelSettings(name="linear"), cases.population((5,), 0, survival=True)

    def updates(engine: str) -> Updates:
        clients = Simulation({0: people}, model, cases.TRAINING[how], ComputeSettings(engine=engine, device="cpu"))
        task = Task("f", 0, 1, tuple(clients.names(0)), SimulationServer(clients).initial(0), LossState())
        return clients.train([task])[0]

    found, expected = updates(engine), updates("loop")
    assert torch.allclose(found.payload.models, expected.payload.models, atol=1e-5)
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.parametrize("engine", ["loop", "threads", "stacked", "fused", "winograd", "vmap:3"])
def test_same_seed_same_bits(engine: str) -> None:
    # A convolution under vmap takes ten times as long; it is for modules of one's own.
    model, shape, classes = cases.MODELS["own" if engine.startswith("vmap") else "cnn-odd"]
    people = cases.population(shape, classes)
    first, _, _ = cases.trained(engine, people, model, cases.TRAINING["mini"])
    again, _, _ = cases.trained(engine, people, model, cases.TRAINING["mini"])
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.payload.models, two.payload.models)
        assert one.losses.tolist() == two.losses.tolist()


@pytest.mark.parametrize("engine", ["fused", "stacked", "loop", "vmap", "threads"])
def test_bfloat16_stays_near_and_leaves_torch_as_it_was(engine: str) -> None:
    settings = torch.backends.mkldnn
    before = settings.enabled
    # As above: no convolution for vmap.
    model, shape, classes = cases.MODELS["mlp" if engine == "vmap" else "cnn-digits"]
    people = cases.population(shape, classes)
    gentle = TrainingSettings(learning_rate=0.02, batch_size=7, epochs=2)
    expected, start, _ = cases.trained("loop", people, model, gentle)
    found, _, _ = cases.trained(engine, people, model, gentle, precision="bfloat16")
    assert not torch.equal(found[0].payload.models, expected[0].payload.models)
    # bfloat16 keeps eight bits of each number, and its errors add up over the steps.
    cases.assert_alike(found[:1], expected[:1], start, 0.25)
    # Where a processor has no bfloat16, torch would switch its library off for all runs after this one.
    assert settings.enabled == before


@pytest.mark.parametrize("engine", ["vmap", "threads", "auto", "stacked", "fused"])
@pytest.mark.parametrize("module", [cases.Drawing, cases.Normed])
def test_modules_that_do_not_stack_fall_back_to_what_is_right(engine: str, module: type) -> None:
    people = cases.population((8, 8), 10, sizes=(23, 9, 16))
    model = ModelSettings(name=module)  # type: ignore[arg-type]
    training = TrainingSettings(batch_size="full", epochs=2)
    expected, _, _ = cases.trained("loop", people, model, training)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, _, clients = cases.trained(engine, people, model, training)
        clients.train([Task("f", 0, 4, ("c0",), expected[0].payload.models[0])])
    for one, two in zip(found, expected, strict=True):
        # Float32 sums in another order.
        assert torch.allclose(one.payload.models, two.payload.models, atol=1e-5)
    if module is cases.Drawing or engine in ("stacked", "fused"):
        assert clients.describe()["engine_choice"] == "loop"
        told = [str(w.message) for w in caught if "one after another" in str(w.message)]
        assert len(told) == (0 if engine == "auto" else 1)
    if module is cases.Drawing and engine == "auto":
        assert "draws at random" in clients.describe()["engine_notes"]


def test_a_small_memory_limit_makes_small_stacks() -> None:
    model, shape, classes = cases.MODELS["mlp"]
    people = cases.population(shape, classes)
    expected, start, clients = cases.trained("loop", people, model, cases.TRAINING["mini"])
    task = Task("plain", 0, 3, tuple(clients.names(0)), start)
    small = Simulation(
        {0: people}, model, cases.TRAINING["mini"], ComputeSettings(engine="vmap", device="cpu", memory_gb=1e-4)
    )
    found = small.train([task])[0]
    assert small.describe()["engine_choice"] != "vmap:1000"
    # Float32 sums in another order.
    assert torch.allclose(found.payload.models, expected[0].payload.models, atol=1e-5)
