"""Runs with flawed clients: who was flawed is stored for every seed, and the flaws reach the rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steelyard.data import FlawSettings, PartitionSettings, load, share_out
from steelyard.data.settings import DataSettings
from steelyard.errors import UserError
from steelyard.experiment.loading import build, read_experiment, to_toml
from steelyard.experiment.running import resume, run
from steelyard.runs.reader import History
from steelyard.runs.store import Store

FLAWS = [
    {"kind": "labels-flipped", "pick": "biggest", "count": 2, "how": "pairs"},
    {"kind": "noisy", "pick": "random", "count": 1, "amount": 0.5},
    {"kind": "claims-size", "pick": "biggest", "count": 2, "among": "all"},
]
SMALL: dict[str, Any] = {
    "name": "flawed",
    "seed": 3,
    "partition": {"scheme": "iid", "clients": 6, "size_spread": 0.5},
    "flaws": FLAWS,
    "model": {"name": "logistic"},
    "training": {"batch_size": 50},
    "rounds": {"count": 2, "fraction": 1.0},
    "compute": {"engine": "loop", "device": "cpu", "threads": 1},
}


def expected(seed: int) -> set[tuple[int, str, str]]:
    flaws = [FlawSettings(**flaw) for flaw in FLAWS]
    population = share_out(load(DataSettings()), PartitionSettings(**SMALL["partition"]), seed, flaws)
    return {(seed, client, words) for client, every in population.flaws.items() for words in every}


def test_who_was_flawed_is_stored_for_every_seed(tmp_path: Path) -> None:
    folder = run(build(SMALL), out=tmp_path / "run", seeds=[3, 4])
    found = History(folder).flaws
    assert list(found.columns) == ["seed", "client", "flaw"]
    assert set(found.itertuples(index=False, name=None)) == expected(3) | expected(4)
    assert len(found) == 10
    liars = {(seed, client) for seed, client, words in expected(3) | expected(4) if words.startswith("claims")}
    true = share_out(load(DataSettings()), PartitionSettings(**SMALL["partition"]), 3)
    told = History(folder).clients.query("seed == 3 and round == 1").set_index("client")["samples"]
    for client in true.clients:
        assert told[client.client] == len(client.train) * (10 if (3, client.client) in liars else 1)
    again = read_experiment(folder)
    assert to_toml(again) == to_toml(build(SMALL))
    assert to_toml(again).count("[[flaws]]") == 3


def test_a_resume_tells_of_every_seed(tmp_path: Path) -> None:
    folder = run(build(SMALL), out=tmp_path / "run", seeds=[3, 4])
    store = Store(folder, 1, 1)
    store.note(status="stopped", flaws="{}")
    store.close()
    resume(folder)
    assert set(History(folder).flaws["seed"]) == {3, 4}


def test_a_run_without_flaws_has_an_empty_frame(tmp_path: Path) -> None:
    folder = run(build({**SMALL, "flaws": []}), out=tmp_path / "run")
    assert History(folder).flaws.empty
    assert "flaws" not in History(folder).info


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ({"kind": "noisy", "clients": ["client-6"]}, "flaws.0.clients: got 'client-6'"),
        ({"kind": "noizy", "pick": "random", "count": 1}, "flaws.0.kind: got 'noizy' (did you mean 'noisy'?)"),
        ({"kind": "stale", "amount": 0, "pick": "random", "count": 1}, "flaws.0.amount: got 0 with kind 'stale'"),
        ({"kind": "noisy", "amout": 1, "pick": "random", "count": 1}, "flaws.0.amout: unknown field (did you mean"),
    ],
)
def test_a_slip_in_the_file_is_one_line(flaw: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        build({**SMALL, "flaws": [flaw]})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
