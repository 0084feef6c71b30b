"""The words of --rules, the default rules, every policy, and what a comparison writes down."""

from __future__ import annotations

import pytest
from tests.kit import assert_refused

from steelyard import Experiment
from steelyard.experiment.loading import build, load, to_toml
from steelyard.experiment.rules import default_rules, load_comparison, parse_rules, with_rules

BASE = Experiment.model_validate({"weighing": {"criteria": ["DS", "LD", "MD"], "priority": "LD>DS>MD"}})


def test_the_default_rules_are_three_criteria_six_orders_and_online():
    assert list(default_rules(BASE)) == [
        *("DS", "LD", "MD"),
        *("DS>LD>MD", "DS>MD>LD", "LD>DS>MD", "LD>MD>DS", "MD>DS>LD", "MD>LD>DS"),
        "online(LD>DS>MD)",
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("online", ["online(LD>DS>MD)"]),
        ("fedavg,mean(DS,LD),product", ["fedavg", "mean(DS,LD)", "product(DS,LD,MD)"]),
        ("recipe,DS", ["LD>DS>MD", "DS"]),
        ("recipe,ld>ds>md", ["LD>DS>MD"]),
        ("FedAvg,FedProx(mu=0.1)+ld,Online", ["fedavg", "fedprox(mu=0.1)+LD", "online(LD>DS>MD)"]),
        ("Krum,FedMedian,multi-krum(DS)", ["multi-krum(EQ)", "median(EQ)", "multi-krum(DS)"]),
        ("DS>LD>MD/max,mean/rank", ["DS>LD>MD/max", "mean(DS,LD,MD)/rank"]),
        ("fitted(DS),fitted(DS>LD/max;steps=4;rate=0.5)", ["fitted(DS)", "fitted(DS>LD/max;steps=4;rate=0.5)"]),
        ("power(VP)^3/max", ["power(VP)^3/max"]),
        ("fitted(owa(VP,LD;most);steps=2)", ["fitted(owa(VP,LD;most);steps=2)"]),
    ],
)
def test_words_of_rules(text, names):
    assert list(parse_rules([text], BASE)) == names
    assert_refused(lambda: parse_rules([" , "], BASE), "--rules", "got nothing")


def test_a_capacity_is_read_from_the_file_that_a_word_names(tmp_path):
    capacity = tmp_path / "worth.toml"
    capacity.write_text('DS = 0.4\nLD = 0.3\n"DS,LD" = 1.0\n', encoding="utf-8")
    (choquet,) = parse_rules([f"choquet(DS,LD;{capacity})"], BASE).values()
    assert choquet.capacity == {"DS": 0.4, "LD": 0.3, "DS,LD": 1.0}


def test_rules_are_written_into_the_experiment_and_read_back(tmp_path):
    compared = with_rules(BASE, ["fedavg", "online", "DS>LD>MD"])
    assert list(compared.rules()) == ["fedavg", "online(LD>DS>MD)", "DS>LD>MD"]
    path = tmp_path / "again.toml"
    path.write_text(to_toml(compared))
    assert load(path).model_dump() == compared.model_dump()


def test_a_comparison_records_samples_and_writes_few_checkpoints():
    compared = load_comparison("quickstart")
    assert compared.rounds.samples
    assert compared.store.checkpoint_every == 2
    own = load_comparison("quickstart", ["store.checkpoint_every=1", "rounds.samples=false"], ["DS"])
    assert (own.store.checkpoint_every, own.rounds.samples) == (1, False)


HELD_OUT = {"scheme": "iid", "clients": 4, "server": "held-out", "test": "held-out"}
SAME_ROWS = {"data": {"source": "mnist"}, "model": {"name": "cnn-adafed"}, "partition": HELD_OUT}
USERS = {"kind": "recommend", "interactions": {"path": "x.tsv"}}
MEANT = {**SAME_ROWS, "partition": {**HELD_OUT, "server_report": "same"}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({**SAME_ROWS, "weighing": {"criteria": ["VP"]}}, "the same rows would weigh and report"),
        ({**MEANT, "weighing": {"criteria": ["VE"]}}, "VP, VS, VF"),
        ({**MEANT, "weighing": {"loss": {"adapt": "barron"}}}, "allowed: class-f1"),
        ({"weighing": {"criteria": ["DS", "LD"], "adjust": {}}, "rounds": {"evaluate_every": 2}}, "evaluate_every"),
        ({"partition": {"scheme": "iid", "clients": 2, "server_report": "apart"}}, "server_report: got 'apart'"),
        ({**USERS, "weighing": {"defence": {}}}, "weighing.defence: given, but clients of this kind"),
        ({**USERS, "privacy": {"aggregation": {"kind": "secure"}}}, "rows of single items"),
    ],
)
def test_what_cannot_be_weighed_honestly_is_refused_before_any_data_is_read(document, message):
    assert_refused(lambda: build(document), message)
