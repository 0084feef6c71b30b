"""The configuration of a node: what is refused, and which clients live where."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.clients.node import NodeConfig
from steelyard.errors import UserError


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({}, "node config: got no clients; allowed: client="),
        ({"client": "a", "partition-id": 0, "num-partitions": 2}, "node config: got both names and a partition"),
        ({"client": "a", "clients": "b"}, "node config: got both client and clients"),
        ({"partition-id": 2, "num-partitions": 2}, "node config partition-id: got 2 of num-partitions 2"),
        ({"partition-id": 0}, "node config partition-id: got 0 of num-partitions None"),
        ({"partition-id": "0", "num-partitions": 2}, "node config partition-id: got '0'"),
        ({"klient": "a"}, "node config klient: unknown (did you mean 'client'?)"),
        ({"client": "a", "data": {"source": "npz"}}, "node config data.path: missing; allowed: the path"),
        ({"client": "a", "data": {"path": 3}}, "node config data.path: got 3; allowed: a path in quotes"),
        ({"client": "a", "data": "x", "partition": 3}, "node config partition: got 3; allowed: a table [partition]"),
        ({"client": "a", "data": "x", "min-rows": 0}, "node config min-rows: got 0; allowed: a whole number from 1"),
        ({"client": "a", "data": "x", "min-rows": True}, "node config min-rows: got True; allowed: a whole number"),
        ({"client": "a", "min-rows": 5}, "node config min-rows: given without data"),
        ({"client": "a", "data": "x", "allow": "*", "min-rows": 5}, 'node config min-rows: given with allow="*"'),
        ({"client": "a", "data": 3}, "node config data: got 3; allowed: a path in quotes"),
        ({"client": "a", "epsilon": 4}, 'node config epsilon: given without require="local"'),
        (
            {"client": "a", "require": "local", "epsilon": "4"},
            "node config epsilon: got '4'; allowed: a number above 0",
        ),
        ({"client": "a", "require": "local", "epsilon": 0}, "node config epsilon: got 0"),
        ({"client": "a", "require": "local", "epsilon": 4}, "node config epsilon: given without state, the folder of"),
        ({"client": "a", "require": "locl"}, "node config require: got 'locl' (did you mean 'local'?)"),
        ({"client": "a", "tests": "false"}, "node config tests: got 'false'; allowed: true, or false"),
        ({"client": "a", "tests": 0}, "node config tests: got 0; allowed: true, or false"),
        ({"client": "a", "test": False}, "node config test: unknown (did you mean 'tests'?)"),
        ({"client": "a", "device-battery": "full"}, "node config device-battery: got 'full'; allowed: a number"),
    ],
)
def test_a_wrong_node_config_is_named(config: dict[str, Any], line: str):
    with pytest.raises(UserError) as caught:
        NodeConfig.read(config)
    assert str(caught.value).startswith(line)


def test_every_client_lives_on_exactly_one_node():
    names = [f"c{i:02d}" for i in range(11)]
    homes = [NodeConfig.read({"partition-id": i, "num-partitions": 4}).choose(names) for i in range(4)]
    assert sorted(name for home in homes for name in home) == names
    assert {len(home) for home in homes} == {2, 3}
    assert NodeConfig.read({"client": 7}).names == ("7",)
    assert NodeConfig.read({"clients": "b, a"}).choose(["a", "b", "c"]) == ("a", "b")
    with pytest.raises(UserError, match=r"no client 'c1'.*did you mean"):
        NodeConfig.read({"client": "c1"}).choose(names)


def test_clients_are_tested_unless_their_owner_says_no():
    assert NodeConfig.read({"client": "a"}).tests
    assert NodeConfig.read({"client": "a", "tests": True}).tests
    assert not NodeConfig.read({"client": "a", "tests": False}).tests


def test_facts_about_device_and_user_are_kept_apart():
    config = NodeConfig.read({"client": "a", "device-battery": 0.25, "user-trust": 1})
    assert config.facts(["a"]) == {"a": {"device": {"battery": 0.25}, "user": {"trust": 1.0}}}
    assert not config.own_data
