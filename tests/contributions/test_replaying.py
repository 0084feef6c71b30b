"""Values found out afterwards, or from where a stopped run goes on, are those measured while the run went."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import CommandLine
from tests.kit import SMALL, assert_refused, changed, named
from tests.runs.contents import query
from tests.stopping import stopped

from steelyard.contributions.document import stored_contributions
from steelyard.contributions.finding import contributions, without
from steelyard.experiment.loading import build
from steelyard.experiment.parts import as_begun
from steelyard.experiment.running import run
from steelyard.rounds.loop import one_round
from steelyard.runs.history import History


def experiment(**sections: Any) -> Any:
    """Five clients on digits, one with wrong labels, two rules side by side, three rounds."""
    document = changed(
        SMALL,
        partition={"scheme": "iid", "clients": 5, "test": "local", "server": "fraction", "server_fraction": 0.2},
        flaws=[{"kind": "labels-flipped", "how": "pairs", "pick": "biggest", "count": 1}],
        rounds={"count": 3},
        beside={"VP": {"criteria": ["VP"]}},
    )
    return build(changed(document, **sections))


def rows(folder: Path) -> dict[tuple[Any, ...], Any]:
    columns = "federation, round, measure, method, clients, added, before, after"
    return {row[:4]: row[4:] for row in query(folder, f"SELECT {columns} FROM contributions")}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(experiment(contributions={"measure": "loss"}), out=tmp_path_factory.mktemp("live") / "run")


@pytest.mark.parametrize("store", [{}, {"keep": "updates"}, {"keep": "updates", "keep_as": "bfloat16"}])
def test_afterwards_is_as_while_it_went(live: Path, tmp_path: Path, store: dict[str, str]) -> None:
    folder = run(experiment(store=store), out=tmp_path / "run")
    found = [contributions(folder, rule) for rule in ("DS", "VP")][-1]
    expected, after = rows(live), rows(folder)
    assert expected.keys() == after.keys()
    assert len(expected) == 2 * 3 * 2
    if "keep_as" not in store:
        assert expected == after
        return
    assert "bfloat16" in found["source"]
    values = (found, contributions(live, "VP"))
    mine, theirs = ({row["client"]: row["value"] for row in each["clients"]} for each in values)
    # bfloat16 holds a number to 1 in 256; losses differ by less than a half.
    assert mine == pytest.approx(theirs, abs=2e-3)


def test_another_model_than_the_runs_and_a_kept_round_that_is_gone_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = run(experiment(store={"keep": "updates"}), out=tmp_path / "kept")
    (kept / "updates" / "round-000002.safetensors").write_bytes(b"nothing")
    assert_refused(lambda: contributions(kept), "round-000002.safetensors", "not a readable")
    folder = run(experiment(), out=tmp_path / "run")
    monkeypatch.setattr("steelyard.contributions.replaying.model_digest", lambda parameters: "0" * 64)
    assert_refused(lambda: contributions(folder), "round 0 of DS", "another model")
    assert isinstance(stored_contributions(folder), str)


SECURE = {"aggregation": {"kind": "secure"}}
LOCAL = {"budget": {"epsilon": 8.0, "delta": 1e-5}, "local": {"clip": 1.0}, "criteria": "public"}
SERVERLESS = {"partition": None}


@pytest.mark.parametrize(
    ("changes", "parts"),
    named(
        [
            ("no server", {"contributions": {}, **SERVERLESS}, ["measure", "'loss'"]),
            ("no tests", {"contributions": {"measure": "local-loss"}, "partition": {"test": "none"}}, ["local-loss"]),
            ("own models", {"contributions": {}, "algorithm": {"name": "ditto"}}, ["contributions", "ditto"]),
            ("hidden", {"contributions": {}, "privacy": SECURE}, ["contributions", "secure"]),
            ("not kept", {"store": {"keep": "updates"}, "privacy": SECURE}, ["store.keep", "secure"]),
            ("noise", {"contributions": {}, "privacy": LOCAL}, ["contributions", "privacy.local"]),
        ]
    ),
)
def test_what_cannot_be_measured_is_refused_before_the_run(changes: dict[str, Any], parts: list[str]) -> None:
    assert_refused(lambda: experiment(beside=None, **changes), *parts)


def test_the_command(live: Path, command: CommandLine, refused: Callable[..., str]) -> None:
    done = command("contributions", live)
    assert done.returncode == 0, done.stderr
    assert json.loads(command("contributions", live, "--format", "json", "--rule", "VP").stdout)["rule"] == "VP"
    for words, told in (
        ([live, "--rule", "nobody"], "--rule: got 'nobody'"),
        ([live, "--without", "nobody"], "CLIENT: got 'nobody'; allowed: client-"),
        ([live, "--retrain", "--method", "classes"], "--method: got 'classes' with --retrain"),
    ):
        assert told in refused("contributions", *words)


def test_a_run_measures_from_where_it_goes_on(
    tmp_path: Path, command: CommandLine, refused: Callable[..., str]
) -> None:
    # In one process, so with one number of threads.
    whole = stopped(experiment(contributions={"measure": "loss"}), tmp_path / "whole", after=1)
    assert command("resume", whole).returncode == 0
    folder = stopped(experiment(), tmp_path / "run", after=1)
    done = command("resume", folder, "--contributions")
    assert done.returncode == 0, done.stderr
    models = "SELECT federation, round, model FROM digests ORDER BY federation, round"
    assert query(folder, models) == query(whole, models)
    measured = rows(whole)
    assert rows(folder) == {key: row for key, row in measured.items() if key[1] > 1}
    assert not History(folder).chain.problem
    contributions(folder)
    assert rows(folder).items() <= measured.items()
    finished = run(experiment(), out=tmp_path / "finished")
    assert "--contributions" in refused("resume", finished, "--contributions")


# ---------------------------------------------------------------- retrained


def losses(folder: Path, left_out: str | None) -> tuple[float, float]:
    """The loss of the first and the last model of a loop over some clients, step by step with no stacking."""
    with as_begun(History(folder)) as (parts, _):
        main = parts.federations[0]
        alone = replace(main, members=frozenset(parts.clients.names(main.seed)) - {left_out})
        states = {alone.name: alone.start(parts.server)}
        plan = replace(parts.plan, contributions=None)
        first = states[alone.name].parameters
        for round in range(1, plan.rounds + 1):
            one_round([alone], states, parts.clients, parts.server, plan, round)
        models = torch.stack([first, states[alone.name].parameters])
        before, after = parts.server.row_tests(main.seed, models).losses.mean(axis=1)  # type: ignore[union-attr]
        return float(before), float(after)


def test_all_coalitions_trained_side_by_side_are_the_runs_of_their_clients(tmp_path: Path) -> None:
    folder = run(experiment(contributions={"measure": "loss"}), out=tmp_path / "run")
    found = contributions(folder, retrained=True)
    before, after = losses(folder, None)
    assert (found["before"], found["after"]) == pytest.approx((before, after), rel=1e-5)
    # Efficiency: the values of all coalitions sum to what training with everybody gained.
    assert sum(row["value"] for row in found["clients"]) == pytest.approx(before - after, rel=1e-5)
    # The client with wrong labels is last, in truth and in the estimate.
    worst = found["clients"][-1]["client"]
    assert contributions(folder)["clients"][-1]["client"] == worst
    _, other = losses(folder, worst)
    truth, guess = without(folder, worst, retrained=True), without(folder, worst)
    assert (truth["without"], guess["after"]) == pytest.approx((other, after), rel=1e-5)
    assert guess["low"] < guess["without"] < min(guess["high"], guess["after"])


def test_more_clients_than_coalitions_can_be_trained_of_are_refused(tmp_path: Path) -> None:
    many = run(experiment(partition={"clients": 11}, rounds={"count": 1}), out=tmp_path / "many")
    assert_refused(lambda: contributions(many, retrained=True), "--retrain", "11 clients", "2^11")
