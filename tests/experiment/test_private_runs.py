"""Runs that promise something: charged before noise is drawn, stopped in time, killed and resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from tests.kit import SMALL, assert_refused, changed
from tests.runs.contents import query
from tests.warm import warm_command

from steelyard.clients.flower import tasks
from steelyard.clients.node import NodeConfig
from steelyard.experiment.description import Description
from steelyard.experiment.loading import build
from steelyard.experiment.running import resume, run
from steelyard.messages.updates import Task
from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.ledger import FILE, Ledger
from steelyard.runs.history import History

BASE = changed(
    {**SMALL, "partition": {"scheme": "iid", "clients": 10}},
    seed=3,
    rounds={"count": 3, "fraction": 0.5, "sampling": "poisson"},
    weighing={"criteria": ["DS"], "max_shares": 2.0},
    privacy={"central": {"clip": 1.0, "noise": 2.0, "references": {"DS": 140}}},
)


FIXED = {"count": 2, "sampling": "fixed"}


def described(privacy: dict[str, Any] | None = None, **changes: Any) -> Description:
    return build({**changed(BASE, **changes), "privacy": privacy or BASE["privacy"]})


def cost(releases: dict[Release, int]) -> Any:
    return pytest.approx(spent(releases, 1e-5), abs=1e-6)


def test_rounds_show_what_they_have_spent_and_stop_before_they_would_pass_a_budget(
    tmp_path: Path, messages: list[str]
) -> None:
    release = Release(2.0, "poisson", 0.5)
    privacy = {**BASE["privacy"], "budget": {"epsilon": spent({release: 2}, 1e-5) + 0.01}}
    found = History(run(described(privacy=privacy, rounds={"count": 9}), out=tmp_path / "run"))
    epsilons = found.rounds["epsilon"]
    assert np.isnan(epsilons.iloc[0])
    # On the way it is counted coarsely.
    assert epsilons.iloc[1] == pytest.approx(spent({release: 1}, 1e-5), abs=5e-3)
    assert epsilons.iloc[2:].tolist() == [cost({release: 2})]
    promise = json.loads(found.info["privacy"])
    assert promise["epsilon"] == {"capped(DS;max_shares=2)": promise["together"]}
    assert promise["together"] == cost({release: 2})
    assert any("stopped after round 2 of 9: another round would pass the budget" in line for line in messages)


def test_what_promises_nothing_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    made = described({**BASE["privacy"], "budget": {"epsilon": 0.01}})
    assert_refused(lambda: run(made, out=tmp_path / "run"), "privacy.budget.epsilon", 0.01)
    assert not (tmp_path / "run").exists()


def test_two_runs_of_one_seed_draw_other_cohorts_other_noise_and_other_salts(tmp_path: Path) -> None:
    """The first record of a run that promises something begins with a secret: a head alone gives nothing away."""
    a, b = (History(run(described(), out=tmp_path / name)) for name in "ab")
    ones, others = (history.rounds["accuracy"].tolist() for history in (a, b))
    assert ones[0] == others[0]
    assert ones[1:] != others[1:]
    assert len(str(a.facts.salt)) == 64
    assert a.facts.salt != b.facts.salt
    first = [query(history.folder, "SELECT head FROM chain WHERE round = 0") for history in (a, b)]
    assert first[0] != first[1]


def test_criteria_are_told_by_chance(tmp_path: Path) -> None:
    privacy = {"local": {"clip": 1.0, "noise": 5.0}, "criteria": "charged", "criteria_noise": 0.5}
    privacy |= {"criteria_mechanism": "randomised-response", "criteria_levels": 11}
    folder = run(described(privacy, rounds=FIXED, weighing={"criteria": ["LD"]}), out=tmp_path / "run")
    clients = History(folder).clients
    told = clients["raw_LD"].dropna()
    assert told.isin(range(11)).all()
    assert told.nunique() > 1
    # Neither losses nor sizes are told.
    assert clients["loss"].isna().all()
    assert set(clients["samples"].dropna()) == {1}
    chance = Release(0.5, mechanism="pure")
    assert {charge.release for charge in Ledger(folder / FILE).charges} == {Release(5.0), chance}
    assert History(folder).rounds["epsilon"].iloc[-1] == cost({Release(5.0): 2, chance: 2})


@pytest.mark.parametrize("criteria", ["public", "charged"])
def test_a_nodes_answer_with_noise_passes_the_servers_checks(criteria: str) -> None:
    bounds = {"criteria_bounds": {"DS": 300.0}} if criteria == "charged" else {}
    made = described({"local": {"clip": 1.0, "noise": 2.0}, "criteria": criteria, **bounds})
    node = made.on_node(NodeConfig.read({"partition-id": 0, "num-partitions": 5}))
    task = Task("f", 3, 1, node.names, made.assemble()[1].initial(3))
    (answer,) = node.clients.train([task])
    expected = tasks.Expected({"DS": lambda value: None})
    arrived = tasks.read_updates(tasks.write_updates(answer), task, node.names, expected)
    assert (arrived.clients, arrived.failures) == (node.names, ())
    assert arrived.losses.tolist() == [0.0, 0.0]
    # 650 parameters with noise 2·2C each: a length of about 4·√650 = 102, where the clipped update has at most 1.
    assert arrived.payload.divergence(task.parameters) == pytest.approx([102.0, 102.0], rel=0.15)
    assert (set(arrived.criteria["DS"]) <= {143.0, 144.0}) == (criteria == "public")


# Dies without a word after a round is charged and its noise is used, before the round is written.
def die_in_the_second_round() -> None:
    from steelyard.runs.store import Store

    commit = Store.commit

    def dying(self: Store, round: int, *rest: Any, **more: Any) -> None:
        if round == 2:
            os._exit(9)
        commit(self, round, *rest, **more)

    Store.commit = dying  # type: ignore[method-assign]


def killed(folder: Path, **budget: float) -> Path:
    """Return a run of which the second round was charged and not written."""
    file = folder / "mine.toml"
    file.write_text(tomli_w.dumps(changed(BASE, privacy={"budget": budget})))
    done = warm_command("run", file, "--out", "run", folder=folder, before=die_in_the_second_round)
    assert done.returncode == 9, done.stderr
    return folder / "run"


def test_a_round_that_is_run_again_after_a_kill_is_charged_again(tmp_path: Path) -> None:
    folder = killed(tmp_path)
    assert [charge.round for charge in Ledger(folder / FILE).charges] == [1, 2]
    resume(folder)
    assert [charge.round for charge in Ledger(folder / FILE).charges] == [1, 2, 2, 3]
    assert History(folder).rounds["epsilon"].iloc[-1] == cost({Release(2.0, "poisson", 0.5): 4})


def test_a_resume_whose_budget_is_used_up_ends_at_once(tmp_path: Path, messages: list[str]) -> None:
    # Two rounds are affordable; the second is charged and killed, so that its repetition is one too many.
    folder = killed(tmp_path, epsilon=spent({Release(2.0, "poisson", 0.5): 2}, 1e-5) + 0.01)
    resume(folder)
    assert History(folder).rounds["round"].max() == 1
    assert len(Ledger(folder / FILE).charges) == 2
    assert any("stopped after round 1 of 3" in line for line in messages)
