"""Weighed in a whole app: its run folder, replies pulled a few at a time, and what it refuses to stand in."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from tests.adapters.flower_grid import Nodes, answered, asked, record
from tests.conftest import CommandLine

from steelyard.adapters import flower_replies
from steelyard.errors import UserError
from steelyard.flower import Weighed
from steelyard.runs.glance import glance
from steelyard.runs.reader import History

SENT: dict[str, Any] = {"w": np.zeros((2, 3), dtype=np.float32), "seen": np.array(0, np.int64)}
RULE = "quality>AG/max"


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


def test_an_app_leaves_a_run_folder_that_commands_read(tmp_path: Path, steelyard: CommandLine) -> None:
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
    done = steelyard("weigh", tmp_path / "run", "--by", "quality", "--format", "json")
    assert [row["client"] for row in json.loads(done.stdout)["clients"]] == ["3", "2", "1"], done.stderr
    assert glance(tmp_path, "run").state == "finished"


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


def test_models_of_past_rounds_are_not_kept() -> None:
    strategy = Weighed("DS")
    strategy.start(nodes_of(), record(SENT), num_rounds=2)
    assert [combined.arrays for combined in strategy.rounds.values()] == [None, None]
    assert all(combined.weights for combined in strategy.rounds.values())


def masked(sent: Mapping[str, Any]) -> str:
    """What a node answers whose app has Flower's secure aggregation, as Flower words an error."""
    message = asked(1, SENT)
    context = Context(1, 1, {}, RecordDict(), {})
    try:
        secaggplus_mod(message, context, lambda message, context: message)
    except Exception as error:
        return f"{type(error)}:<'{error}'>"
    raise AssertionError("Flower's mod answers messages that are not its own now")


def test_flowers_secure_aggregation_is_refused() -> None:
    with pytest.raises(UserError, match="strategy: the nodes' app uses Flower's secure aggregation") as found:
        Weighed("DS").start(nodes_of(2, n1=masked, n2=masked), record(SENT), num_rounds=1)
    assert "\n" not in str(found.value)
    reply = answered(asked(7, SENT), SENT, {"num-examples": 1})
    reply.content["secaggplus_configs"] = ConfigRecord({"stage": "unmask"})
    assert flower_replies.is_masked(reply)


def test_one_node_cannot_stop_the_app_by_a_word_of_secure_aggregation() -> None:
    strategy = Weighed("DS")
    strategy.start(nodes_of(3, n2=masked), record(SENT), num_rounds=1)
    assert list(strategy.rounds[1].weights) == ["1", "3"]
    assert strategy.rounds[1].reasons["2"].startswith("its app uses Flower's secure aggregation")


def test_noise_for_equal_weights_is_refused_around_it() -> None:
    outer = DifferentialPrivacyClientSideFixedClipping(Weighed("DS"), 0.5, 1.0, 3)
    with pytest.raises(UserError, match=r"strategy: the configuration holds 'clipping_norm'.*its noise is for equal"):
        outer.start(nodes_of(), record(SENT), num_rounds=1)


def test_noise_inside_it_is_refused() -> None:
    inner: Any = DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.5, 1.0, 3)
    with pytest.raises(UserError, match="strategy: got DifferentialPrivacyClientSideFixedClipping"):
        Weighed("DS", inner)


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
    assert arrays is not None
    assert arrays["w"].numpy().tolist() == given.tolist()
