"""Hidden updates: the same models as in the open, whoever drops out or lies; and what a node keeps and refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from tests.clients.flower.flower_fakes import FakeGrid, assert_taken_back
from tests.federate.small_experiment import described, federated, grid_of
from tests.kit import assert_refused, changed, named
from tests.runs.contents import models

from steelyard.base.errors import UserError
from steelyard.clients.flower import tasks, wire
from steelyard.clients.flower.hidden_messages import (
    AnswerForm,
    HideForm,
    KeysForm,
    OpenForm,
    ShareForm,
)
from steelyard.clients.flower.wire import (
    TRAIN,
    TaskForm,
    read_array,  # NumPy's own reader is not safe in several threads.
)
from steelyard.clients.node import NodeConfig
from steelyard.experiment.loading import build, read_experiment
from steelyard.experiment.node_rules import agreed
from steelyard.federate.app_folder import experiment_text
from steelyard.federate.certificates import make_key
from steelyard.federate.client_app import NodeFault, app
from steelyard.federate.secure_node import HiddenRound
from steelyard.federate.server_app import federate
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import LossState, Task, Updates
from steelyard.privacy.hidden import FixedPoint
from steelyard.privacy.secure import SecureClient, Unopened, self_key, stream
from steelyard.privacy.settings import AggregationSettings
from steelyard.rounds.weigh import Exploded
from steelyard.runs.history import History

OPENED = described(
    weighing={"criteria": ["DS", "LD"], "priority": "LD>DS"},
    rounds={"count": 1, "fraction": 1.0},
    federate={"timeout": 30.0},
)
DOCUMENT = {**OPENED, "privacy": {"aggregation": {"kind": "secure"}}}
Fields = dict[str, Any]
Change = Callable[[Fields, Fields], None]


def assert_close(one: Path, other: Path) -> None:
    """Words have 24 binary places and more: a sum of six rounds by less than 6 times 2**-24 of the bound of 16."""
    for name, ours in models(one).items():
        torch.testing.assert_close(ours, models(other)[name], rtol=0, atol=1e-5)


def spoil(grid: FakeGrid, faults: dict[tuple[str, int], Change | None]) -> None:
    """Let nodes change their answers to a kind of message: the form and the arrays, in place; None: they are gone."""

    def tamper(question: Message, answer: Message) -> list[Message]:
        place = (question.metadata.message_type, question.metadata.dst_node_id)
        if place not in faults:
            return [answer]
        change = faults[place]
        if change is None:
            return [Message(Error(8, "gone"), reply_to=question)]
        text, found = wire.split(answer.content)
        form, arrays = json.loads(text), {name: read_array(array, name).copy() for name, array in found.items()}
        change(form, arrays)
        answer.content["form"] = ConfigRecord({"json": json.dumps(form)})
        answer.content["arrays"] = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        return [answer]

    grid.tamper = tamper


def spoiled(
    folder: Path, faults: dict[tuple[str, int], Change | None], document: Any = DOCUMENT
) -> tuple[History, FakeGrid]:
    """Run with a client on each of six nodes, 40 to 45, some of which spoil what they send."""
    grid, config = grid_of(document, 6, out=str(folder))
    spoil(grid, faults)
    return History(federate(grid, config, "9")), grid  # type: ignore[arg-type]


def failures(history: History) -> dict[str, str]:
    left = history.clients[history.clients["failure"].notna()]
    return dict(zip(left["client"], left["failure"], strict=True))


@pytest.mark.parametrize(("nodes", "fresh"), [(6, True), (2, False)])
def test_a_federation_gives_the_model_that_updates_in_the_open_give(tmp_path: Path, nodes: int, fresh: bool) -> None:
    federated(tmp_path / "open", changed(OPENED, rounds={"count": 2}), 2)
    grid, config = grid_of(changed(DOCUMENT, rounds={"count": 2}), nodes, fresh, out=str(tmp_path / "run"))
    seen: list[tuple[str, Any]] = []

    def look(question: Message, answer: Message) -> list[Message]:
        if question.metadata.message_type in (TRAIN, HideForm.kind):
            seen.extend((name, read_array(array, name)) for name, array in wire.split(answer.content)[1].items())
        return [answer]

    grid.tamper = look
    federate(grid, config, "9")  # type: ignore[arg-type]
    assert_close(tmp_path / "run", tmp_path / "open")
    # No message holds a model: key shares with the criteria, and words that are noise.
    assert {name for name, _ in seen} == {"key_shares", "words"}
    words = np.concatenate([array for name, array in seen if name == "words"])
    counts = np.bincount(words >> 30, minlength=4) / len(words)
    assert ((counts > 0.2) & (counts < 0.3)).all()


@pytest.mark.parametrize("stage", [pytest.param(KeysForm.kind, marks=pytest.mark.slow), TRAIN, OpenForm.kind])
def test_a_node_that_drops_out_is_left_out_as_in_the_open(tmp_path: Path, stage: str) -> None:
    history, _ = spoiled(tmp_path / "run", {(stage, 42): None})
    assert list(failures(history)) == ([] if stage == OpenForm.kind else ["client-002"])
    spoiled(tmp_path / "open", {} if stage == OpenForm.kind else {(TRAIN, 42): None}, OPENED)
    assert_close(tmp_path / "run", tmp_path / "open")


def low_order(form: Fields, arrays: Fields) -> None:
    arrays["keys"][:, 32:64] = 0


def unreadable(form: Fields, arrays: Fields) -> None:
    arrays["key_shares"].fill(7)


def lie(form: Fields, arrays: Fields) -> None:
    form |= {"clients": [], "failures": [{"client": "client-002", "reason": "cannot read"}]}
    form["unreadable"] = {"client-002": ["client-004", "client-002", "a stranger"]}
    arrays.clear()


@pytest.mark.parametrize(
    ("stage", "change", "said"),
    named(
        [
            ("a key of low order", KeysForm.kind, low_order, {"client-002": "its key is not a valid key"}),
            (
                "shares nobody can read",
                TRAIN,
                unreadable,
                {"client-002": "left out: sent key shares "},
            ),
            (
                "a lie of another's",
                *(HideForm.kind, lie),
                {
                    "client-002": "left out: says that it cannot read the key shares of client-004",
                    "client-004": "left out: sent key shares that client-002 cannot read",
                },
            ),
        ]
    ),
)
def test_a_node_that_cheats_is_left_out_and_the_others_go_on(
    tmp_path: Path, stage: str, change: Change, said: dict[str, str]
) -> None:
    history, grid = spoiled(tmp_path / "run", {(stage, 42): change})
    found = failures(history)
    assert set(found) == set(said)
    assert all(found[client].startswith(words) for client, words in said.items()), found
    assert history.clients[history.clients["failure"].isna()]["weight"].sum() == pytest.approx(1.0)
    if change is unreadable:
        # Nobody trains twice, and one sum is opened, the same as if it had dropped out after the weights were given.
        assert [grid.kinds.count(kind) for kind in (TRAIN, ShareForm.kind, OpenForm.kind)] == [6, 5, 5]
        spoiled(tmp_path / "dropped", {(HideForm.kind, 42): None})
        assert_close(tmp_path / "run", tmp_path / "dropped")


def test_a_node_of_small_weight_cannot_move_the_model_beyond_the_bound(tmp_path: Path) -> None:
    """It adds 100 to every parameter of what it hides; 6 clients and a bound of 16 leave 24 binary places."""

    def push(form: Fields, arrays: Fields) -> None:
        arrays["words"] = arrays["words"] + np.uint32(100 * 2**24)

    with pytest.raises(Exploded, match=r"round 1 of LD>DS: the hidden sum of 6 clients moves a parameter by 100, .*16"):
        spoiled(tmp_path / "run", {(HideForm.kind, 42): push})


def test_a_node_sends_no_whole_model_where_updates_are_hidden_and_answers_no_old_message(tmp_path: Path) -> None:
    _, grid = federated(tmp_path / "run", DOCUMENT, 3)

    def first(kind: str) -> Message:
        asked = (message for message, _ in grid.sent.values() if message.metadata.dst_node_id == 40)
        return next(message for message in asked if message.metadata.message_type == kind)

    def assert_refuses(kind: str, content: RecordDict, words: str) -> None:
        message = Message(content, 40, kind, ttl=60.0, group_id="1")
        message.metadata.__dict__["_message_id"] = "again"
        with pytest.raises(NodeFault, match=words):
            app(message, grid.nodes[40].context)  # type: ignore[attr-defined]

    for kind in (HideForm.kind, TRAIN):
        assert_refuses(kind, first(kind).content, "attempt")
    task, header = tasks.read_task(first(TRAIN).content)
    bare = tasks.write_task(task, task.clients, 60.0, tasks.pack_parameters(task), header.run, header.experiment)
    assert_refuses(TRAIN, bare, "refused: cohort: its keys go with a task where updates are hidden")


def test_a_node_that_requires_hidden_updates_takes_part_in_no_other_experiment() -> None:
    node = NodeConfig.read({"client": "a", "require": "aggregation", "allow": "*", "key": "k", "peers": "p"})
    agreed(dict(DOCUMENT), node)
    assert_refused(lambda: agreed(dict(OPENED), node), "privacy.aggregation", "owner requires it")
    beside = {**DOCUMENT, "beside": {"DS": {"criteria": ["DS"], "priority": "DS"}}}
    assert_refused(lambda: agreed(beside, node), "beside: 2 rules", "another weighted sum")


def owned(folder: Path, document: Fields, **terms: Any) -> tuple[FakeGrid, Fields]:
    """Six nodes with a client each whose owners require hidden updates, and have the public keys of one another."""
    grid, config = grid_of(document, 6, out=str(folder / "run"))
    for number, node in grid.nodes.items():
        make_key(folder / f"{number}" / "key")
        node.context.node_config |= {"require": "aggregation", "key": str(folder / f"{number}" / "key"), **terms}  # type: ignore[attr-defined]
        node.context.node_config |= {"peers": str(folder / f"peers-{number}"), "state": str(folder / f"{number}")}  # type: ignore[attr-defined]
    for number in grid.nodes:
        (folder / f"peers-{number}").mkdir()
        for other in set(grid.nodes) - {number}:
            shutil.copy(folder / f"{other}" / "key.pub", folder / f"peers-{number}" / f"{other}.pub")
    return grid, config


ALONE = {
    "weighing": {"criteria": ["DS"], "score": "power", "power": 900, "normalise": "max", "priority": None},
    "privacy": {"aggregation": {"kind": "secure", "largest_weight": 1.0}},
}
SIX = {"least-cohort": 6}
ALL_STAY = {"aggregation": {"kind": "secure", "threshold": 1.0}}


def test_a_server_holds_its_rule_to_the_owners_terms_and_says_so(tmp_path: Path, messages: list[str]) -> None:
    grid, config = owned(tmp_path, DOCUMENT, **{"least-cohort": 5, "bound": 4.0})
    grid.nodes[41].context.node_config |= {"largest-weight": 1.5}  # type: ignore[attr-defined]
    history = History(federate(grid, config, "9"))  # type: ignore[arg-type]
    said = "terms of the nodes: rounds.min_clients = 5, weighing.max_shares = 1.5, privacy.aggregation.bound = 4"
    assert said in messages
    assert history.clients["weight"].max() <= 1.5 / 6 + 1e-9
    kept = read_experiment(tmp_path / "run")
    assert (kept.rounds.min_clients, kept.weighing.max_shares) == (5, 1.5)
    assert [one["what"] for one in map(json.loads, (tmp_path / "40" / "asked.jsonl").read_text().splitlines())] == [
        "question", "round", "question",
    ]  # fmt: skip
    assert any("helps to open the sum of 6 clients" in line for line in messages)


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        (
            {"least-cohort": 7},
            "rounds.min_clients: node 40 asks for 7 clients in a sum (least-cohort), and there are 6",
        ),
        ({"questions-per-day": 1}, "rounds.count: asks 2, and node 40 allows 1 (questions-per-day)"),
        ({"bound": 1e6, "largest-weight": 1.0, "least-cohort": 6}, None),
    ],
)
def test_an_experiment_that_cannot_be_held_to_the_terms_is_refused(
    tmp_path: Path, terms: Fields, said: str | None
) -> None:
    grid, config = owned(tmp_path, DOCUMENT, **terms)
    if said is None:
        federate(grid, config, "9")  # type: ignore[arg-type]
        return
    assert_refused(lambda: federate(grid, config, "9"), said)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def forged(form: Fields, arrays: Fields) -> None:
    (signed,) = form["vouchers"].values()
    signed["client-001"] = signed["client-001"][:-2] + "00"


@pytest.mark.parametrize(
    ("sections", "terms", "listed", "faults", "said"),
    named(
        [
            ("a weight of one", ALONE, {}, 5, {}, "largest-weight: a client here would weigh 6 equal shares of the 6"),
            ("most are invented", {}, {}, 2, {}, "peers: no listed node vouches for 3 of 6 clients"),
            ("few that count", {"privacy": ALL_STAY}, {}, 1, {}, "least-cohort: 2 of 6 clients count"),
            ("a large update", {}, {"bound": 1e-9}, 5, {}, "its update changes a parameter by"),
            ("a false signature", {}, SIX, 5, {(KeysForm.kind, 41): forged}, "least-cohort: 5 of 6 clients count"),
            ("who stays to the end", {}, SIX, 5, {(HideForm.kind, 42): None}, "least-cohort: 5 of 5 clients count"),
        ]
    ),
)
def test_no_sum_is_opened_for_a_server_that_weighs_one_alone_or_invents_peers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
    sections: Any,
    terms: Any,
    listed: int,
    faults: dict[tuple[str, int], Change | None],
    said: str,
) -> None:
    """`power(DS)^900` gives one client all weight; the keys of nodes that a server invents are on nobody's list."""
    monkeypatch.setattr("steelyard.federate.server_app.held_to", lambda *_: {})
    grid, config = owned(tmp_path, changed(DOCUMENT, **sections), **terms)
    for number in grid.nodes:
        for file in sorted((tmp_path / f"peers-{number}").iterdir())[listed:]:
            file.unlink()
    spoil(grid, faults)
    with pytest.raises(UserError, match=f"{said.partition(':')[0]}|0 of 6 clients helped"):
        federate(grid, config, "9")  # type: ignore[arg-type]
    assert [line for line in messages if f"not answered: {said}" in line or f"withdraws: {said}" in line]
    assert not any("helps to open" in line for line in messages)


def other_weights(form: dict[str, Any]) -> None:
    form["weights"][:2] = form["weights"][1::-1]


def other_training(form: dict[str, Any]) -> None:
    """Hardly any: where all others have updates of nothing, a sum is the update of one."""
    form["experiment"] = json.dumps(changed(json.loads(form["experiment"]), training={"learning_rate": 1e-9}))


def tell_otherwise(grid: FakeGrid, number: int, kind: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Let a server change what it asks of one node, in messages of this kind."""
    honest = grid.nodes[number]

    def asked(message: Message) -> Any:
        if message.metadata.message_type == kind:
            form = json.loads(str(wire.split(message.content)[0]))
            change(form)
            message.content["form"] = ConfigRecord({"json": json.dumps(form)})
        return honest(message)

    grid.nodes[number] = asked


def half(form: dict[str, Any]) -> None:
    """More than half of a cohort open a sum, it says with the keys; with the task, that all of it must stay."""
    aggregation = {"kind": "secure", "threshold": 0.51}
    form["experiment"] = json.dumps(changed(json.loads(form["experiment"]), privacy={"aggregation": aggregation}))


def test_a_node_counts_strangers_by_the_threshold_under_which_it_shared(tmp_path: Path, messages: list[str]) -> None:
    grid, config = owned(tmp_path, changed(DOCUMENT, privacy=ALL_STAY))
    for file in sorted((tmp_path / "peers-40").iterdir())[2:]:
        file.unlink()
    tell_otherwise(grid, 40, KeysForm.kind, half)
    with pytest.raises(UserError):
        federate(grid, config, "9")  # type: ignore[arg-type]
    assert any("not answered: peers: no listed node vouches for 3 of 6 clients" in line for line in messages)


@pytest.mark.parametrize(("kind", "change"), [(HideForm.kind, other_weights), (TRAIN, other_training)])
def test_a_server_that_tells_nodes_unequal_things_learns_noise(
    tmp_path: Path, kind: str, change: Callable[[dict[str, Any]], None]
) -> None:
    """The masks that node 42 shares with the others come from other keys then, and do not cancel."""
    grid, config = owned(tmp_path, DOCUMENT)
    tell_otherwise(grid, 42, kind, change)
    with pytest.raises(Exploded, match="moves a parameter by"):
        federate(grid, config, "9")  # type: ignore[arg-type]


NAMES = ("a", "b", "c", "d")
START = torch.tensor([1.0, -2.0, 0.5])
STEPS = torch.tensor([[1.0, 0.0, 0.25], [0.0, 2.0, 0.0], [-1.0, 1.0, 0.0], [0.5, 0.5, 4.0]])
SETTINGS = AggregationSettings(bound=4.0)


class Node:
    """One node with four clients, which are the whole cohort; `said` and `arrays` are its last answer."""

    def __init__(self, state: RecordDict | None = None, steps: torch.Tensor = STEPS) -> None:
        self.state = RecordDict() if state is None else state
        self.steps = steps
        self.round = HiddenRound(self.state, "f", SETTINGS)
        self.said, self.arrays = AnswerForm(federation="", round=0, clients=[], failures=[]), {}

    def fields(self, attempt: str, **more: Any) -> Fields:
        return {"run": "r", "federation": "f", "seed": 0, "round": 1, "attempt": attempt, "clients": list(NAMES),
                "seconds": 9.0, **more}  # fmt: skip

    def _hear(self, content: RecordDict) -> None:
        text, found = wire.split(content)
        self.said = AnswerForm.read(text)
        self.arrays = {name: array.numpy() for name, array in found.items()}

    def held(self) -> dict[str, SecureClient]:
        return self.round._clients(self.state["hidden/f"]["context"])  # type: ignore[index, arg-type]

    def keys(self, attempt: str, clients: tuple[str, ...] = NAMES, **more: Any) -> np.ndarray:
        self._hear(self.round.keys(KeysForm(**self.fields(attempt, clients=list(clients)) | more)))
        return self.arrays["keys"]

    def ask_shares(self, attempt: str, cohort: tuple[str, ...], keys: np.ndarray) -> None:
        asked = [name for name in cohort if name in NAMES]
        form = ShareForm(**self.fields(attempt, clients=asked), cohort=list(cohort))
        asked, found = ShareForm.receive(wire.content(form, {"keys": keys}))
        self._hear(self.round.share(asked, *found))

    def share(self, attempt: str, cohort: tuple[str, ...]) -> np.ndarray:
        """Begin another try with some of the clients, and return their key shares."""
        self.ask_shares(attempt, cohort, self.keys(attempt, cohort, again=True))
        return self.arrays["key_shares"]

    def train(self, attempt: str, keys: np.ndarray) -> Updates:
        task = Task("f", 0, 1, NAMES, START)
        nothing = np.zeros(4)
        updates = Updates("f", 1, NAMES, np.ones(4, np.int64), {}, nothing, DenseModels(START + self.steps))
        form = TaskForm(**self.fields(attempt), loss=LossState(""), algorithm={}, cohort=list(NAMES))
        return self.round.trained(form, keys, task, updates)

    def hide(self, attempt: str, shares: np.ndarray, weights: list[float], members: tuple[str, ...] = NAMES) -> None:
        mine = [NAMES.index(name) for name in members]
        received = shares[mine][:, mine].swapaxes(0, 1)  # from sender, receiver to receiver, sender
        form = HideForm(**self.fields(attempt, clients=list(members)), members=list(members), weights=weights)
        asked, found = HideForm.receive(wire.content(form, {"key_shares": received}))
        self._hear(self.round.hide(asked, *found))

    def open(self, attempt: str, survivors: tuple[str, ...] = NAMES) -> None:
        form = OpenForm(**self.fields(attempt, clients=list(survivors)), survivors=list(survivors))
        self._hear(self.round.open(form))

    def play(self, attempt: str, weights: list[float]) -> np.ndarray:
        """Do all but the opening, and return the hidden sum."""
        payload: Any = self.train(attempt, self.keys(attempt)).payload
        self.hide(attempt, payload.shares, weights)
        return self.arrays["words"]


def test_models_and_keys_are_gone_when_they_are_no_longer_needed():
    node = Node()
    node.play("one", [0.25] * 4)
    # Until the sum is opened the round may be tried again.
    assert sorted(node.state) == ["hidden/f", "hidden/f/models", "hidden/f/trained"]
    node.open("one")
    assert sorted(node.state) == ["hidden/f/opened"]


def test_a_round_is_opened_again_only_for_the_same_sum():
    """A run that was killed repeats its round: the same clients with the same weights, or nothing."""
    node = Node()
    node.play("one", [0.25] * 4)
    node.open("one")
    node.play("two", [0.25] * 4)
    node.open("two")
    node.play("three", [0.25] * 4)
    assert_taken_back(lambda: node.open("three", ("a", "b", "c")), "opened before")
    node.play("four", [0.2, 0.3, 0.25, 0.25])
    assert_taken_back(lambda: node.open("four"), "opened before")


@pytest.mark.parametrize("weighing", [{}, {"criteria": ["DS"], "score": "power", "power": 2, "priority": None}])
def test_a_server_that_ends_workers_gets_no_second_sum_of_a_round(tmp_path: Path, weighing: Fields) -> None:
    """A task with no time for it ends the worker, with all that it holds.

    The same run then asks for the sum of others, or under other weights, by a rule of another name.
    """
    grid, config = grid_of(DOCUMENT, 6, memory=tmp_path / "memory", out=str(tmp_path / "one"))
    federate(grid, config, "9")  # type: ignore[arg-type]
    for node in grid.nodes.values():
        node.context.state.clear()  # type: ignore[attr-defined]
    if weighing:
        config["experiment"] = experiment_text(build(changed(DOCUMENT, weighing=weighing)))
    else:
        spoil(grid, {(TRAIN, 42): None})
    with pytest.raises(Unopened, match=r"0 of \d clients helped to open the sum"):
        federate(grid, {**config, "out": str(tmp_path / "two")}, "9")  # type: ignore[arg-type]


def test_a_round_is_tried_again_with_what_was_trained_and_fresh_keys():
    """d's key shares could not be read: a, b and c hide the same updates again, and their sum is exact."""
    node, weights = Node(), [0.1, 0.2, 0.3, 0.4]
    first, old = node.play("one", weights), node.held()
    shares = node.share("two", ("a", "b", "c"))
    fresh = node.held()
    assert all(fresh[name].keys().mask != old[name].keys().mask for name in "abc")
    node.hide("two", shares, weights[:3], ("a", "b", "c"))
    encoding = FixedPoint.of(32, 4.0, 3)
    plain = encoding.encode(STEPS[:3].double().numpy() * np.array(weights[:3])[:, None]).sum(0, dtype=np.uint32)
    own = [self_key(client._seed, client.context) for client in node.held().values()]
    words = node.arrays["words"]
    assert (words - sum(stream(key, 3, words.dtype) for key in own)).tolist() == plain.tolist()
    assert (words != first).all()
    # What was hidden in the first try is never opened: its keys are gone, also for the client that was left out.
    assert_taken_back(lambda: node.open("one"), "no keys for it")
    node.open("two", ("a", "b", "c"))
    assert node.said.clients == ["a", "b", "c"]
    assert node.arrays["shares"].shape == (3, 3, 33)


def test_nothing_is_tried_again_after_a_sum_was_opened_or_in_another_round():
    node = Node()
    assert_taken_back(lambda: node.keys("one", again=True), "nothing was trained for this round")
    node.play("one", [0.25] * 4)
    assert_taken_back(lambda: node.keys("two", again=True, round=2), "nothing was trained for this round")
    node.open("one")
    assert_taken_back(lambda: node.keys("two", again=True), "nothing was trained for this round")


def test_another_try_has_nobody_new_and_not_fewer_than_had_to_stay():
    node = Node()
    node.play("one", [0.25] * 4)
    keys = node.keys("two", again=True)
    stranger = SecureClient("z", b"", SETTINGS).keys().write()
    shown = np.concatenate([keys, np.frombuffer(stranger, np.uint8)[None]])
    assert_taken_back(lambda: node.ask_shares("two", (*NAMES, "z"), shown), "z were not in the first try")
    node.ask_shares("two", ("a", "b"), keys[:2])
    assert {failure.reason for failure in node.said.failures} == {"2 clients in the round; allowed: at least 3"}


def test_a_client_with_too_much_weight_or_too_large_an_update_withdraws_alone():
    node = Node(steps=STEPS * torch.tensor([[1.0], [1.0], [1.0], [2.0]]))
    updates = node.train("one", node.keys("one"))
    assert updates.clients == ("a", "b", "c")
    assert [failure.client for failure in updates.failures] == ["d"]
    assert "by 8; allowed: at most 4 (privacy.aggregation.bound)" in updates.failures[0].reason
    payload: Any = updates.payload
    whole = np.concatenate([payload.shares, np.zeros((1, 4, 82), np.uint8)])
    node.hide("one", whole, [0.51, 0.25, 0.24], ("a", "b", "c"))
    assert node.said.clients == ["b", "c"]
    assert node.said.failures[0].reason == "its weight would be 0.51; allowed: 0 to 0.5"


def test_messages_of_another_attempt_or_before_their_time_are_refused():
    node = Node()
    keys = node.keys("one")
    assert_taken_back(lambda: node.train("two", keys), "no keys for it")
    assert_taken_back(lambda: node.hide("one", np.zeros((4, 4, 82), np.uint8), [0.25] * 4), "nothing was trained")
    assert_taken_back(lambda: Node().open("one"), "no keys for it")
