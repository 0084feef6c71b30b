"""A long run on the page: 1,000 rounds of 371 clients open in under 2 s, and a new round costs only itself."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from tests.runs.records import evaluations, federation, record, state, updates

from steelyard.page.figures import Figures
from steelyard.runs.process import this_process
from steelyard.runs.store import Store
from steelyard.weighing.rule import Rule, WeighingSettings

ROUNDS, CLIENTS = 1000, tuple(f"client-{number:03d}" for number in range(371))


def write(store: Store, round: int, chance: np.random.Generator) -> None:
    raw = chance.random((len(CLIENTS), 2)) + 0.1
    sent = updates(
        round=round,
        clients=CLIENTS,
        samples=chance.integers(1, 99, len(CLIENTS)),
        criteria={"DS": raw[:, 0], "LD": raw[:, 1]},
        losses=chance.random(len(CLIENTS)),
        failures=(),
    )
    scores = np.clip(chance.normal(round / ROUNDS, 0.1, (1, len(CLIENTS))), 0, 1)
    tested = evaluations(
        round=round, clients=CLIENTS, samples=np.full(len(CLIENTS), 10), scores=scores, losses=1 - scores
    )
    weighing = Rule(WeighingSettings(criteria=("DS", "LD"))).weigh(raw)
    made = record(round=round, updates=sent, weighing=weighing, evaluations=tested, accuracy=round / ROUNDS)
    store.commit(round, [made], {"DS>LD": state(round)}, dict, last=False)


def seconds(work: object) -> float:
    """Time of this process, so that a busy machine does not count."""
    assert callable(work)
    begun = time.process_time()
    work()
    return time.process_time() - begun


@pytest.mark.slow
def test_a_long_run_opens_at_once(tmp_path: Path) -> None:
    for name in ("pandas", "scipy.stats"):  # what the page loads before its first visitor comes
        import_module(name)
    chance = np.random.default_rng(0)
    store = Store(tmp_path / "long", checkpoint_every=10**9)
    store.register([federation()])
    store.note(status="running", rounds=ROUNDS, measure="accuracy", writer=this_process().text())
    (tmp_path / "long" / "experiment.toml").write_text('name = "long"\n', encoding="utf-8")
    for round in range(ROUNDS):
        write(store, round, chance)
    figures = Figures(tmp_path)

    def open_it() -> None:
        figures.overview(["long"])
        for kind in ("accuracy", "weights"):
            assert figures.figure(["long"], kind, None, None, None)["spec"] is not None

    first = seconds(open_it)
    write(store, ROUNDS, chance)
    again = seconds(lambda: figures.overview(["long"]))
    store.close()
    assert first < 2.0
    assert again < first / 3
