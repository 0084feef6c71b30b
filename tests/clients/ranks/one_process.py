"""Ranks that all live in this process: what they send each other is written and read as between real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from steelyard.clients.local import Simulation, SimulationServer
from steelyard.clients.ranks.engine import RanksEngine, Share
from steelyard.clients.ranks.group import Answer, Place, Ranks
from steelyard.clients.ranks.wire import Content, read, written


def travelled(content: Content) -> Content:
    """What comes out at the other end."""
    return read(written(content))


class OneProcess(Ranks):
    """Answers of all ranks, one after the other."""

    def __init__(self, make: Callable[[], Simulation], count: int) -> None:
        super().__init__(Place(0, count, 0, count))
        others = [make() for _ in range(1, count)]
        self.shares = [Share(other, SimulationServer(other)) for other in others]
        self.asked: list[tuple[str, list[int]]] = []

    def ask(
        self, command: str, contents: Mapping[int, Content], answer: Answer, common: Content = None
    ) -> dict[int, Content]:
        found: dict[int, Content] = {}
        self.asked.append((command, sorted(contents)))
        for rank, content in sorted(contents.items()):
            given = content if common is None else {**(content or {}), **common}
            if command in ("assemble", "release"):
                found[rank] = None
            elif rank == 0:
                found[rank] = answer(command, given)
            else:
                found[rank] = travelled(self.shares[rank - 1].answer(command, travelled(given)))
        return found


def ranked(make: Callable[[], Simulation], count: int = 3) -> Simulation:
    """Clients that so many ranks share, each of them made by `make`."""
    simulation = make()
    RanksEngine(OneProcess(make, count), simulation, {})
    return simulation


def ranks_of(simulation: Simulation) -> OneProcess:
    assert simulation.context.leader is not None
    assert isinstance(simulation.context.leader.ranks, OneProcess)
    return simulation.context.leader.ranks
