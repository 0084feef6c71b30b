"""Attacks: their names, who is made hostile, what malicious clients did by hand, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import assert_refused, small
from tests.runs.records import evaluations, federation, record, state, updates

from steelyard.base.measures import estimate
from steelyard.experiment.loading import build
from steelyard.messages.payloads import DenseModels
from steelyard.report.rendering import render
from steelyard.runs.facts import RunFacts
from steelyard.runs.store import Store
from steelyard.studies.attack import (
    ADAPTIVE,
    ATTACKS,
    Attack,
    AttackBlock,
    AttackRow,
    Attacks,
    attack_names,
    attack_parts,
    outcomes,
    recommended,
    rules_for,
    under_attack,
)

BASE = small(rounds={"count": 5, "last": 2})


def test_names_of_attacks() -> None:
    fixed = [name for name in ATTACKS if not name.startswith("adaptive")]
    every = [name if name.endswith("inflation") else f"{name}+inflation" for name in fixed]
    assert attack_names(["all"]) == every
    assert attack_names(["alie, sign-flip+inflation,", "alie"]) == ["alie", "sign-flip+inflation"]
    assert attack_names(["alie+late-inflation"], adaptive=True) == [
        "alie+late-inflation",
        *(f"{name}+inflation" for name in ADAPTIVE),
    ]
    for wrong in ("inflation+late-inflation", "ali", "alie+ipm", "all+inflation"):
        assert_refused(lambda wrong=wrong: attack_names([wrong]), "--attack", f"'{wrong}'", "NAME+late-inflation")
    assert_refused(lambda: attack_names(["ali"]), "did you mean 'alie'")
    assert_refused(lambda: attack_names([" ,"]), "--attack", "got nothing")


@pytest.mark.parametrize(
    ("attack", "flaws"),
    [
        ("sign-flip", [{"kind": "reversed", "amount": 1.0, "pick": "random"}]),
        ("late-inflation", [{"kind": "claims-criteria", "from_round": 3, "pick": "random"}]),
        (
            "backdoor-boosted+inflation",
            [
                {"kind": "backdoor", "pick": "random"},
                {"kind": "boosted", "pick": "same"},
                {"kind": "claims-criteria", "from_round": None, "pick": "same"},
            ],
        ),
        (
            "alie+late-inflation",
            [
                {"kind": "alie", "from_round": None, "pick": "random"},
                {"kind": "claims-criteria", "from_round": 3, "pick": "same"},
            ],
        ),
    ],
)
def test_a_share_of_the_clients_becomes_hostile_beside_the_flaws_there_are(
    attack: str, flaws: list[dict[str, Any]]
) -> None:
    """Claims that begin late are true in the first half of five rounds."""
    own = BASE.changed({"flaws": [{"kind": "noisy", "pick": "biggest", "count": 2}]})
    first, *added = under_attack(own, attack, 0.25).model_dump()["flaws"]
    assert (first["kind"], first["count"]) == ("noisy", 2)
    assert [{name: row.get(name) for name in wanted} for wanted, row in zip(flaws, added, strict=True)] == flaws
    assert added[0]["share"] == 0.25


def test_what_cannot_be_attacked_is_refused() -> None:
    assert under_attack(BASE, "clean", 0.0) == BASE
    for fraction in (0.0, 0.5):
        assert_refused(lambda fraction=fraction: under_attack(BASE, "alie", fraction), "--fraction", f"{fraction:g}")
    lists = build({"kind": "recommend", "interactions": {"path": "x.tsv"}})
    assert_refused(lambda: under_attack(lists, "alie", 0.2), "'recommend'", "'learning'")
    errors = build({"data": {"source": "diabetes"}})
    assert_refused(lambda: under_attack(errors, "alie", 0.2), "no classes")


def test_a_server_with_rows_of_its_own_compares_one_rule_more() -> None:
    served = BASE.changed({"partition.server": "fraction"})
    assert [rule for rule in rules_for(served) if rule not in rules_for(BASE)] == ["fltrust(EQ)"]
    assert rules_for(BASE)[0] == "fedavg"
    assert rules_for(BASE)[-1] == rules_for(served)[-1] == "guarded"


CLIENTS = ("a", "b", "c")
# Rows of each client in two rounds, and whom the detector lets through.
ROWS = ([6, 3, 1], [3, 3, 2])
FLAGS = ([1, 0, 1], [1, 1, 0])


def made(
    folder: Path, flaws: Mapping[str, Mapping[str, Sequence[str]]], level: float, *door: str, ended: str = ""
) -> None:
    """Write a run of two rules, two seeds and two rounds; accuracy is the level, a tenth more in the second round."""
    rates = {"backdoor": lambda number: np.array([0.25, 1.0 / number])}
    columns = {**rates, "backdoor_rows": lambda _: np.array([3.0, 1.0])}
    folder.mkdir(parents=True)
    store = Store(folder)
    both = [("size", "DS", ROWS), ("detector", "TR", FLAGS)]
    ran = [
        (federation(f"{rule}/{seed}", seed, rule, criteria=(name,)), raw) for rule, name, raw in both for seed in (2, 1)
    ]
    store.register([one for one, _ in ran])
    for number in range(3):
        records = []
        for one, raw in ran if number else []:
            column = np.array(raw[number - 1], dtype=float)
            sent = updates(
                *(one.name, number),
                clients=CLIENTS,
                samples=column.astype(np.int64),
                criteria={},
                losses=np.ones(3),
                payload=DenseModels(torch.zeros(3, 1)),
                failures=(),
            )
            rows = {name: columns[name](number) for name in door}
            server = {"server_accuracy": level + number / 10, "server_macro_f1": 0.0, "server_metrics": {"f1": [1.0]}}
            records.append(
                record(
                    *(one.name, number),
                    updates=sent,
                    weighing=one.rule.weigh(column[:, None]),
                    order=(0,),
                    tried=(((0,), 0.5),),
                    evaluations=evaluations(one.name, number, scores=np.array([[number / 4, 1.0]]), metrics=rows),
                    accuracy=one.seed / 4,
                    **server if one.rule_name == "size" else {},
                )
            )
        why = {one.name: "exploded" if (number, one.rule_name) == (2, ended) else "" for one, _ in ran}
        states = {name: state(number, ended=reason) for name, reason in why.items()}
        store.commit(number, records, states, dict, last=number == 2)
    given = {seed: {client: list(words) for client, words in found.items()} for seed, found in flaws.items()}
    store.note(RunFacts(status="finished", flaws=given))
    store.close()


OWN = {"1": {"b": ["noisy"]}, "2": {"b": ["noisy"]}}
HOSTILE = {"1": {"b": ["noisy"], "c": ["reversed"]}, "2": {"b": ["noisy", "reversed"]}}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Client b is noisy in any case; hostile are c with one seed, b with the other."""
    folder = tmp_path_factory.mktemp("attacked")
    made(folder / "clean", OWN, 0.7)
    made(folder / "sign-flip", HOSTILE, 0.4)
    made(folder / "backdoor", HOSTILE, 0.6, "backdoor", "backdoor_rows")
    return folder


def test_what_hostile_clients_did_by_hand(attacked: Path) -> None:
    size, detector = outcomes(attacked / "backdoor", BASE.rounds, attacked / "clean")
    assert (size.rule, size.fedavg, detector.rule, detector.fedavg) == ("size", True, "detector", False)
    assert size.accuracy.values == pytest.approx((0.75, 0.75))  # the mean of .7 and .8 on the server's rows
    assert detector.accuracy.values == (0.25, 0.5)  # no server tested it: the clients' score, by the seed
    # c has .1 and .25 of the two rounds' weight; b .3 and .375.
    assert (size.weight, size.largest) == pytest.approx(((0.175 + 0.3375) / 2, 0.375))
    # The detector gives c ½ and 0, and b 0 and ½.
    assert (detector.weight, detector.largest) == pytest.approx((0.25, 0.5))
    # Of the two that are honest one was left out in one of two rounds.
    assert (size.false_alarms, detector.false_alarms) == (None, 1 / 4)
    # Three rows at a quarter and one at a half, in the last round.
    assert size.backdoor is not None
    assert size.backdoor.values == pytest.approx((1.25 / 4,) * 2)
    assert outcomes(attacked / "sign-flip", BASE.rounds)[0].backdoor is None
    late = outcomes(attacked / "backdoor", BASE.rounds.model_copy(update={"last": 1}), attacked / "clean")
    assert late[0].accuracy.values == pytest.approx((0.8, 0.8))
    # Whoever is flawed is hostile where no other run says who was so before.
    assert outcomes(attacked / "backdoor", BASE.rounds)[0].weight == pytest.approx(((0.4 + 0.625) / 2 + 0.3375) / 2)
    clean = outcomes(attacked / "clean", BASE.rounds, attacked / "clean")
    assert [(row.weight, row.largest, row.backdoor, row.ended) for row in clean] == [(None, None, None, 0)] * 2


def test_an_attack_is_held_against_the_run_without_it(attacked: Path, tmp_path: Path) -> None:
    study = Attack(attacks=("sign-flip", "backdoor"), fraction=0.25, seeds=2, experiment=BASE)
    assert [(cell.folder, cell.seeds) for cell in study.cells()] == [
        (name, (5, 6)) for name in ("clean", "sign-flip", "backdoor")
    ]
    assert [len(study.described(cell).flaws) for cell in study.cells()] == [0, 1, 1]
    found = study.answer(attacked)
    assert [block.attack for block in found.attacks] == ["clean", "sign-flip", "backdoor"]
    assert (found.folder, found.seeds, found.fraction, found.flawed_clients) == (str(attacked), 2, 0.25, ("b",))
    clean, flip, door = (block.rules[0] for block in found.attacks)
    assert clean.lost is None
    assert flip.lost is not None
    assert door.lost is not None
    assert (flip.lost.values, door.lost.values) == (pytest.approx((0.3, 0.3)), pytest.approx((0.1, 0.1)))
    assert found.recommendation is not None
    rows = {row.rule: row.value.values for row in found.recommendation.rules}
    assert rows == {"size": pytest.approx((0.55, 0.55)), "detector": (0.25, 0.5)}  # of both attacks the worse
    said, stored = study.next_lines(found)
    assert stored == f"runs stored in {attacked}"
    command = f"steelyard attack {attacked}/clean/experiment.toml --rules recipe --attack sign-flip,backdoor"
    assert f"{command} --fraction 0.25 --seeds" in said
    (tmp_path / "clean").mkdir()
    assert_refused(lambda: study.answer(tmp_path), tmp_path, "clean is not done")
    assert_refused(lambda: Attack(attacks=("none",), fraction=0.2, seeds=2, experiment=BASE), "--attack", "'none'")


def row(rule: str, *values: float, **fields: Any) -> AttackRow:
    return AttackRow(rule=rule, accuracy=estimate(values), **fields)


def test_a_rule_that_exploded_is_not_recommended_and_fedavg_may_have_another_name() -> None:
    size = row("size", 0.5, 0.5, 0.51, fedavg=True)
    exploded, sound = row("VP", 0.9, 0.91, 0.9, ended=1), row("LD", 0.7, 0.7, 0.72)
    found = recommended([AttackBlock(attack="flip", rules=(exploded, sound, size))], "again")
    assert found is not None
    assert (found.baseline, found.rule, found.where) == ("size", "LD", "under flip")
    reasons = {row.rule: row.left_out for row in found.rules}
    assert reasons == {"size": "", "LD": "", "VP": "its training diverged in 1 of 3 seeds under flip"}
    worse = recommended([AttackBlock(attack="flip", rules=(sound, size.model_copy(update={"ended": 3})))], "again")
    assert worse is not None
    assert worse.rule is None
    assert "size, the baseline: its training diverged in 3 of 3 seeds" in worse.sentence
    # Nobody weighs by size alone: the first is held against. The worst attack counts, seed by seed.
    other = AttackBlock(attack="door", rules=(row("VP", 0.2, 0.95, 0.2), row("LD", 0.6, 0.8, 0.6)))
    both = recommended([AttackBlock(attack="flip", rules=(row("VP", 0.9, 0.91, 0.9), sound)), other], "again")
    assert both is not None
    assert (both.baseline, both.where) == ("VP", "under the worst of 2 attacks")
    assert {row.rule: row.value.values for row in both.rules} == {"VP": (0.2, 0.91, 0.2), "LD": (0.6, 0.7, 0.6)}
    assert recommended([], "again") is None


def document() -> Attacks:
    first = row("EQ", 0.9, 0.92, weight=0.25, lost=estimate([0.02, 0.04]), backdoor=estimate([0.5, 0.5]))
    other = row("TR", 0.8, 0.8, false_alarms=0.125, lost=estimate([0.0, 0.0]))
    clean = AttackBlock(attack="clean", rules=(row("EQ", 0.93, 0.95), row("TR", 0.8)))
    attack = AttackBlock(attack="flip", rules=(first, other))
    return Attacks(
        folder="runs",
        seeds=2,
        recommendation=None,
        fraction=0.25,
        flawed_clients=("b", "c"),
        attacks=(clean, attack),
    )


def test_attacks_are_told_in_tables_and_in_lines() -> None:
    found = document()
    shown = render(attack_parts(found))
    for part in ("no attack: no malicious clients, but 2 that", "flip: 25% of the clients malicious"):
        assert part in shown
    cells = [line.split() for line in shown.splitlines() if line.startswith(("EQ", "TR", "rule"))]
    assert cells[:3] == [["rule", "accuracy"], ["EQ", "94.0", "±", "12.7"], ["TR", "80.0"]]
    assert cells[3] == ["rule", "accuracy", "lost", "weight", "backdoor", "false", "alarms"]
    assert cells[4] == ["EQ", "91.0", "±", "12.7", "3.0", "±", "12.7", "25%", "50", "%", "±", "0"]
    assert cells[5] == ["TR", "80.0", "±", "0.0", "0.0", "±", "0.0", "12.5%"]
    explained = " ".join(shown.split())
    for name in ("accuracy", "lost", "weight", "backdoor", "false alarms"):
        assert f"{name}: " in explained
    bare = found.model_copy(update={"flawed_clients": (), "attacks": found.attacks[:1]})
    assert "malicious clients, but" not in render(attack_parts(bare))
    assert "backdoor" not in render(attack_parts(bare))
    assert found.lines_on("EQ") == [
        "flip, 25% of the clients malicious: accuracy 91.0%, 3.0 points lost; they had 25% of all weight"
    ]
    assert found.lines_on("TR") == ["flip, 25% of the clients malicious: accuracy 80.0%, 0.0 points lost"]
    assert found.lines_on("LD") == ["flip, 25% of the clients malicious: tested under other rules only (EQ, TR)"]
    alone = AttackBlock(attack="door", rules=(row("EQ", 0.5),))
    assert found.model_copy(update={"attacks": (alone,)}).lines_on("EQ") == [
        "door, 25% of the clients malicious: accuracy 50.0%"
    ]
