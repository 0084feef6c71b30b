"""Who lives where: names bound to keys, what the data look like by majority, silence, absurd introductions refused."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error
from tests.clients.flower.flower_fakes import FakeGrid, Node, crowd, failing, honest, reasons, task, until

from steelyard.base.errors import UserError
from steelyard.clients.flower import wire
from steelyard.clients.flower.grid import FlowerClients
from steelyard.clients.flower.register import Entry, Register
from steelyard.clients.flower.wire import INTRODUCE, TRAIN, IntroductionForm


def about(features: int, *clients: str) -> Node:
    """An honest node whose samples have so many features."""
    form = IntroductionForm(version="test", clients=list(clients), about={"features": [features], "classes": 2})
    otherwise = honest(*clients)
    return lambda m: wire.content(form, {}) if m.metadata.message_type == INTRODUCE else otherwise(m)


def until_noted(clients: FlowerClients, *notes: str) -> None:
    until(lambda: all(any(note in line for line in clients.roster.notes) for note in notes), clients)


class TestData:
    """What the data look like."""

    def test_is_what_most_nodes_say(self) -> None:
        # The liar has the lowest id and introduces itself first.
        clients = crowd({1: about(7, "c1"), 2: about(3, "c2"), 3: about(3, "c3")}, nodes=2)
        until_noted(clients, "node 1 was not admitted: its data is of another kind")
        assert clients.roster.about == {"features": [3], "classes": 2}
        assert clients.names(0) == ["c2", "c3"]

    def test_is_what_the_experiment_says_whatever_the_majority(self) -> None:
        nodes = {1: about(7, "c1"), 2: about(7, "c2"), 3: about(3, "c3")}
        clients = crowd(nodes, nodes=1, known={"features": [3]})
        until_noted(clients, "node 2 was not admitted: its data has features = [7]; allowed: [3]")
        assert clients.roster.about == {"features": [3], "classes": 2}
        assert clients.names(0) == ["c3"]

    @pytest.mark.parametrize(
        ("node", "note"),
        [
            (about(10**9, "c1"), "about features: no data have such sizes"),
            (honest(*(f"x{i}" for i in range(10_001))), "10001 names; allowed: 1 to 10000"),
        ],
    )
    def test_absurd_ones_are_refused_with_their_node(self, node: Node, note: str) -> None:
        clients = crowd({1: node, 2: about(3, "c2")}, nodes=1)
        until_noted(clients, note)
        assert clients.names(0) == ["c2"]


def keyed(nodes: dict[int, Any]) -> tuple[FakeGrid, dict[int, str]]:
    """Return a grid that knows a key of each node, and the keys as a register writes them."""
    grid = FakeGrid(nodes)
    keys = {node: ec.generate_private_key(ec.SECP384R1()).public_key() for node in nodes}
    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    grid.get_nodes = lambda: [  # type: ignore[attr-defined]
        SimpleNamespace(node_id=node, public_key=keys[node].public_bytes(*form)) for node in grid.get_node_ids()
    ]
    ssh = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return grid, {node: key.public_bytes(*ssh).decode() for node, key in keys.items()}


def registered(grid: FakeGrid, *entries: Entry, listed: list[Entry] | None = None, **options: Any) -> FlowerClients:
    known = list(entries) if listed is None else listed
    options = {"nodes": 1, "timeout": 5.0, "start_timeout": 5.0, **options}
    return crowd(grid, register=lambda: Register({entry.key: entry for entry in known}), **options)


class TestKeys:
    """Names are bound to keys."""

    def test_a_name_of_the_register_belongs_to_its_key_also_while_that_is_away(self) -> None:
        grid, keys = keyed({1: honest("c1"), 2: honest("c1")})
        clients = registered(grid, Entry("mallory", keys[1], most=5), Entry("ada", keys[2], ("c1",)))
        until_noted(clients, "client c1 belongs to the key of ada")
        assert clients.roster.holder("c1") == 2
        clients.roster.heard(2, answered=False)
        clients.roster.refresh()
        assert clients.roster.holder("c1") == 2  # Silence is no reason to give it away.

    def test_a_name_belongs_to_the_key_that_first_had_it_also_after_a_resume(self) -> None:
        grid, keys = keyed({1: honest("c1")})
        first = registered(grid, Entry("ada", keys[1]))
        grid, keys = keyed({1: honest("c1"), 2: honest("c1", "c2")})
        with pytest.raises(UserError, match=r"0 admitted.*client c1 belongs to the key of another node"):
            registered(grid, Entry("mallory", keys[2], most=5), state=first.snapshot(), start_timeout=1.0)

    def test_a_node_holds_no_more_than_its_entry_says_and_a_key_may_be_registered_during_a_run(self) -> None:
        grid, keys = keyed({1: honest("c1", "c2"), 2: honest("c3"), 3: honest("c4")})
        entries = [Entry("ada", keys[1], most=1), Entry("bob", keys[2])]
        clients = registered(grid, listed=entries)
        until_noted(
            clients, "node ada was not admitted: clients: 2 names; its entry allows 1", "key is not in the register"
        )
        assert clients.names(0) == ["c3"]
        entries.append(Entry("eve", keys[3]))
        until(lambda: clients.names(0) == ["c3", "c4"], clients)
        assert clients.roster.holder("c4") == 3

    def test_whoever_waits_hears_which_node_is_missing_and_why(self) -> None:
        refusing = failing("c2", kind=INTRODUCE, answer=Error(0, "<class 'NotAllowed'>:<'data.labels: got y'>"))
        grid, keys = keyed({1: honest("c1"), 2: refusing, 3: lambda message: None, 4: honest("c4")})
        del grid.nodes[4]
        entries = [Entry(name, keys[node]) for node, name in enumerate(("ada", "bob", "eve", "far"), 1)]
        with pytest.raises(UserError) as caught:
            registered(grid, *entries, nodes=2, start_timeout=2.0)
        assert str(caught.value) == (
            "federate.nodes: 2 nodes are to take part, 1 admitted within federate.start_timeout = 2 s; "
            "bob was not admitted: failed with code 0: NotAllowed: data.labels: got y; "
            "eve is connected and has not said who it is; far is not connected"
        )


class TestClaims:
    """Two nodes that say they hold the same client."""

    def test_a_second_claim_does_not_displace_a_client_that_answers(self) -> None:
        grid = FakeGrid({5: honest("c1")})
        clients = crowd(grid)
        grid.nodes[1] = honest("c1", "c2")
        until(lambda: clients.roster.holder("c2") == 1, clients)
        assert clients.roster.holder("c1") == 5
        assert "client c1 is claimed by node 1, but node 5 holds it" in clients.roster.notes
        assert clients.train([task("c1", "c2")])[0].clients == ("c1", "c2")

    def test_a_silent_node_loses_its_client_to_one_that_claims_it(self) -> None:
        grid = FakeGrid({5: failing("c1")})
        clients = crowd(grid, 2.0)
        clients.train([task("c1")])
        grid.nodes[9] = honest("c1")  # Started again: a new id, while Flower still believes in the old one.
        assert clients.train([task("c1", round=2)])[0].clients == ("c1",)


def test_nodes_that_are_all_gone_are_waited_for() -> None:
    """It is the server that was away: it waits, as before the first round."""
    grid = FakeGrid({1: honest("c1"), 2: honest("c2")})
    clients = crowd(grid, 2.0, start_timeout=20.0)
    away = dict(grid.nodes)
    grid.nodes.clear()
    threading.Timer(0.2, lambda: grid.nodes.update(away)).start()
    clients.meet()
    assert clients.roster.nodes == 2


class TestSilence:
    """A node that is silent costs one timeout, not one per round, and comes back when it answers."""

    def test_it_is_asked_less_and_less_often_and_always_where_all_are_silent(self) -> None:
        grid = FakeGrid({1: failing("c1", kind=TRAIN), 2: honest("c2")})  # It says who it is, and never works.
        clients = crowd(grid, 0.7)
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
        alone = crowd({1: failing("c1", kind=TRAIN)}, 0.3)
        for round in (1, 2):
            assert reasons(alone.train([task("c1", round=round)])[0].failures) == {"c1": "no answer within 0.3 s"}

    def test_it_is_back_in_the_round_after_it_answers(self) -> None:
        grid = FakeGrid({1: honest("c1"), 2: honest("c2")})
        clients = crowd(grid, 1.0)
        grid.nodes[1] = lambda message: None  # Stopped: neither works nor says anything.
        assert reasons(clients.train([task("c1", "c2", round=1)])[0].failures) == {"c1": "no answer within 1 s"}
        begun = time.monotonic()
        assert clients.train([task("c1", "c2", round=2)])[0].clients == ("c2",)
        assert time.monotonic() - begun < 0.95  # It is not waited for again.
        grid.nodes[1] = honest("c1")
        deadline = time.monotonic() + 30
        while clients.train([task("c1", "c2", round=3)])[0].clients != ("c1", "c2"):
            assert time.monotonic() < deadline
