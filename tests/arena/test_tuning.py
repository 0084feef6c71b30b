"""Choosing settings: on the seeds for choosing and the clients' own rows, for rivals and for a candidate alike."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.arena.made import QUICK, SUITE
from tests.warm import warm_processes

from steelyard import UserError
from steelyard.arena.suite import load_suite, suites
from steelyard.arena.table import tuning_text
from steelyard.arena.tuning import TUNING, Tried, tune
from steelyard.experiment.rule_words import parse_rules
from steelyard.report.recorded_curves import read_curves
from steelyard.runs.reader import History
from steelyard.sweeps import jobs
from steelyard.sweeps.running import How


def test_settings_are_judged_by_the_clients_own_rows_on_seeds_that_never_report(tmp_path: Path) -> None:
    rules = parse_rules(["fedadam(server_rate=0.03)", "fedadam"], SUITE.experiment("hospitals"))
    told: list[str] = []
    found = tune(SUITE, rules, tmp_path, ["hospitals"], QUICK, How(announce=told.append))
    assert told == ["choosing among 2 settings, scene 1 of 1: hospitals"]
    history = History(tmp_path / TUNING / "hospitals")
    seeds = set(history.federations["seed"])
    assert seeds == set(SUITE.choose[: SUITE.tuning.seeds])
    assert not seeds & {*SUITE.report, *SUITE.held_out}
    curves = [curve for curve in read_curves(history) if curve.rule == "fedadam"]
    assert found["fedadam"] == pytest.approx(sum(float(curve.overall[-1]) for curve in curves) / len(curves))
    told.clear()
    assert tune(SUITE, rules, tmp_path, ["hospitals"], QUICK, How(announce=told.append)) == found
    assert told == []
    with pytest.raises(UserError, match="holds other settings"):
        tune(SUITE, parse_rules(["EQ", "LD"], SUITE.experiment("hospitals")), tmp_path, ["hospitals"], QUICK)


def test_scenes_in_processes_of_their_own_give_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "multiprocessing", SimpleNamespace(get_context=lambda kind: warm_processes()))
    rules = parse_rules(["fedadam(server_rate=0.03)", "fedadam"], SUITE.experiment("hospitals"))
    scenes = ["clean", "hospitals"]
    told: list[str] = []
    both = tune(SUITE, rules, tmp_path / "both", scenes, QUICK, How(announce=told.append, jobs=2))
    assert told == [f"choosing among 2 settings, scene {n} of 2: {name}" for n, name in enumerate(scenes, 1)]
    assert both == tune(SUITE, rules, tmp_path / "one", scenes, QUICK)


def test_the_best_is_the_first_of_the_best_and_none_that_exploded() -> None:
    values = {"a1": 0.5, "a2": 0.7, "a3": 0.7, "a4": math.nan}
    assert Tried("a", values).best == "a2"
    assert [Tried("a", values, frozen).best for frozen in ("a1", "a3")] == ["a2", "a3"]
    with pytest.raises(UserError, match="every setting of a exploded"):
        _ = Tried("a", {"a1": math.nan}).best


def test_what_is_frozen_is_said_beside_what_is_best() -> None:
    frozen = next(word for word in SUITE.rivals if word.startswith("fedprox"))
    tried = dict.fromkeys(SUITE.tuning.settings["fedprox"], 0.5)
    assert tuning_text(SUITE, [Tried("fedprox", tried | {frozen: 0.9})]).startswith("As frozen.")
    other = next(word for word in tried if word != frozen)
    text = tuning_text(SUITE, [Tried("fedprox", tried | {other: 0.9})])
    assert text.startswith("Other settings than the frozen ones are best for fedprox.")
    assert "not the whole suite" not in text
    assert "not the whole suite" in tuning_text(SUITE, [Tried("fedprox", tried)], whole=False)


@pytest.mark.parametrize("name", suites())
def test_every_rival_with_settings_has_one_of_them_and_no_more_than_the_budget(name: str) -> None:
    suite = load_suite(name)
    for words in suite.tuning.settings.values():
        assert len(words) <= suite.tuning.budget
        assert sum(word in suite.rivals for word in words) == 1
