"""Flower's strategy that weighs: a rule's weights, bad replies left out, its folder, what it refuses."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAdam, FedAvg, FedMedian
from safetensors.torch import save_file
from tests.adapters.flower_grid import Arrays, Nodes, answered, asked, record
from tests.conftest import CommandLine
from tests.kit import assert_refused, of_diff
from tests.warm import warm_script

from steelyard import Model, Result
from steelyard.adapters import ClientTest, flower_replies
from steelyard.base.errors import UserError
from steelyard.flower import Weighed
from steelyard.models.taking import look_at_model
from steelyard.proof.signing import model_digest
from steelyard.runs.glance import glance
from steelyard.runs.history import History
from steelyard.runs.signatures import Findings

SENT: dict[str, Any] = {"w": np.zeros((2, 3), dtype=np.float32), "seen": np.array(0, np.int64)}
RULE = "quality>AG/max"
GOOD = {"num-examples": 10, "q": 1.0}
TEST = {"accuracy": 1.0, "loss": 1.0, "num-examples": 10}


def model(value: float, **changed: Any) -> dict[str, Any]:
    return {"w": np.full((2, 3), value, np.float32), "seen": np.array(0), **changed}


def aggregated(strategy: Weighed, replies: Sequence[tuple[Arrays, Mapping[str, Any]]], sent: Arrays = SENT) -> Any:
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
    return Nodes(clients, {n: {"num-examples": 5, "f1": 0.1 * n, "eval_loss": 1.0, "eval_acc": 0.5} for n in clients})


def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
    if number == 3:
        raise RuntimeError("no GPU left")
    return MetricRecord({"accuracy": 0.4, "f1": 0.75, "loss": 2.0, "all": [1.0, 2.0]})


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
        assert arrays is not None
        assert metrics is not None
        found.append({"w": arrays["w"].numpy(), **metrics})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert found[1][name] == pytest.approx(value, abs=1e-6)


def test_a_reply_that_cannot_be_weighed_is_left_out() -> None:
    strategy = Weighed("q", metrics=["q"])
    columns = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))  # read as they are
    odd = model(1, **{"x\x1b[2J" * 999: np.zeros(1)})
    replies = [({"w": columns, "seen": np.array(0)}, GOOD), (model(1), {"q": 1}), (odd, GOOD)]
    found = aggregated(strategy, replies)
    assert (found["w"].tolist(), found["seen"].dtype) == (columns.tolist(), np.int64)
    reasons = strategy.rounds[1].reasons
    assert reasons["2"] == "metric num-examples is missing"
    assert reasons["3"].startswith(r"array x\x1b[2Jx\x1b")
    assert len(reasons["3"]) == 500
    assert aggregated(Weighed("DS"), [(model(np.nan), GOOD)] * 2) is None, "nothing to weigh keeps the model"


def test_the_rule_that_the_refusal_of_fedmedian_names_is_its_equal() -> None:
    with pytest.raises(UserError) as refused:
        Weighed("DS", FedMedian())
    rule = re.findall(r"'(.*?)'", str(refused.value))[-1]
    replies = [(model(value), {"num-examples": size}) for value, size in ((1, 9), (2, 9), (3, 9), (8, 500), (9, 900))]
    messages = [answered(asked(node, SENT), *reply) for node, reply in enumerate(replies, 1)]
    arrays, _ = FedMedian().aggregate_train(1, messages)
    assert arrays is not None
    assert aggregated(Weighed(rule), replies)["w"].tolist() == arrays["w"].numpy().tolist() == model(3)["w"].tolist()


def test_the_servers_optimiser_steps_from_the_weighed_model() -> None:
    found: list[Any] = []
    for strategy in (FedAdam(eta=0.1), Weighed("DS", FedAdam(eta=0.1))):
        result = strategy.start(nodes_of(), record({"w": SENT["w"]}), 3)
        found.append(result.arrays["w"].numpy())
    assert found[1] == pytest.approx(found[0], abs=1e-5)
    assert abs(found[1]).min() > 0.01


def test_the_servers_optimiser_makes_no_negative_variances() -> None:
    sent: dict[str, Any] = {"w": np.ones(2, np.float32), "bn.running_var": np.full(2, 0.1, np.float32)}

    def halves(model: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
        return {name: array / 2 for name, array in model.items()}, {"num-examples": 5}

    def nodes() -> Any:
        return Nodes({1: halves, 2: halves})

    plain = FedAdam(eta=0.5).start(nodes(), record(sent), 1).arrays["bn.running_var"].numpy()
    found = Weighed("DS", FedAdam(eta=0.5)).start(nodes(), record(sent), 1).arrays
    assert (plain < 0).all()
    assert found["bn.running_var"].numpy() == pytest.approx(0.05)
    assert (found["w"].numpy() < 1).all()


def test_an_app_leaves_a_run_folder_that_commands_read(tmp_path: Path, command: CommandLine) -> None:
    strategy = Weighed(RULE, metrics=["quality"], folder=tmp_path / "run", measure="f1")
    grid = nodes_of(3, n4=lambda sent: "the disk is full", n5=lambda sent: None)
    strategy.start(grid, record(SENT), num_rounds=2, timeout=0.5, evaluate_fn=evaluate)
    history = History(tmp_path / "run")
    found = history.cohorts(RULE, 0, after=1)
    assert dict(zip(found.clients, found.weight, strict=True)) == pytest.approx(strategy.rounds[2].weights, abs=1e-15)
    assert found.samples.tolist() == [10, 20, 30]
    reasons = dict(zip(*(history.failures_after(1)[name] for name in ("client", "failure")), strict=True))
    assert reasons == {"4": "answered with an error: the disk is full", "5": "no reply came"}
    last = history.rounds.iloc[-1]
    assert last["accuracy"] == pytest.approx(0.3)  # five nodes, 0.1 to 0.5, alike in size
    assert (last["server_accuracy"], json.loads(last["server_metrics"])["loss"]) == (0.75, 2.0)
    assert sorted(history.tested(RULE, 0).metrics) == ["eval_acc"]
    assert (history.chain.round, history.chain.problem) == (2, "")
    done = command("weigh", tmp_path / "run", "--by", "quality", "--format", "json")
    assert [row["client"] for row in json.loads(done.stdout)["clients"]] == ["3", "2", "1"], done.stderr
    assert "weights: 2 rounds computed again" in command("verify", tmp_path / "run").stdout
    assert [combined.arrays for combined in strategy.rounds.values()] == [None, None]


def test_the_diff_of_the_page_makes_a_weighed_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(of_diff("flower-app.md"), {"FedAvg": FedAvg, "grid": nodes_of(), "arrays": record(SENT)})
    assert History(tmp_path / "runs" / "first").last_round == 10


def test_without_a_flower_that_has_what_is_needed_one_line_says_what_to_install(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    for gone in ("sys.modules['flwr'] = None", "import flwr.serverapp.strategy as s; del s.QFedAvg"):
        script.write_text(f"import sys; {gone}\nimport steelyard.flower\n")
        ended = warm_script(script, folder=tmp_path, fresh=True)
        assert ended.stderr.strip().splitlines()[-1].endswith("pip install 'steelyard[flower]'")


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
    # A budget of four messages is four at a time.
    size = sum(len(array.data) for array in record(SENT).values())
    monkeypatch.setattr(flower_replies, "AT_ONCE", 4 * size)
    nodes = Nodes({node: client(1.0) for node in range(10)})
    assert replies_of(nodes) == list(range(10))
    assert nodes.pulls == [4, 4, 2]
    grid: Any = flower_replies.FewAtATime(nodes)  # type: ignore[arg-type]
    assert len(grid.pull_messages(grid.push_messages([asked(1, SENT)]))) == 1
    assert replies_of(Nodes({})) == []


def test_what_else_a_strategy_asks_of_a_grid_is_handed_on() -> None:
    inner = Mock()
    grid = flower_replies.FewAtATime(inner)
    for name, arguments, options in (
        *(("create_message", ("content",), {"dst_node_id": 3}), ("set_run", ("run",), {})),
        *(("get_node_ids", (), {}), ("get_nodes", (), {})),
    ):
        assert getattr(grid, name)(*arguments, **options) in (getattr(inner, name).return_value, None)
        getattr(inner, name).assert_called_once_with(*arguments, **options)
    assert grid.run is inner.run


def of_test(metrics: Mapping[str, Any], measure: str | None = None) -> Any:
    """What is read of a node's test."""
    answers = {"1": answered(asked(1, SENT, "evaluate"), SENT, metrics)}
    return flower_replies.read_tests(answers, "n", measure).scores.get("1")


def test_a_nodes_test_is_read_by_the_names_that_people_use() -> None:
    every = {"n": 3.6, "test_accuracy": 0.1, "eval_acc": 0.2, "acc": 0.3, "accuracy": 0.4, "test_loss": 6.0, "loss": 5}
    kept = {"acc": 0.3, "eval_acc": 0.2, "test_accuracy": 0.1, "test_loss": 6.0}
    assert of_test(every) == ClientTest(0.4, 4, 5.0, kept)
    for name in ("acc", "eval_acc", "eval_accuracy", "test_accuracy"):
        assert of_test({name: 0.5, "n": 1, "eval_loss": 2.0, "shares": [0.5]}) == ClientTest(0.5, 1, 2.0)
    named = of_test({"f1": 0.7, "accuracy": 0.5, "n": 2}, "f1")
    assert (named.score, named.samples, dict(named.metrics)) == (0.7, 2, {"accuracy": 0.5})
    assert math.isnan(named.loss)
    assert of_test({"n": 1}) is of_test({"accuracy": 0.5, "n": 1}, "f1") is None
    many = of_test({"accuracy": 0.5, "n": 1, **{f"m{number:02}": 1.0 for number in range(60)}})
    assert list(many.metrics) == [f"m{number:02}" for number in range(50)]


@pytest.mark.parametrize(
    ("sent", "reason", "means"),
    [
        ({"precision": 1.0, "num-examples": 10}, "metric accuracy is missing", (0.5, 1.0)),
        ({}, "metric num-examples is missing", (0.5, 1.0)),
        ({**TEST, "accuracy": [1.0]}, "metric accuracy is missing, or not as", (0.5, 1.0)),
        ({**TEST, "num-examples": [10]}, "metric num-examples is missing, or", (0.5, 1.0)),
        ({**TEST, "num-examples": 1e15}, "num-examples = 1e+15", (0.5, 1.0)),
        ({**TEST, "num-examples": 0}, "num-examples = 0", (0.5, 1.0)),
        ({**TEST, "accuracy": math.nan, "loss": 5.0}, "score = nan", (0.5, 2.0)),
        ({**TEST, "accuracy": 0.9, "loss": math.inf}, None, (0.6, 1.0)),
        ({**TEST, "num-examples": 10**9}, None, (0.75, 1.0)),  # as three of the others
        ({**TEST, "accuracy": 0.5, "more": 1.0}, None, (0.5, 1.0)),
        (None, "answered with an error: no rows", (0.5, 1.0)),
    ],
)
def test_one_nodes_test_neither_stops_an_app_nor_decides_its_means(
    tmp_path: Path, sent: dict[str, Any] | None, reason: str | None, means: tuple[float, float]
) -> None:
    grid = nodes_of(4)
    grid.tests = {node: {**TEST, "accuracy": 0.5} for node in (1, 2, 3)} | {4: sent}
    strategy = Weighed("DS", folder=tmp_path / "run")
    result = strategy.start(grid, record(SENT), num_rounds=1)
    found = result.evaluate_metrics_clientapp[1]
    assert (found["accuracy"], found["loss"], len(found)) == (pytest.approx(means[0]), pytest.approx(means[1]), 2)
    assert [why.partition(reason or "")[0] for why in strategy.rounds[1].untested.values()] == ([""] if reason else [])
    history = History(tmp_path / "run")
    assert history.rounds.iloc[-1]["accuracy"] == pytest.approx(found["accuracy"])
    assert history.untested["client"].tolist() == (["4"] if reason else [])


def test_tests_of_which_none_can_count_give_no_means() -> None:
    grid = nodes_of(2)
    grid.tests = {1: {"accuracy": 0.5, "num-examples": -1}, 2: {"num-examples": 1, "accuracy": math.nan}}
    assert "accuracy" not in Weighed("DS").start(grid, record(SENT), num_rounds=1).evaluate_metrics_clientapp[1]
    grid.tests = {1: {}, 2: {}}
    assert not Weighed("DS").start(grid, record(SENT), num_rounds=1).evaluate_metrics_clientapp


def test_a_reply_is_read_whole_or_named() -> None:
    read = flower_replies.read_reply
    found = read("ann", answered(asked(1, SENT), SENT, {"n": 7, "q": 0.5, "all": [1.0]}), "n")
    assert not isinstance(found, str)
    assert (found.client, found.samples, found.measures, list(found.arrays)) == (
        "ann",
        7.0,
        {"n": 7.0, "q": 0.5},
        [*SENT],
    )
    for kind, added in (("2 and 1", record(SENT)), ("1 and 2", MetricRecord({"n": 1}))):
        message = answered(asked(1, SENT), SENT, {"n": 1})
        message.content["more"] = added
        assert str(read("a", message, "n")).startswith(f"sent {kind} records")
    assert flower_replies.read_tests({"1": message}, "n", None).reasons["1"].startswith("sent 2 records of metrics")


def test_replies_that_the_server_makes_for_lost_nodes_count_for_nothing() -> None:
    """An error from a node that was not asked is the server's own word; who was asked and is silent is named."""
    strategy = Weighed("DS")
    strategy.configure_train(1, record(SENT), ConfigRecord(), nodes_of(3))
    whole = answered(asked(1, SENT), SENT, {"num-examples": 1})
    strategy.aggregate_train(1, [whole, failed("lost", 2), failed("lost", 99)])
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


def test_an_array_that_is_no_array_leaves_its_client_out() -> None:
    """Whatever bytes one client sends, the others are weighed; tests/clients/flower has all kinds of them."""
    replies = [answered(asked(node, SENT), SENT, {"num-examples": 1}) for node in (1, 2, 3)]
    (arrays,) = replies[2].content.array_records.values()
    arrays["w"] = Array("float32", (2, 3), "numpy.ndarray", b"PK\x03\x04")
    strategy = Weighed("DS")
    strategy.configure_train(1, record(SENT), ConfigRecord(), nodes_of(3))
    strategy.aggregate_train(1, replies)
    assert list(strategy.rounds[1].weights) == ["1", "2"]
    assert strategy.rounds[1].reasons["3"].startswith("array w")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"rule": 7}, ("rule", 7)),
        ({"metrics": "quality"}, ("metrics: got 'quality'",)),
        ({"rows": [[1.0]]}, ("rows", [[1.0]])),
        ({"folder": 3}, ("folder: got 3",)),
        ({"strategy": FedAvg}, ("strategy: got the class FedAvg", "FedAvg()")),
        ({"strategy": FedMedian()}, ("strategy", "FedMedian")),
        (
            {"strategy": DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.5, 1.0, 3)},
            ("strategy", "DifferentialPrivacyClientSideFixedClipping"),
        ),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], parts: tuple[Any, ...]) -> None:
    assert_refused(lambda: Weighed(**arguments), *parts)
    outer = DifferentialPrivacyClientSideFixedClipping(Weighed("DS"), 0.5, 1.0, 3)
    assert_refused(lambda: outer.start(nodes_of(), record(SENT), num_rounds=1), "strategy", "'clipping_norm'")
    assert_refused(lambda: Weighed("DS").aggregate_train(1, []), "strategy", "has sent no model yet")


def failed(reason: str, node: int = 1) -> Message:
    return Message(Error(code=1, reason=reason), reply_to=asked(node, SENT))


def test_an_app_that_starts_again_gets_what_its_folder_keeps(tmp_path: Path) -> None:
    """The model, its whole numbers and the moments inside: the same bits as in one go, wherever it would begin."""
    models: list[dict[str, Any]] = []
    arrays: Any = None
    for name, parts in (("whole", (4,)), ("parts", (2, 2))):
        for rounds in parts:
            strategy = Weighed("DS", FedAdam(eta=0.1, beta_1=0.9), folder=tmp_path / name, keep_models=True)
            arrays = strategy.start(nodes_of(), record(SENT), rounds).arrays
        models.append({name: array.numpy().tolist() for name, array in arrays.items()})
    assert models[0] == models[1] != {name: array.tolist() for name, array in SENT.items()}
    assert "started again after round 2, from the kept model" in History(tmp_path / "parts").notes
    assert "started again" not in History(tmp_path / "whole").notes
    leaves_with_its_weights(tmp_path / "parts", models[0])
    other = Weighed("DS", FedAvg(), folder=tmp_path / "parts", keep_models=True)
    assert_refused(lambda: other.start(nodes_of(), record(SENT), 1), "strategy", "FedAvg")
    larger = record({**SENT, "w": np.zeros((9, 3), np.float32)})
    other = Weighed("DS", FedAdam(), folder=tmp_path / "parts", keep_models=True)
    assert_refused(lambda: other.start(nodes_of(), larger, 1), "folder", "model of 6 numbers")


def leaves_with_its_weights(run: Path, arrays: dict[str, Any]) -> None:
    """The model has the app's own names and types; what is not known is said, and nothing is predicted."""
    folder = Result(run).model().save(run.parent / "model")
    model = Model.load(folder)
    weights = model.network.state_dict()
    assert {name: tensor.tolist() for name, tensor in weights.items()} == arrays
    assert {name: str(tensor.dtype) for name, tensor in weights.items()} == {
        "w": "torch.float32",
        "seen": "torch.int64",
    }
    assert "is not known" in model.card
    assert model.use == "load {}/model.safetensors into the network of your app"
    assert "| w | float32 | 2×3 |" in model.card
    assert_refused(lambda: model.predict(np.zeros((1, 6))), "a network of your own")
    assert look(run, folder).checked["model"].startswith("DS, seed 0, round 4")
    document = json.loads((folder / "model.json").read_text())
    save_file({**weights, "w": weights["w"].T.contiguous()}, folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    document["weights"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    document["origin"]["digest"] = model_digest(weights["w"].T.reshape(-1))
    (folder / "model.json").write_text(json.dumps(document))
    assert any("arrays are not those" in finding.what for finding in look(run, folder).changed)


def look(run: Path, folder: Path) -> Findings:
    found = Findings()
    look_at_model(folder, run, found)
    return found


@pytest.mark.parametrize(("inside", "missing"), [(FedAvg, "the model of round 1"), (FedAdam, "(m_t)")])
def test_an_app_that_cannot_go_on_is_refused(tmp_path: Path, inside: type[FedAvg], missing: str) -> None:
    arrays = Weighed("DS", inside(), folder=tmp_path / "run").start(nodes_of(), record(SENT), 1).arrays
    begins = record(SENT) if inside is FedAvg else arrays
    again = Weighed("DS", inside(), folder=tmp_path / "run")
    assert_refused(lambda: again.start(nodes_of(), begins, 1), "folder", missing, "keep_models=True")
    assert (History(tmp_path / "run").last_round, "started" in History(tmp_path / "run").notes) == (1, False)


def test_an_app_that_starts_again_goes_on_in_its_folder(tmp_path: Path) -> None:
    """Rounds are counted on, and criteria remember what they did: the same as in one go."""

    def begun(name: str) -> Weighed:
        return Weighed(RULE, metrics=["quality"], folder=tmp_path / name)

    begun("whole").start(nodes_of(), record(SENT), num_rounds=4)
    arrays: Any = begun("parts").start(nodes_of(), record(SENT), num_rounds=2).arrays
    strategy, grid = begun("parts"), nodes_of()
    for number in (1, 2):  # a loop of one's own, with the tests that `start` asks for
        messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        arrays, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
        messages = strategy.configure_evaluate(number, arrays, ConfigRecord(), grid)
        strategy.aggregate_evaluate(number, grid.send_and_receive(messages))
    assert History(tmp_path / "parts").last_round == 3, "the last one is written with its tests"
    strategy.close()
    assert "started again after round 2, from its own model" in History(tmp_path / "parts").notes
    assert History(tmp_path / "parts").chain.head == History(tmp_path / "whole").chain.head


def test_an_app_that_fails_leaves_its_rounds_and_the_reason(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no GPU left"):
        Weighed("DS", folder=tmp_path / "run").start(nodes_of(), record(SENT), num_rounds=4, evaluate_fn=evaluate)
    history = History(tmp_path / "run")
    assert (history.last_round, history.info["stopped"]) == (3, "RuntimeError: no GPU left")
    assert (glance(tmp_path, "run").state, glance(tmp_path, "run").rounds) == ("stopped", 4)
