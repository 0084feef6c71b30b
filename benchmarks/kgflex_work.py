"""One cell of the tables of docs/results/kgflex.md: a training that is looked at on the way, a baseline, new items."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks import cold_start, cold_start_data
from benchmarks.kgflex_plan import Cell
from steelyard.errors import UserError
from steelyard.experiment.loading import load
from steelyard.experiment.recommend import RecommendDescription
from steelyard.experiment.running import federations_of, plan_of
from steelyard.recommend.baselines import recommend
from steelyard.recommend.kgflex import explain
from steelyard.recommend.kgflex.clients import KgflexClients
from steelyard.recommend.kgflex.selection import Selection
from steelyard.recommend.knowledge.loading import load_features
from steelyard.recommend.metrics import measure
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import RoundRecord, RoundState

Tell = Callable[[Mapping[str, Any]], None]
"""Takes what was found so far and keeps it."""
CUTOFFS, TOPS = (10, 1), (None, 100, 50, 10, 5)


class OutOfTime(Exception):
    """The time that a cell had is over; what it told is kept."""


def describe(cell: Cell) -> RecommendDescription:
    """Return the experiment of a cell."""
    changes = {**cell["set"], "seed": cell.get("seed", 1), "fpl.threads": 1, "rounds.evaluate_every": 1 << 20}
    if cell.get("epochs"):
        changes["rounds.epochs"] = max(cell["epochs"])
    if cell["stage"] == "search" or cell.get("validation"):
        changes["interactions.validation"] = 0.2
    experiment = load(f"kgflex-{cell['data']}").changed(changes)
    assert isinstance(experiment, RecommendDescription)
    return experiment


class Looker:
    """A recorder that stores nothing, looks at the lists after some epochs and tells what it saw at once."""

    def __init__(
        self, experiment: RecommendDescription, clients: KgflexClients, epochs: Sequence[int], tell: Tell, until: float
    ) -> None:
        self.experiment, self.clients, self.epochs = experiment, clients, set(epochs)
        self.tell, self.until = tell, until
        self.each = 1 if experiment.bundled else experiment.schedule().rounds_per_epoch

    def commit(
        self,
        round: int,
        records: Sequence[RoundRecord],
        states: Mapping[str, RoundState],
        snapshot: Callable[[], Mapping[str, torch.Tensor]],
        *,
        last: bool,
    ) -> None:
        """Look if this round ends an epoch that was asked for."""
        epoch, rest = divmod(round, self.each)
        if time.time() > self.until:
            raise OutOfTime
        if rest or epoch not in self.epochs:
            return
        name = records[0].federation
        lists, _ = self.clients.lists(name, self.experiment.seed, states[name].parameters, max(CUTOFFS))
        view = self.clients.users.ground.view
        self.tell({str(epoch): {str(k): rounded(measure(view(lists, k))) for k in CUTOFFS}})
        if last and self.experiment.seed == 1:
            self.tell({"kept": self.kept(lists)})

    def kept(self, lists: np.ndarray) -> dict[str, Any]:
        """Return the quartiles of Table 6.2 in both readings."""
        seed, parts = self.experiment.seed, self.clients.parts
        known = self.clients.knowledge(seed)
        after = explain.after_lists(known, lists, self.clients.users.histories.names, seed, parts.settings)
        flags = {"shown": explain.shown(known, lists), "again": explain.informative_again(known, after)}
        before, then = (set(np.argsort(-explain.cloud(each))[:100].tolist()) for each in (known.selection, after))
        quartiles = {
            name: {str(top): _quartiles(known.selection, flag, top) for top in TOPS} for name, flag in flags.items()
        }
        features = known.selection.sizes.mean()
        return {**quartiles, "cloud": len(before & then) / len(before), "features_per_user": round(float(features), 1)}


def _quartiles(selection: Selection, flags: np.ndarray, top: int | None) -> list[float]:
    return [round(float(each), 4) for each in np.nanpercentile(explain.kept(selection, flags, top), (25, 50, 75))]


def rounded(figures: Mapping[str, float]) -> dict[str, float]:
    """Return metrics short enough for a line."""
    return {name: float(f"{value:.5g}") for name, value in figures.items()}


def work(cell: Cell, tell: Tell, until: float) -> None:
    """Do one cell and tell what was found, bit by bit; no more is done after `until` (seconds since the epoch)."""
    torch.set_num_threads(1)
    match cell["stage"]:
        case "baseline":
            tell(baseline(describe(cell), cell))
        case "cold-choice":
            case, data, features = cold_start_data.prepared(cell["data"])
            drawn = cold_start_data.draw(data, features, case, 0)
            tell(cold_start.chosen(case, drawn, cell["most"], 1))
        case "cold":
            case, data, features = cold_start_data.prepared(cell["data"])
            drawn = cold_start_data.draw(data, features, case, cell["draw"])
            epochs = {int(most): count for most, count in cell["epochs"].items()}
            make = cold_start.systems(case, epochs, 1)[cell["system"]]
            tell({"0": rounded(cold_start.judged(drawn, make(drawn)))})
        case _:
            train(describe(cell), cell["epochs"], tell, until)


def train(experiment: RecommendDescription, epochs: Sequence[int], tell: Tell, until: float) -> None:
    """Train KGFlex and look at the lists after these epochs."""
    clients, server = experiment.assemble()
    assert isinstance(clients, KgflexClients)
    tell({"features": str(clients.parts.features)})
    looker = Looker(experiment, clients, epochs, tell, until)
    run_rounds(federations_of(experiment), {}, clients, server, plan_of(experiment), looker)


def baseline(experiment: RecommendDescription, cell: Cell) -> dict[str, Any]:
    """Train a baseline on the recipe's split; one whose library is not here says so."""
    prepared = experiment.prepare()
    assert experiment.knowledge is not None
    features = load_features(experiment.knowledge, prepared.data.items) if cell["system"] == "vsm" else None
    try:
        lists, _ = recommend(cell["system"], prepared.split.train, 10, cell["seed"], cell["settings"], features)
    except UserError as error:
        return {"missing": str(error)}
    return {"0": {str(k): rounded(measure(prepared.users.ground.view(lists, k))) for k in CUTOFFS}}
