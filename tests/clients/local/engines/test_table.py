"""The table of engines: names, what each fits, and what is worth a trial."""

from __future__ import annotations

import pytest
import torch
from tests.clients.local import engine_cases as cases

from steelyard.clients.local import ComputeSettings, Simulation
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.table import ENGINES, DoesNotFit, can_fork, candidates, make, parse
from steelyard.errors import UserError
from steelyard.learning.models import ConvNet, DenseNet, ModelSettings
from steelyard.learning.training import TrainingSettings


def setup_of(model: ModelSettings, shape: tuple[int, ...], classes: int, precision: str = "float32") -> TrainingSetup:
    compute = ComputeSettings(device="cpu", precision=precision)  # type: ignore[arg-type]
    return Simulation({0: cases.population(shape, classes)}, model, TrainingSettings(), compute).context.setup


def test_engine_names() -> None:
    assert parse("vmap:50") == ("vmap", 50)
    for wrong in ("vmapp", "vmap:0", "vmap:x"):
        with pytest.raises(UserError, match=r"compute\.engine"):
            parse(wrong)
    with pytest.raises(UserError, match="did you mean 'stacked'"):
        parse("stackd")


def test_candidates_can_all_be_made() -> None:
    for model, shape, classes in cases.MODELS.values():
        setup = setup_of(model, shape, classes)
        for name in candidates(setup, 100):
            make(setup, *parse(name))


@pytest.mark.parametrize(
    ("model", "precision", "fitting", "tried"),
    [
        (
            "cnn-digits",
            "float32",
            {"loop", "threads", "processes", "vmap", "fused", "winograd", "stacked"},
            "winograd fused threads",
        ),
        ("cnn-digits", "bfloat16", {"loop", "threads", "processes", "vmap", "fused", "stacked"}, "fused threads"),
        ("mlp", "float32", {"loop", "threads", "processes", "vmap", "stacked"}, "stacked threads"),
        ("own", "float32", {"loop", "threads", "processes", "vmap"}, "threads vmap:50 vmap:10 loop"),
    ],
)
def test_what_fits_on_the_cpu(model: str, precision: str, fitting: set[str], tried: str) -> None:
    setup = setup_of(*cases.MODELS[model], precision)
    assert {name for name, kind in ENGINES.items() if kind.misfit(setup) is None} == fitting
    assert candidates(setup, 100) == tried.split()
    for name in ENGINES:
        if name in fitting:
            assert make(setup, name).name == (name if name != "processes" or can_fork() else "threads")
        else:
            with pytest.raises(DoesNotFit):
                make(setup, name)


class Doubled(ConvNet):
    """A network of the user's that is made like the built-in one and computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Wider(DenseNet):
    """A network of the user's that runs like the built-in one and has another layer inside."""

    def __init__(self) -> None:
        super().__init__(64, [8], 10)
        self.layers[0] = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Tanh())


def doubled() -> Doubled:
    return Doubled((1, 8, 8), (4, 6), 3, 8, 10)


@pytest.mark.parametrize("factory", [doubled, Wider])
def test_a_changed_network_is_not_taken_for_the_built_in_one(factory: type) -> None:
    setup = setup_of(ModelSettings(name=factory), (8, 8), 10)  # type: ignore[arg-type]
    assert {name for name, kind in ENGINES.items() if kind.misfit(setup) is None} == {
        "loop",
        "threads",
        "processes",
        "vmap",
    }
