"""What a node keeps and refuses in a round with hidden updates, message by message, without a network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from steelyard.clients.flower import tasks, wire
from steelyard.clients.flower.forms import LossForm, Refused, TaskForm
from steelyard.clients.flower.hidden_forms import AnswerForm, HideForm, KeysForm, OpenForm, ShareForm
from steelyard.federate.hidden_node import HiddenRound, read_hide, read_share
from steelyard.messages import Task, Updates
from steelyard.privacy.fixed_point import FixedPoint
from steelyard.privacy.masks import stream
from steelyard.privacy.secure_client import SecureClient, self_key
from steelyard.privacy.settings import AggregationSettings
from steelyard.update_payloads import DenseModels

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

    def fields(self, attempt: str, **more: Any) -> dict[str, Any]:
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
        self._hear(self.round.share(*read_share(wire.content(form, {"keys": keys}))))

    def share(self, attempt: str, cohort: tuple[str, ...]) -> np.ndarray:
        """Begin another try with some of the clients, and return their key shares."""
        self.ask_shares(attempt, cohort, self.keys(attempt, cohort, again=True))
        return self.arrays["key_shares"]

    def train(self, attempt: str, keys: np.ndarray) -> Updates:
        task = Task("f", 0, 1, NAMES, START)
        nothing = np.zeros(4)
        updates = Updates("f", 1, NAMES, np.ones(4, np.int64), {}, nothing, DenseModels(START + self.steps))
        header = wire.Header("r", "", 9.0, NAMES, keys, attempt)
        return self.round.trained(header, task, updates)

    def hide(self, attempt: str, shares: np.ndarray, weights: list[float], members: tuple[str, ...] = NAMES) -> None:
        mine = [NAMES.index(name) for name in members]
        received = shares[mine][:, mine].swapaxes(0, 1)  # from sender, receiver to receiver, sender
        form = HideForm(**self.fields(attempt, clients=list(members)), members=list(members), weights=weights)
        self._hear(self.round.hide(*read_hide(wire.content(form, {"key_shares": received}))))

    def open(self, attempt: str, survivors: tuple[str, ...] = NAMES) -> None:
        form = OpenForm(**self.fields(attempt, clients=list(survivors)), survivors=list(survivors))
        self._hear(self.round.open(form))

    def play(self, attempt: str, weights: list[float]) -> np.ndarray:
        """Do all but the opening, and return the hidden sum."""
        payload: Any = self.train(attempt, self.keys(attempt)).payload
        self.hide(attempt, payload.shares, weights)
        return self.arrays["words"]


def test_the_pair_masks_of_a_whole_cohort_on_one_node_cancel_and_its_own_remain():
    node, weights = Node(), [0.1, 0.2, 0.3, 0.4]
    words = node.play("one", weights)
    encoding = FixedPoint.of(32, 4.0, 4)
    plain = encoding.encode(STEPS.double().numpy() * np.array(weights)[:, None]).sum(0, dtype=np.uint32)
    own = [self_key(client._seed, client.context) for client in node.held().values()]
    assert (words - sum(stream(key, 3, words.dtype) for key in own)).tolist() == plain.tolist()
    assert (words != plain).all()
    node.open("one")
    assert node.said.clients == list(NAMES)
    assert node.arrays["shares"].shape == (4, 4, 33)


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
    with pytest.raises(Refused, match="opened before"):
        node.open("three", ("a", "b", "c"))
    node.play("four", [0.2, 0.3, 0.25, 0.25])
    with pytest.raises(Refused, match="opened before"):
        node.open("four")


def test_a_round_is_tried_again_with_what_was_trained_and_fresh_keys():
    """d's key shares could not be read: a, b and c hide the same updates again, and their sum is exact."""
    node, weights = Node(), [0.1, 0.2, 0.3, 0.4]
    first = node.play("one", weights)
    old = {name: client.keys() for name, client in node.held().items()}
    shares = node.share("two", ("a", "b", "c"))
    fresh = node.held()
    assert all(fresh[name].keys().mask != old[name].mask for name in "abc")
    assert all(client.least == 3 for client in fresh.values())
    node.hide("two", shares, weights[:3], ("a", "b", "c"))
    encoding = FixedPoint.of(32, 4.0, 3)
    plain = encoding.encode(STEPS[:3].double().numpy() * np.array(weights[:3])[:, None]).sum(0, dtype=np.uint32)
    own = [self_key(client._seed, client.context) for client in node.held().values()]
    words = node.arrays["words"]
    assert (words - sum(stream(key, 3, words.dtype) for key in own)).tolist() == plain.tolist()
    assert (words != first).all()
    # What was hidden in the first try is never opened: its keys are gone, also for the client that was left out.
    with pytest.raises(Refused, match="no keys for it"):
        node.open("one")
    node.open("two", ("a", "b", "c"))
    assert node.said.clients == ["a", "b", "c"]
    assert sorted(node.state) == ["hidden/f/opened"]


def test_nothing_is_tried_again_after_a_sum_was_opened_or_in_another_round():
    node = Node()
    with pytest.raises(Refused, match="nothing was trained for this round"):
        node.keys("one", again=True)
    node.play("one", [0.25] * 4)
    with pytest.raises(Refused, match="nothing was trained for this round"):
        node.keys("two", again=True, round=2)
    node.open("one")
    with pytest.raises(Refused, match="nothing was trained for this round"):
        node.keys("two", again=True)


def test_another_try_has_nobody_new_and_not_fewer_than_had_to_stay():
    node = Node()
    node.play("one", [0.25] * 4)
    keys = node.keys("two", again=True)
    stranger = SecureClient("z", b"", SETTINGS).keys().write()
    with pytest.raises(Refused, match="z were not in the first try"):
        node.ask_shares("two", (*NAMES, "z"), np.concatenate([keys, np.frombuffer(stranger, np.uint8)[None]]))
    node.ask_shares("two", ("a", "b"), keys[:2])
    assert {failure.reason for failure in node.said.failures} == {"2 clients in the round; allowed: at least 3"}


def test_a_client_says_whose_key_shares_it_cannot_read():
    node = Node()
    payload: Any = node.train("one", node.keys("one")).payload
    spoiled = payload.shares.copy()
    spoiled[3] = 0  # from d to all
    spoiled[1, 0] = 0  # from b to a
    node.hide("one", spoiled, [0.25] * 4)
    assert node.said.clients == ["d"]
    assert node.said.unreadable == {"a": ["b", "d"], "b": ["d"], "c": ["d"]}


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
    with pytest.raises(Refused, match="no keys for it"):
        node.train("two", keys)
    with pytest.raises(Refused, match="nothing was trained"):
        node.hide("one", np.zeros((4, 4, 82), np.uint8), [0.25] * 4)
    with pytest.raises(Refused, match="no keys for it"):
        Node().open("one")


def test_keys_that_are_not_the_node_s_own_make_its_clients_withdraw():
    node = Node()
    keys = node.keys("one").copy()
    keys[2, 0] ^= 1
    updates = node.train("one", keys)
    assert {failure.client: failure.reason for failure in updates.failures}["c"] == (
        "its own keys came back changed, or not at all"
    )


def test_a_task_says_whose_keys_it_brings():
    loss = LossForm(name="auto")
    form = TaskForm(
        run="r",
        federation="f",
        seed=0,
        round=1,
        clients=["a"],
        loss=loss,
        algorithm={"name": "fedavg"},
        seconds=1.0,
        cohort=["a", "b"],
    )
    content = wire.content(form, {"parameters": np.zeros(2, np.float32)})
    with pytest.raises(Refused, match=r"arrays: got parameters; allowed: exactly keys, parameters"):
        tasks.read_task(content)
