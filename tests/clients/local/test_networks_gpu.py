"""Networks that people bring, on a GPU: stacks give what the loop gives on the CPU, and the same bits every time."""

from __future__ import annotations

import pytest
import torch
from tests.clients.local import engine_cases as cases
from tests.clients.local.engines.test_tasks import UNET, labelled, masked
from tests.clients.local.layers.test_stackable import NETWORKS as STACKABLE
from tests.clients.local.layers.test_stackable import TRAINING
from torch import nn

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.clients.local.engines import compiled, graph_buffers
from steelyard.data.dataset import Population
from steelyard.learning.models import ModelSettings
from steelyard.messages import LossState, Task, Updates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path_factory.mktemp("cache")))


class Lora(nn.Module):
    """A frozen layer with two thin matrices beside it, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(64, 32).requires_grad_(False), nn.Linear(32, 10)
        self.lora_A, self.lora_B = nn.Linear(64, 4, False), nn.Linear(4, 32, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.head(torch.relu(self.base(x) + 2 * self.lora_B(self.lora_A(x))))


class Convolutional(nn.Module):
    """Kernels whose shape does not show whether their channels were moved (3 × 3 × 3), and one of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(),
            nn.Conv2d(3, 3, 3, groups=3), nn.Flatten(), nn.Linear(48, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x[:, None])


NETWORKS = {**STACKABLE, "lora": Lora, "convolutional": Convolutional}
CASES = [(name, engine, how) for name in NETWORKS for engine in ("graph", "vmap") for how in ("mini", "adam")]
# The bias of keys has no gradient but rounding, which Adam makes as large as any.
CASES = [case for case in CASES if case[0] != "encoded" or case[2] != "adam"]
CASES += [("normed", "graph", "heavy"), ("normed", "graph", "updates"), ("recurrent", "graph", "updates")]
# A compiler takes up to a minute for each.
CASES += [("normed", "compiled", "mini"), ("recurrent", "compiled", "heavy"), ("convolutional", "compiled", "mini")]
CASES += [("lora", "compiled", "mini"), ("encoded", "compiled", "mini")]
# Dropout inside attention and between the layers of an LSTM is ours, one layer of cuDNN at a time.
CASES += [("encoded", "loop", "mini"), ("recurrent", "loop", "mini")]


def people(*, alike: bool = False) -> Population:
    # 21 and 11 rows leave one over, which batch norm joins to the batch before. Clients that are alike stay in a stack
    # to its end, so that a compiler has one size of it to do.
    return cases.population((8, 8), 10, sizes=(21,) * 4 if alike else (21, 11, 5, 14))


@pytest.mark.parametrize(("name", "engine", "how"), CASES)
def test_any_network_gives_what_the_loop_gives(name: str, engine: str, how: str) -> None:
    model = ModelSettings(name=NETWORKS[name])  # type: ignore[arg-type]
    those = people(alike=engine == "compiled")
    expected, start, _ = cases.trained("loop", those, model, TRAINING[how], "cpu")
    found, _, clients = cases.trained(engine, those, model, TRAINING[how], "cuda")
    assert clients.describe()["engine_choice"].partition(":")[0] == engine
    # Norms and Adam divide by what may be near 0, and rounding with it; a wrong mask or a wrong step is far beyond.
    cases.assert_alike(found, expected, start, 2e-2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["mini", "adam"])
@pytest.mark.parametrize("name", ["normed", "recurrent", "convolutional"])
def test_steps_launched_together_are_the_same_bits(
    name: str, how: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, training = ModelSettings(name=NETWORKS[name]), TRAINING[how].model_copy(update={"epochs": 5})  # type: ignore[arg-type]

    def rounds(together: int) -> list[torch.Tensor]:
        monkeypatch.setattr(graph_buffers, "TOGETHER", together)
        clients = Simulation(
            {0: people()},
            model,
            training,
            ComputeSettings(engine="graph", device="cuda", precision=precision),  # type: ignore[arg-type]
        )
        start = SimulationServer(clients).initial(0)
        tasks = [Task("f", 0, round, tuple(clients.names(0)), start) for round in (1, 2)]
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
    alike = cases.population((8, 8), 10, sizes=(20, 20, 20))
    model = ModelSettings(name=cases.Own)
    clients = Simulation({0: alike}, model, TRAINING["mini"], ComputeSettings(engine="compiled", device="cuda"))
    start = SimulationServer(clients).initial(0)
    clients.train([Task("f", 0, 1, tuple(clients.names(0)), start)])
    assert clients.describe()["engine_choice"].partition(":")[0] == "compiled"
    assert len(made) == 1


def updates(whose: Population, model: ModelSettings, how: str, engine: str, loss: str, device: str) -> Updates:
    training = cases.TRAINING[how].model_copy(update={"loss": loss})
    clients = Simulation({0: whose}, model, training, ComputeSettings(engine=engine, device=device))
    start = SimulationServer(clients).initial(0)
    found = clients.train([Task("f", 0, 1, tuple(clients.names(0)), start, LossState())])[0]
    assert clients.describe()["engine_choice"].partition(":")[0] == engine
    return found


@pytest.mark.parametrize("engine", ["loop", "vmap", "graph"])
@pytest.mark.parametrize("loss", ["pixel-cross-entropy", "dice"])
@pytest.mark.parametrize("how", ["mini", "full"])
def test_masks_train_as_in_the_loop(how: str, loss: str, engine: str) -> None:
    expected = updates(masked(), UNET, how, "loop", loss, "cpu")
    found = updates(masked(), UNET, how, engine, loss, "cuda")
    assert torch.allclose(found.payload.models.cpu(), expected.payload.models, atol=1e-3)
    assert found.losses == pytest.approx(expected.losses, rel=1e-2)


@pytest.mark.parametrize("engine", ["loop", "vmap", "graph"])
@pytest.mark.parametrize("name", ["mlp", "tabular"])
def test_several_labels_train_as_in_the_loop(name: str, engine: str) -> None:
    expected = updates(labelled(), ModelSettings(name=name), "mini", "loop", "auto", "cpu")
    found = updates(labelled(), ModelSettings(name=name), "mini", engine, "auto", "cuda")
    assert torch.allclose(found.payload.models.cpu(), expected.payload.models, atol=1e-4)
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)
