"""Hostile clients and defences through whole runs: resumed to the same bits, recorded, capped, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.experiment.hostile_clients import SMALL
from tests.runs.contents import checkpoint
from tests.stopping import assert_a_stop_changes_nothing

from steelyard.errors import UserError
from steelyard.experiment.comparing import with_rules
from steelyard.experiment.loading import build, load
from steelyard.experiment.running import run
from steelyard.report.hostile import outcome
from steelyard.runs.reader import History
from steelyard.sweeps.attacking import attack_names, under_attack


def defended(**defence: Any) -> dict[str, Any]:
    return {**SMALL, "weighing": {"criteria": ["DS"], "name": "rule", "defence": defence}}


def test_the_radius_that_leans_on_the_round_before_survives_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smoothed = build(defended(rule="clip", quantile=0.3, smooth=0.8))
    assert_a_stop_changes_nothing(smoothed, tmp_path, monkeypatch)
    # The radius does lean: a run whose radius is each round's own ends elsewhere.
    run(build(defended(rule="clip", quantile=0.3)), out=tmp_path / "own")
    ours, theirs = checkpoint(tmp_path / "whole")[2], checkpoint(tmp_path / "own")[2]
    assert not torch.equal(ours["models/rule"], theirs["models/rule"])


def test_the_record_of_clients_and_the_chance_of_buckets_survive_a_stop_and_alarms_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {**SMALL, "rounds": {"count": 5, "fraction": 1.0}}
    document["partition"] = {**SMALL["partition"], "scheme": "iid"}
    del document["partition"]["alpha"]
    rules = ["client-momentum+clip(product(RD,TR);buckets=2)", "flame(TR)", "EQ"]
    described = under_attack(with_rules(build(document), rules), "scaled-reversal", 0.2)
    assert_a_stop_changes_nothing(described, tmp_path, monkeypatch)
    found = outcome(tmp_path / "whole", described.rounds)
    assert found["EQ"]["false_alarms"] is None
    for rule in rules[:2]:
        flags = History(tmp_path / "whole").clients.query("rule == @rule")
        hostile = set(History(tmp_path / "whole").flaws["client"])
        honest = flags[~flags["client"].isin(hostile)]
        assert found[rule]["false_alarms"] == pytest.approx((honest["raw_TR"] == 0).mean())
        # Two clients that go the other way in every round are found out.
        last = flags[(flags["round"] == 5) & flags["client"].isin(hostile)]
        assert last["raw_TR"].tolist() == [0.0, 0.0]
        assert last["weight"].tolist() == [0.0, 0.0]


def test_the_success_of_a_backdoor_is_recorded(tmp_path: Path) -> None:
    described = with_rules(build({**SMALL, "rounds": {"count": 6, "fraction": 1.0}}), ["EQ", "median(EQ)"])
    run(under_attack(described, "backdoor", 0.4), out=tmp_path / "run")
    frame = History(tmp_path / "run").evaluations
    assert ((frame["backdoor"] >= 0) & (frame["backdoor"] <= 1)).all()
    found = outcome(tmp_path / "run", described.rounds)
    (plain,), (median,) = found["EQ"]["backdoor"], found["median(EQ)"]["backdoor"]
    assert plain > 0.5 > median
    last = frame[(frame["rule"] == "EQ") & (frame["round"] == 6)]
    rows = last["backdoor_rows"]
    assert plain == pytest.approx((last["backdoor"] * rows).sum() / rows.sum())
    # Rows of the target's own class cannot be fooled, and are not counted.
    assert 0 < rows.sum() < last["samples"].sum()


def test_a_liar_is_never_over_the_cap_in_a_whole_run(tmp_path: Path) -> None:
    rules = [
        *("DS>LD>MD", "capped(DS>LD>MD;max_weight=0.25)", "capped(DS;max_shares=1.5)"),
        *("online(DS>LD>MD)", "capped(online(DS>LD>MD);max_weight=0.25)", "capped(DS;bound=2)"),
    ]
    described = with_rules(build(SMALL), rules)
    run(under_attack(described, "inflation", 0.2), out=tmp_path / "run")
    found = outcome(tmp_path / "run", described.rounds)
    clients = History(tmp_path / "run").clients
    largest = clients.groupby("rule")["weight"].max()
    assert found["DS>LD>MD"]["largest"] > 0.4  # what lies take where nothing limits them
    for rule, cap in ((rules[1], 0.25), (rules[2], 1.5 / 6), (rules[4], 0.25)):
        assert largest[rule] <= cap + 1e-12
        assert found[rule]["largest"] == pytest.approx(cap)  # and they do take all that they may
    assert found[rules[5]]["largest"] < found["DS>LD>MD"]["largest"]
    claims = clients[clients["rule"] == "DS>LD>MD"]
    # The number of classes is what the task can hold: no claim is above it.
    assert claims["raw_LD"].max() == 10
    assert claims["raw_DS"].max() > 1000 * claims["raw_DS"].median() / 10
    assert not len(History(tmp_path / "run").failures_after())  # every claim could be true, so nobody was refused


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {**defended(rule="fltrust"), "partition": {"scheme": "iid", "clients": 10}},
            r"weighing\.defence\.rule: fltrust trains on the server's test set, and partition\.server = 'none'",
        ),
        (
            {"kind": "recommend", "interactions": {"path": "x.tsv"}, "weighing": {"defence": {}}},
            "weighing.defence: given, but clients of this kind do not send whole models",
        ),
    ],
)
def test_what_a_server_cannot_follow_is_refused_before_the_run(document: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(document)


def test_what_cannot_be_attacked() -> None:
    assert attack_names(["all"])[-3:] == ["semantic-boosted+inflation", "late-inflation", "inflation"]
    assert not any(name.startswith("adaptive") for name in attack_names(["all"]))
    assert attack_names([], adaptive=True)[0] == "adaptive+inflation"
    with pytest.raises(UserError, match=r"--attack: got 'inflation\+late-inflation'"):
        attack_names(["inflation+late-inflation"])
    assert attack_names(["alie, sign-flip+inflation", "alie"]) == ["alie", "sign-flip+inflation"]
    with pytest.raises(UserError, match="of kind 'recommend' have no hostile clients"):
        under_attack(load("fpl-ml1m"), "sign-flip", 0.2)
    assert under_attack(build(SMALL), "clean", 0.0) == build(SMALL)


def test_lies_that_begin_late(tmp_path: Path) -> None:
    described = with_rules(build({**SMALL, "rounds": {"count": 4, "fraction": 1.0}}), ["fedavg"])
    attacked = under_attack(described, "late-inflation", 0.2)
    (flaw,) = attacked.model_dump(mode="json")["flaws"]
    assert (flaw["kind"], flaw["from_round"]) == ("claims-criteria", 3)
    run(attacked, out=tmp_path / "run")
    clients = History(tmp_path / "run").clients
    largest = clients.groupby("round")["weight"].max()
    assert (largest[[1, 2]] < 0.5).all()
    assert (largest[[3, 4]] > 0.49).all()  # two liars, a thousand times as large as they are
    alone = under_attack(described, "free-riders+late-inflation", 0.2).model_dump(mode="json")["flaws"]
    assert [(each["kind"], each["pick"]) for each in alone] == [("free-rider", "random"), ("claims-criteria", "same")]


@pytest.mark.parametrize("attack", ["free-riders+late-inflation", "semantic-boosted+late-inflation", "bias-push"])
def test_attacks_survive_a_stop(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = under_attack(with_rules(build(SMALL), ["fedavg", "clip(EQ)"]), attack, 0.3)
    assert_a_stop_changes_nothing(described, tmp_path, monkeypatch)


# One class flipped by four of ten with an equal say is outvoted by the rows of the others: they must lie to reach it.
@pytest.mark.parametrize(
    ("attack", "rule"),
    [("class-flip+inflation", "fedavg"), ("semantic-boosted", "EQ"), ("backdoor-boosted", "EQ")],
)
def test_how_often_an_aim_is_reached(attack: str, rule: str, tmp_path: Path) -> None:
    described = with_rules(build({**SMALL, "rounds": {"count": 6, "fraction": 1.0}}), [rule])
    rates: list[float] = []
    for name in ("clean", attack):
        # Without an attack the same rows are tested: a flaw of hardly any row brings them in.
        document = under_attack(described, attack, 0.4).model_dump(mode="json", exclude_none=True)
        if name == "clean":
            document["flaws"] = [{**document["flaws"][0], "amount": 1e-9}]
        run(build(document), out=tmp_path / name)
        (rate,) = outcome(tmp_path / name, described.rounds)[rule]["backdoor"] or ()
        rates.append(rate)
    assert rates[1] > rates[0] + 0.3
    assert rates[0] < 0.35
