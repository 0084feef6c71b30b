"""The summary on the terminal, at the widths that people have."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.cli.summaries import show_summary


def rule(name: str, accuracy: float) -> dict[str, Any]:
    return {
        "rule": name,
        "seed": 1,
        "server": {"accuracy": accuracy},
        "flawed": {"weight": 0.25, "samples": 0.5},
        "flawed_weight": 0.25,
        "accuracy": accuracy,
        "accuracy_on": None,
        "worst_tenth": 0.125,
        "worst_tenth_on": {"rows": 24, "low": 0.043, "high": 0.31, "too_few": False},
        "rounds_to_target": None,
        "testing_rounds": 0,
        "orders": {"tried": {}, "kept": {}, "last": None},
        "heaviest_clients": [{"client": f"client-{i:03d}", "share": 0.1, "samples": 50} for i in range(5)],
        "criteria": [{"name": "DS", "measured_by": "client"}],
        "asks_clients": True,
        "adapts_loss": False,
        "lost": None,
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
    "server_rows": "the server's 46 rows",
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
    shown = " ".join(lines)
    for cell in ("75.00%", "50.00%", "25.0%", "12.50% [4–31] (24)", "46", "not reached"):
        assert cell in shown
    # Every column is there: what does not fit beside the others stands in a block below.
    assert sum(line.startswith("VP>LD>DS/max") for line in lines) == {50: 3, 60: 3, 80: 2, 120: 2}[width]
    assert any(line.startswith("fedavg") and "client-000 10.0% (50)" in line for line in lines)


def test_a_recommender_speaks_its_own_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    plain = rule("DS", 0.1842) | {"server": {}, "flawed": None, "flawed_weight": None, "worst_tenth": 0.0}
    show_summary(SUMMARY | {"measure": "ndcg@10", "rules": [plain | {"worst_tenth_on": None}], "flaws": {}})
    shown = capsys.readouterr().out
    assert "ndcg@10, mean over the users" in shown
    assert "0.1842" in shown
    assert "18.42%" not in shown
    assert "clients reach" not in shown
    assert shown.rstrip().endswith("next: steelyard recommend report run")


def test_control_characters_in_names_reach_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_summary(SUMMARY | {"rules": [rule("evil\x1b[2J[/b]", 0.5)], "sentence": "a\x1b]0;b"})
    assert "\x1b" not in (text := capsys.readouterr().out)
    assert "evil" in text
    assert "[/b]" in text


def test_scores_of_a_sample_have_their_interval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    drawn = rule("DS", 0.81) | {"accuracy_on": {"clients": 10_000, "of": 1_000_000, "low": 0.805, "high": 0.815}}
    show_summary(SUMMARY | {"rules": [drawn]})
    line = "tested on 10,000 of 1,000,000 clients; 95% interval for all: DS 80.50% to 81.50%"
    assert line in capsys.readouterr().out


def test_what_cutting_adapters_lost_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    show_summary(SUMMARY | {"rules": [rule("flexlora", 0.5) | {"lost": {"product": 0.125, "factors": 0.5}}]})
    shown = " ".join(capsys.readouterr().out.split())
    assert "cutting the weighted sum of the adapters to their rank lost 12.5% of it" in shown
    assert "averages of A and of B would have lost 50.0%" in shown
