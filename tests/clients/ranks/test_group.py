"""What a launcher says of a process is read, and refused where it is nonsense; ranks share out their machine."""

from __future__ import annotations

import pytest

from steelyard.clients.local import ComputeSettings
from steelyard.clients.local.hardware import threads_of
from steelyard.clients.ranks.group import Place, current, join, rank_count
from steelyard.clients.ranks.placing import on_rank
from steelyard.errors import UserError

MET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_process_that_is_alone_joins_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Place.given({}) is None
    assert Place.given({"WORLD_SIZE": "1", "RANK": "0", **MET}) is None
    assert Place.given({"WORLD_SIZE": "4", **MET}) is None
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join() is None
    assert current() is None
    assert rank_count() == 1


def test_the_place_is_that_of_the_launcher() -> None:
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **MET}
    assert Place.given(given) == Place(5, 8, 1, 4)
    assert Place.given({"RANK": "1", "WORLD_SIZE": "2", **MET}) == Place(1, 2, 1, 2)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR: missing"),
        ({"RANK": "2", "WORLD_SIZE": "2", **MET}, "RANK: got '2' in the environment; allowed: a whole number from 0"),
        ({"RANK": "-1", "WORLD_SIZE": "2", **MET}, "RANK: got '-1'"),
        ({"RANK": "0", "WORLD_SIZE": "0", **MET}, "WORLD_SIZE: got '0'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3", **MET}, "LOCAL_WORLD_SIZE: got '3'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x", **MET}, "LOCAL_RANK: got 'x'"),
    ],
)
def test_nonsense_is_named(given: dict[str, str], line: str) -> None:
    with pytest.raises(UserError) as refused:
        Place.given(given)
    assert str(refused.value).startswith(line)


def test_threads_and_memory_are_shared_out_and_what_is_given_stays() -> None:
    cpu = ComputeSettings(device="cpu")
    halved = on_rank(cpu, Place(1, 4, 1, 2))
    assert halved.threads == max(1, threads_of(cpu) // 2)
    assert halved.memory_gb is not None
    assert halved.device == "cpu"
    given = ComputeSettings(device="cpu", threads=3, memory_gb=2.0, engine="loop")
    assert on_rank(given, Place(1, 4, 1, 2)) == given
