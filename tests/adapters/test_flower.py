"""Flower's strategy that weighs: weights as `steelyard.weigh` gives them, bad replies left out, others inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, Krum
from sklearn.datasets import load_digits
from tests.adapters.flower_grid import Arrays, Nodes, answered, asked, record
from tests.adapters.recorded import REFUSED_RULES

import steelyard
from steelyard.errors import UserError
from steelyard.flower import ServerRows, Weighed

SENT: dict[str, Any] = {"w": np.zeros((2, 3), dtype=np.float32), "b": np.zeros(2, dtype=np.float32)}


def model(value: float, **changed: Any) -> dict[str, Any]:
    return {"w": np.full((2, 3), value, np.float32), "b": np.full(2, value, np.float32), **changed}


def aggregated(
    strategy: Weighed, replies: Sequence[tuple[Arrays, Mapping[str, Any]]], sent: Arrays = SENT
) -> dict[str, Any] | None:
    """Send one round out and give the answers back, as Flower does."""
    nodes: Any = Nodes({node: lambda model, reply=reply: reply for node, reply in enumerate(replies, 1)})
    messages = strategy.configure_train(1, record(sent), ConfigRecord(), nodes)
    arrays, _ = strategy.aggregate_train(1, nodes.send_and_receive(messages))
    return None if arrays is None else {name: array.numpy() for name, array in arrays.items()}


def test_weights_are_those_of_a_table() -> None:
    metrics = [{"num-examples": n, "quality": q} for n, q in ((300, 0.5), (100, 0.9), (50, 0.7))]
    strategy = Weighed("quality>DS/max", metrics=["quality"])
    found = aggregated(strategy, [(model(i), m) for i, m in enumerate(metrics)])
    table = {str(i): {"quality": m["quality"], "DS": m["num-examples"]} for i, m in enumerate(metrics, 1)}
    expected = steelyard.weigh(table, "quality>DS/max").weights
    assert list(strategy.rounds[1].weights.values()) == pytest.approx(expected, abs=1e-12)
    assert found is not None
    assert found["w"][0, 0] == pytest.approx(expected @ [0, 1, 2])
    assert found["w"].dtype == np.float32


def test_by_size_it_is_flowers_own_average() -> None:
    replies = [(model(i), {"num-examples": n, "loss": i}) for i, n in ((1, 30), (2, 10), (5, 7))]
    ours = aggregated(Weighed("DS"), replies)
    theirs, _ = FedAvg().aggregate_train(1, [answered(asked(i, SENT), *reply) for i, reply in enumerate(replies, 1)])
    assert ours is not None
    assert theirs is not None
    for name, array in theirs.items():
        assert ours[name] == pytest.approx(array.numpy(), abs=1e-6)


def test_the_distance_of_models_is_measured_here() -> None:
    """MD needs nothing of the clients: the third strayed far, and gets little."""
    strategy = Weighed("MD")
    aggregated(strategy, [(model(v), {"num-examples": 10}) for v in (0.1, 0.1, 5.0)])
    weights = strategy.rounds[1].weights
    assert weights["3"] < weights["1"] == pytest.approx(weights["2"])


@pytest.mark.parametrize(
    ("arrays", "metrics", "reason"),
    [
        (model(np.nan), {"num-examples": 10, "q": 1}, "model holds NaN or infinity"),
        (model(1), {"num-examples": 10}, "criterion q is missing"),
        (model(1), {"num-examples": 10, "q": float("nan")}, "criterion q"),
        (model(1), {"num-examples": 10, "q": -1.0}, "criterion q"),
        (model(1), {"q": 1}, "metric num-examples is missing"),
        (model(1), {"num-examples": 0, "q": 1}, "samples = 0"),
        (model(1), {"num-examples": float("inf"), "q": 1}, "samples = inf"),
        (model(1), {"num-examples": 1e300, "q": 1}, "samples = 1e+300; allowed: 1 to 1000000000000"),
        (model(1), {"num-examples": 10, "q": 1e300}, "criterion q = 1e+300; allowed: 0 to 1e+30"),
        (model(1, **{"x\x1b[2J" * 999: np.zeros(1)}), {"num-examples": 10, "q": 1}, r"array x\x1b[2Jx\x1b"),
        (model(1, b=np.zeros(3, np.float32)), {"num-examples": 9, "q": 1}, "array b has shape (3,), and (2,) was sent"),
        (model(1, x=np.zeros(1)), {"num-examples": 10, "q": 1}, "array x was not sent"),
        ({"w": SENT["w"]}, {"num-examples": 10, "q": 1}, "array b is missing"),
    ],
)
def test_a_reply_that_cannot_be_weighed_is_left_out(arrays: Arrays, metrics: Mapping[str, Any], reason: str) -> None:
    strategy = Weighed("q", metrics=["q"])
    good = {"num-examples": 10, "q": 1.0}
    found = aggregated(strategy, [(model(1), good), (arrays, metrics), (model(3), good)])
    assert found is not None
    assert found["w"][0, 0] == pytest.approx(2.0)
    assert list(strategy.rounds[1].reasons) == ["2"]
    assert strategy.rounds[1].reasons["2"].startswith(reason)
    assert len(strategy.rounds[1].reasons["2"]) <= 500
    assert strategy.rounds[1].reasons["2"].isprintable()


def test_nothing_to_weigh_keeps_the_model() -> None:
    strategy = Weighed("DS")
    assert aggregated(strategy, [(model(np.nan), {"num-examples": 1})] * 2) is None
    assert set(strategy.rounds[1].reasons) == {"1", "2"}


def test_types_stay_as_they_are() -> None:
    sent: dict[str, Any] = {"w": np.zeros(3, np.float16), "d": np.zeros(2), "seen": np.array(7, np.int64)}
    replies = [
        (
            {"w": np.full(3, v, np.float16), "d": np.full(2, float(v)), "seen": np.array(n, np.int64)},
            {"num-examples": s},
        )
        for v, n, s in ((1, 2**40, 1), (2, 2**40 + 4, 3))
    ]
    found = aggregated(Weighed("DS"), replies, sent)
    assert found is not None
    assert {name: array.dtype for name, array in found.items()} == {name: array.dtype for name, array in sent.items()}
    assert found["seen"] == 2**40 + 3
    assert found["d"].tolist() == [1.75, 1.75]


def test_robust_rules_and_caps_hold_an_attacker() -> None:
    replies = [(model(v), {"num-examples": 10}) for v in (1.0, 1.1, 0.9, 1000.0)]
    found = aggregated(Weighed("median(EQ)"), replies)
    assert found is not None
    assert 0.8 < found["w"][0, 0] < 1.2
    capped = Weighed("capped(DS;max_shares=1.5)")
    aggregated(capped, [(model(1), {"num-examples": n}) for n in (1, 1, 1000)])
    assert capped.rounds[1].weights["3"] == pytest.approx(0.5)


def test_the_servers_optimiser_steps_from_the_weighed_model() -> None:
    clients = {n: lambda sent, n=n: ({k: v + n for k, v in sent.items()}, {"num-examples": n}) for n in (1, 2, 3)}
    found: list[dict[str, Any]] = []
    for strategy in (FedAdam(eta=0.1), Weighed("DS", FedAdam(eta=0.1))):
        nodes: Any = Nodes(clients)
        result = strategy.start(nodes, record(SENT), 3)
        found.append({name: array.numpy() for name, array in result.arrays.items()})
    for name in SENT:
        assert found[1][name] == pytest.approx(found[0][name], abs=1e-5)
        assert abs(found[1][name]).min() > 0.01


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        *REFUSED_RULES,
        ({"rule": 7}, "rule: got 7"),
        ({"metrics": "quality"}, "metrics: got 'quality'; allowed: a list of names, such as ['quality']"),
        ({"metrics": [3]}, "metrics: got 3; allowed: a list of names"),
        ({"plugins": "own.py"}, "plugins: got 'own.py'; allowed: a list of files or modules"),
        ({"rows": [[1.0]]}, "rows: got [[1.0]]; allowed: ServerRows(network, features, labels)"),
        ({"folder": 3}, "folder: got 3; allowed: the path of a folder"),
        ({"strategy": FedMedian()}, "strategy: got FedMedian"),
        ({"strategy": Krum()}, "strategy: got Krum"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_round(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as found:
        Weighed(**arguments)
    assert line in str(found.value)
    assert "\n" not in str(found.value)


def test_wrong_labels_of_the_biggest_do_not_decide() -> None:
    """Digits, six clients, the two biggest label each digit as the next: sizes follow them, worth does not."""
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    parts = torch.split(torch.arange(1300), [450, 450, 100, 100, 100, 100])
    server, test = slice(1300, 1360), slice(1360, None)

    def client(rows: torch.Tensor, shift: int) -> Any:
        def train(sent: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
            net = torch.nn.Linear(64, 10)
            net.load_state_dict({name: torch.tensor(value) for name, value in sent.items()})
            steps = torch.optim.SGD(net.parameters(), lr=0.5)
            for _ in range(30):
                steps.zero_grad()
                torch.nn.functional.cross_entropy(net(x[rows]), (y[rows] + shift) % 10).backward()
                steps.step()
            return {name: value.numpy() for name, value in net.state_dict().items()}, {"num-examples": len(rows)}

        return train

    nodes: Any = Nodes({i + 1: client(rows, int(i < 2)) for i, rows in enumerate(parts)})
    rows = ServerRows(torch.nn.Linear(64, 10), x[server], y[server])
    found: list[float] = []
    for strategy in (
        FedAvg(fraction_evaluate=0.0),
        Weighed("power(VP)^3", FedAvg(fraction_evaluate=0.0), rows=rows),
    ):
        net = torch.nn.Linear(64, 10)
        torch.nn.init.zeros_(net.weight)
        torch.nn.init.zeros_(net.bias)
        result = strategy.start(nodes, ArrayRecord(net.state_dict()), num_rounds=5)
        net.load_state_dict(result.arrays.to_torch_state_dict())
        found.append(float((net(x[test]).argmax(1) == y[test]).float().mean()))
    assert found[0] < 0.3
    assert found[1] > 0.85
