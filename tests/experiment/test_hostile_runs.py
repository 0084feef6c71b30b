"""Hostile and flawed clients and defences through whole runs: recorded, resumed to the same bits, capped, refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit import SMALL as KIT
from tests.kit import changed
from tests.stopping import assert_a_stop_changes_nothing

from steelyard.experiment.loading import build
from steelyard.experiment.rules import with_rules
from steelyard.experiment.running import resume, run
from steelyard.runs.facts import RunFacts
from steelyard.runs.history import History
from steelyard.runs.store import Store
from steelyard.studies.attack import outcomes, under_attack

SMALL = changed(
    KIT,
    partition={"clients": 10, "minimum": 8, "server": "fraction", "server_report": "apart"},
    training={"learning_rate": 0.5, "epochs": 2, "batch_size": 60},
    rounds={"count": 4, "fraction": 0.6},
    compute={"threads": 1},
    store={"checkpoint_every": 1},
)


def test_the_record_of_clients_survives_a_stop_and_alarms_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {**SMALL, "rounds": {"count": 5, "fraction": 1.0}}
    document["partition"] = {**SMALL["partition"], "scheme": "iid"}
    del document["partition"]["alpha"]
    rules = ["client-momentum+clip(product(RD,TR);mix)", "spectral(TR)", "EQ"]
    described = under_attack(with_rules(build(document), rules), "scaled-reversal", 0.2)
    assert_a_stop_changes_nothing(described, tmp_path, monkeypatch)
    found = {row.rule: row for row in outcomes(tmp_path / "whole", described.rounds)}
    assert found["EQ"].false_alarms is None
    for rule in rules[:2]:
        flags = History(tmp_path / "whole").clients.query("rule == @rule")
        hostile = set(History(tmp_path / "whole").flaws["client"])
        honest = flags[~flags["client"].isin(hostile)]
        assert found[rule].false_alarms == pytest.approx((honest["raw_TR"] == 0).mean())
        # Two clients that go the other way in every round are found out.
        last = flags[(flags["round"] == 5) & flags["client"].isin(hostile)]
        assert last["raw_TR"].tolist() == [0.0, 0.0]
        assert last["weight"].tolist() == [0.0, 0.0]


def test_a_liar_is_never_over_the_cap_in_a_whole_run(tmp_path: Path) -> None:
    rules = ["DS>LD>MD", "capped(DS;max_shares=1.5)", "capped(online(DS>LD>MD);max_weight=0.25)", "capped(DS;bound=2)"]
    described = with_rules(build(SMALL), rules)
    run(under_attack(described, "late-inflation", 0.2), out=tmp_path / "run")
    found = {row.rule: row for row in outcomes(tmp_path / "run", described.rounds)}
    clients = History(tmp_path / "run").clients
    largest = clients.groupby("rule")["weight"].max()
    assert found["DS>LD>MD"].largest > 0.4  # what lies take where nothing limits them
    for rule, cap in ((rules[1], 1.5 / 6), (rules[2], 0.25)):
        assert largest[rule] <= cap + 1e-12
        assert found[rule].largest == pytest.approx(cap)  # and they do take all that they may
    assert found[rules[3]].largest < found["DS>LD>MD"].largest
    claims = clients[clients["rule"] == "DS>LD>MD"]
    # They begin late.
    assert claims[claims["round"] < 3]["weight"].max() < 0.4
    # The number of classes is what the task can hold: no claim is above it.
    assert claims["raw_LD"].max() == 10
    assert not len(History(tmp_path / "run").failures_after())  # every claim could be true, so nobody was refused


def test_who_was_flawed_is_stored_for_every_seed_also_by_a_resume(tmp_path: Path) -> None:
    flawed = {**KIT, "flaws": [{"kind": "noisy", "pick": "random", "count": 1, "amount": 0.5}]}
    folder = run(build(flawed), out=tmp_path / "run", seeds=[3, 4])
    found = History(folder).flaws
    assert found["seed"].tolist() == [3, 4]
    store = Store(folder, 1, 1)
    store.note(RunFacts(status="stopped", flaws={}))
    store.close()
    resume(folder)
    assert History(folder).flaws.equals(found)
