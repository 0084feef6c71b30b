"""A report begins with the recommendation, and says what stands against one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.report.made_run import RULES, make_run
from tests.runs.contents import chain_again

from steelyard.report.documents.comparison import Recommendation
from steelyard.report.headline import headline
from steelyard.report.view import RunView
from steelyard.runs.store import Store

WHY = "no client's model is finite"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three seeds in which the last scores on the server's rows are known."""
    folder = make_run(tmp_path / "run", rounds=2, clients=4, seeds=(1, 2, 3), rules=RULES)
    scores = {"VP>DS": (0.5, 0.6, 0.2), "fedavg": (0.4, 0.52, 0.9), "online(DS>LD)": (0.1, 0.1, 0.1)}
    for rule, found in scores.items():
        for seed, accuracy in enumerate(found, start=1):
            score(folder, rule, seed, accuracy)
    return folder


def score(folder: Path, rule: str, seed: int, accuracy: float | None) -> None:
    change(folder, "UPDATE rounds SET server_accuracy = ? WHERE federation = {}", rule, seed, accuracy)


def end(folder: Path, rule: str, seed: int) -> None:
    """Let a rule's model explode before the server first tested it, as `rounds.evaluate_every` makes possible."""
    score(folder, rule, seed, None)
    change(folder, "INSERT INTO ended VALUES ({}, 2, ?)", rule, seed, WHY)


def change(folder: Path, query: str, rule: str, seed: int, value: object) -> None:
    store = Store(folder)
    federation = "(SELECT id FROM federations WHERE rule = ? AND seed = ?)"
    values = (value, rule, seed) if query.index("?") < query.index("{}") else (rule, seed, value)
    with store._db:
        store._db.execute(query.format(federation), values)
        chain_again(store._db)
    store.close()


def test_the_report_begins_with_the_recommendation(run: Path) -> None:
    """VP>DS is ahead by 10 and 8 points and behind by 70: the mean is -17.3, the deviation 45.6."""
    first = headline(RunView([run]))[0]
    assert first.startswith(
        "Keep fedavg: with 3 seeds nothing is better on the server's clean rows; a difference under "
    )
    document = RunView([run]).documents[0]
    assert document is not None
    assert document["recommendation"]["sentence"] == first
    tested = {row["rule"]: row for row in document["recommendation"]["rules"]}
    assert tested["VP>DS"]["difference"]["values"] == pytest.approx([0.1, 0.08, -0.7])
    assert tested["VP>DS"]["ahead"] == 2


@pytest.mark.parametrize("rule", ["VP>DS", "fedavg"])
def test_a_rule_whose_model_exploded_is_not_recommended(run: Path, rule: str) -> None:
    for seed in (1, 2, 3):
        score(run, "VP>DS", seed, 0.95 + seed / 100)
    assert headline(RunView([run]))[0].startswith("Keep fedavg")  # .9 in the third seed, .4 and .52 before
    end(run, rule, 3)
    lines = headline(RunView([run]))
    assert any(line.startswith(f"{rule}, seed 3, ended in round 2: {WHY}.") for line in lines)
    if rule == "fedavg":
        assert lines[0] == ("No recommendation: fedavg, which the others are held against, exploded in 1 of 3 seeds.")
    else:
        document = RunView([run]).documents[0]
        assert document is not None
        left_out = {row["rule"]: row["left_out"] for row in document["recommendation"]["rules"]}
        assert left_out == {"fedavg": "", "VP>DS": "its model exploded in 1 of 3 seeds", "online(DS>LD)": ""}


def test_a_run_that_goes_on_recommends_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=2, clients=4, seeds=(1, 2, 3), rules=RULES, status="stopped")
    first, *_ = headline(RunView([folder]))
    assert first == "No recommendation: the run is stopped, after round 2 of 2."


def test_rows_that_chose_do_not_decide(tmp_path: Path) -> None:
    """Online adjustment picks its order by the clients' tests, and 'same' weighs clients on the rows that report."""
    folder = make_run(tmp_path / "run", rounds=2, clients=4, seeds=(1, 2, 3), rules=RULES)
    toml = folder / "experiment.toml"
    text = toml.read_text(encoding="utf-8")

    def recommended(server: str) -> Recommendation:
        toml.write_text(text.replace('server_report = "apart"', server), encoding="utf-8")
        found = RunView([folder]).documents[0]
        assert found is not None
        return found["recommendation"]

    assert recommended('server_report = "apart"')["where"] == "on the server's clean rows"
    found = recommended('server_report = "same"')
    assert found["where"] == "on the clients' 40 test rows"
    left_out = {row["rule"]: row["left_out"] for row in found["rules"]}
    assert left_out["online(DS>LD)"] == "the rows that report also chose its order"
    assert left_out["VP>DS"] == ""


def test_a_private_comparison_says_what_it_spent(run: Path) -> None:
    promise = {
        "model": "central",
        "delta": 1e-5,
        "budget": 8.0,
        "accountant": "rdp",
        "clip": 1.0,
        "noise": {},
        "epsilon": {"VP>DS": 4.0, "fedavg": 4.0},
        "together": 6.25,
        "neighbours": "add or remove",
        "charges": 2,
        "ended": {},
        "notes": [],
    }
    store = Store(run)
    store.note(privacy=promise)
    store.close()
    first = headline(RunView([run]))[0]
    assert first.startswith("Keep fedavg: ")
    assert first.endswith(" Comparing spent ε 6.25 of any one client's privacy, all rules together.")


def test_few_rows_recommend_nothing_and_the_clients_tests_choose(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=2, clients=4, seeds=(1, 2, 3), rules=RULES)

    def found(rows: int) -> str:
        store = Store(folder)
        store.note(report_rows=dict.fromkeys(("1", "2", "3"), rows))
        store.close()
        document = RunView([folder]).documents[0]
        assert document is not None
        return document["recommendation"]["sentence"]

    assert found(29) == "No recommendation: 29 rows are too few to report on rules (30 at least)."
    for rule, gain in (("VP>DS", 0.05), ("online(DS>LD)", 0.04)):
        for seed in (1, 2, 3):
            score(folder, "fedavg", seed, 0.5 + seed / 100)
            score(folder, rule, seed, 0.5 + seed / 100 + gain + seed / 10_000)
    assert found(30).startswith("Use ")
    assert found(30).endswith(" The clients' 40 test rows chose it.")
