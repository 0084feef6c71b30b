"""Flower's strategy that weighs: a rule's weights, bad replies left out, its folder, what it refuses."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAdam, FedAvg, FedMedian
from tests.adapters.flower_grid import Arrays, Nodes, answered, asked, record
from tests.conftest import CommandLine
from tests.kit import assert_refused

from steelyard.adapters import ClientTest, flower_replies
from steelyard.flower import Weighed
from steelyard.runs.glance import glance
from steelyard.runs.reader import History

SENT: dict[str, Any] = {"w": np.zeros((2, 3), dtype=np.float32), "seen": np.array(0, np.int64)}
RULE = "quality>AG/max"
GOOD = {"num-examples": 10, "q": 1.0}


def model(value: float, **changed: Any) -> dict[str, Any]:
    return {"w": np.full((2, 3), value, np.float32), "seen": np.array(0), **changed}


def aggregated(
    strategy: Weighed, replies: Sequence[tuple[Arrays, Mapping[str, Any]]], sent: Arrays = SENT
) -> dict[str, Any] | None:
    """Send one round out and give the answers back, as Flower does."""
    nodes: Any = Nodes({node: lambda model, reply=reply: reply for node, reply in enumerate(replies, 1)})
    messages = strategy.configure_train(1, record(sent), ConfigRecord(), nodes)
    arrays, _ = strategy.aggregate_train(1, nodes.send_and_receive(messages))
    return None if arrays is None else {name: array.numpy() for name, array in arrays.items()}


def client(step: float) -> Any:
    """A client that moves every number by a step, and says how good its data are."""

    def train(sent: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
        arrays = {name: (value + np.asarray(step, value.dtype)).astype(value.dtype) for name, value in sent.items()}
        return arrays, {"num-examples": 10.0 * step, "quality": 0.2 * step}

    return train


def nodes_of(count: int = 3, **changed: Any) -> Any:
    """A grid of some nodes, each with a test; `changed` replaces clients by number."""
    clients = {number: client(number) for number in range(1, count + 1)} | {int(k[1:]): v for k, v in changed.items()}
    tests = {number: {"num-examples": 5, "eval_acc": 0.1 * number, "eval_loss": 1.0, "f1": 0.5} for number in clients}
    return Nodes(clients, tests)


def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"accuracy": 0.2 + 0.1 * number, "loss": 2.0})


class Clock:
    """Time in which only sleeping takes any; what was slept is kept."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(flower_replies, "time", made)
    return made


def test_by_size_it_is_flowers_own_average_of_models_and_metrics() -> None:
    replies = [(model(i), {"num-examples": n, "loss": i}) for i, n in ((1, 30), (2, 10), (5, 7))]
    found: list[dict[str, Any]] = []
    for strategy in (FedAvg(), Weighed("DS")):
        strategy.configure_train(1, record(SENT), ConfigRecord(), nodes_of())
        messages = [answered(asked(i, SENT), *reply) for i, reply in enumerate(replies, 1)]
        arrays, metrics = strategy.aggregate_train(1, messages)
        assert metrics is not None
        found.append({"w": arrays["w"].numpy(), **metrics})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert found[1][name] == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("arrays", "metrics", "reason"),
    [
        (model(np.nan), GOOD, "model holds NaN or infinity"),
        (model(1), {"q": 1}, "metric num-examples is missing"),
        (model(1), {"num-examples": 10, "q": [1.0]}, "criterion q is missing"),
        (model(1, **{"x\x1b[2J" * 999: np.zeros(1)}), GOOD, r"array x\x1b[2Jx\x1b"),
    ],
)
def test_a_reply_that_cannot_be_weighed_is_left_out(arrays: Arrays, metrics: Mapping[str, Any], reason: str) -> None:
    strategy = Weighed("q", metrics=["q"])
    found = aggregated(strategy, [(model(1), GOOD), (arrays, metrics), (model(3), GOOD)])
    assert found["w"][0, 0] == pytest.approx(2.0)
    reasons = strategy.rounds[1].reasons
    assert list(reasons) == ["2"]
    assert reasons["2"].startswith(reason)
    assert len(reasons["2"]) <= 500
    assert reasons["2"].isprintable()
    assert aggregated(Weighed("DS"), [(model(np.nan), GOOD)] * 2) is None, "nothing to weigh keeps the model"


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
    assert {name: array.dtype for name, array in found.items()} == {name: array.dtype for name, array in sent.items()}
    assert found["seen"] == 2**40 + 3
    assert found["d"].tolist() == [1.75, 1.75]


def test_the_servers_optimiser_steps_from_the_weighed_model() -> None:
    clients = {n: lambda sent, n=n: ({k: v + n for k, v in sent.items()}, {"num-examples": n}) for n in (1, 2, 3)}
    found: list[dict[str, Any]] = []
    for strategy in (FedAdam(eta=0.1), Weighed("DS", FedAdam(eta=0.1))):
        nodes: Any = Nodes(clients)
        result = strategy.start(nodes, record({"w": SENT["w"]}), 3)
        found.append({name: array.numpy() for name, array in result.arrays.items()})
    assert found[1]["w"] == pytest.approx(found[0]["w"], abs=1e-5)
    assert abs(found[1]["w"]).min() > 0.01


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"rule": "VP>DS"}, ("VP", "no rows were given")),
        ({"rule": 7}, ("rule", 7)),
        ({"metrics": "quality"}, ("metrics", "'quality'")),
        ({"rows": [[1.0]]}, ("rows", [[1.0]])),
        ({"folder": 3}, ("folder", 3)),
        ({"strategy": FedMedian()}, ("strategy", "FedMedian")),
        (
            {"strategy": DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.5, 1.0, 3)},
            ("strategy", "DifferentialPrivacyClientSideFixedClipping"),
        ),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_round(arguments: dict[str, Any], parts: tuple[Any, ...]) -> None:
    assert_refused(lambda: Weighed(**arguments), *parts)


def test_what_stands_in_the_wrong_place_is_refused_in_the_first_round() -> None:
    outer = DifferentialPrivacyClientSideFixedClipping(Weighed("DS"), 0.5, 1.0, 3)
    assert_refused(lambda: outer.start(nodes_of(), record(SENT), num_rounds=1), "strategy", "'clipping_norm'")
    assert_refused(lambda: Weighed("DS").aggregate_train(1, []), "strategy", "has sent no model yet")


def test_an_app_leaves_a_run_folder_that_commands_read(tmp_path: Path, command: CommandLine) -> None:
    strategy = Weighed(RULE, metrics=["quality"], folder=tmp_path / "run")
    grid = nodes_of(3, n4=lambda sent: "the disk is full", n5=lambda sent: None)
    strategy.start(grid, record(SENT), num_rounds=2, timeout=0.5, evaluate_fn=evaluate)
    history = History(tmp_path / "run")
    found = history.cohorts(RULE, 0, after=1)
    assert found.clients == ("1", "2", "3")
    assert dict(zip(found.clients, found.weight, strict=True)) == pytest.approx(strategy.rounds[2].weights, abs=1e-15)
    assert found.samples.tolist() == [10, 20, 30]
    reasons = dict(zip(*(history.failures_after(1)[name] for name in ("client", "failure")), strict=True))
    assert reasons == {"4": "answered with an error: the disk is full", "5": "no reply came"}
    last = history.rounds.iloc[-1]
    assert last["accuracy"] == pytest.approx(0.3)  # five nodes, 0.1 to 0.5, alike in size
    assert last["server_accuracy"] == pytest.approx(0.4)
    assert sorted(history.tested(RULE, 0).metrics) == ["f1"]
    assert (history.chain.round, history.chain.problem) == (2, "")
    done = command("weigh", tmp_path / "run", "--by", "quality", "--format", "json")
    assert [row["client"] for row in json.loads(done.stdout)["clients"]] == ["3", "2", "1"], done.stderr
    assert glance(tmp_path, "run").state == "finished"
    assert [combined.arrays for combined in strategy.rounds.values()] == [None, None]


def test_an_app_that_starts_again_goes_on_in_its_folder(tmp_path: Path) -> None:
    """Rounds are counted on, and criteria remember what they did: the same as in one go."""
    whole = Weighed(RULE, metrics=["quality"], folder=tmp_path / "whole")
    whole.start(nodes_of(), record(SENT), num_rounds=4)
    arrays = record(SENT)
    for _ in range(2):
        part = Weighed(RULE, metrics=["quality"], folder=tmp_path / "parts")
        arrays = part.start(nodes_of(), arrays, num_rounds=2).arrays
    one, two = (History(tmp_path / name) for name in ("whole", "parts"))
    assert two.last_round == 4
    assert two.chain.head == one.chain.head


def test_rounds_of_a_loop_of_ones_own_are_written(tmp_path: Path) -> None:
    strategy, grid = Weighed("DS", folder=tmp_path / "run"), nodes_of()
    for number in (1, 2):
        messages = strategy.configure_train(number, record(SENT), ConfigRecord(), grid)
        strategy.aggregate_train(number, grid.send_and_receive(messages))
    assert History(tmp_path / "run").last_round == 1
    strategy.close()
    assert History(tmp_path / "run").last_round == 2


def test_an_app_that_fails_leaves_its_rounds_and_the_reason(tmp_path: Path) -> None:
    def broken(number: int, arrays: ArrayRecord) -> MetricRecord:
        if number == 2:
            raise RuntimeError("no GPU left")
        return evaluate(number, arrays)

    strategy = Weighed("DS", folder=tmp_path / "run")
    with pytest.raises(RuntimeError, match="no GPU left"):
        strategy.start(nodes_of(), record(SENT), num_rounds=3, evaluate_fn=broken)
    history = History(tmp_path / "run")
    assert history.last_round == 2
    assert history.info["stopped"] == "RuntimeError: no GPU left"
    assert glance(tmp_path, "run").state == "stopped"


def test_the_servers_figures_are_stored_under_the_names_of_the_folder(tmp_path: Path) -> None:
    """The score under "accuracy", by whichever name it came; lists are left out, other figures stay."""
    for measure, score in ((None, 0.25), ("f1", 0.75)):
        figures = {"acc": 0.25, "f1": 0.75, "loss": 2.0, "all": [1.0, 2.0]}
        grid, folder = nodes_of(), tmp_path / str(measure)
        strategy = Weighed("DS", folder=folder, measure=measure)
        strategy.start(grid, record(SENT), 1, evaluate_fn=lambda number, arrays, own=figures: MetricRecord(own))
        history = History(folder)
        last = history.rounds.iloc[-1]
        assert last["server_accuracy"] == score
        assert json.loads(last["server_metrics"])["loss"] == 2.0
        assert history.info["measure"] == (measure or "accuracy")


def pulled(grid: Any) -> int:
    """Run a round and return how many replies had arrays in memory when one more was pulled, at most."""
    arrays: list[weakref.ref[Array]] = []
    answer, most = grid._answer, 0

    def counted(message: Any) -> Any:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in arrays))
        reply = answer(message)
        arrays.append(weakref.ref(reply.content["arrays"]["w"]))
        return reply

    grid._answer = counted
    Weighed("DS", FedAvg(fraction_evaluate=0.0)).start(grid, record(SENT), num_rounds=1)
    return most


def test_large_replies_are_in_memory_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply's arrays are gone before the next reply is pulled; small models come with one call."""
    grid = nodes_of(8)
    assert pulled(grid) == 7
    assert grid.pulls == [8]
    monkeypatch.setattr(flower_replies, "AT_ONCE", 1)
    grid = nodes_of(8)
    assert pulled(grid) == 0
    assert grid.pulls == [1] * 8


def late(looks: int) -> Any:
    """A client whose reply is there at the so manyth look."""
    left = [looks]

    def train(sent: Mapping[str, Any]) -> Any:
        left[0] -= 1
        return None if left[0] > 0 else client(1.0)(sent)

    return train


def replies_of(nodes: Nodes, timeout: float | None = None) -> list[int]:
    """Which nodes answer, in the order in which their replies come."""
    grid: Any = flower_replies.FewAtATime(nodes)  # type: ignore[arg-type]
    messages = [asked(node, SENT) for node in sorted(nodes.clients)]
    return [message.metadata.src_node_id for message in grid.send_and_receive(messages, timeout=timeout)]


def test_looks_for_replies_become_rarer_while_none_comes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert replies_of(Nodes({1: client(1.0), 2: late(4), 3: late(15)})) == [1, 2, 3]
    growing = [0.05 * 1.5**step for step in range(11)]
    assert clock.slept == pytest.approx([0.05, *growing[1:3], *[min(3.0, wait) for wait in (0.05, *growing[1:])]])
    clock.slept.clear()
    assert replies_of(Nodes({1: client(1.0), 2: lambda sent: None}), timeout=1.0) == [1]
    assert 1.0 <= sum(clock.slept) < 1.0 + clock.slept[-1]
    assert replies_of(Nodes({1: client(1.0)}), timeout=0.0) == []
    # 24 bytes of numbers behind a header, and a counter: a budget of four messages is four at a time.
    size = sum(len(array.data) for array in record(SENT).values())
    monkeypatch.setattr(flower_replies, "AT_ONCE", 4 * size)
    nodes = Nodes({node: client(1.0) for node in range(10)})
    assert replies_of(nodes) == list(range(10))
    assert nodes.pulls == [4, 4, 2]


def of_test(metrics: Mapping[str, Any] | None, measure: str | None = None) -> ClientTest | None:
    """What is read of a node's test; of an error without metrics."""
    message = asked(1, SENT, "evaluate")
    if metrics is None:
        return flower_replies.read_test(Message(Error(code=1, reason="x"), reply_to=message), "n", measure)
    return flower_replies.read_test(answered(message, SENT, metrics), "n", measure)


def test_a_nodes_test_is_read_by_the_names_that_people_use() -> None:
    every = {"n": 3.6, "test_accuracy": 0.1, "eval_acc": 0.2, "acc": 0.3, "accuracy": 0.4, "test_loss": 6.0, "loss": 5}
    kept = {"acc": 0.3, "eval_acc": 0.2, "test_accuracy": 0.1, "test_loss": 6.0}
    assert of_test(every) == ClientTest(0.4, 4, 5.0, kept)
    for name in ("accuracy", "acc", "eval_acc", "eval_accuracy", "test_accuracy"):
        found = of_test({name: 0.5, "n": 1, "eval_loss": 2.0, "shares": [0.5]})
        assert found == ClientTest(0.5, 1, 2.0)
    named = of_test({"f1": 0.7, "accuracy": 0.5}, "f1")
    assert (named.score, named.samples, dict(named.metrics)) == (0.7, 0, {"accuracy": 0.5})
    assert math.isnan(named.loss)
    for nothing in (None, {"n": 1}, {"accuracy": 0.5, "n": -1}, {"accuracy": 0.5, "n": 2.0**53}, {"acc": math.inf}):
        assert of_test(nothing) is None
    assert of_test({"accuracy": 0.5}, "f1") is None
    assert of_test({"accuracy": 0.5, "n": 2.0**52}) is not None
    many = of_test({"accuracy": 0.5, **{f"m{number:02}": 1.0 for number in range(60)}})
    assert list(many.metrics) == [f"m{number:02}" for number in range(50)]
    two = answered(asked(1, SENT), SENT, {"accuracy": 0.5})
    two.content["more"] = MetricRecord({"accuracy": 0.5})
    assert flower_replies.read_test(two, "n", None) is None


def test_a_reply_is_read_whole_or_named() -> None:
    read = flower_replies.read_reply
    found = read("ann", answered(asked(1, SENT), SENT, {"n": 7, "q": 0.5, "all": [1.0]}), "n")
    assert not isinstance(found, str)
    assert (found.client, found.samples, found.measures, found.is_change) == ("ann", 7.0, {"n": 7.0, "q": 0.5}, False)
    assert {name: array.tolist() for name, array in found.arrays.items()} == {n: a.tolist() for n, a in SENT.items()}
    assert read("a", Message(Error(code=1, reason="no disk"), reply_to=asked(1, SENT)), "n") == (
        "answered with an error: no disk"
    )
    for kind, added in (("2 and 1", record(SENT)), ("1 and 2", MetricRecord({"n": 1}))):
        message = answered(asked(1, SENT), SENT, {"n": 1})
        message.content["more"] = added
        assert str(read("a", message, "n")).startswith(f"sent {kind} records")


def test_replies_that_the_server_makes_for_lost_nodes_count_for_nothing() -> None:
    """An error from a node that was not asked is the server's own word; who was asked and is silent is named."""
    strategy = Weighed("DS")
    strategy.configure_train(1, record(SENT), ConfigRecord(), nodes_of(3))
    lost = [Message(Error(code=1, reason="lost"), reply_to=asked(node, SENT)) for node in (2, 99)]
    for message, node in zip(lost, (2, 99), strict=True):
        assert message.metadata.src_node_id == node
    strategy.aggregate_train(1, [answered(asked(1, SENT), SENT, {"num-examples": 1}), *lost])
    assert strategy.rounds[1].reasons == {"2": "answered with an error: lost", "3": "no reply came"}


def masked(sent: Mapping[str, Any]) -> str:
    """What a node answers whose app has Flower's secure aggregation, as Flower words an error."""
    message = asked(1, SENT)
    context = Context(1, 1, {}, RecordDict(), {})
    try:
        secaggplus_mod(message, context, lambda message, context: message)
    except Exception as error:
        return f"{type(error)}:<'{error}'>"
    raise AssertionError("Flower's mod answers messages that are not its own now")


def test_flowers_secure_aggregation_is_refused_but_one_node_cannot_stop_the_app() -> None:
    hidden = nodes_of(2, n1=masked, n2=masked)
    assert_refused(lambda: Weighed("DS").start(hidden, record(SENT), num_rounds=1), "strategy", "secaggplus_mod")
    reply = answered(asked(7, SENT), SENT, {"num-examples": 1})
    assert not flower_replies.is_masked(reply)
    reply.content["secaggplus_configs"] = ConfigRecord({"stage": "unmask"})
    assert flower_replies.is_masked(reply)
    strategy = Weighed("DS")
    strategy.start(nodes_of(3, n2=masked), record(SENT), num_rounds=1)
    assert list(strategy.rounds[1].weights) == ["1", "3"]
    assert "secaggplus_mod" in strategy.rounds[1].reasons["2"]


def test_what_a_node_says_is_bounded(tmp_path: Path) -> None:
    """Reasons and metrics go into the folder: a node can neither fill it nor make an accuracy of no number."""
    grid = nodes_of(2, n3=lambda sent: "x\n" * 10_000)
    many = {f"m{number:04}": 1.0 for number in range(1000)}
    grid.tests |= {node: {"num-examples": 5, "accuracy": 0.5, **many} for node in (1, 2, 3)}
    grid.tests[1]["accuracy"] = float("inf")
    strategy = Weighed("DS", folder=tmp_path / "run")
    strategy.start(grid, record(SENT), num_rounds=1)
    assert len(strategy.rounds[1].reasons["3"]) < 600
    tested = History(tmp_path / "run").tested("DS", 0)
    assert tested.clients == ("2", "3")
    assert len(tested.metrics) < 100


def header(text: str) -> bytes:
    """An array file that is nothing but its header."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def archive() -> bytes:
    file = BytesIO()
    np.savez(file, w=SENT["w"])
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"PK\x03\x04",
        archive(),
        header("((((("),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }\n"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000000000000, 0), }\n"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -6), }\n") + bytes(24),
        header("{'descr': '|V0', 'fortran_order': False, 'shape': (2, 3), }\n"),
        header("{'descr': '|O', 'fortran_order': False, 'shape': (2, 3), }\n") + bytes(48),
    ],
)
def test_an_array_that_is_no_array_leaves_its_client_out(data: bytes) -> None:
    """Whatever bytes one client sends: the others are weighed, and nothing is allocated for what it claims."""
    replies = [answered(asked(node, SENT), SENT, {"num-examples": 1}) for node in (1, 2, 3)]
    (arrays,) = replies[2].content.array_records.values()
    arrays["w"] = Array("float32", (2, 3), "numpy.ndarray", data)
    strategy = Weighed("DS")
    strategy.configure_train(1, record(SENT), ConfigRecord(), nodes_of(3))
    strategy.aggregate_train(1, replies)
    assert list(strategy.rounds[1].weights) == ["1", "2"]
    assert strategy.rounds[1].reasons["3"].startswith("array w")


def test_an_array_in_columns_is_read_as_it_is() -> None:
    sent = {"w": np.zeros((2, 3), np.float32)}
    given = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    strategy = Weighed("DS")
    grid: Any = Nodes({node: lambda model: ({"w": given}, {"num-examples": 1}) for node in (1, 2)})
    messages = strategy.configure_train(1, record(sent), ConfigRecord(), grid)
    arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert arrays["w"].numpy().tolist() == given.tolist()
