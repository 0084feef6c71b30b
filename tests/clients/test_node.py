"""The configuration of a node: what is refused, and which clients live where."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kit import assert_refused

from steelyard.clients.node import NodeConfig, Terms


def test_every_client_lives_on_exactly_one_node():
    names = [f"c{i:02d}" for i in range(11)]
    homes = [NodeConfig.read({"partition-id": i, "num-partitions": 4}).choose(names) for i in range(4)]
    assert sorted(name for home in homes for name in home) == names
    assert {len(home) for home in homes} == {2, 3}
    assert NodeConfig.read({"client": 7}).names == ("7",)
    assert NodeConfig.read({"clients": "b, a"}).choose(["a", "b", "c"]) == ("a", "b")
    assert_refused(lambda: NodeConfig.read({"client": "c1"}).choose(names), "no client 'c1'", "did you mean")


def test_facts_about_device_and_user_are_kept_apart():
    config = NodeConfig.read({"client": "a", "device-battery": 0.25, "user-trust": 1, "user-country": "IT"})
    assert (config.device, config.user) == ({"battery": 0.25}, {"trust": 1.0, "country=IT": 1.0})
    assert not config.own_data
    assert config.tests
    assert not NodeConfig.read({"client": "a", "tests": False}).tests


OF_TWO = {"partition-id": 0, "num-partitions": 2}
OWN = {"client": "a", "data": "x"}
SUMMED = {"client": "a", "require": "aggregation", "key": "k", "peers": "p"}
SAFE = {"client": "a", "require": "local", "state": "s"}


def test_a_node_that_asks_for_sums_has_limits_of_its_own():
    assert NodeConfig.read({**SUMMED, "bound": 4}).terms == Terms(least_cohort=3, largest_weight=2.0, bound=4.0)
    assert NodeConfig.read({"client": "a"}).terms == Terms()


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        ({}, "node config", "no clients"),
        ({"client": "a", **OF_TWO}, "node config", "both names and a partition"),
        ({**OF_TWO, "partition-id": 2}, "partition-id", 2),
        ({"klient": "a"}, "klient", "'client'"),
        ({"client": "a", "data": {"source": "npz"}}, "data.path", "missing"),
        ({**OWN, "partition": 3}, "partition", 3),
        ({"client": "a", "min-rows": 5}, "min-rows", "without data"),
        ({**OWN, "allow": "*", "min-rows": 5}, "min-rows", 'allow="*"'),
        ({"client": "a", "epsilon": 4}, "epsilon", 'without require="local"'),
        (SAFE, "epsilon", "as in epsilon=8"),
        ({"client": "a", "require": "local", "epsilon": 8}, "epsilon", "without state"),
        ({**SAFE, "epsilon": 0}, "epsilon", 0),
        ({"client": "a", "require": "records", "state": "s"}, "epsilon", 'beside require="records"'),
        ({**SAFE, "require": "local,records", "epsilon": 8}, "require", "one of them"),
        ({"client": "a", "require": "locl"}, "require", "'local'"),
        ({"client": "a", "require": "aggregation", "key": "k"}, "peers", "invent all others"),
        ({"client": "a", "bound": 2}, "bound", 'without require="aggregation"'),
        ({"client": "a", "rounds-per-day": 2}, "rounds-per-day", "without state"),
        ({**SUMMED, "least-cohort": 2}, "least-cohort", 2),
        ({**SUMMED, "largest-weight": 0.5}, "largest-weight", 0.5),
        ({"client": "a", "tests": "false"}, "tests", "'false'"),
        ({"client": "a", "device-battery": "full"}, "device-battery", "'full'"),
    ],
)
def test_a_wrong_node_config_is_named(config: dict[str, Any], field: str, value: object) -> None:
    assert_refused(lambda: NodeConfig.read(config), field, value)
