"""Every engine gives what the loop gives, takes no model that it would train wrongly, and repeats its own bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tests.clients.local import engine_cases as cases
from tests.clients.local.engine_cases import Case
from torch import nn

from steelyard.clients.local import Simulation
from steelyard.clients.local.engines import choice
from steelyard.clients.local.engines.stacked import GraphEngine
from steelyard.clients.local.engines.steps import CompiledStep, HandDerivedStep, MappedStep, StackStep
from steelyard.clients.local.engines.table import hand_derived_steps
from steelyard.learning.descent import Descent
from steelyard.learning.training import TrainingSettings
from steelyard.messages.algorithm import Part

BUILT_IN = [name for name in cases.MODELS if name not in ("own", "keras")]
CONVOLUTIONAL = [name for name in BUILT_IN if name.startswith("cnn")]
DENSE = ["mlp", "logistic", "linear", "own"]


@pytest.fixture(autouse=True)
def quick_trials(own_cache: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "REPEATS", 1)  # which one wins a trial is nothing to these tests
    monkeypatch.setattr(CompiledStep, "backend", "aot_eager")


def crossed(names: Iterable[str], ways: Iterable[str], engines: str, each: int = 2) -> list[Any]:
    """Pair cases with engines; of each row and column one pair in `each` is a quick test, the others are slow ones."""
    rows = [f"{name}, {how}" for name in names for how in ways]
    return [
        pytest.param(name, engine, marks=[pytest.mark.slow] * bool((row + column) % each))
        for row, name in enumerate(rows)
        for column, engine in enumerate(engines.split())
    ]


# A convolution under vmap takes ten times as long, and tracing takes seconds: few of them are quick tests.
TABLE = [
    *crossed(BUILT_IN, cases.TRAINING, "stacked:4", 4),
    *crossed(CONVOLUTIONAL, cases.TRAINING, "fused fused/winograd", 4),
    *crossed(DENSE, cases.TRAINING, "stacked/vmap:4", 3),
    *crossed([*CONVOLUTIONAL, "keras"], ["mini"], "stacked/vmap:4 threads auto", 6),
    *crossed(["cnn-digits", "mlp"], cases.OPTIMISERS, "stacked:4 threads", 2),
    *crossed(["keras"], cases.OPTIMISERS, "stacked/vmap:4 threads", 2),
    *crossed(["cnn-digits", "cnn-odd"], cases.OPTIMISERS, "fused", 2),
    *crossed(["own"], cases.OPTIMISERS, "stacked/vmap:4", 2),
    # Images that are changed before each step.
    *crossed(["cnn-odd"], ["mini, reflect", "full, zero"], "threads stacked:4 fused fused/winograd stacked/vmap:4", 2),
    *crossed(["keras"], ["mini, zero"], "threads stacked/vmap:4", 2),
    # What changes images does not ask what looks at them: the network that is traced soonest.
    *crossed(["logistic"], ["mini, reflect", "updates, zero"], "compiled", 2),
    # Losses that look at other answers, or have no closed form.
    *crossed(["linear"], ["mini, survival", "full, survival"], "threads stacked:4 stacked/vmap:4", 2),
    *crossed(["cnn"], ["mini, barron", "mini, pinball"], "threads stacked:4 fused fused/winograd stacked/vmap:4", 2),
    *crossed(["unet"], ["mini, pixel-cross-entropy", "full, dice"], "threads stacked/vmap:3 captured", 2),
    *crossed(["mlp", "linear"], ["mini, labels"], "threads stacked/vmap:3 stacked:3", 2),
    *crossed(["tabular"], ["mini, labels"], "threads stacked/vmap:3", 2),
    # The steps that graphs capture on a GPU, and what is compiled from them.
    *crossed(["cnn-digits", "mlp"], [*cases.TRAINING, "adam"], "derived captured", 6),
    *crossed(["keras"], ["mini", "adam"], "captured", 2),
    *crossed(["plain"], ["heavy"], "compiled captured", 1),
    *crossed(["normed", "tied"], ["mini", "heavy", "adam"], "stacked/vmap:3 captured", 3),
    *crossed(["encoded", "tied", "normed"], ["updates"], "captured compiled", 8),
    # Parts that are frozen, shared, called twice, or without a gradient.
    *crossed(["frozen dense", "frozen cnn", "frozen own"], ["mini", "heavy"], "threads stacked/vmap:3 captured", 3),
    *crossed(["backbone", "reused"], ["mini", "heavy"], "threads stacked/vmap:3", 2),
    *crossed(["encoded"], ["mini"], "threads stacked/vmap:2", 1),
]


def on_graphs(engine: str, expected: Simulation, what: Case, start: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Train the first federation as a GPU would: the same buffers and steps, without a graph."""
    setup = expected.context.setup

    def step(descent: Descent, part: Part) -> StackStep:
        if engine == "derived":
            return HandDerivedStep(hand_derived_steps(setup.module, setup.layout, "float32"), descent)  # type: ignore[arg-type]
        return (MappedStep if engine == "captured" else CompiledStep)(setup, descent, part)

    made = GraphEngine(setup, step, "stacked/graph", 3)
    cohort, _ = expected.context.cohort(cases.tasks_of(expected.names(0), start, what, 1))
    out = torch.zeros(len(cohort), setup.layout.size)
    for _ in range(1 if engine == "compiled" else 2):  # the buffers are used again
        losses = made.train(cohort, out.zero_())
    return out, losses


@pytest.mark.parametrize(("name", "engine"), TABLE)
def test_every_engine_gives_what_the_loop_gives(name: str, engine: str) -> None:
    what = cases.case(name)
    expected, start, loop = cases.by_the_loop(name)
    assert not torch.equal(expected[0].payload.models, start.expand_as(expected[0].payload.models))
    assert len(start) == loop.context.setup.layout.size
    if engine in ("captured", "compiled", "derived"):
        models, losses = on_graphs(engine, loop, what, start)
        cases.assert_near(models, losses, expected[0], start, what.tolerance)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what falls back to another engine says so
        found, _, clients = cases.trained(what, engine)
    assert engine == "auto" or cases.engine_of(clients) == engine.partition(":")[0]
    cases.assert_alike(found, expected, start, what.tolerance)


def test_images_are_changed() -> None:
    apart = [cases.by_the_loop(each)[0][0].payload.models for each in ("cnn-odd, mini, reflect", "cnn-odd, mini")]
    assert float(torch.linalg.vector_norm(apart[0] - apart[1])) > 1e-2


def test_the_library_may_answer_in_another_order_of_memory() -> None:
    """Without oneDNN, which a run in bfloat16 switches off where a CPU lacks it, answers are channels first."""
    expected, start, _ = cases.by_the_loop("cnn-odd, full")
    with torch.backends.mkldnn.flags(enabled=False):
        found, _, _ = cases.trained(cases.case("cnn-odd, full"), "fused")
    cases.assert_alike(found, expected, start, 1e-4)


@pytest.mark.parametrize(
    ("name", "engine"),
    [("keras", "loop"), ("keras", "threads"), ("keras", "stacked/vmap:2"), ("reused", "stacked/vmap:3")],
)
def test_dropout_by_name_depends_on_the_stream_alone(name: str, engine: str) -> None:
    clients = cases.simulated(cases.case(f"{name}, mini"), engine)

    def trained(*names: str) -> torch.Tensor:
        return clients.train([cases.task_of(clients, 3, names)])[0].payload.models

    state = torch.get_rng_state()
    together = trained("c0", "c1", "c2")
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    # Alone or in a stack: the same masks; float32 sums in another order.
    assert torch.allclose(trained("c1")[0], together[1], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "engine"),
    [("cnn-digits", "fused"), ("cnn-digits", "stacked"), ("cnn-digits", "loop"), ("mlp", "stacked/vmap")],
)
def test_bfloat16_stays_near_and_leaves_torch_as_it_was(name: str, engine: str) -> None:
    before = torch.backends.mkldnn.enabled
    gentle = TrainingSettings(learning_rate=0.02, batch_size=7, epochs=2)
    what = Case(cases.MODELS[name][0], cases.people_of(name), gentle)
    expected, start, _ = cases.trained(what)
    found, _, _ = cases.trained(what, engine, precision="bfloat16")
    assert not torch.equal(found[0].payload.models, expected[0].payload.models)
    # bfloat16 keeps eight bits of each number, and its errors add up over the steps.
    cases.assert_alike(found[:1], expected[:1], start, 0.25)
    # Where a processor has no bfloat16, torch would switch its library off for all runs after this one.
    assert torch.backends.mkldnn.enabled == before


class Warming(nn.Module):
    """Counts its steps in a whole number that two parts share; a mask of -inf and a table that is not sent beside."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.part = nn.Linear(64, 10), nn.Module()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.part.register_buffer("steps", self.steps)  # type: ignore[arg-type]
        self.register_buffer("mask", torch.full((10,), -torch.inf).index_fill_(0, torch.arange(10), 0.0))
        self.register_buffer("table", torch.full((3, 3), -torch.inf).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.dense(x.flatten(1))
        if self.training:
            self.steps += 1  # type: ignore[operator]
            found = found * (1 - 0.5 ** self.part.steps.float()) + self.mask  # type: ignore[operator]
        return found


def test_buffers_that_are_not_sent_or_shared_begin_anew_with_every_client() -> None:
    """What one client counted must not reach the next one: then a cohort would depend on its order."""
    what = Case(cases.of(Warming), cases.population((8, 8), 10))
    expected, start, clients = cases.trained(what)
    assert len(start) == 650 + 10
    alone = clients.train(cases.tasks_of(clients.names(0)[-1:], start, what, 1))[0]
    # The same client takes the same steps in the same process.
    assert torch.equal(alone.payload.models[0], expected[0].payload.models[-1])
    found, _, threads = cases.trained(what, "threads")
    assert cases.engine_of(threads) == "threads"
    cases.assert_alike(found, expected, start, 1e-5)


class Centred(nn.Module):
    """Looks at its whole batch, which padding would change."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.dense(x - x.mean(dim=0))


def tracked() -> nn.Module:
    norm = nn.InstanceNorm1d(4, track_running_stats=True)
    return nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 16)), norm, nn.Flatten(), nn.Linear(64, 10))


REFUSED = [
    *((cases.Drawing, engine, "draws at random") for engine in ("stacked/vmap", "threads", "processes")),
    *((cases.Normed, engine, "does not take this model") for engine in ("stacked/hand", "fused")),
    (Warming, "stacked/vmap", "its buffer steps changes while it trains and is not sent"),
    (tracked, "stacked/vmap", "its norm would count the padding of short batches"),
    (Centred, "stacked/vmap", "does not take this model"),
    (cases.NETWORKS["frozen dense"], "stacked/hand:3", "does not take this model"),
    (cases.NETWORKS["frozen cnn"], "fused", "does not take this model"),
    (cases.NETWORKS["frozen cnn"], "fused/winograd", "does not take this model"),
]


@pytest.mark.parametrize(("module", "engine", "why"), REFUSED)
def test_what_an_engine_would_train_wrongly_is_trained_one_after_another(module: Any, engine: str, why: str) -> None:
    # All clients fill whole batches of four but for their last, of one row; what looks at a batch must see such a one.
    training = TrainingSettings(batch_size=4, epochs=1)
    what = Case(cases.of(module), cases.population((8, 8), 10, sizes=(33, 9, 33)), training)
    expected, start, _ = cases.trained(what)
    clients = cases.simulated(what, engine)
    with pytest.warns(UserWarning, match=why) as told:
        found = clients.train(cases.tasks_of(clients.names(0), start, what))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clients.train([cases.task_of(clients, 4, ("c0",))])  # told once, not every round
    assert clients.describe()["engine_choice"] == "loop"
    assert sum("one after another" in str(each.message) for each in told) == 1
    cases.assert_alike(found, expected, start, 1e-5)
