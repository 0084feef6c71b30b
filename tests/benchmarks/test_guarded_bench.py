"""The choice of `guarded`: worst cases by hand, and a piece that stops and goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import guarded, guarded_tables


def line(rule: str, attack: str, early: list[float], converged: list[float], **more: Any) -> dict[str, Any]:
    setting: dict[str, Any] = {"stage": "digits", "data": "digits", "scheme": "iid", "rows": 60}
    setting |= {"share": 0.0 if attack == "clean" else 0.2}
    reached = {"seeds": list(range(1, len(early) + 1)), "early": early, "converged": converged}
    return {**setting, "attack": attack, "rule": rule, **reached, **more}


LINES = [
    line("EQ", "clean", [0.80, 0.90], [0.95, 0.95]),
    line("EQ", "ipm", [0.10, 0.10], [0.10, 0.10]),
    line("median(EQ)", "clean", [0.80, 0.80], [0.90, 0.92]),
    line("median(EQ)", "ipm", [0.70, 0.70], [0.90, 0.90]),
    line("median(EQ)", "backdoor", [0.80, 0.80], [0.88, 0.90], backdoor=[0.0, 0.04]),
    line("clip(TR)", "clean", [0.80, 0.88], [0.95, 0.95], alarms=[[0.02, 0.0], [0.0, 0.0]]),
    line("clip(TR)", "ipm", [0.75, 0.85], [0.95, 0.93], alarms=[[0.0, 0.9], [0.0, 1.0]]),
]


def test_the_worst_case_is_the_most_lost_early_or_late_against_the_same_rule() -> None:
    found = guarded_tables.worst(LINES)["median(EQ)"]
    assert found.cost == pytest.approx(5.0)  # early: 0 and 10 points below the plain mean
    lost, where = found.most("iid", 0.2) or (0.0, "")
    assert lost == pytest.approx(10.0)
    assert where == "ipm, early, digits"
    assert found.backdoor == {0.2: pytest.approx(2.0)}
    assert found.below == pytest.approx(15.0)
    assert guarded_tables.worst(LINES)["clip(TR)"].false_alarms == pytest.approx(1.0)


def test_a_stopped_piece_goes_on_and_runs_no_cell_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guarded, "EARLY", 1)
    monkeypatch.setattr(guarded, "CONVERGED", 2)
    words = ["guarded", str(tmp_path), "--rules", "EQ clip(TR)", "--seeds", "1", "--shares", "0.2"]
    words += ["--attacks", "backdoor", "--part", "1/2"]
    monkeypatch.setattr(sys, "argv", [*words, "--seconds", "0.001"])
    with pytest.raises(SystemExit) as stopped:
        guarded.main()
    assert stopped.value.code == 3
    monkeypatch.setattr(sys, "argv", words)
    guarded.main()
    lines = [json.loads(text) for text in (tmp_path / "digits-1of2.jsonl").read_text().splitlines()]
    assert [(each["scheme"], each["attack"], each["rule"]) for each in lines] == [
        ("iid", attack, rule) for attack in ("clean", "backdoor") for rule in ("EQ", "clip(TR)")
    ]
    assert "alarms" in lines[1]
    assert len(lines[2]["backdoor"]) == 1
    capsys.readouterr()
    guarded.main()
    assert capsys.readouterr().out == ""
