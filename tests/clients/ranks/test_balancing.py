"""Clients go to ranks by their steps: each once, none much longer than it must be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from steelyard.clients.ranks.balancing import SLACK, share_out

TASKS = st.lists(
    st.dictionaries(st.integers(0, 40).map(lambda number: f"c{number:02}"), st.integers(0, 50), min_size=1),
    min_size=1,
    max_size=4,
)


def loads(shares: list[list[list[str]]], steps: list[dict[str, int]]) -> list[int]:
    return [sum(steps[task][name] for task, names in enumerate(mine) for name in names) for mine in shares]


@given(TASKS, st.integers(1, 5), st.data())
def test_every_client_is_trained_once_and_whole_tasks_on_one_rank(
    steps: list[dict[str, int]], ranks: int, data: st.DataObject
) -> None:
    whole = data.draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps)))
    shares = share_out(steps, whole, ranks)
    assert len(shares) == ranks
    for task, clients in enumerate(steps):
        given_out = [name for mine in shares for name in mine[task]]
        assert sorted(given_out) == sorted(clients)
        assert all(mine[task] == sorted(mine[task]) for mine in shares)
        if whole[task]:
            assert sum(bool(mine[task]) for mine in shares) == 1


@given(TASKS, st.integers(1, 5))
def test_no_rank_has_much_more_than_its_part(steps: list[dict[str, int]], ranks: int) -> None:
    shares = share_out(steps, [False] * len(steps), ranks)
    every = [count for clients in steps for count in clients.values()]
    # Longest first is at most a longest unit above an even share; whole federations are taken only within SLACK of it.
    assert max(loads(shares, steps)) <= SLACK * (sum(every) / ranks + max(every))


def test_the_longest_go_first() -> None:
    shares = share_out([{"a": 3, "b": 3, "c": 2, "d": 2, "e": 2}], [False], 2)
    assert sorted(loads(shares, [{"a": 3, "b": 3, "c": 2, "d": 2, "e": 2}])) == [5, 7]
    assert {"a", "b"} & set(shares[0][0]) != {"a", "b"}


def test_federations_of_equal_length_are_not_split() -> None:
    one = {f"c{number}": 5 for number in range(6)}
    shares = share_out([one, one], [False, False], 2)
    assert [[len(names) for names in mine] for mine in shares] in ([[6, 0], [0, 6]], [[0, 6], [6, 0]])
    three = share_out([one, one], [False, False], 3)
    assert max(loads(three, [one, one])) == 20
