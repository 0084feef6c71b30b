"""A long run on the page: what is read and what is sent stay small, and a new round costs only itself.

How many seconds that takes is measured by `python -m benchmarks.looking`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runs.records import evaluations, federation, record, state, updates

from steelyard.page import live
from steelyard.page.figures import Figures
from steelyard.report.figures import shared, weights
from steelyard.runs.process import this_process
from steelyard.runs.store import Store
from steelyard.runs.typed import Reader
from steelyard.weighing.rule import Rule, WeighingSettings

ROUNDS, CLIENTS = 300, tuple(f"client-{number:03d}" for number in range(80))
LOOKED_AT = 10_000
"""Entries that are looked at here, of the 24,000 that the run has."""
THIRDS = ROUNDS // 3
"""Every third round: of these and of the last, what single clients sent is read; the heat map has as many columns."""


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


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Generator[Counter[str]]:
    """Count the rows that are read of each table that grows with every round."""
    found: Counter[str] = Counter()
    read = Reader.rows

    def rows(self: Reader, table: str, columns: Any, *where: Any) -> list[tuple[Any, ...]]:
        answer = read(self, table, columns, *where)
        if table in ("rounds", "updates", "evaluations", "failures"):
            found[table] += len(answer)
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(Reader, "rows", rows)
        yield found


def drawn(figures: Figures) -> dict[str, tuple[int, int]]:
    """Ask for what the page shows first; returns for each figure how many rows it sends, and of how many rounds."""
    figures.overview(["long"])
    sent: dict[str, tuple[int, int]] = {}
    for kind in ("accuracy", "weights"):
        spec = figures.figure(["long"], kind, None, None, None)["spec"]
        assert spec is not None
        (rows,) = spec["datasets"].values()
        sent[kind] = len(rows), max(len(row["round"]) for row in rows)
    return sent


def test_a_long_run_is_read_once_and_sent_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LOOKED_AT", LOOKED_AT)
    chance = np.random.default_rng(0)
    store = Store(tmp_path / "long", checkpoint_every=10**9)
    store.register([federation()])
    store.note(status="running", rounds=ROUNDS, measure="accuracy", writer=this_process().text())
    (tmp_path / "long" / "experiment.toml").write_text('name = "long"\n', encoding="utf-8")
    for round in range(ROUNDS):
        write(store, round, chance)
    figures, newest = Figures(tmp_path), 2  # of the newest round the list of runs asks for its number and its accuracy
    with counted(monkeypatch) as first:
        sent = drawn(figures)
    assert sent == {"accuracy": (1, shared.POINTS), "weights": (weights.CLIENTS, THIRDS)}
    assert THIRDS <= weights.COLUMNS
    # Once for how many clients answered, once for all columns, once for the last round; of what clients sent a part.
    assert first == {"rounds": 2 * ROUNDS + 1 + newest, "updates": 3 + THIRDS + 1}
    with counted(monkeypatch) as again:
        assert drawn(figures) == sent
    assert again == {"rounds": newest}
    for later in (ROUNDS, ROUNDS + 1):
        write(store, later, chance)
        with counted(monkeypatch) as added:
            drawn(figures)
        assert added == {"rounds": 1 + 1 + newest, "updates": 1}
    store.close()
