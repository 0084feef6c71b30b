"""The summary on the terminal, at the widths that people have."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.cli.tables import show_summary


def rule(name: str, accuracy: float) -> dict[str, Any]:
    return {
        "rule": name,
        "seed": 1,
        "server": {"accuracy": accuracy},
        "flawed": {"weight": 0.25, "samples": 0.5},
        "flawed_weight": 0.25,
        "accuracy": accuracy,
        "worst_tenth": 0.125,
        "rounds_to_target": None,
        "testing_rounds": 0,
        "orders": {"tried": {}, "kept": {}, "last": None},
        "heaviest_clients": [{"client": f"client-{i:03d}", "share": 0.1, "samples": 50} for i in range(5)],
        "criteria": [{"name": "DS", "measured_by": "client"}],
        "asks_clients": True,
        "adapts_loss": False,
        "fedavg": name == "fedavg",
    }


SUMMARY: dict[str, Any] = {
    "run": "run",
    "notes": "",
    "weighed_one": [],
    "chain": {"problem": "", "head": "", "round": 0},
    "privacy": None,
    "measure": "accuracy",
    "target": 0.9,
    "share": 0.5,
    "sentence": "One plain sentence.",
    "flaws": {"1": {"client-002": ["labels flipped (100%)"]}},
    "rules": [rule("VP>LD>DS/max", 0.75), rule("fedavg", 0.5)],
}


@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_tables_fit_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    show_summary(SUMMARY)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    first = next(line for line in lines if line.startswith("│ VP>LD>DS/max"))
    assert first.endswith("│")
    assert "75.00%" in first
    assert "25.0%" in first
    hidden = any(line.startswith("in a wider terminal also: ") for line in lines)
    assert hidden == (width <= 60)
    assert any("worst 10%" in line for line in lines) or hidden
