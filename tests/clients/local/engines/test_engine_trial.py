"""The trial notices an engine that does not give what training one after another gives."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.clients.local import engine_cases as cases
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.clients.local.device_data.cohort import Cohort
from steelyard.clients.local.device_data.schedule import CurrentStep
from steelyard.clients.local.engines import compiled, engine_trial, table
from steelyard.clients.local.engines.compiled import CompiledStep
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.engine_trial import Trial, run_trial
from steelyard.clients.local.engines.graph import GraphEngine
from steelyard.clients.local.engines.sequential import SequentialEngine
from steelyard.learning.descent import Descent
from steelyard.learning.models import DenseNet, ModelSettings
from steelyard.messages import Floats, LossState, Task


class Scaled(SequentialEngine):
    """The right updates, times a factor: wrong by as much as the factor is away from 1."""

    def __init__(self, setup: TrainingSetup, factor: float) -> None:
        super().__init__(setup)
        self.factor = factor

    def train(self, cohort: Cohort, out: torch.Tensor) -> Floats:
        losses = super().train(cohort, out)
        start = cohort.start(out.device)
        out.copy_(start + self.factor * (out - start))
        return losses


class OneWrong(SequentialEngine):
    """All updates right but the last one, which is another client's."""

    def train(self, cohort: Cohort, out: torch.Tensor) -> Floats:
        losses = super().train(cohort, out)
        out[-1] = out[0]
        return losses


class WrongRate(CompiledStep):
    """Steps that are a tenth too long."""

    def __init__(self, setup: TrainingSetup, descent: Descent) -> None:
        super().__init__(setup, replace(descent, rate=1.1 * descent.rate))


class CountsPadding(CompiledStep):
    """Steps in which the padding of a short batch counts like a sample."""

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, current: CurrentStep, loss: LossState) -> None:
        same = torch.full_like(current.tables.weights, 1 / current.samples)
        super().gradients(models, into, replace(current, tables=replace(current.tables, weights=same)), loss)


@pytest.fixture
def work() -> tuple[TrainingSetup, Cohort]:
    return work_of(cases.SIZES)


def first_layer_frozen() -> nn.Module:
    module = DenseNet(64, (12,), 10)
    next(module.parameters()).requires_grad_(False)
    return module


def work_of(sizes: tuple[int, ...], own: ModelSettings | None = None) -> tuple[TrainingSetup, Cohort]:
    model, shape, classes = cases.MODELS["mlp"]
    model = own or model
    people = cases.population(shape, classes, sizes)
    clients = Simulation({0: people}, model, cases.TRAINING["mini"], ComputeSettings(engine="loop", device="cpu"))
    start = SimulationServer(clients).initial(0)
    cohort, _ = clients.cohort_builder.gather([Task("f", 0, 1, tuple(clients.names(0)), start)])
    return clients.context.setup, cohort


def scaled(factor: float) -> Callable[[TrainingSetup], Scaled]:
    return lambda setup: Scaled(setup, factor)


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize(
    ("precision", "right", "wrong"),
    [("float32", 1.015, 1.03), ("float32", 0.985, 0.97), ("tf32", 1.04, 1.07), ("bfloat16", 1.2, 1.4)],
)
def test_an_engine_that_disagrees_is_refused(
    precision: str, right: float, wrong: float, timed: bool, work: tuple[TrainingSetup, Cohort]
) -> None:
    # 2, 5 and 30 % of the update's size are allowed in float32, TF32 and bfloat16; on the CPU TF32 is float32.
    setup, cohort = work
    given = replace(setup, precision=precision)  # type: ignore[arg-type]
    found = run_trial(given, cohort, {"right": scaled(right), "wrong": scaled(wrong)}, timed=timed)
    assert list(found.refused) == ["wrong"]
    assert f"differs from the loop's by {abs(wrong - 1):.1g}" in found.refused["wrong"]
    assert set(found.seconds) == ({"right"} if timed else set())
    assert found.best == ("right" if timed else "loop")


class Noisy(SequentialEngine):
    """The loop's updates and noise of this share of their size, another one for each start."""

    def __init__(self, setup: TrainingSetup, share: float) -> None:
        super().__init__(setup)
        self.share = share

    def train(self, cohort: Cohort, out: torch.Tensor) -> Floats:
        losses = super().train(cohort, out)
        start = cohort.start(out.device)
        draw = torch.Generator().manual_seed(zlib.crc32(start.numpy().tobytes()) + int(100 * self.share))
        noise = torch.randn(start.shape, generator=draw)
        out += self.share * noise * ((out - start).norm(dim=1) / noise.norm(dim=1))[:, None]
        return losses


@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize(("rounding", "refused"), [(0.0, {0.1, 0.2, 0.4}), (0.03, {0.2, 0.4}), (0.2, {0.4})])
def test_an_engine_may_be_as_far_as_rounding_takes_the_loop(
    precision: str,
    rounding: float,
    refused: set[float],
    work: tuple[TrainingSetup, Cohort],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Two updates with independent noise of .03 are .042 apart, and three times that is allowed; never more than .3.
    setup, cohort = work
    monkeypatch.setattr(engine_trial, "SequentialEngine", lambda given: Noisy(given, rounding))
    engines = {str(share): lambda given, share=share: Noisy(given, share) for share in (0.01, 0.1, 0.2, 0.4)}
    given = replace(setup, precision=precision)  # type: ignore[arg-type]
    found = run_trial(given, cohort, engines, timed=False)
    assert set(found.refused) == {str(share) for share in refused}


def test_one_wrong_client_is_enough(work: tuple[TrainingSetup, Cohort]) -> None:
    found = run_trial(*work, {"one wrong": OneWrong, "right": SequentialEngine})
    assert list(found.refused) == ["one wrong"]


@pytest.mark.parametrize("timed", [True, False])
def test_a_program_is_compiled_once_for_the_trial_and_the_run(timed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def noted(step: object, **options: object) -> object:
        made.append(step)
        return make_fx(step, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "compile", lambda traced, **options: traced)  # what is traced runs as it is
    monkeypatch.setattr(compiled, "make_fx", noted)
    setup, whole = work_of((24, 24, 24, 24))

    def engine(step: type[CompiledStep]) -> Callable[[TrainingSetup], GraphEngine]:
        return lambda given: GraphEngine(given, lambda descent: step(given, descent), "compiled", 2)

    kinds = {"right": engine(CompiledStep), "long": engine(WrongRate), "padded": engine(CountsPadding)}
    found = run_trial(setup, whole, kinds, timed=timed)
    assert set(found.refused) == {"long", "padded"}
    assert "differs from the loop's by 0.09" in found.refused["long"]
    assert len(made) == 2  # one for each rate
    out, expected = (torch.empty((len(whole), setup.layout.size)) for _ in range(2))
    engine(CompiledStep)(setup).train(whole, out)
    assert len(made) == 2
    SequentialEngine(setup).train(whole, expected)
    assert torch.allclose(out, expected, atol=1e-5)


def test_algorithms_with_optimisers_of_their_own_share_a_program_and_keep_their_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda traced, **options: made.append(traced) or traced)
    setup, whole = work_of((24, 24))
    engine = GraphEngine(setup, lambda descent: CompiledStep(setup, descent), "compiled", 2)
    forms = [replace(whole.descent, pull=pull, momentum=0.9) for pull in (0.0, 0.001, 0.01, 0.1, 1.0)]
    out, before = torch.empty((len(whole), setup.layout.size)), []
    for round in range(2):
        for form in forms:
            engine.train(replace(whole, descent=form), out)
        before = before or list(engine._buffers.values())
        assert list(engine._buffers.values()) == before, round
    assert len(made) == 1
    assert len(before) == len(forms)
    engine.setup = replace(setup, memory=1)
    engine.train(replace(whole, descent=replace(forms[0], pull=2.0)), out)
    assert len(engine._buffers) == 3  # no room: the new ones, and two others


def test_frozen_numbers_that_were_changed_are_seen_by_a_program_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda traced, **options: traced)
    setup, whole = work_of((24, 24), ModelSettings(name=first_layer_frozen))
    out, expected = (torch.empty((len(whole), setup.layout.size)) for _ in range(2))
    for _ in range(2):
        GraphEngine(setup, lambda descent: CompiledStep(setup, descent), "compiled", 2).train(whole, out)
        SequentialEngine(setup).train(whole, expected)
        assert torch.allclose(out, expected, atol=1e-5)
        with torch.no_grad():
            next(setup.module.parameters()).mul_(2)


def test_an_engine_that_breaks_is_refused_with_the_reason(work: tuple[TrainingSetup, Cohort]) -> None:
    def broken(setup: TrainingSetup) -> SequentialEngine:
        raise ValueError("no such operator\nand more")

    found = run_trial(*work, {"broken": broken})
    assert found.refused == {"broken": "ValueError: no such operator"}
    assert found.best == "loop"


def test_a_later_engine_must_win_by_a_tenth() -> None:
    assert Trial({"a": 1.0, "b": 0.95}).best == "a"
    assert Trial({"a": 1.0, "b": 0.85}).best == "b"
    assert Trial({"a": 1.0, "b": 0.85, "c": 0.8}).best == "b"


@pytest.mark.parametrize("asked", ["vmap", "auto"])
def test_a_simulation_does_not_use_an_engine_that_disagrees(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path))
    wrong = replace(table.ENGINES["vmap"], make=lambda setup, chunk: Scaled(setup, 1.1))
    monkeypatch.setitem(table.ENGINES, "vmap", wrong)
    monkeypatch.setitem(table.ENGINES, "threads", replace(table.ENGINES["threads"], make=wrong.make))
    model, shape, classes = cases.MODELS["own"]
    people = cases.population(shape, classes)
    expected, _, _ = cases.trained("loop", people, model, cases.TRAINING["mini"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, _, clients = cases.trained(asked, people, model, cases.TRAINING["mini"])
    assert clients.describe()["engine_choice"] == "loop"
    assert torch.equal(found[0].payload.models, expected[0].payload.models)
    if asked == "vmap":
        assert "differs from the loop's by 0.1 of its size" in str(caught[0].message)
    else:
        assert "threads refused" in clients.describe()["engine_reason"]
