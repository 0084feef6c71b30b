"""Hidden updates over the two Flower apps, joined without a network: the same models as in the open."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message
from tests.federate.small_experiment import weights
from tests.federate.test_federate_apps import described, grid_of

from steelyard.clients.flower import tasks, wire
from steelyard.clients.flower.forms import TRAIN
from steelyard.clients.flower.hidden_forms import HIDE, KEYS, OPEN, SHARE
from steelyard.clients.node import NodeConfig
from steelyard.errors import UserError
from steelyard.experiment.loading import build
from steelyard.experiment.node_rules import agreed
from steelyard.experiment.running import run
from steelyard.federate.client_app import NodeFault, app
from steelyard.federate.server_app import federate
from steelyard.privacy.secure_server import Unopened
from steelyard.rounds.soundness import Exploded
from steelyard.runs.reader import History
from steelyard.usercode import NotAllowed

RULE = {"criteria": ["DS", "LD"], "score": "prioritized", "priority": "LD>DS"}


def hidden(**changes: Any) -> dict[str, Any]:
    return described(
        weighing=RULE | {"priority": "LD>DS"},
        rounds={"count": 2, "fraction": 1.0},
        privacy={"aggregation": {"kind": "secure"}},
        **changes,
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("open") / "run"
    document = hidden()
    del document["privacy"]
    run(build(document), out=folder)
    return weights(folder)


@pytest.mark.parametrize(("nodes", "fresh"), [(6, True), (2, False)])
def test_a_federation_gives_the_model_that_updates_in_the_open_give(
    tmp_path: Path, plain: dict[str, torch.Tensor], nodes: int, fresh: bool
):
    grid, config = grid_of(hidden(), nodes, fresh, out=str(tmp_path / "run"))
    seen: list[tuple[str, dict[str, Any]]] = []

    def look(question: Message, answer: Message) -> list[Message]:
        if answer.has_content() and question.metadata.message_type in (TRAIN, HIDE):
            arrays = wire.split(answer.content)[1]
            seen.append((question.metadata.message_type, {name: array.numpy() for name, array in arrays.items()}))
        return [answer]

    grid.tamper = look
    federate(grid, config, "9")  # type: ignore[arg-type]
    for name, ours in weights(tmp_path / "run").items():
        torch.testing.assert_close(ours, plain[name], rtol=0, atol=1e-5)
    assert [kind for kind in grid.kinds if kind in (KEYS, TRAIN, HIDE, OPEN)] == [
        kind for _ in range(2) for kind in (KEYS, TRAIN, HIDE, OPEN) for _ in range(nodes)
    ]
    # No message holds a model: key shares with the criteria, and words that are noise.
    assert {(kind, *sorted(arrays)) for kind, arrays in seen} == {(TRAIN, "key_shares"), (HIDE, "words")}
    words = np.concatenate([arrays["words"] for kind, arrays in seen if kind == HIDE])
    counts = np.bincount(words >> 30, minlength=4) / len(words)
    assert ((counts > 0.2) & (counts < 0.3)).all()
    history = History(tmp_path / "run")
    assert (history.clients["bytes"] > 650 * 4 / (6 / nodes)).all()


def dropping(grid: Any, gone: dict[str, set[int]]) -> None:
    """Let nodes fall silent from a kind of message on: their answers to it never arrive."""

    def tamper(question: Message, answer: Message) -> list[Message]:
        if question.metadata.dst_node_id in gone.get(question.metadata.message_type, set()):
            return [Message(Error(8, "gone"), reply_to=question)]
        return [answer]

    grid.tamper = tamper


@pytest.mark.parametrize("stage", [KEYS, TRAIN, HIDE, OPEN])
def test_a_node_that_drops_out_at_any_stage_is_left_out_and_named(
    tmp_path: Path, plain: dict[str, torch.Tensor], stage: str
):
    document = hidden(federate={"timeout": 30.0})
    document["rounds"] = {"count": 1, "fraction": 1.0}
    grid, config = grid_of(document, 6, out=str(tmp_path / "run"))
    dropping(grid, {stage: {42}})
    federate(grid, config, "9")  # type: ignore[arg-type]
    there = History(tmp_path / "run").clients
    left = there[~there["failure"].isna()]
    assert left["client"].tolist() == ([] if stage == OPEN else ["client-002"])
    assert there[there["failure"].isna()]["weight"].sum() == pytest.approx(1.0)
    del document["privacy"]
    grid, config = grid_of(document, 6, out=str(tmp_path / "plain"))
    if stage != OPEN:
        dropping(grid, {TRAIN: {42}})
    federate(grid, config, "9")  # type: ignore[arg-type]
    if stage != HIDE:  # there the weights were given before it was gone
        for name, ours in weights(tmp_path / "run").items():
            torch.testing.assert_close(ours, weights(tmp_path / "plain")[name], rtol=0, atol=1e-5)


def test_a_node_that_shows_a_key_of_low_order_is_left_out_and_the_others_go_on(tmp_path: Path):
    document = hidden()
    document["rounds"] = {"count": 1, "fraction": 1.0}
    grid, config = grid_of(document, 6, out=str(tmp_path / "run"))

    def tamper(question: Message, answer: Message) -> list[Message]:
        if question.metadata.message_type == KEYS and question.metadata.dst_node_id == 42:
            _, arrays = wire.split(answer.content)
            shown = arrays["keys"].numpy().copy()
            shown[:, 32:64] = 0
            answer.content["arrays"] = ArrayRecord({"keys": Array(shown)})
        return [answer]

    grid.tamper = tamper
    federate(grid, config, "9")  # type: ignore[arg-type]
    there = History(tmp_path / "run").clients
    left = there[~there["failure"].isna()]
    assert left[["client", "failure"]].to_numpy().tolist() == [["client-002", "its key is not a valid key"]]
    assert there[there["failure"].isna()]["weight"].sum() == pytest.approx(1.0)


def changing(grid: Any, kind: str, node: int, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Let a node change its answers to a kind of message: the form and the arrays, in place."""

    def tamper(question: Message, answer: Message) -> list[Message]:
        if (question.metadata.message_type, question.metadata.dst_node_id) == (kind, node):
            text, found = wire.split(answer.content)
            form, arrays = json.loads(text), {name: array.numpy().copy() for name, array in found.items()}
            change(form, arrays)
            answer.content["form"] = ConfigRecord({"json": json.dumps(form)})
            answer.content["arrays"] = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        return [answer]

    grid.tamper = tamper


def one_round(**changes: Any) -> dict[str, Any]:
    return hidden(**changes) | {"rounds": {"count": 1, "fraction": 1.0}}


def failures(folder: Path) -> dict[str, str]:
    there = History(folder).clients
    left = there[~there["failure"].isna()]
    return dict(zip(left["client"], left["failure"], strict=True))


def test_a_node_whose_key_shares_nobody_can_read_is_left_out_and_the_others_go_on(tmp_path: Path):
    grid, config = grid_of(one_round(), 6, out=str(tmp_path / "run"))
    changing(grid, TRAIN, 42, lambda form, arrays: arrays["key_shares"].fill(7))
    federate(grid, config, "9")  # type: ignore[arg-type]
    said = "left out: sent key shares that client-000, client-001, client-003, client-004, client-005 cannot read"
    assert failures(tmp_path / "run") == {"client-002": said}
    # Nobody trains twice, the one that is left out is not asked again, and one sum is opened.
    counts = {kind: grid.kinds.count(kind) for kind in (KEYS, TRAIN, SHARE, HIDE, OPEN)}
    assert counts == {KEYS: 11, TRAIN: 6, SHARE: 5, HIDE: 11, OPEN: 5}
    there = History(tmp_path / "run").clients
    assert there[there["failure"].isna()]["weight"].sum() == pytest.approx(1.0)
    # The same as if it had dropped out after the weights were given.
    grid, config = grid_of(one_round(), 6, out=str(tmp_path / "dropped"))
    dropping(grid, {HIDE: {42}})
    federate(grid, config, "9")  # type: ignore[arg-type]
    for name, ours in weights(tmp_path / "run").items():
        torch.testing.assert_close(ours, weights(tmp_path / "dropped")[name], rtol=0, atol=1e-5)


def test_a_node_that_falsely_says_so_of_another_loses_its_own_place_too(tmp_path: Path):
    def lie(form: dict[str, Any], arrays: dict[str, Any]) -> None:
        form["clients"] = []
        form["failures"] = [{"client": "client-002", "reason": "cannot read"}]
        form["unreadable"] = {"client-002": ["client-004", "client-002", "a stranger"]}
        arrays.clear()

    grid, config = grid_of(one_round(), 6, out=str(tmp_path / "run"))
    changing(grid, HIDE, 42, lie)
    federate(grid, config, "9")  # type: ignore[arg-type]
    assert failures(tmp_path / "run") == {
        "client-002": "left out: says that it cannot read the key shares of client-004",
        "client-004": "left out: sent key shares that client-002 cannot read",
    }


def test_a_complaint_of_a_client_that_hid_its_update_is_refused(tmp_path: Path):
    grid, config = grid_of(one_round(), 6, out=str(tmp_path / "run"))
    changing(grid, HIDE, 42, lambda form, arrays: form.update(unreadable={"client-002": ["client-004"]}))
    federate(grid, config, "9")  # type: ignore[arg-type]
    reason = "dropped out before its update arrived: unreadable: names clients that hid their updates"
    assert failures(tmp_path / "run")["client-002"].startswith(reason)


def test_a_node_of_small_weight_cannot_move_the_model_beyond_the_bound(tmp_path: Path):
    """It adds 100 to every parameter of what it hides; 6 clients and a bound of 16 leave 24 binary places."""
    grid, config = grid_of(hidden(), 6, out=str(tmp_path / "run"))
    changing(grid, HIDE, 42, lambda form, arrays: arrays.update(words=arrays["words"] + np.uint32(100 * 2**24)))
    with pytest.raises(Exploded, match=r"round 1 of LD>DS: the hidden sum of 6 clients moves a parameter by 100, .*16"):
        federate(grid, config, "9")  # type: ignore[arg-type]


def test_nodes_that_show_the_same_key_are_left_out_and_the_others_go_on(tmp_path: Path):
    grid, config = grid_of(one_round(), 6, out=str(tmp_path / "run"))

    def twice(form: dict[str, Any], arrays: dict[str, Any]) -> None:
        arrays["keys"][:, 32:64] = arrays["keys"][:, :32]

    changing(grid, KEYS, 42, twice)
    federate(grid, config, "9")  # type: ignore[arg-type]
    said = "shows the same key twice, or one that another client shows"
    assert failures(tmp_path / "run") == {"client-002": said}


@pytest.mark.parametrize("stage", [TRAIN, HIDE, OPEN])
def test_with_more_gone_than_the_threshold_allows_the_run_stops_and_says_so(tmp_path: Path, stage: str):
    """Of six clients four must stay."""
    grid, config = grid_of(hidden(), 6, out=str(tmp_path / "run"))
    dropping(grid, {stage: {41, 43, 44}})
    with pytest.raises(Unopened, match=r"round 1 of LD>DS: 3 of 6 clients .*it takes 4 to open a sum"):
        federate(grid, config, "9")  # type: ignore[arg-type]


def test_a_node_sends_no_whole_model_where_updates_are_hidden_and_answers_no_old_message(tmp_path: Path):
    grid, config = grid_of(hidden(), 3, out=str(tmp_path / "run"))
    federate(grid, config, "9")  # type: ignore[arg-type]

    def again(kind: str, content: Any = None) -> Any:
        """Ask node 40 once more what it was asked first, or something else of that kind."""
        first = next(
            message
            for message, _ in grid.sent.values()
            if (message.metadata.message_type, message.metadata.dst_node_id) == (kind, 40)
        )
        message = Message(content or first.content, 40, kind, ttl=60.0, group_id="1")
        message.metadata.__dict__["_message_id"] = "again"
        return first, lambda: app(message, grid.nodes[40].context)  # type: ignore[attr-defined]

    for kind in (HIDE, OPEN):
        with pytest.raises(NodeFault, match="refused: attempt: this node has no keys"):
            again(kind)[1]()
    task, header = tasks.read_task(again(TRAIN)[0].content)
    bare = tasks.write_task(task, task.clients, 60.0, tasks.pack_parameters(task), header.run, header.experiment)
    with pytest.raises(NodeFault, match="refused: cohort: its keys go with a task where updates are hidden"):
        again(TRAIN, bare)[1]()
    with pytest.raises(NodeFault, match="refused: attempt"):
        again(TRAIN)[1]()


def test_a_node_that_requires_hidden_updates_takes_part_in_no_other_experiment():
    node = NodeConfig.read({"client": "a", "require": "aggregation", "allow": "*"})
    document = hidden()
    agreed(dict(document), node)
    del document["privacy"]
    with pytest.raises(NotAllowed, match=r"privacy.aggregation: missing, but this node's owner requires it"):
        agreed(dict(document), node)
    with pytest.raises(UserError, match=r"require: got 'agregation' \(did you mean 'aggregation'"):
        NodeConfig.read({"client": "a", "require": "agregation"})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"beside": {"fedavg": {"criteria": ["DS"]}}}, "another weighted sum of the same updates"),
        ({"privacy": {"aggregation": {"kind": "ckks"}}}, "allowed there: secure"),
    ],
)
def test_what_only_a_simulation_may_do_is_refused_across_machines(tmp_path: Path, changes: dict[str, Any], why: str):
    grid, config = grid_of({**hidden(), **changes}, 2, out=str(tmp_path / "run"))
    with pytest.raises(UserError, match=why):
        federate(grid, config, "9")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=why):
        build({**hidden(), **changes}).on_node(NodeConfig.read({"partition-id": 0, "num-partitions": 2}))
