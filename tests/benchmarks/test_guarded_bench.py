"""The choice of `guarded`: worst cases by hand, and a piece that stops and goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.kit import start

from benchmarks import guarded


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
    head, _, *rows = guarded.worst(LINES).splitlines()
    names = head.strip("| ").split(" | ")
    assert [row.split("`")[1] for row in rows] == ["clip(TR)", "median(EQ)", "EQ"], "the least below the mean first"
    clip, median, _ = (dict(zip(names, map(str.strip, row[1:-1].split("|")), strict=True)) for row in rows)
    assert median["clean cost"] == "5", "early: 0 and 10 points below the plain mean"
    assert (median["iid, 20%"], median["backdoor, 20%"]) == ("10.0 (ipm, early, digits)", "2%")
    assert (median["below"], median["cells"]) == ("15", "2")
    assert clip["false alarms"] == "1.0%"


def ended(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", list(words))
    with pytest.raises(SystemExit) as stopped:
        start(guarded.main)
    return stopped.value.code


def test_a_stopped_piece_goes_on_and_runs_no_cell_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guarded, "EARLY", 1)
    monkeypatch.setattr(guarded, "CONVERGED", 2)
    words = ["guarded", str(tmp_path), "--rules", "EQ clip(TR)", "--seeds", "1", "--shares", "0.2"]
    words += ["--attacks", "backdoor", "--part", "0/2"]
    assert ended(monkeypatch, *words, "--seconds", "0.001") == 3
    assert ended(monkeypatch, *words) == 0
    lines = [json.loads(text) for text in (tmp_path / "digits-0of2.jsonl").read_text().splitlines()]
    assert [(each["scheme"], each["attack"], each["rule"]) for each in lines] == [
        ("iid", attack, rule) for attack in ("clean", "backdoor") for rule in ("EQ", "clip(TR)")
    ]
    assert "alarms" in lines[1]
    assert len(lines[2]["backdoor"]) == 1
    capsys.readouterr()
    assert ended(monkeypatch, *words) == 0
    assert capsys.readouterr().out == ""
