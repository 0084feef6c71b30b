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
    assert found.most("dirichlet", 0.2) is None
    assert found.backdoor == {0.2: pytest.approx(2.0)}
    assert found.below == pytest.approx(15.0)
    assert guarded_tables.worst(LINES)["clip(TR)"].false_alarms == pytest.approx(1.0)


def test_the_best_are_those_least_below_the_plain_mean() -> None:
    met = [*LINES, line("clip(TR)", "backdoor", [0.75, 0.85], [0.95, 0.93])]
    assert guarded_tables.best(met, ["median(EQ)", "clip(TR)", "EQ"], 1) == ["EQ", "clip(TR)"]
    # Who was spared an attack is not the best for that.
    assert guarded_tables.best(LINES, ["median(EQ)", "clip(TR)", "EQ"], 1) == ["EQ", "median(EQ)"]
    assert guarded_tables.text(LINES).splitlines()[2].startswith("| `clip(TR)` | 1.0 | 4.0 (ipm, early, digits) |")
    assert "| digits, IID | 4.0 (ipm, early) | 3 |" in guarded_tables.of_rule(LINES, "clip(TR)")


def test_a_stopped_piece_goes_on_and_runs_no_cell_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guarded, "EARLY", 1)
    monkeypatch.setattr(guarded, "CONVERGED", 2)
    words = ["guarded", str(tmp_path), "--rules", "EQ centred-clip(TR)", "--seeds", "1", "--shares", "0.2"]
    words += ["--attacks", "backdoor", "--part", "1/2"]
    monkeypatch.setattr(sys, "argv", [*words, "--seconds", "0.001"])
    with pytest.raises(SystemExit) as stopped:
        guarded.main()
    assert stopped.value.code == 3
    monkeypatch.setattr(sys, "argv", words)
    guarded.main()
    lines = [json.loads(text) for text in (tmp_path / "digits-1of2.jsonl").read_text().splitlines()]
    assert [(each["scheme"], each["attack"], each["rule"]) for each in lines] == [
        ("iid", attack, rule) for attack in ("clean", "backdoor") for rule in ("EQ", "centred-clip(TR)")
    ]
    assert "alarms" in lines[1]
    assert len(lines[2]["backdoor"]) == 1
    assert 0 < lines[0]["converged"][0] <= 1
    capsys.readouterr()
    guarded.main()
    assert capsys.readouterr().out == ""


def test_the_final_stage_meets_every_attack_once_and_the_worst_ones_with_further_shares_and_rows() -> None:
    found = list(guarded.cells("final", ["alie", "ipm"], [0.2, 0.3], [60, 20], ["ipm"]))
    kinds = 6  # three data sets, IID and Dirichlet
    assert [(each.rows, each.share, each.attack) for each in found[::kinds]] == [
        (60, 0.0, "clean"),
        (60, 0.2, "alie"),
        (60, 0.2, "ipm"),
        (60, 0.3, "ipm"),
        (20, 0.0, "clean"),
        (20, 0.2, "ipm"),
    ]
    assert len({each.key for each in found}) == len(found) == 6 * kinds
    assert len(list(guarded.cells("final", ["alie", "ipm"], [0.2, 0.3], [60, 20]))) == kinds * (2 + 2 * 2 * 2)


def final(monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> None:
    words = ["guarded", str(folder), "--stage", "final", "--attacks", "semantic-boosted,adaptive-ipm"]
    monkeypatch.setattr(sys, "argv", [*words, "--few", "ipm+inflation", "--shares", "0.2,0.3", *more])
    guarded.main()


@pytest.mark.slow
def test_the_final_stage_goes_on_and_opens_its_seeds_for_one_set_of_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guarded, "EARLY", 1)
    monkeypatch.setattr(guarded, "CONVERGED", 2)
    monkeypatch.setattr(guarded, "RESULTS", tmp_path / "committed")
    # Seeds of its own: those of the stage stay closed.
    monkeypatch.setattr(guarded, "STAGES", {"final": (("digits",), (7, 8), 0)})
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stopped:
        final(monkeypatch, out, "--rows", "60,20", "--part", "1/2", "--seconds", "0.001")
    assert stopped.value.code == 3
    for part in ("1/2", "2/2"):
        final(monkeypatch, out, "--rows", "60,20", "--part", part)
    lines = guarded.read(out)
    cells = {(each["scheme"], each["rows"], each["share"], each["attack"]) for each in lines}
    settings = [(60, 0.0, "clean"), (60, 0.2, "semantic-boosted"), (60, 0.2, "adaptive-ipm")]
    settings += [(60, 0.3, "ipm+inflation"), (20, 0.0, "clean"), (20, 0.2, "ipm+inflation")]
    assert cells == {(scheme, *setting) for scheme in ("iid", "dirichlet") for setting in settings}
    # The plain mean takes part where nobody is hostile; each line has all seeds.
    assert {each["rule"] for each in lines if each["attack"] == "clean"} == {"EQ", "guarded"}
    assert {each["rule"] for each in lines if each["attack"] != "clean"} == {"guarded"}
    assert all(each["seeds"] == [7, 8] and len(each["converged"]) == 2 for each in lines)
    assert all(len(each["backdoor"]) == 2 for each in lines if each["attack"] == "semantic-boosted")
    capsys.readouterr()
    with pytest.raises(SystemExit) as refused:
        final(monkeypatch, out, "--rules", "EQ clip(RD)")
    assert refused.value.code == 2
    assert "seeds 7 to 8 were opened for guarded; allowed" in capsys.readouterr().err
    # Also where the lines of another machine were brought back and committed.
    (tmp_path / "committed").mkdir()
    (out / guarded.OPENED).rename(tmp_path / "committed" / guarded.OPENED)
    with pytest.raises(SystemExit) as refused:
        final(monkeypatch, tmp_path / "new", "--rules", "EQ clip(RD)")
    assert refused.value.code == 2
    with pytest.raises(SystemExit) as stopped:
        final(monkeypatch, tmp_path / "new", "--rules", "EQ clip(RD)", "--open-again", "--seconds", "-1")
    assert stopped.value.code == 3
    assert json.loads((tmp_path / "new" / guarded.OPENED).read_text())["rules"] == [["guarded"], ["clip(RD)"]]
