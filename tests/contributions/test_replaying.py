"""Values found out afterwards are those measured while the run went, to the last bit; what is refused."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import CommandLine

from steelyard.contributions.document import stored_contributions
from steelyard.contributions.finding import contributions
from steelyard.errors import UserError
from steelyard.experiment.loading import build
from steelyard.experiment.running import resume, run
from steelyard.rounds.loop import Progress


def experiment(**sections: Any) -> Any:
    """Five clients on digits, one with wrong labels, two rules side by side, three rounds."""
    document: dict[str, Any] = {
        "seed": 3,
        "data": {"source": "digits"},
        "partition": {"scheme": "iid", "clients": 5, "test": "local", "server": "fraction", "server_fraction": 0.2},
        "flaws": [{"kind": "labels-flipped", "how": "pairs", "pick": "biggest", "count": 1}],
        "model": {"name": "logistic"},
        "training": {"learning_rate": 0.1, "epochs": 1, "batch_size": 50},
        "rounds": {"count": 3, "fraction": 1.0},
        "weighing": {"criteria": ["DS"]},
        "beside": {"VP": {"criteria": ["VP"]}},
        "compute": {"engine": "loop"},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    return build(document)


def rows(folder: Path) -> dict[tuple[Any, ...], Any]:
    db = sqlite3.connect(folder / "run.sqlite")
    found = db.execute("SELECT federation, round, measure, method, clients, added, before, after FROM contributions")
    return {row[:4]: row[4:] for row in found}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(experiment(contributions={"measure": "loss"}), out=tmp_path_factory.mktemp("live") / "run")


@pytest.mark.parametrize(
    ("store", "source"),
    [({}, "replay"), ({"keep": "updates"}, "kept updates"), ({"keep": "updates", "keep_as": "bfloat16"}, "rounded")],
)
def test_afterwards_is_as_while_it_went(live: Path, tmp_path: Path, store: dict[str, str], source: str) -> None:
    folder = run(experiment(store=store), out=tmp_path / "run")
    assert isinstance(stored_contributions(folder), str)
    for rule in ("DS", "VP"):
        found = contributions(folder, rule)
    expected, after = rows(live), rows(folder)
    assert expected.keys() == after.keys()
    assert len(expected) == 2 * 3 * 2
    if source == "rounded":
        assert "bfloat16" in found["source"]
        close = contributions(live, "VP")
        for mine, theirs in zip(
            sorted(found["clients"], key=lambda row: row["client"]),
            sorted(close["clients"], key=lambda row: row["client"]),
            strict=True,
        ):
            assert mine["value"] == pytest.approx(theirs["value"], abs=2e-3)
    else:
        assert expected == after
    assert found["clients"][-1]["client"] == contributions(live, "VP")["clients"][-1]["client"]


def test_a_run_that_was_stopped_and_resumed_has_the_same_values(live: Path, tmp_path: Path) -> None:
    def stop(round: int, scores: object) -> None:
        if round == 2:
            raise KeyboardInterrupt

    wanted: Progress = stop
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(experiment(contributions={"measure": "loss"}), out=folder, progress=wanted)
    resume(folder)
    assert rows(folder) == rows(live)


def test_values_of_a_round_sum_to_what_it_gained(live: Path) -> None:
    found = contributions(live)
    assert sum(row["value"] for row in found["clients"]) == pytest.approx(found["before"] - found["after"])
    assert found["total"] == pytest.approx(found["before"] - found["after"])
    assert found["total_low"] > 0
    assert sum(row["share"] or 0 for row in found["clients"]) == pytest.approx(1.0)


def test_another_model_than_the_runs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run(experiment(), out=tmp_path / "run")
    monkeypatch.setattr("steelyard.contributions.replaying.model_digest", lambda parameters: "0" * 64)
    with pytest.raises(UserError, match="round 0 of DS gives another model than the run had"):
        contributions(folder)
    assert isinstance(stored_contributions(folder), str)


def test_a_kept_round_that_is_gone_is_named(tmp_path: Path) -> None:
    folder = run(experiment(store={"keep": "updates"}), out=tmp_path / "run")
    (folder / "updates" / "round-000002.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"round-000002\.safetensors: not a readable"):
        contributions(folder)


SECURE = {"aggregation": {"kind": "secure"}}
LOCAL = {"budget": {"epsilon": 8.0, "delta": 1e-5}, "local": {"clip": 1.0}, "criteria": "public"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"contributions": {}, "partition": {"server": "none", "server_fraction": None}}, "measure: got 'loss', and p"),
        ({"contributions": {"measure": "local-loss"}, "partition": {"test": "none"}}, "measure: got 'local-loss', and"),
        ({"contributions": {}, "algorithm": {"name": "ditto"}}, "contributions: the clients of 'ditto'"),
        ({"contributions": {}, "privacy": SECURE}, "contributions: this run has .*, kind 'secure'"),
        ({"store": {"keep": "updates"}, "privacy": SECURE}, "store.keep: this run has .*, kind 'secure'"),
        ({"contributions": {}, "privacy": LOCAL}, "contributions: this run has .privacy.local."),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_run(changes: dict[str, Any], words: str) -> None:
    document = experiment().model_dump(mode="json", exclude_none=True)
    document["beside"] = {}
    for name, section in changes.items():
        mixed = {**document.get(name, {}), **section}
        document[name] = {key: value for key, value in mixed.items() if value is not None}
    with pytest.raises(UserError, match=words):
        build(document)


def test_the_command(live: Path, steelyard: CommandLine, refused: Callable[..., str]) -> None:
    done = steelyard("contributions", live)
    assert done.returncode == 0, done.stderr
    assert "What each client added (shapley)" in done.stdout
    assert "An interval that holds 0" in done.stdout
    document = json.loads(steelyard("contributions", live, "--format", "json", "--rule", "VP").stdout)
    assert document["rule"] == "VP"
    assert {"client", "value", "low", "high"} <= set(document["clients"][0])
    assert "--rule: got 'nobody'" in refused("contributions", live, "--rule", "nobody")
    assert "no run here (no experiment.toml); allowed: one of the runs in it" in refused("contributions", live.parent)
