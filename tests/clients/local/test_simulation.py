"""The simulator: training and tests by hand, its server, its memory, and the one door to it."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.clients.local import engine_cases as cases
from tests.kit import assert_refused, small
from torch.nn import functional

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.clients.local.evaluator import MANY
from steelyard.clients.local.hardware import MatrixPool
from steelyard.data.dataset import Behaviour, ClientRows, Dataset, Population
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings, orders
from steelyard.messages.updates import Question, Task
from steelyard.runs.store import Store
from steelyard.weighing.criterion import Criterion

SIZES = (5, 3, 8, 1)


def dataset(classes: int = 3) -> Dataset:
    draw = np.random.default_rng(0)
    features = torch.from_numpy(draw.normal(size=(60, 4)).astype(np.float32))
    labels = (
        torch.from_numpy(draw.integers(0, 3, 60))
        if classes
        else torch.from_numpy(draw.normal(size=60).astype(np.float32))
    )
    return Dataset("toy", features, labels, classes)


def population(data: Dataset | None = None, **extra: object) -> Population:
    data = data or dataset()
    clients, begin = [], 0
    for number, size in enumerate(SIZES):
        train = np.arange(begin, begin + size)
        test = np.arange(30 + 4 * number, 30 + 4 * number + (4 if number != 1 else 0))
        clients.append(ClientRows(f"c{number}", train, test))
        begin += size
    return Population(data, tuple(clients), np.arange(50, 60), **extra)  # type: ignore[arg-type]


def make(
    people: Population | None = None,
    criteria: tuple[Criterion, ...] = (),
    model: Any = "logistic",
    engine: str = "loop",
    memory_gb: float | None = None,
    **training: Any,
) -> Simulation:
    settings = TrainingSettings(**{"learning_rate": 0.1, "batch_size": 2, "epochs": 2, **training})
    compute = ComputeSettings(engine=engine, device="cpu", memory_gb=memory_gb)
    return Simulation({0: people or population()}, ModelSettings(name=model), settings, compute, criteria)


def task(clients: Simulation, round: int = 1, names: tuple[str, ...] = ("c0", "c1", "c2", "c3"), **extra) -> Task:
    return Task("f", 0, round, names, SimulationServer(clients).initial(0), **extra)


def outputs_of(flat: torch.Tensor, rows: Any) -> torch.Tensor:
    """Logistic regression, written out."""
    return dataset().features[rows].to(flat.dtype) @ flat[:12].view(3, 4).T + flat[12:]


def stepped(flat: torch.Tensor, batches: Iterable[torch.Tensor]) -> torch.Tensor:
    """Plain SGD, written out: one step for each batch of rows."""
    for rows in batches:
        flat = flat.detach().requires_grad_()
        loss = functional.cross_entropy(outputs_of(flat, rows), dataset().labels[rows])
        flat = flat - 0.1 * torch.autograd.grad(loss, flat)[0]
    return flat.detach()


def test_training_equals_plain_sgd_written_out() -> None:
    clients = make()
    work = task(clients)
    updates = clients.train([work])[0]
    order = torch.from_numpy(orders(0, 1, ["c2"], 8, TrainingSettings(batch_size=2, epochs=2))[0])
    # Float32 sums in another order, eight steps of a few numbers below 1.
    expected = stepped(work.parameters, (order + 8).flatten().split(2))
    assert torch.allclose(updates.payload.models[2], expected, atol=1e-6)
    assert updates.samples.tolist() == list(SIZES)
    assert updates.clients == ("c0", "c1", "c2", "c3")
    server = SimulationServer(clients)
    order = torch.as_tensor(orders(0, 3, ["server"], 10, TrainingSettings(batch_size=2, epochs=2))[0])
    found = server.train(0, 3, work.parameters)
    assert torch.allclose(found, stepped(work.parameters, (order + 50).flatten().split(2)), atol=1e-5)
    assert torch.equal(found, server.train(0, 3, work.parameters))
    assert not torch.equal(found, server.train(0, 4, work.parameters))


def test_evaluation_by_hand() -> None:
    clients = make()
    models = torch.zeros(2, 15)
    models[0, 12] = 1.0  # always class 0
    models[1, 14] = 1.0  # always class 2
    answer = clients.evaluate([Question("f", 0, 1, models, detailed=True)])[0]
    labels = dataset().labels.numpy()
    assert answer.clients == ("c0", "c2", "c3")  # c1 has no test samples
    expected = [[(labels[rows] == c).mean() for rows in (slice(30, 34), slice(38, 42), slice(42, 46))] for c in (0, 2)]
    assert answer.scores.tolist() == expected
    assert answer.right is not None
    right = labels[[*range(30, 34), *range(38, 46)]] == 0
    assert answer.right.tolist() == right.tolist()
    # The loss is log(e + 2) less 1 where class 0 is right.
    assert answer.losses[0, 0] == pytest.approx(np.log(np.e + 2) - expected[0][0])
    assert answer.overall()[0] == pytest.approx(right.mean())


def test_server_test_and_initial() -> None:
    clients = make()
    server = SimulationServer(clients)
    models = torch.zeros(1, 15)
    models[0, 13] = 1.0
    test = server.test(0, models)
    labels = dataset().labels[50:].numpy()
    assert test.accuracy[0] == (labels == 1).mean()
    precision = (labels == 1).mean()
    assert test.f1[0].tolist() == pytest.approx([0, 2 * precision / (1 + precision), 0])
    assert torch.equal(server.initial(0), server.initial(0))


def test_regression() -> None:
    clients = make(population(dataset(classes=0)), model="linear")
    start = SimulationServer(clients).initial(0)[None]
    answer = clients.evaluate([Question("f", 0, 1, start)])[0]
    assert answer.scores[0] == pytest.approx(-answer.metrics["rmse"])
    test = SimulationServer(clients).test(0, start)
    assert test.f1.shape == (1, 0)
    assert set(test.errors) == {"mape", "mae", "rmse"}


def test_a_client_that_ignores_the_model_trains_on_from_its_own() -> None:
    people = population(behaviours={"c0": Behaviour(own_model=True)})
    clients = make(people)
    first = clients.train([task(clients)])[0].payload.models
    again = clients.train([task(clients, round=2)])[0].payload.models
    from_own = make().train([Task("f", 0, 2, ("c0",), first[0])])[0].payload.models
    from_global = make().train([task(clients, round=2)])[0].payload.models
    assert torch.equal(again[0], from_own[0])
    assert torch.equal(again[1:], from_global[1:])


def test_memory_beyond_the_limit_goes_to_a_file() -> None:
    clients = make()
    small = make(memory_gb=1e-7)
    assert torch.equal(small.train([task(clients)])[0].payload.models, clients.train([task(clients)])[0].payload.models)


def test_what_cannot_work_is_refused() -> None:
    assert_refused(lambda: make().names(7), "no population for it")


def test_a_block_of_memory_is_used_again_only_when_nobody_looks() -> None:
    pool = MatrixPool(1 << 20)
    first = pool.matrix(10, 100)
    first.fill_(1.0)
    address, row = first.data_ptr(), first[3]
    del first
    second = pool.matrix(10, 100)  # a row of the first is still held
    second.fill_(2.0)
    assert second.data_ptr() != address
    assert row.tolist() == [1.0] * 100
    del row
    assert pool.matrix(10, 100).data_ptr() == address
    assert pool.held() <= 2 * 4096


def test_a_matrix_beyond_the_memory_lies_in_a_file_and_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would kill a process that writes into a mapped file for which the disk has no room."""
    pool = MatrixPool(100)
    matrix = pool.matrix(10, 100)
    matrix[3] = torch.arange(100.0)
    assert (pool.held(), matrix[3].sum().item()) == (0, 4950.0)

    def full(*given: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert_refused(lambda: pool.matrix(10, 100), "compute.memory_gb", "No space left", "TMPDIR")


@pytest.mark.parametrize("hidden", [(), (5, 3)])
def test_many_models_in_one_stack_give_what_each_gives_alone(hidden: tuple[int, ...]) -> None:
    """Coalitions of clients are tested together; the stack is cut by models and by rows."""
    chance = torch.Generator().manual_seed(0)
    # So little memory that no two models fit at once.
    settings = ModelSettings(name="mlp", hidden=hidden) if hidden else ModelSettings(name="logistic")
    compute = ComputeSettings(engine="loop", device="cpu", memory_gb=0.00002)
    server = SimulationServer(Simulation({0: population()}, settings, TrainingSettings(), compute))
    models = server.initial(0) + 0.3 * torch.randn(MANY + 6, len(server.initial(0)), generator=chance)
    together = server.test(0, models)
    alone = [server.test(0, one[None]) for one in models]
    # Float32 sums of a few numbers of about 1 in another order.
    assert together.losses == pytest.approx(np.concatenate([test.losses for test in alone]), abs=1e-6)
    assert together.f1 == pytest.approx(np.concatenate([test.f1 for test in alone]))
    assert len(np.unique(together.losses)) == len(models)


def loss_of(flat: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy on the server's rows, in float64."""
    return functional.cross_entropy(outputs_of(flat.double(), slice(50, 60)), dataset().labels[50:])


def test_slopes_are_those_of_finite_differences() -> None:
    server = SimulationServer(make())
    start = server.initial(0)
    models = torch.stack([start, -2 * start])
    found = server.gradients([0, 0], models)
    for model, gradient in zip(models.double(), found, strict=True):
        steps = 1e-6 * torch.eye(len(model), dtype=torch.float64)
        expected = torch.stack([(loss_of(model + step) - loss_of(model - step)) / 2e-6 for step in steps])
        # Float32 slopes against differences in float64 that are exact to about 1e-9.
        assert torch.allclose(gradient.double(), expected, atol=1e-5)


ROOT = Path(__file__).resolve().parents[3]


def test_the_door_needs_no_torch() -> None:
    code = (
        "import sys; from steelyard.clients.local import ComputeSettings; ComputeSettings(engine='loop');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, check=True)


def test_everyone_outside_goes_through_the_door() -> None:
    clients = ROOT / "src" / "steelyard" / "clients"
    inside = {clients / "local", clients / "ranks"}  # the simulator, and the same in several processes
    for path in (ROOT / "src").rglob("*.py"):
        assert inside & {*path.parents} or "from steelyard.clients.local." not in path.read_text("utf-8"), path


@pytest.mark.parametrize(("people", "model"), [(cases.masked, cases.UNET), (cases.labelled, ModelSettings(name="mlp"))])
def test_a_question_that_nobody_has_rows_for_has_an_answer_of_nobody(people: Any, model: ModelSettings) -> None:
    """`partition.test = "none"` with masks and with several labels."""
    untested = {0: replace(found := people(), clients=[replace(one, test=one.test[:0]) for one in found.clients])}
    clients = Simulation(untested, model, TrainingSettings(), ComputeSettings(engine="loop", device="cpu"))
    (answer,) = clients.evaluate([Question("f", 0, 1, SimulationServer(clients).initial(0)[None])])
    assert (answer.clients, answer.scores.shape, answer.losses.shape) == ((), (1, 0), (1, 0))


def held() -> tuple[int, int]:
    """Bytes of all tensors, and of what Python and NumPy asked for and have not given back."""
    gc.collect()
    # Of other tests in this process there may be tensors without memory, of a kind of their own.
    kinds = (torch.Tensor, torch.nn.Parameter)
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) in kinds]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values()), tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize(("engine", "algorithm"), [("loop", "fedavg"), ("stacked", "scaffold")])
def test_memory_does_not_grow_with_the_rounds(
    engine: str, algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with all it does: rounds, criteria, what clients keep, the store with its checkpoints."""
    seen, commit, rounds = dict[int, tuple[int, int]](), Store.commit, itertools.count()

    def watched(self: Store, *given: Any, **options: Any) -> None:
        if (round := next(rounds)) in (4, 12):
            seen[round] = held()
        commit(self, *given, **options)

    monkeypatch.setattr(Store, "commit", watched)
    experiment = small(
        rounds={"count": 12},
        partition={"clients": 20},
        model={"name": "mlp", "hidden": [128]},
        algorithm={"name": algorithm},
        compute={"engine": engine},
    )
    tracemalloc.start()
    try:
        experiment.run(tmp_path / "run")
    finally:
        tracemalloc.stop()
    (tensors, rest), (tensors_then, rest_then) = seen[12], seen[4]
    # A model is 38 kB. One that is kept in each round makes 300 kB in these eight; a row of the history is about 1 kB.
    assert tensors - tensors_then < 100_000
    assert rest - rest_then < 100_000
