"""Algorithms by name: in files, in --rules, refused where they do not go together with something, and kept by runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import CommandLine
from tests.kit import SMALL, assert_refused, changed, named, small
from tests.runs.contents import assert_same_bits
from tests.stopping import stopped_and_resumed

from steelyard import Algorithm, Experiment, algorithm
from steelyard.base.settings import validated
from steelyard.experiment.parts import federations_of
from steelyard.experiment.rules import with_rules
from steelyard.experiment.running import run
from steelyard.report.figures import draw
from steelyard.report.view import RunView
from steelyard.runs.history import History

SERVER = {"partition": {"server": "fraction", "server_fraction": 0.1}}


def test_words_name_algorithm_and_rule() -> None:
    found = with_rules(small(**SERVER), ["LD,scaffold,fedprox(mu=0.5)+LD>DS/max,fedavg,fedavgm(beta=0.5)+guarded"])
    made = {f.name: (f.algorithm.name, f.rule.names) for f in federations_of(found)}
    assert made == {
        "LD": ("fedavg", ("LD",)),
        "scaffold": ("scaffold", ("DS",)),
        "fedprox(mu=0.5)+LD>DS/max": ("fedprox", ("LD", "DS")),
        "fedavg": ("fedavg", ("DS",)),
        "fedavgm(beta=0.5)+guarded": ("fedavgm", ("RD",)),
    }
    assert federations_of(found)[2].algorithm.pull == 0.5


def test_rules_without_an_algorithm_take_the_experiments() -> None:
    found = with_rules(small(algorithm={"name": "fedprox", "mu": 0.2}), ["LD,fedavg,scaffold"])
    assert [(f.name, f.algorithm.name, f.algorithm.pull) for f in federations_of(found)] == [
        ("fedprox(mu=0.2)+LD", "fedprox", 0.2),
        ("fedavg", "fedavg", 0.0),
        ("scaffold", "scaffold", 0.0),
    ]


SECURE = {"privacy": {"aggregation": {"kind": "secure"}}}
MEDIAN = {"weighing": {"criteria": ["EQ"], "defence": {"rule": "median"}}}
NOISY = {"privacy": {"local": {"clip": 1.0, "noise": 1.0}, "criteria": "public"}}


@pytest.mark.parametrize(
    ("section", "others", "parts"),
    named(
        [
            ("a slip", {"name": "scafold"}, {}, ["algorithm.name", "'scafold'", "scaffold", "apfl, client-momentum"]),
            ("one's own", {"name": "mine"}, {}, ["algorithm.name", "'mine'", "plugins"]),
            ("adam", {"name": "fednova"}, {"training": {"optimiser": "adam"}}, ["training.optimiser", "adam", "sgd"]),
            ("robust and weighed", {"name": "fedfomo"}, MEDIAN, ["weighing.defence", "median", "weigh single models"]),
            (
                "no client trains",
                {"name": "scaffold"},
                {**SERVER, "weighing": {"trained_by": "server"}},
                ["name", "trained_by"],
            ),
            ("hidden vectors", {"name": "scaffold"}, SECURE, ["privacy.aggregation", "scaffold", "control_change"]),
            ("hidden updates", {"name": "fednova"}, SECURE, ["privacy.aggregation", "fednova", "single updates"]),
            ("shown models", {"name": "fedfomo"}, SECURE, ["privacy.aggregation", "fedfomo", "models as they are"]),
            ("noise", {"name": "fednova"}, NOISY, ["privacy.local", "fednova", "steps"]),
        ]
    ),
)
def test_what_does_not_go_together_is_refused(
    section: dict[str, Any], others: dict[str, Any], parts: list[str]
) -> None:
    document = changed(SMALL, algorithm=section, **others)
    assert_refused(lambda: validated(Experiment, document, ""), *parts)


def test_clients_that_test_each_others_models_stand_on_one_machine() -> None:
    assert_refused(small(algorithm={"name": "fedfomo"}).check_federated, "algorithm.name", "fedfomo")


def test_algorithms_that_need_the_sum_alone_go_with_robust_rules_and_hidden_sums() -> None:
    for name in ("fedprox", "feddyn", "fedavgm", "fedadam"):
        small(algorithm={"name": name}, **MEDIAN)
        small(algorithm={"name": name}, **SECURE)


OWN = """
from steelyard import Algorithm, ServerStep, algorithm


@algorithm("half-way")
class HalfWay(Algorithm):
    \"\"\"Goes a part of the way.\"\"\"

    part: float = 0.5

    def step(self, server: ServerStep):
        return server.parameters + self.part * server.change, {}
"""


def test_an_algorithm_of_ones_own(tmp_path: Path, command: CommandLine) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\n[rounds]\ncount = 2\n[model]\nname = "logistic"\n[partition]\nclients = 3\n'
        '[algorithm]\nname = "half-way"\npart = 0.25\nplugins = ["mine.py"]\n'
    )
    done = command("run", tmp_path / "mine.toml", "--trust", "--out", "run", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert "half-way" in done.stdout


def unused(self: object, given: object) -> None: ...


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("train", unused, "by_hand is False"),
        ("by_hand", True, "no train"),
        ("correction", unused, "corrects is 'nothing'"),
        ("listen", unused, "listens is False"),
        ("sent", unused, "replaces is False"),
    ],
)
def test_a_method_that_nobody_would_ask_for_is_refused(name: str, value: object, says: str) -> None:
    unasked = type("Unasked", (Algorithm,), {name: value})
    assert_refused(lambda: algorithm("unasked")(unasked), "@algorithm('unasked')", name, says)


# ---------------------------------------------------------------- what runs keep

RULES = ["scaffold,feddyn(alpha=0.1),fedadam,fedavgm+LD,fedprox(mu=0.5),client-momentum+clip(EQ)"]
PERSONAL = ["local-only,fine-tuned,ditto,apfl,fedrep(head_epochs=2),fedala,fedfomo"]


@pytest.mark.parametrize(("rules", "kept"), [(RULES, 3), (PERSONAL, 9)])
def test_a_stopped_comparison_goes_on_to_the_same_bits(tmp_path: Path, rules: list[str], kept: int) -> None:
    training = {"batch_size": 120, "momentum": 0.5, "schedule": {"kind": "cosine"}}
    described = small(model={"name": "mlp", "hidden": [8]}, rounds={"count": 4, "fraction": 0.5}, training=training)
    experiment = with_rules(described, rules)
    whole = run(experiment, out=tmp_path / "whole")
    assert_same_bits(whole, stopped_and_resumed(experiment, tmp_path / "cut", after=2))
    # The vectors that clients keep (control variates, momenta, models of their own), each of those who took part.
    assert sum("vector" in name for name in History(whole).last_checkpoint()[1]) > 3 * kept


def test_a_run_names_its_algorithms_and_keeps_who_listened_to_whom(tmp_path: Path, command: CommandLine) -> None:
    document = {"partition": {"clients": 4, "scheme": "iid"}, "rounds": {"count": 2, "fraction": 1.0}}
    folder = run(with_rules(small(**document), ["fedavg,fedfomo"]), out=tmp_path / "run")
    history = History(folder)
    rules = json.loads(command("table", folder, "--format", "json").stdout)["rules"]
    assert {row["rule"]: row["algorithm"] for row in rules} == {"fedavg": "fedavg", "fedfomo": "fedfomo"}
    found = history.listening
    assert set(found["rule"]) == {"fedfomo"}
    sums = found.groupby(["round", "client"])["weight"].sum()
    assert all(total == pytest.approx(1, abs=1e-5) or total == 0 for total in sums)
    assert draw(RunView([history]), "listening", rule="fedfomo") is not None
