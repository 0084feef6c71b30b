"""Archives as `paper_results` keeps them, written by hand: the papers' rules and seeds without any training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks import paper_results
from steelyard.experiment.comparing import load_comparison
from steelyard.experiment.loading import RUN_FILE, to_toml
from steelyard.experiment.running import federations_of
from steelyard.messages import Evaluations, LossState
from steelyard.rounds.state import Federation, RoundRecord, RoundState
from steelyard.runs.store import Store
from steelyard.weighing.priorities import OrderState


def make_archive(
    part: str, out: Path, rounds: int, clients: int, *, ended: str = "", order: int = 1, leads: float = 0.0
) -> None:
    """Write the archive of a part: accuracy rises with the round, at DS `leads` faster; `ended` explodes in round 3.

    `order` is the step in which clients are first seen: -1 gives them other numbers in the database.
    """
    recipe, *words = paper_results.PARTS[part]
    given = dict(zip(words[::2], words[1::2], strict=True)) | {"--set": ""}
    changes = [value for name, value in zip(words[::2], words[1::2], strict=True) if name == "--set"]
    experiment = load_comparison(recipe, changes, [given["--rules"]])
    federations = federations_of(experiment)
    names = [f"writer-{number:03d}" for number in range(clients)]
    folder = out / "runs" / part
    store = Store(folder, checkpoint_every=rounds)
    (folder / RUN_FILE).write_text(to_toml(experiment), encoding="utf-8")
    store.register(federations)
    states: dict[str, RoundState] = {}
    for round in range(rounds + 1):
        records: list[RoundRecord] = []
        for place, federation in enumerate(federations):
            if federation.name == ended and round >= 3:
                states[ended] = _state(federation, 2, ended="it exploded")
                continue
            states[federation.name] = _state(federation, round)
            speed = 1 + place / 100 + (leads if federation.rule_name == "DS" else 0.0)
            scores = _scores(federation.seed, round * speed, clients)
            tested = Evaluations(
                federation.name,
                round,
                tuple(names[::order]),
                np.full(clients, 10),
                scores[None, ::order],
                np.zeros((1, clients)),
                right=np.arange(clients) < round if round == rounds else None,
            )
            records.append(
                RoundRecord(
                    federation.name,
                    round,
                    0.1,
                    evaluations=tested,
                    accuracy=float(scores.mean()),
                    loss=LossState(),
                    order=federation.rule.start_order,
                )
            )
        store.commit(round, records, states, dict, last=round == rounds)
    store.finish(notes="")
    store.close()
    paper_results.keep(folder, out / f"{part}.tar.xz", {"part": part, "seconds": 1.0, "command": "made"})


def _state(federation: Federation, round: int, ended: str = "") -> RoundState:
    orders = OrderState(federation.rule.start_order, 0.5)
    return RoundState(round, torch.zeros(1), LossState(), orders, finished=bool(ended), ended=ended)


def _scores(seed: int, progress: float, clients: int) -> np.ndarray:
    """Each client reaches 100 % after its own number of rounds, in whole tenths."""
    pace = 10 + (np.arange(clients) * 7 + seed) % 40
    return np.floor(10 * np.clip(progress / pace, 0, 1)) / 10
