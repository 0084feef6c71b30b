"""The choice of `guarded`: worst cases by hand, and a piece that stops and goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.kit import start

from benchmarks import guarded
from steelyard.data import load
from steelyard.experiment.loading import build


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


def test_rows_at_the_server_with_wrong_labels_and_without_two_classes(tmp_path: Path) -> None:
    """What trains at the clients and what reports stays as it is."""
    cell = guarded.Cell("roles", "digits", "iid", 60, 0.0, "clean", clients=4)
    described = build(guarded.experiment(cell))
    dataset = load(described.data)
    right, wrong, lacking = (guarded.HELD[held](dataset, described.partition, 1) for held in guarded.HELD)
    kept, spoiled, few = (each.dataset.labels.numpy()[each.server] for each in (right, wrong, lacking))
    assert len(spoiled) == 60
    assert sorted(kept) != sorted(spoiled)
    untouched = np.intersect1d(right.server, wrong.server)
    assert len(untouched) == 54
    assert set(few) == {0, 1, 4, 5, 6, 7, 8, 9}
    for each in (wrong, lacking):
        assert each.report.tolist() == right.report.tolist()
        assert [rows.train.tolist() for rows in each.clients] == [rows.train.tolist() for rows in right.clients]


def test_recall_of_the_flipped_class_is_told_against_the_run_without() -> None:
    clean = line("EQ", "clean", [0.9], [0.9], recall=[[0.9, 0.8]])
    flipped = line("EQ", "class-flip", [0.8], [0.8], recall=[[0.9, 0.5]])
    head, _, row = guarded.worst([clean, flipped]).splitlines()
    found = dict(zip(head.strip("| ").split(" | "), map(str.strip, row[1:-1].split("|")), strict=True))
    assert (found["recall lost"], found["recall of a class"]) == ("30.0", "80")


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
