"""Runs that promise something: charged before noise is drawn, stopped in time, killed and resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import CommandLine
from tests.warm import warm_command

from steelyard.errors import UserError
from steelyard.experiment.guarantees import guarantee_notes
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.running import resume, run
from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.ledger import Ledger
from steelyard.privacy.ledger_marks import FILE
from steelyard.privacy.settings import PrivacySettings
from steelyard.rounds.private import PrivateRounds
from steelyard.runs.reader import History
from steelyard.settings import validated

BASE: dict[str, Any] = {
    "seed": 3,
    "data": {"source": "digits"},
    "partition": {"scheme": "iid", "clients": 10},
    "model": {"name": "logistic"},
    "training": {"learning_rate": 0.2, "epochs": 1, "batch_size": 40},
    "rounds": {"count": 3, "fraction": 0.5, "sampling": "poisson"},
    "weighing": {"criteria": ["DS"], "max_shares": 2.0},
    "privacy": {"central": {"clip": 1.0, "noise": 2.0, "references": {"DS": 140}}},
    "compute": {"engine": "loop"},
}
COHORT = {"clip": 1.0, "noise": 2.0, "weights": "cohort", "cohorts": "public"}


def described(**changes: Any) -> LearningDescription:
    document = json.loads(json.dumps(BASE))
    for name, value in changes.items():
        document[name] = value if name == "privacy" else {**document.get(name, {}), **value}
    return validated(LearningDescription, document, "experiment")


def test_rounds_show_what_they_have_spent(tmp_path: Path) -> None:
    folder = run(described(), out=tmp_path / "run")
    found = History(folder).rounds
    expected = [spent({Release(2.0, "poisson", 0.5): count}, 1e-5) for count in (1, 2, 3)]
    assert np.isnan(found["epsilon"].iloc[0])
    assert found["epsilon"].iloc[1:].tolist() == pytest.approx(expected, abs=5e-3)
    assert found["epsilon"].iloc[-1] == pytest.approx(expected[-1], abs=1e-6)
    promise = json.loads(History(folder).info["privacy"])
    assert promise["epsilon"] == {"capped(DS;max_shares=2)": pytest.approx(expected[-1])}
    assert promise["neighbours"] == "with or without one client"
    assert promise["noise"] == {"capped(DS;max_shares=2)": 2.0}


def test_a_run_stops_before_it_would_pass_its_budget_and_says_so(tmp_path: Path, messages: list[str]) -> None:
    limit = spent({Release(2.0, "poisson", 0.5): 2}, 1e-5) + 0.01
    privacy = {**BASE["privacy"], "budget": {"epsilon": limit}}
    folder = run(described(privacy=privacy, rounds={"count": 9, "evaluate_every": 5}), out=tmp_path / "run")
    found = History(folder).rounds
    assert found["round"].tolist() == [0, 1, 2]
    assert found["epsilon"].max() <= limit
    # The last round that the budget allows is tested, whatever evaluate_every says.
    assert found["accuracy"].notna().tolist() == [True, False, True]
    assert History(folder).info["status"] == "finished"
    assert any("stopped after round 2 of 9: another round would pass the budget" in line for line in messages)


def test_a_round_that_turns_out_to_pass_the_budget_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where clients come while a run is under way: the round before could not know."""
    affords = PrivateRounds.affords
    monkeypatch.setattr(PrivateRounds, "affords", lambda self, of, rounds: rounds != (2,) and affords(self, of, rounds))
    with pytest.raises(UserError, match=r"privacy\.budget\.epsilon: got 50, and round 2 of .* would exceed it"):
        run(described(privacy={**BASE["privacy"], "budget": {"epsilon": 50}}), out=tmp_path / "run")
    assert History(tmp_path / "run").rounds["round"].tolist() == [0, 1]
    assert (tmp_path / "run" / "privacy.jsonl").read_text().count("\n") == 1


def test_a_budget_that_allows_no_round_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    privacy = {**BASE["privacy"], "budget": {"epsilon": 0.01}}
    with pytest.raises(UserError, match=r"privacy\.budget\.epsilon: got 0\.01, and the first round .* alone costs"):
        run(described(privacy=privacy), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_delta_that_promises_nothing_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    privacy: dict[str, Any] = {**BASE["privacy"], "budget": {"delta": 0.1}}
    with pytest.raises(
        UserError, match=r"privacy\.budget\.delta: got 0\.1 with 10 clients, .*accept_large_delta = true"
    ):
        run(described(privacy=privacy), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    meant = {**privacy, "accept_large_delta": True}
    folder = run(described(privacy=meant, rounds={"count": 1}), out=tmp_path / "run")
    assert History(folder).rounds["epsilon"].iloc[-1] == pytest.approx(
        spent({Release(2.0, "poisson", 0.5): 1}, 0.1), abs=1e-6
    )


def test_secret_cohorts_of_a_fixed_size_are_charged_as_one_client_for_another(tmp_path: Path) -> None:
    folder = run(described(rounds={"count": 2, "fraction": 0.5, "sampling": "fixed"}), out=tmp_path / "run")
    found = json.loads(History(folder).info["privacy"])
    assert found["neighbours"] == "with one client, or with another in its place"
    assert found["accountant"] == "pld"
    # Twice as far apart as with or without a client: as two rounds of half the noise, and a little more.
    assert found["together"] == pytest.approx(spent({Release(2.0, "fixed", 0.5): 2}, 1e-5), abs=1e-6)
    assert found["together"] >= spent({Release(1.0, "poisson", 0.5): 2}, 1e-5)


def test_noise_is_found_for_the_budget(tmp_path: Path) -> None:
    privacy = {"central": {"clip": 1.0, "references": {"DS": 140}}, "budget": {"epsilon": 3.0}}
    folder = run(described(privacy=privacy), out=tmp_path / "run")
    found = History(folder).rounds
    assert found["round"].max() == 3
    assert 2.9 < found["epsilon"].iloc[-1] <= 3.0


def test_two_runs_of_one_seed_draw_other_cohorts_and_other_noise(tmp_path: Path) -> None:
    accuracies = [History(run(described(), out=tmp_path / name)).rounds["accuracy"].tolist() for name in ("a", "b")]
    assert accuracies[0][0] == accuracies[1][0]
    assert accuracies[0][1:] != accuracies[1][1:]


def test_public_cohorts_charge_each_client_for_the_rounds_it_takes_part_in(tmp_path: Path) -> None:
    privacy = {"central": COHORT, "criteria": "public"}
    folder = run(
        described(privacy=privacy, rounds={"count": 5, "fraction": 0.2, "sampling": "fixed"}), out=tmp_path / "run"
    )
    clients = History(folder).clients
    most = int(clients[clients["round"] > 0].groupby("client").size().max())
    assert most < 5
    assert History(folder).rounds["epsilon"].iloc[-1] == pytest.approx(spent({Release(2.0): most}, 1e-5))
    assert "declared public" in History(folder).info["notes"]


def test_charged_criteria_are_noised_and_cost_as_much_as_updates(tmp_path: Path) -> None:
    privacy = {"central": COHORT, "criteria": "charged", "criteria_bounds": {"DS": 200.0}}
    rounds = {"count": 1, "fraction": 1.0, "sampling": "fixed"}
    folder = run(described(privacy=privacy, rounds=rounds), out=tmp_path / "run")
    told = History(folder).clients["raw_DS"].dropna()
    assert told.between(0, 200).all()
    # IID clients hold 143 or 144 rows; noise of twice the range tells mostly its ends, at times of all of them.
    assert not told.isin([143.0, 144.0]).all()
    assert History(folder).rounds["epsilon"].iloc[-1] == pytest.approx(spent({Release(2.0): 2}, 1e-5))


def test_criteria_are_told_by_chance_and_a_resumed_run_counts_them(tmp_path: Path) -> None:
    privacy = {"local": {"clip": 1.0, "noise": 5.0}, "criteria": "charged", "criteria_noise": 0.5}
    privacy |= {"criteria_mechanism": "randomised-response", "criteria_levels": 11}
    changes: dict[str, Any] = {"rounds": {"count": 2, "sampling": "fixed"}, "weighing": {"criteria": ["LD"]}}
    folder = run(described(privacy=privacy, **changes), out=tmp_path / "run")
    told = History(folder).clients["raw_LD"].dropna()
    assert told.isin(range(11)).all()
    assert told.nunique() > 1
    charged = {charge.release for charge in Ledger(folder / FILE).charges}
    assert charged == {Release(5.0), Release(0.5, mechanism="pure")}
    cost = spent({Release(5.0): 2, Release(0.5, mechanism="pure"): 2}, 1e-5)
    assert History(folder).rounds["epsilon"].iloc[-1] == pytest.approx(cost, abs=1e-6)


def test_devices_that_add_noise_tell_neither_losses_nor_sizes(tmp_path: Path) -> None:
    privacy = {"local": {"clip": 1.0, "noise": 5.0}}
    changes: dict[str, Any] = {"rounds": {"count": 2, "sampling": "fixed"}, "weighing": {"criteria": ["EQ"]}}
    folder = run(described(privacy=privacy, **changes), out=tmp_path / "run")
    found = History(folder)
    assert set(found.clients["samples"].dropna()) == {1}
    assert found.clients["loss"].isna().all()
    assert found.rounds["epsilon"].iloc[-1] == pytest.approx(spent({Release(5.0): 2}, 1e-5))


@pytest.mark.parametrize("criteria", ["public", "charged"])
def test_a_nodes_answer_with_noise_passes_the_servers_checks(criteria: str) -> None:
    from steelyard.clients.flower import tasks
    from steelyard.clients.node import NodeConfig
    from steelyard.messages import Task

    privacy: dict[str, Any] = {"local": {"clip": 1.0, "noise": 2.0}, "criteria": criteria}
    if criteria == "charged":
        privacy["criteria_bounds"] = {"DS": 300.0}
    described_as = described(privacy=privacy)
    server = described_as.assemble()[1]
    node = described_as.on_node(NodeConfig.read({"partition-id": 0, "num-partitions": 5}))
    task = Task("f", 3, 1, node.names, server.initial(3))
    (answer,) = node.clients.train([task])
    known = {"DS": lambda value: None}
    arrived = tasks.read_updates(tasks.write_updates(answer), task, node.names, tasks.Expected(known))
    assert arrived.clients == node.names
    assert arrived.failures == ()
    assert arrived.losses.tolist() == [0.0, 0.0]
    moved = arrived.payload.divergence(task.parameters)
    # 650 parameters with noise 2·2C each: a length of about 4·√650 = 102, where the clipped update has at most 1.
    assert moved == pytest.approx([102.0, 102.0], rel=0.15)
    exact = {143.0, 144.0}
    assert (set(arrived.criteria["DS"]) <= exact) == (criteria == "public")


# Dies without a word after a round is charged and its noise is used, before the round is written.
def die_in_the_second_round() -> None:
    from steelyard.runs.store import Store

    commit = Store.commit

    def dying(self: Store, round: int, *rest: Any, **more: Any) -> None:
        if round == 2:
            os._exit(9)
        commit(self, round, *rest, **more)

    Store.commit = dying  # type: ignore[method-assign]


def written(path: Path) -> Path:
    import tomli_w

    path.write_text(tomli_w.dumps({"name": "private", **BASE}))
    return path


def test_a_round_that_is_run_again_after_a_kill_is_charged_again(tmp_path: Path) -> None:
    document, folder = written(tmp_path / "e.toml"), tmp_path / "run"
    killed = warm_command("run", document, "--out", folder, folder=tmp_path, before=die_in_the_second_round)
    assert killed.returncode == 9, killed.stderr
    assert [charge.round for charge in Ledger(folder / FILE).charges] == [1, 2]
    resume(folder)
    assert [charge.round for charge in Ledger(folder / FILE).charges] == [1, 2, 2, 3]
    last = History(folder).rounds["epsilon"].iloc[-1]
    assert last == pytest.approx(spent({Release(2.0, "poisson", 0.5): 4}, 1e-5), abs=1e-6)


def test_a_run_that_lost_its_ledger_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from steelyard.runs.store import Store

    commit = Store.commit

    def dying(self: Store, round: int, *rest: Any, **more: Any) -> None:
        if round == 2:
            raise KeyboardInterrupt
        commit(self, round, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "commit", dying)
        with pytest.raises(KeyboardInterrupt):
            run(described(), out=tmp_path / "run")
    (tmp_path / "run" / FILE).unlink()
    with pytest.raises(UserError, match=r"privacy\.jsonl: the ledger of this run is gone"):
        resume(tmp_path / "run")


def test_a_resume_whose_budget_is_used_up_ends_at_once(tmp_path: Path, messages: list[str]) -> None:
    # Two rounds are affordable; the second is charged and killed, so that its repetition is one too many.
    limit = spent({Release(2.0, "poisson", 0.5): 2}, 1e-5) + 0.01
    document, folder = tmp_path / "e.toml", tmp_path / "run"
    written(document)
    with document.open("a") as file:
        file.write(f"\n[privacy.budget]\nepsilon = {limit}\n")
    killed = warm_command("run", document, "--out", folder, folder=tmp_path, before=die_in_the_second_round)
    assert killed.returncode == 9, killed.stderr
    resume(folder)
    assert History(folder).rounds["round"].max() == 1
    assert len(Ledger(folder / FILE).charges) == 2
    assert any("stopped after round 1 of 3" in line for line in messages)


def test_a_run_with_hidden_updates_says_what_is_hidden_and_promises_no_more() -> None:
    (note,) = guarantee_notes(PrivacySettings.model_validate({"aggregation": {}}), ["DS"])
    assert (
        note == "updates are hidden by masks: the server sees their weighted sum, and criteria and losses in the open"
    )
    local = {"aggregation": {"kind": "ckks"}, "local": {"clip": 1.0, "noise": 1.0}}
    hidden, scores = guarantee_notes(PrivacySettings.model_validate(local), ["EQ"])
    assert "hidden by ckks" in hidden
    assert "not covered by the guarantee" in scores


def test_the_command_line_shows_what_was_spent(tmp_path: Path, steelyard: CommandLine) -> None:
    done = steelyard("run", written(tmp_path / "e.toml"), "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "ε " in done.stderr
    assert "privacy: ε 2.20" in done.stdout
    assert "at δ = 1e-05 (client-level, with or without one client; noise by the server, pld)" in done.stdout
    assert steelyard("report", tmp_path / "run").returncode == 0
    assert "ε 2.20" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
