import numpy as np
import pytest
import torch
from torch import nn

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import Behaviour, ClientRows, Dataset, Population
from steelyard.errors import UserError
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings, orders
from steelyard.messages import LossState, Question, Task
from steelyard.weighing.criteria import Criterion, LocalData, get

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


def make(people: Population | None = None, criteria: tuple[Criterion, ...] = (), **training: object) -> Simulation:
    settings = TrainingSettings(**{"learning_rate": 0.1, "batch_size": 2, "epochs": 2, **training})  # type: ignore[arg-type]
    return Simulation(
        {0: people or population()}, ModelSettings(name="logistic"), settings,
        ComputeSettings(engine="loop", device="cpu"), criteria,
    )  # fmt: skip


def task(clients: Simulation, round: int = 1, names: tuple[str, ...] = ("c0", "c1", "c2", "c3"), **extra) -> Task:
    return Task("f", 0, round, names, SimulationServer(clients).initial(0), **extra)


def test_training_equals_plain_sgd_written_out() -> None:
    clients = make()
    work = task(clients)
    updates = clients.train([work])[0]
    data = dataset()
    linear = nn.Linear(4, 3)
    with torch.no_grad():
        linear.weight.copy_(work.parameters[:12].view(3, 4))
        linear.bias.copy_(work.parameters[12:])
    order = orders(0, 1, ["c2"], 8, TrainingSettings(batch_size=2, epochs=2))[0]
    for epoch in order:
        for batch in torch.from_numpy(epoch + 8).split(2):
            loss = nn.functional.cross_entropy(linear(data.features[batch]), data.labels[batch])
            linear.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in linear.parameters():
                    parameter -= 0.1 * parameter.grad
    expected = torch.cat([linear.weight.reshape(-1), linear.bias])
    # Float32 sums in another order.
    assert torch.allclose(updates.payload.models[2], expected, atol=1e-6)
    assert updates.samples.tolist() == list(SIZES)
    assert updates.clients == ("c0", "c1", "c2", "c3")


def test_several_tasks_in_one_call_equal_one_by_one() -> None:
    clients = make()
    first = task(clients)
    second = Task("g", 0, 1, ("c1", "c3"), first.parameters + 0.1, LossState("auto", (1.0, 2.0, 3.0)))
    both = clients.train([first, second])
    assert torch.equal(both[1].payload.models, clients.train([second])[0].payload.models)
    assert torch.equal(both[0].payload.models, clients.train([first])[0].payload.models)
    plain = clients.train([Task("g", 0, 1, ("c1", "c3"), second.parameters)])[0]
    assert not torch.equal(both[1].payload.models, plain.payload.models)


def test_criteria_about_data_are_taken_once() -> None:
    calls: list[str] = []

    def counted(local: LocalData) -> float:
        calls.append(local.client)
        assert local.features is not None
        return float(local.features().shape[1])

    def of_model(local: LocalData) -> float:
        assert local.model is not None
        calls.append("model")
        return float(local.model.abs().sum())

    criteria = (
        get("DS"), get("LD"), get("MD"),
        Criterion("N", "client", "data", "", counted), Criterion("M", "client", "model", "", of_model),
    )  # fmt: skip
    clients = make(criteria=criteria)
    updates = clients.train([task(clients)])[0]
    clients.train([task(clients, round=2)])
    assert set(updates.criteria) == {"DS", "LD", "N", "M"}
    assert updates.criteria["DS"].tolist() == list(SIZES)
    assert updates.criteria["LD"][3] == 1
    assert updates.criteria["N"].tolist() == [4.0] * 4
    assert updates.criteria["M"][0] == pytest.approx(float(updates.payload.models[0].abs().sum()))
    assert calls.count("c0") == 1
    assert calls.count("model") == 8


def test_a_measure_that_fails_excludes_its_client_only() -> None:
    def fragile(local: LocalData) -> float:
        return 1 / (len(local.labels) - 3)

    clients = make(criteria=(Criterion("F", "client", "data", "", lambda local: abs(fragile(local))),))
    updates = clients.train([task(clients)])[0]
    assert updates.clients == ("c0", "c2", "c3")
    assert updates.payload.models.shape[0] == 3
    assert updates.failures[0].client == "c1"
    assert "ZeroDivisionError" in updates.failures[0].reason


def test_unknown_and_empty_clients_are_failures() -> None:
    people = population()
    empty = ClientRows("c9", np.zeros(0, np.int64), np.zeros(0, np.int64))
    clients = make(Population(people.dataset, (*people.clients, empty), people.server))
    updates = clients.train([task(clients, names=("c1", "c8", "c9"))])[0]
    assert updates.clients == ("c1",)
    assert [(f.client, f.reason) for f in updates.failures] == [("c8", "not registered"), ("c9", "no training samples")]


def test_wrong_labels_are_trained_on() -> None:
    people = population()
    wrong = (people.dataset.labels[:5] + 1) % 3
    first = ClientRows("c0", people.clients[0].train, people.clients[0].test, wrong)
    lying = make(Population(people.dataset, (first, *people.clients[1:]), people.server))
    models = lying.train([task(lying)])[0].payload.models
    honest = make().train([task(lying)])[0].payload.models
    assert not torch.allclose(models[0], honest[0])
    assert torch.equal(models[1:], honest[1:])


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
    assert answer.right.tolist() == (labels[[*range(30, 34), *range(38, 46)]] == 0).tolist()
    chance = np.exp(1) / (np.exp(1) + 2)
    hit = expected[0][0]
    assert answer.losses[0, 0] == pytest.approx(-np.log(chance) * hit - np.log(1 / (np.exp(1) + 2)) * (1 - hit))
    assert answer.overall()[0] == pytest.approx((labels[[*range(30, 34), *range(38, 46)]] == 0).mean())


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
    people = population(dataset(classes=0))
    clients = Simulation(
        {0: people}, ModelSettings(name="linear"), TrainingSettings(batch_size="full", epochs=30),
        ComputeSettings(engine="loop", device="cpu"),
    )  # fmt: skip
    server = SimulationServer(clients)
    work = Task("f", 0, 1, ("c2",), server.initial(0), LossState("barron", None, 1.0, 1.0))
    updates = clients.train([work])[0]
    answer = clients.evaluate([Question("f", 0, 1, updates.payload.models)])[0]
    assert answer.scores[0] == pytest.approx(-answer.metrics["rmse"])
    test = server.test(0, updates.payload.models)
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
    resumed = make(people)
    clients_state = make(people)
    clients_state.train([task(clients)])
    resumed.restore(clients_state.snapshot())
    assert torch.equal(resumed.train([task(clients, round=2)])[0].payload.models, again)


def test_memory_beyond_the_limit_goes_to_a_file() -> None:
    clients = make()
    small = Simulation(
        {0: population()}, ModelSettings(name="logistic"), clients.context.training,
        ComputeSettings(engine="loop", device="cpu", memory_gb=1e-7),
    )  # fmt: skip
    assert torch.equal(small.train([task(clients)])[0].payload.models, clients.train([task(clients)])[0].payload.models)


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match=r"compute\.device: got 'tpu'"):
        Simulation({0: population()}, ModelSettings(), TrainingSettings(), ComputeSettings(device="tpu"))
    with pytest.raises(UserError, match="no population for it, only for"):
        make().names(7)
    wrong = Simulation({0: population()}, lambda: nn.Linear(9, 3), TrainingSettings())
    with pytest.raises(UserError, match="does not take features of shape"):
        wrong.train([Task("f", 0, 1, ("c0",), torch.zeros(30))])


def test_describe_says_how() -> None:
    clients = make()
    clients.train([task(clients)])
    facts = clients.describe()
    assert facts["engine_choice"] == "loop"
    assert facts["device"] == "cpu"
    assert facts["parameters"] == "15"
    assert float(facts["memory_peak_gb"]) > 0
