"""The sentence on who won compares the same seeds on both sides, also where one of them ended early."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.report.made_run import RULES, make_run
from tests.runs.contents import chain_again

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


def test_all_seeds_count_where_all_have_a_score(run: Path) -> None:
    first = headline(RunView([run]))[0]
    assert first.startswith("VP>DS ended at 43.3% on clean rows, fedavg at 60.7%: -17.3 points; ahead in 2 of 3 seeds")


@pytest.mark.parametrize("rule", ["VP>DS", "fedavg"])
def test_a_seed_that_ended_on_one_side_is_left_out_on_both(run: Path, rule: str) -> None:
    end(run, rule, 3)
    told = headline(RunView([run]))
    assert told[0].startswith(
        "VP>DS ended at 55.0% on clean rows, fedavg at 46.0%: +9.0 points, on the 2 of 3 seeds in which both were "
        "tested; ahead in 2 of 2 seeds"
    )
    assert any(line.startswith(f"{rule}, seed 3, ended in round 2: {WHY}.") for line in told)


def test_a_rule_does_not_win_by_having_ended_in_the_hard_seeds(run: Path) -> None:
    """In the one seed that it ended with, it is behind fedavg by more than the other rule is in the mean of three."""
    score(run, "online(DS>LD)", 3, 0.7)  # fedavg: 0.9, so 20 points behind
    end(run, "online(DS>LD)", 1)
    end(run, "online(DS>LD)", 2)
    assert headline(RunView([run]))[0].startswith("VP>DS ended at 43.3% on clean rows, fedavg at 60.7%")


def test_one_seed_that_both_have_tells_no_effect_from_chance(run: Path) -> None:
    end(run, "VP>DS", 3)
    end(run, "fedavg", 2)
    first = headline(RunView([run]))[0]
    assert "+10.0 points, on the 1 of 3 seeds in which both were tested (one seed, so it may be chance" in first


def test_without_a_seed_that_both_have_nothing_is_compared(run: Path) -> None:
    end(run, "VP>DS", 3)
    end(run, "online(DS>LD)", 3)
    end(run, "fedavg", 1)
    end(run, "fedavg", 2)
    first = headline(RunView([run]))[0]
    assert first == "VP>DS ended at 55.0% on clean rows; there is no other rule to hold it against."
