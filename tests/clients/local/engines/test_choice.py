"""Which engine a run uses: the one asked for, else the one of an earlier trial, else the fastest that is right."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.clients.local import engine_cases as cases
from tests.clients.local.engine_cases import Case
from tests.kit import assert_refused

from steelyard.clients.local.cohort import Cohort
from steelyard.clients.local.engines import choice, table
from steelyard.clients.local.engines.choice import Trial, run_trial
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.loop import LoopEngine
from steelyard.clients.local.engines.table import ENGINES, DoesNotFit, can_fork, candidates, make, parse
from steelyard.learning.models import DenseNet, ModelSettings
from steelyard.messages.updates import Floats

pytestmark = pytest.mark.usefixtures("own_cache")
MLP = cases.case("mlp, mini")


def test_engine_names() -> None:
    assert parse("stacked/vmap:50") == ("stacked/vmap", 50)
    with pytest.warns(FutureWarning, match="'vmap' is deprecated: use 'stacked/vmap'"):
        assert parse("vmap:50") == ("stacked/vmap", 50)
    for wrong in ("stackd", "stacked/vmap:0", "stacked/vmap:x"):
        assert_refused(lambda wrong=wrong: parse(wrong), "compute.engine", wrong)


class Wider(DenseNet):
    """A network of the user's that runs like the built-in one and has another layer inside."""

    def __init__(self) -> None:
        super().__init__(64, [8], 10)
        self.layers[0] = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Tanh())


HAND, WINOGRAD = "stacked/hand", "fused/winograd"
OWN = "threads stacked/vmap:50 stacked/vmap:10 loop"


@pytest.mark.parametrize(
    ("model", "precision", "beside", "tried"),
    [
        (cases.MODELS["cnn-digits"][0], "float32", {"fused", WINOGRAD, HAND}, f"{WINOGRAD} fused threads"),
        (cases.MODELS["cnn-digits"][0], "bfloat16", {"fused", HAND}, "fused threads"),
        (cases.MODELS["mlp"][0], "float32", {HAND}, "stacked threads"),
        *((cases.of(own), "float32", set(), OWN) for own in (cases.Own, Wider)),
    ],
)
def test_what_fits_on_the_cpu(model: ModelSettings, precision: str, beside: set[str], tried: str) -> None:
    setup = cases.simulated(Case(model, cases.people_of("mlp")), precision=precision).context.setup
    fitting = {"loop", "threads", "processes", "stacked/vmap", *beside}
    assert {name for name, kind in ENGINES.items() if kind.misfit(setup) is None} == fitting
    assert candidates(setup, 100) == tried.split()
    for name in ENGINES:
        if name in fitting:
            assert make(setup, name).name == (name if name != "processes" or can_fork() else "threads")
        else:
            with pytest.raises(DoesNotFit):
                make(setup, name)
    assert make(setup, "stacked").name == (HAND if HAND in beside else "stacked/vmap")


def test_a_choice_is_kept_and_taken_back_with_what_is_to_tell_of_it(own_cache: Path) -> None:
    drawing = Case(cases.of(cases.Drawing), MLP.people)
    for what, told in ((MLP, ""), (drawing, "the model draws at random while it trains")):
        first, second = (cases.trained(what, "auto")[2].describe() for _ in range(2))
        assert "trial" in first["engine_reason"]
        assert second["engine_reason"] == "found by an earlier trial on this machine"
        assert first["engine_choice"] == second["engine_choice"]
        assert first.get("engine_notes", "").startswith(told)
        assert second.get("engine_notes") == first.get("engine_notes")
    # A choice for the whole net is not taken for one of the same shapes of which a part is frozen.
    part = Case(cases.of(lambda: cases.frozen(DenseNet(64, (16, 8), 10), "layers.0.weight")), MLP.people)
    assert cases.trained(part, "auto")[2].describe()["engine_reason"] != second["engine_reason"]


def test_of_two_trials_the_first_to_write_decides_and_a_damaged_file_is_tried_again(own_cache: Path) -> None:
    own_cache.mkdir()
    for notes in ("", ', "notes": null'):
        (own_cache / "engines.json").write_text(f'{{"key": {{"engine": "loop", "why": "long ago"{notes}}}}}')
        assert choice.kept_choice("key") is None
    first = choice.Choice("stacked:2", ("told",))
    for later in (first, choice.Choice("threads")):
        assert choice.keep_choice("key", later, "why") == first
    assert choice.kept_choice("key") == first
    assert choice.kept_choice("other") is None


class OneWrong(LoopEngine):
    """All updates right but the last one, which is another client's."""

    def train(self, cohort: Cohort, out: torch.Tensor) -> Floats:
        losses = super().train(cohort, out)
        out[-1] = out[0]
        return losses


class Noisy(LoopEngine):
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


def work(what: Case = MLP) -> tuple[TrainingSetup, Cohort]:
    clients = cases.simulated(what)
    return clients.context.setup, clients.context.cohort([cases.task_of(clients)])[0]


@pytest.mark.parametrize(
    ("precision", "allowed", "timed"), [("float32", 0.02, True), ("tf32", 0.05, False), ("bfloat16", 0.3, False)]
)
def test_an_engine_that_disagrees_is_refused(precision: str, allowed: float, timed: bool) -> None:
    # These shares of the update's size are allowed; on the CPU TF32 is float32.
    setup, cohort = work()
    given = replace(setup, precision=precision)  # type: ignore[arg-type]
    engines = {
        name: lambda each, share=share: Noisy(each, share)
        for name, share in (("right", 0.75 * allowed), ("wrong", 1.4 * allowed))
    }
    found = run_trial(given, cohort, engines, timed=timed)
    assert list(found.refused) == ["wrong"]
    assert f"differs from the loop's by {1.4 * allowed:.2g}" in found.refused["wrong"]
    assert set(found.seconds) == ({"right"} if timed else set())
    assert found.best == ("right" if timed else "loop")


@pytest.mark.parametrize(("rounding", "refused"), [(0.0, {0.1, 0.2, 0.4}), (0.03, {0.2, 0.4}), (0.2, {0.4})])
def test_an_engine_may_be_as_far_as_rounding_takes_the_loop(
    rounding: float, refused: set[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two updates with independent noise of .03 are .042 apart, and three times that is allowed; never more than .3.
    monkeypatch.setattr(choice, "LoopEngine", lambda given: Noisy(given, rounding))
    engines = {str(share): lambda given, share=share: Noisy(given, share) for share in (0.01, 0.1, 0.2, 0.4)}
    assert set(run_trial(*work(), engines, timed=False).refused) == {str(share) for share in refused}


def test_an_engine_that_breaks_or_has_one_wrong_client_is_refused_with_the_reason() -> None:
    def broken(setup: TrainingSetup) -> LoopEngine:
        raise ValueError("no such operator\nand more")

    found = run_trial(*work(), {"one wrong": OneWrong, "right": LoopEngine, "broken": broken})
    assert set(found.refused) == {"one wrong", "broken"}
    assert found.refused["broken"] == "ValueError: no such operator"
    assert run_trial(*work(), {"broken": broken}).best == "loop"


def test_a_later_engine_must_win_by_a_tenth() -> None:
    assert Trial({"a": 1.0, "b": 0.95}).best == "a"
    assert Trial({"a": 1.0, "b": 0.85}).best == "b"
    assert Trial({"a": 1.0, "b": 0.85, "c": 0.8}).best == "b"


@pytest.mark.parametrize("asked", ["stacked/vmap", "auto"])
def test_a_simulation_does_not_use_an_engine_that_disagrees(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stacked/vmap", "threads"):
        wrong = replace(table.ENGINES[name], make=lambda setup, chunk: Noisy(setup, 0.1))
        monkeypatch.setitem(table.ENGINES, name, replace(wrong, compared=table.ENGINES["stacked/vmap"].compared))
    what = Case(cases.of(cases.Own), MLP.people)
    with pytest.warns() if asked == "stacked/vmap" else pytest.MonkeyPatch.context() as told:
        found, _, clients = cases.trained(what, asked)
    assert clients.describe()["engine_choice"] == "loop"
    assert torch.equal(found[0].payload.models, cases.trained(what)[0][0].payload.models)
    words = str(told[0].message) if asked == "stacked/vmap" else clients.describe()["engine_reason"]  # type: ignore[index]
    assert ("differs from the loop's by 0.1 of its size" if asked == "stacked/vmap" else "threads refused") in words
