"""Who lives where: names bound to keys, what the data look like by majority, absurd introductions refused."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error
from tests.clients.flower.flower_fakes import FakeGrid, Node, failing, honest, reasons, task, until

from steelyard.clients.flower import roster, wire
from steelyard.clients.flower.forms import INTRODUCE, TRAIN, IntroductionForm
from steelyard.clients.flower.grid import FlowerClients
from steelyard.clients.flower.register import Entry, Register
from steelyard.clients.flower.settings import FederateSettings
from steelyard.errors import UserError

JUDGES: dict[str, Any] = {"DS": lambda value: None}


def _about(features: int, *clients: str) -> Node:
    """An honest node whose samples have so many features."""
    form = IntroductionForm(version="test", clients=list(clients), about={"features": [features], "classes": 2})
    otherwise = honest(*clients)
    return lambda m: wire.content(form, {}) if m.metadata.message_type == INTRODUCE else otherwise(m)


def test_what_the_data_look_like_is_what_most_nodes_say():
    # The liar has the lowest id and introduces itself first.
    grid = FakeGrid({1: _about(7, "c1"), 2: _about(3, "c2"), 3: _about(3, "c3")})
    clients = FlowerClients(grid, JUDGES, FederateSettings(nodes=2, timeout=5.0))  # type: ignore[arg-type]
    until(lambda: len(clients.roster._claims) == 3, clients)
    clients.wait()
    assert clients.roster.about == {"features": [3], "classes": 2}
    assert clients.names(0) == ["c2", "c3"]
    assert any("node 1 was not admitted: its data is of another kind" in note for note in clients.roster.notes)


def test_what_the_experiment_says_of_the_data_no_majority_outvotes():
    grid = FakeGrid({1: _about(7, "c1"), 2: _about(7, "c2"), 3: _about(3, "c3")})
    known = {"features": [3]}
    settings = FederateSettings(nodes=1, timeout=5.0)
    clients = FlowerClients(grid, JUDGES, settings, known=known)  # type: ignore[arg-type]
    until(lambda: len(clients.roster.notes) == 2, clients)
    clients.wait()
    assert clients.roster.about == {"features": [3], "classes": 2}
    assert clients.names(0) == ["c3"]
    told = "node 1 was not admitted: its data has features = [7]; allowed: [3], as the experiment says"
    assert told in clients.roster.notes


@pytest.mark.parametrize("features", [10**9, -1])
def test_absurd_data_are_refused_with_their_node(features: int):
    grid = FakeGrid({1: _about(features, "c1"), 2: _about(3, "c2")})
    clients = FlowerClients(grid, JUDGES, FederateSettings(nodes=1, timeout=5.0))  # type: ignore[arg-type]
    clients.wait()
    until(lambda: any("about features: no data have such sizes" in note for note in clients.roster.notes), clients)
    assert clients.names(0) == ["c2"]


def test_a_hundred_thousand_names_from_one_node_are_refused():
    grid = FakeGrid({1: honest(*(f"x{i}" for i in range(10_001))), 2: honest("c2")})
    clients = FlowerClients(grid, JUDGES, FederateSettings(nodes=1, timeout=20.0))  # type: ignore[arg-type]
    clients.wait()
    until(lambda: any("10001 names; allowed: 1 to 10000" in note for note in clients.roster.notes), clients)
    assert clients.names(0) == ["c2"]


class TestKeys:
    """Names are bound to keys."""

    def made(self, grid: FakeGrid, *entries: Entry) -> FlowerClients:
        register = Register({entry.key: entry for entry in entries})
        settings = FederateSettings(nodes=1, timeout=5.0, start_timeout=5.0)
        return FlowerClients(grid, JUDGES, settings, register=lambda: register)  # type: ignore[arg-type]

    def keyed(self, nodes: dict[int, Any]) -> tuple[FakeGrid, dict[int, str]]:
        grid = FakeGrid(nodes)
        pairs = {node: ec.generate_private_key(ec.SECP384R1()).public_key() for node in nodes}
        pems = {
            node: key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
            for node, key in pairs.items()
        }
        lines = {
            node: key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
            for node, key in pairs.items()
        }
        grid.get_nodes = lambda: [  # type: ignore[attr-defined]
            SimpleNamespace(node_id=node, public_key=pems[node]) for node in grid.get_node_ids()
        ]
        return grid, lines

    def test_a_name_of_the_register_belongs_to_its_key_also_while_that_is_away(self):
        grid, keys = self.keyed({1: honest("c1"), 2: honest("c1")})
        clients = self.made(grid, Entry("mallory", keys[1], most=5), Entry("ada", keys[2], ("c1",)))
        clients.wait()
        until(lambda: any("client c1 belongs to the key of ada" in note for note in clients.roster.notes), clients)
        assert clients.roster.holder("c1") == 2
        clients.roster.heard(2, answered=False)
        clients.roster.refresh()
        assert clients.roster.holder("c1") == 2  # Silence is no reason to give it away.

    def test_a_name_belongs_to_the_key_that_first_had_it_also_after_a_resume(self):
        grid, keys = self.keyed({1: honest("c1"), 2: honest("c1", "c2")})
        entries = (Entry("ada", keys[1]), Entry("mallory", keys[2], most=5))
        first = self.made(grid, *entries)
        del grid.nodes[2]
        first.wait()
        grid, keys = self.keyed({1: honest("c1"), 2: honest("c1", "c2")})
        second = self.made(grid, Entry("mallory", keys[2], most=5))
        second.restore(first.snapshot())
        with pytest.raises(UserError, match="0 admitted"):
            second.wait()
        assert any("client c1 belongs to the key of another node" in note for note in second.roster.notes)

    def test_a_node_holds_no_more_than_its_entry_says_and_none_without_one(self):
        grid, keys = self.keyed({1: honest("c1", "c2"), 2: honest("c3"), 3: honest("c4")})
        clients = self.made(grid, Entry("ada", keys[1], most=1), Entry("bob", keys[2]))
        clients.wait()
        until(lambda: len(clients.roster.notes) == 2, clients)
        assert clients.names(0) == ["c3"]
        notes = " | ".join(clients.roster.notes)
        assert "2 names; its entry allows 1" in notes
        assert "its key is not in the register" in notes

    def test_a_key_that_is_registered_during_a_run_takes_part_and_notes_name_nodes_by_the_register(self):
        grid, keys = self.keyed({1: honest("c1"), 2: honest("c2"), 3: honest("c3", "c4")})
        entries = [Entry("ada", keys[1]), Entry("bob", keys[3])]
        settings = FederateSettings(nodes=1, timeout=5.0, start_timeout=5.0)
        made = FlowerClients(
            grid,  # type: ignore[arg-type]
            JUDGES,
            settings,
            register=lambda: Register({entry.key: entry for entry in entries}),
        )
        made.wait()
        until(lambda: len(made.roster.notes) == 2, made)
        assert any(note.startswith("node bob was not admitted: clients: 2 names") for note in made.roster.notes)
        assert made.names(0) == ["c1"]
        entries.append(Entry("eve", keys[2]))
        until(lambda: made.names(0) == ["c1", "c2"], made)
        assert made.roster.holder("c2") == 2

    def test_whoever_waits_hears_which_node_is_missing_and_why(
        self, messages: list[str], monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(roster, "_QUIET_SECONDS", 0.5)
        refusing = failing("c2", kind=INTRODUCE, answer=Error(0, "<class 'NotAllowed'>:<'data.labels: got y'>"))
        grid, keys = self.keyed({1: honest("c1"), 2: refusing, 3: lambda message: None, 4: honest("c4")})
        names = {1: "ada", 2: "bob", 3: "eve", 4: "far"}
        gone, entries = 4, [Entry(name, keys[node]) for node, name in names.items()]
        del grid.nodes[gone]
        settings = FederateSettings(nodes=2, timeout=5.0, start_timeout=2.0)
        register = Register({entry.key: entry for entry in entries})
        made = FlowerClients(grid, JUDGES, settings, register=lambda: register)  # type: ignore[arg-type]
        with pytest.raises(UserError) as caught:
            made.wait()
        missing = (
            "bob was not admitted: failed with code 0: NotAllowed: data.labels: got y; "
            "eve is connected and has not said who it is; far is not connected"
        )
        assert str(caught.value) == (
            "federate.nodes: 2 nodes are to take part, 1 admitted within federate.start_timeout = 2 s; " + missing
        )
        assert "node bob was not admitted: failed with code 0: NotAllowed: data.labels: got y" in messages
        assert messages[-1] == f"still waiting: {missing}"


class TestAllGone:
    """Where no node at all is there any more, it is the server that was away: it waits, as before the first round."""

    def made(self, grid: FakeGrid, seconds: float) -> FlowerClients:
        settings = FederateSettings(nodes=2, timeout=2.0, start_timeout=seconds)
        clients = FlowerClients(grid, JUDGES, settings)  # type: ignore[arg-type]
        clients.wait()
        return clients

    def test_they_are_waited_for(self):
        grid = FakeGrid({1: honest("c1"), 2: honest("c2")})
        clients = self.made(grid, 20.0)
        away = dict(grid.nodes)
        grid.nodes.clear()
        threading.Timer(0.5, lambda: grid.nodes.update(away)).start()
        clients.meet()
        assert clients.roster.nodes == 2

    def test_who_does_not_come_back_is_waited_for_once_and_one_that_stays_is_enough(self):
        grid = FakeGrid({1: honest("c1"), 2: honest("c2")})
        clients = self.made(grid, 1.0)
        del grid.nodes[2]
        begun = time.monotonic()
        clients.meet()
        assert time.monotonic() - begun < 0.9
        grid.nodes.clear()
        clients.meet()
        assert (clients.roster.nodes, time.monotonic() - begun > 1.0) == (0, True)


class TestSilence:
    """A node that is silent costs one timeout, not one per round, and comes back when it answers."""

    def made(self, grid: FakeGrid) -> FlowerClients:
        clients = FlowerClients(grid, JUDGES, FederateSettings(nodes=2, timeout=1.0))  # type: ignore[arg-type]
        clients.wait()
        return clients

    def test_it_is_asked_less_and_less_often(self):
        grid = FakeGrid({1: failing("c1", kind=TRAIN), 2: honest("c2")})  # It says who it is, and never works.
        clients = self.made(grid)
        grid.kinds.clear()
        asked: list[int] = []
        for round in range(1, 10):
            before = grid.kinds.count(TRAIN)
            (updates,) = clients.train([task("c1", "c2", round=round)])
            assert updates.clients == ("c2",)
            if grid.kinds.count(TRAIN) - before == 2:
                asked.append(round)
            else:
                assert reasons(updates.failures) == {"c1": "its node was silent and has not answered since"}
        assert asked == [1, 2, 4, 8]

    def test_it_is_back_in_the_round_after_it_answers(self):
        grid = FakeGrid({1: honest("c1"), 2: honest("c2")})
        clients = self.made(grid)
        grid.nodes[1] = lambda message: None  # Stopped: neither works nor says anything.
        assert reasons(clients.train([task("c1", "c2", round=1)])[0].failures) == {"c1": "no answer within 1 s"}
        begun = time.monotonic()
        (updates,) = clients.train([task("c1", "c2", round=2)])
        assert updates.clients == ("c2",)
        assert time.monotonic() - begun < 0.95  # It is not waited for again.
        grid.nodes[1] = honest("c1")
        deadline = time.monotonic() + 30
        while clients.train([task("c1", "c2", round=3)])[0].clients != ("c1", "c2"):
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def test_where_all_are_silent_they_are_asked_all_the_same(self):
        grid = FakeGrid({1: failing("c1", kind=TRAIN)})
        clients = FlowerClients(grid, JUDGES, FederateSettings(timeout=0.5))  # type: ignore[arg-type]
        clients.wait()
        for round in (1, 2):
            (updates,) = clients.train([task("c1", round=round)])
            assert reasons(updates.failures) == {"c1": "no answer within 0.5 s"}
