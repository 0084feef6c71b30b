"""Which files a reader walks through: `python -m benchmarks.walk NAME [--steps]` follows one real run.

Prints the files of src in the order in which they are first entered, and how often control comes back to a file that it
had left. A step is a function that calls another one; each counts once, however often a loop takes it, and the ways
back after the last step count for nothing. Files outside a walk's own rooms are passed through without a word.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from inspect import CO_OPTIMIZED
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import steelyard

SOURCE = Path(steelyard.__file__).parent


class Place(NamedTuple):
    """A function of src; what is defined inside it is a part of it."""

    file: str
    function: str


class Walk(NamedTuple):
    """Something that can be followed."""

    rooms: tuple[str, ...]
    """Files below these count; empty for all of src."""
    prepare: Callable[[Path], Callable[[], object]]
    """Takes an empty folder, does what comes before, and returns what is followed."""
    begin: str = ""
    """Nothing counts before this function has returned for the first time; empty: all counts."""
    end: str = ""
    """Nothing counts once this function has returned after that."""


def csv(folder: Path) -> Callable[[], object]:
    """A CSV column becomes a tensor: the table of four hospitals is read, filled and scaled."""
    from steelyard.api import Experiment
    from steelyard.data import load

    described = Experiment.load("hospitals")
    assert isinstance(described, Experiment)
    return partial(load, described.data)


def round(folder: Path) -> Callable[[], object]:
    """A round's row is stored, joins the chain, and is verified."""
    from benchmarks.store import write_run
    from steelyard.experiment.loading import load, to_toml
    from steelyard.report.verification import verify

    described = to_toml(load("quickstart"))

    def follow() -> None:
        write_run(folder / "run", 1, 3)
        (folder / "run" / "experiment.toml").write_text(described, encoding="utf-8")
        verify(folder / "run")

    return follow


def fpl(folder: Path) -> Callable[[], object]:
    """Interactions in a file become precision at 10, by way of an epoch of FPL."""
    from steelyard.api import RecommendExperiment

    lines = [f"{user}\t{user * 7 % 5 + item}\t5\t{item}" for user in range(30) for item in range(25)]
    (folder / "ratings.tsv").write_text("\n".join(lines), encoding="utf-8")
    changes = ["rounds.epochs=1", "rounds.evaluate_every=1", "ranking.score=precision"]
    experiment = RecommendExperiment.load("fpl-amazon", [*changes, f"interactions.path={folder / 'ratings.tsv'}"])
    return lambda: experiment.run(out=folder / "run", progress=False)


def update(folder: Path, *changes: str) -> Callable[[], object]:
    """Clients' trained models become the weighted sum of FedAvg."""
    from steelyard.api import Experiment

    fedavg = ["weighing.criteria=['DS']", "weighing.priority=DS", "rounds.count=1", *changes]
    experiment = Experiment.load("quickstart", fedavg)
    return lambda: experiment.run(out=folder / "run", progress=False)


class OneNode:
    """A grid with one node in this process, which answers with the client app at once."""

    def __init__(self, config: dict[str, Any]) -> None:
        from flwr.app import Context, RecordDict

        from steelyard.clients.flower.internals import enter_run

        enter_run(1, 1)
        self._context = Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})
        self._sent: dict[str, Any] = {}
        self._busy = threading.Lock()

    def get_node_ids(self) -> list[int]:
        return [1]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        from steelyard.clients.flower.parts import name_message

        names: list[str] = []
        for message in messages:
            names.append(f"message-{len(self._sent)}")
            name_message(message, names[-1])
            self._sent[names[-1]] = message
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Any]:
        from steelyard.federate.client_app import app

        with self._busy:  # A node does one thing after the other.
            return [app(self._sent[name], self._context) for name in names]


def flower(folder: Path) -> Callable[[], object]:
    """Models that clients on a node trained become the weighted sum of FedAvg, over Flower's messages."""
    from steelyard.experiment.loading import load
    from steelyard.experiment.running import run
    from steelyard.federate.server_app import clients_behind

    fedavg = ["weighing.criteria=['DS']", "weighing.priority=DS", "beside={}", "rounds.count=1", "federate.nodes=1"]
    described = load("quickstart", fedavg)
    grid: Any = OneNode({"partition-id": 0, "num-partitions": 1, "allow": "*"})
    clients = clients_behind(grid, described, "walk")
    server = described.at_server(clients.roster.about)
    server.initial(described.seed)  # So that it has read its data before anything is followed.
    return lambda: run(described, out=folder / "run", assemble=lambda: (clients, server))


def layer(folder: Path) -> Callable[[], object]:
    """A network gets layers that stack."""
    from torch import nn

    from steelyard.clients.local.layers import stackable

    return lambda: stackable(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.LSTM(2, 2)), products=True)


def finished(folder: Path) -> Path:
    """Run the quickstart for two rounds; returns its folder."""
    from steelyard.api import Experiment

    return Experiment.load("quickstart", ["rounds.count=2"]).run(folder / "run", progress=False).folder


def result(folder: Path) -> Callable[[], object]:
    """What a run recorded becomes which rule to use, and the table behind it."""
    from steelyard.cli.printing import finish
    from steelyard.result import Result

    run = finished(folder)
    return lambda: finish(lambda: Result(run), "text")


def report(folder: Path) -> Callable[[], object]:
    """The same, and the report that `run my.toml --report` writes beside it."""
    from steelyard.cli.printing import finish
    from steelyard.result import Result

    run = finished(folder)
    return lambda: finish(lambda: Result(run), "text", report=True)


_SENT = ("clients", "messages", "algorithms", "defence", "privacy", "rounds")


def weighing(folder: Path) -> Callable[[], object]:
    """A field of [weighing] decides weights: a file becomes an experiment, its rule weighs a cohort."""
    import numpy as np

    from steelyard.experiment.loading import load
    from steelyard.experiment.parts import federations_of

    (folder / "own.toml").write_text('[weighing.policy]\nname = "feddisco"\na = 0.3\n', encoding="utf-8")

    def follow() -> None:
        rule = federations_of(load(folder / "own.toml"))[0].rule
        rule.weigh(np.array([[30.0, 0.1], [10.0, 0.2]]))

    return follow


WALKS: dict[str, Walk] = {
    "csv": Walk((), csv),
    "round": Walk(("runs", "proof", "report"), round),
    "fpl": Walk(("recommend",), fpl),
    # What the weights are is another matter: rooms through which updates pass.
    "update": Walk(_SENT, update, "ChosenEngine.train", "DenseModels.combine"),
    "vector": Walk(
        _SENT, lambda folder: update(folder, "algorithm.name=scaffold"), "ChosenEngine.train", "Scaffold.step"
    ),
    "flower": Walk((*_SENT, "federate"), flower, "Engine.train", "DenseModels.combine"),
    "layer": Walk((), layer),
    "result": Walk(("report",), result),
    "report": Walk((), report),
    "weighing": Walk(("experiment", "weighing"), weighing),
}


def place_of(frame: FrameType | None, rooms: tuple[str, ...]) -> Place | None:
    """Return the innermost function of the rooms that a frame runs in; None while a module is being imported."""
    found = None
    while frame is not None:
        code = frame.f_code
        path = Path(code.co_filename)
        if path.is_relative_to(SOURCE):
            if not code.co_flags & CO_OPTIMIZED:  # the body of a module or of a class
                return None
            file = path.relative_to(SOURCE).as_posix()
            if found is None and (not rooms or file.removesuffix(".py").split("/")[0] in rooms):
                found = Place(file, code.co_qualname.split(".<locals>")[0])
        frame = frame.f_back
    return found


@contextmanager
def followed(rooms: tuple[str, ...], begin: str = "", end: str = "") -> Generator[list[Place]]:
    """Write down every step between functions of the rooms, each once: where it comes from, and where it leads."""
    steps: dict[tuple[Place | None, Place], None] = {}
    places: list[Place] = []
    left: set[str] = {""}

    def look(frame: FrameType, event: str, _: object) -> None:
        if not frame.f_code.co_filename.startswith(str(SOURCE)):
            return
        if (
            event == "return"
            and frame.f_code.co_qualname in (begin, end)
            and (frame.f_code.co_qualname == begin or begin in left)
        ):
            left.add(frame.f_code.co_qualname)
        if event != "call" or begin not in left or (end and end in left):
            return
        to, before = place_of(frame, rooms), place_of(frame.f_back, rooms)
        if to is not None and to != before:
            steps[before, to] = None

    threading.setprofile(look)  # For threads that begin meanwhile.
    sys.setprofile(look)
    try:
        yield places
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        places += [place for step in steps for place in step if place is not None]


def main() -> None:
    """Follow one walk and print its files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=WALKS)
    parser.add_argument("--steps", action="store_true", help="print every function, file by file")
    chosen = parser.parse_args()
    walk = WALKS[chosen.name]
    with tempfile.TemporaryDirectory() as scratch:
        run = walk.prepare(Path(scratch))
        with followed(walk.rooms, walk.begin, walk.end) as places:
            run()
    stays = [file for file, _ in groupby(place.file for place in places)]
    if chosen.steps:
        for file, inside in groupby(places, key=lambda place: place.file):
            print(f"{file}: {', '.join(dict.fromkeys(place.function for place in inside))}")
    files = list(dict.fromkeys(stays))
    print("\n".join(files))
    print(f"{chosen.name}: {len(files)} files, {len(stays)} stays, {len(stays) - len(files)} returns")


if __name__ == "__main__":
    main()
