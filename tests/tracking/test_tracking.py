"""Trackers: what they are told, by stand-ins for their packages; one that fails or is missing never harms a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.kit import assert_refused, small
from tests.stopping import stopped

from steelyard import Experiment, History, resume

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Call]]:
    """Put a stand-in for a tracker's package in place; returns the list of what it is told."""

    def make(name: str, fails_at: str | None = None) -> list[Call]:
        told: list[Call] = []
        module = ModuleType(name)
        module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]

        def answer(word: str) -> Callable[..., Any]:
            def call(*values: Any, **options: Any) -> Any:
                told.append((word, values, options))
                if word == fails_at:
                    raise ConnectionError(f"{word} does\nnot work")
                return run

            return call

        run = SimpleNamespace(
            id="run-7", info=SimpleNamespace(run_id="run-7"), log=answer("log"), finish=answer("finish")
        )
        words = ("init", "log", "finish", "set_experiment", "start_run", "log_params", "log_metrics", "end_run")
        for word in words:
            setattr(module, word, answer(word))
        monkeypatch.setitem(sys.modules, name, module)
        return told

    return make


def quick(to: str) -> Experiment:
    return small(tracking={"to": to, "project": "scales"})


def logged(told: list[Call], word: str) -> list[tuple[int, Mapping[str, float]]]:
    return [(options["step"], values[0]) for name, values, options in told if name == word]


@pytest.mark.parametrize(("to", "word"), [("trackio", "log"), ("wandb", "log"), ("mlflow", "log_metrics")])
def test_every_round_is_told_and_a_resume_goes_on(
    tmp_path: Path, package: Callable[..., list[Call]], to: str, word: str
) -> None:
    told = package(to)
    result = quick(to).run(tmp_path / "one")
    rounds = result.history.rounds
    seen = logged(told, word)
    assert [step for step, _ in seen] == [0, 1, 2]
    for (_, figures), accuracy in zip(seen, rounds["accuracy"], strict=True):
        assert figures["DS/accuracy"] == accuracy
    assert seen[2][1]["DS/largest_weight"] == result.history.clients["weight"].max()
    assert seen[2][1]["DS/answered"] == 6
    assert told[-1][0] in ("finish", "end_run")
    known = History(tmp_path / "one").info["tracked_as"]
    assert known == ("one" if to == "trackio" else "run-7")


def test_a_stopped_run_says_so_and_is_found_again(tmp_path: Path, package: Callable[..., list[Call]]) -> None:
    told = package("wandb", fails_at=None)
    stopped(quick("wandb"), tmp_path / "one", 1)
    assert told[-1] == ("finish", (), {"exit_code": 1})
    first = next(options for word, _, options in told if word == "init")
    assert (first["project"], first["name"], first["id"]) == ("scales", "one", None)
    told.clear()
    resume(tmp_path / "one")
    again = next(options for word, _, options in told if word == "init")
    assert (again["id"], again["resume"]) == ("run-7", "allow")
    assert [step for step, _ in logged(told, "log")] == [2]


@pytest.mark.parametrize("fails_at", ["init", "log", "finish"])
def test_a_failing_tracker_is_told_once_and_the_run_goes_on(
    tmp_path: Path, package: Callable[..., list[Call]], messages: list[str], fails_at: str
) -> None:
    package("trackio", fails_at)
    result = quick("trackio").run(tmp_path / "one")
    assert result.history.info["status"] == "finished"
    lines = [line for line in messages if "tracking" in line]
    why = f"(ConnectionError: {fails_at} does not work)"
    assert lines == [f"tracking.to = 'trackio' failed {why}; the run continues without it"]


def test_a_missing_package_is_one_line_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    words = ("tracking.to: got 'trackio'", "not installed", "steelyard[trackio]")
    assert_refused(lambda: quick("trackio").run(tmp_path / "one"), *words)
    assert not (tmp_path / "one").exists()
