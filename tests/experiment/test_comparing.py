"""The words of --rules, the default rules, and what a comparison writes down."""

from __future__ import annotations

import pytest

from steelyard import Experiment, UserError
from steelyard.experiment.comparing import default_rules, load_comparison, with_rules
from steelyard.experiment.loading import load, recipes, to_toml
from steelyard.experiment.rule_words import parse_rules
from steelyard.weighing.adafed import BarronLoss, ClassLoss, loss_rule

BASE = Experiment.model_validate({"weighing": {"criteria": ["DS", "LD", "MD"], "priority": "LD>DS>MD"}})


def test_the_default_rules_are_three_criteria_six_orders_and_online():
    assert list(default_rules(BASE)) == [
        *("DS", "LD", "MD"),
        *("DS>LD>MD", "DS>MD>LD", "LD>DS>MD", "LD>MD>DS", "MD>DS>LD", "MD>LD>DS"),
        "online(LD>DS>MD)",
    ]


def test_a_recipe_without_an_order_compares_its_own_rules():
    assert list(default_rules(load("adafed-2"))) == ["adafed", "adafed-weights", "fedavg"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("DS", ["DS"]),
        ("MD>DS>LD", ["MD>DS>LD"]),
        ("LD>DS", ["LD>DS"]),
        ("online", ["online(LD>DS>MD)"]),
        ("online(MD>DS>LD)@7", ["online(MD>DS>LD)@7"]),
        ("greedy, bandit", ["greedy(LD>DS>MD)", "bandit(LD>DS>MD)"]),
        ("budget(20)", ["budget(20)"]),
        ("fedavg,mean(DS,LD),product", ["fedavg", "mean(DS,LD)", "product(DS,LD,MD)"]),
        ("recipe,DS", ["LD>DS>MD", "DS"]),
        ("DS>LD>MD/max,mean/rank", ["DS>LD>MD/max", "mean(DS,LD,MD)/rank"]),
        ("fitted(DS),fitted(DS>LD/max;steps=4;rate=0.5)", ["fitted(DS)", "fitted(DS>LD/max;steps=4;rate=0.5)"]),
        ("weighted-mean(DS=2,LD=1),owa(DS,LD;most)", ["weighted-mean(DS=2,LD=1)", "owa(DS,LD;most)"]),
        ("power(VP)^3/max", ["power(VP)^3/max"]),
    ],
)
def test_words_of_rules(text, names):
    assert list(parse_rules([text], BASE)) == names


def test_what_the_words_of_scores_and_fits_stand_for(tmp_path):
    capacity = tmp_path / "worth.toml"
    capacity.write_text('DS = 0.4\nLD = 0.3\n"DS,LD" = 1.0\n', encoding="utf-8")
    words = ["weighted-mean(DS=2,LD=1)", "owa(DS,LD;0.7,0.3)", "owa(DS,LD;most)", f"choquet(DS,LD;{capacity})"]
    weighted, ranked, most, choquet = parse_rules(words, BASE).values()
    assert weighted.weights == (2.0, 1.0)
    assert ranked.weights == (0.7, 0.3)
    assert most.quantifier == "most"
    assert choquet.capacity == {"DS": 0.4, "LD": 0.3, "DS,LD": 1.0}
    (fitted,) = parse_rules(["fitted(LD>DS/max;steps=4;shrink=0.5)"], BASE).values()
    assert (fitted.criteria, fitted.normalise) == (("LD", "DS"), "max")
    assert fitted.fit is not None
    assert (fitted.fit.steps, fitted.fit.rate, fitted.fit.shrink) == (4, 3.0, 0.5)
    served = Experiment.load("quickstart", ["partition.server=fraction"])
    assert parse_rules(["server-only"], served)["server-only"].trained_by == "server"


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("fitted(DS;steps)", "allowed: fitted(RULE;steps=10;rate=3;shrink=0)"),
        ("fitted(DS;step=3)", "unknown field"),
        ("owa(DS,LD;sometimes)", "sometimes"),
        ("weighted-mean(DS=x,LD=1)", "allowed: a number"),
        ("choquet(DS,LD;nowhere.toml)", "nowhere.toml cannot be read"),
        ("DS>XX/max", "names no rule or criterion 'XX'"),
    ],
)
def test_slips_in_the_new_words_are_named(word, line):
    with pytest.raises(UserError) as caught:
        parse_rules([word], BASE)
    assert line in str(caught.value)


def test_what_the_words_stand_for():
    found = parse_rules(["online(MD>DS>LD)@7", "budget(20)", "adafed", "power(VP)^2"], BASE)
    online = found["online(MD>DS>LD)@7"]
    # The criteria stay as the recipe lists them: that is the order in which others are tried.
    assert online.criteria == ("DS", "LD", "MD")
    assert online.order() == (2, 0, 1)
    assert online.adjust is not None
    assert (online.adjust.strategy, online.adjust.budget) == ("online", 7)
    assert found["budget(20)"].adjust is not None
    assert found["budget(20)"].adjust.budget == 20
    assert found["adafed"].criteria == ("VP",)
    assert found["adafed"].when_zero == "keep"
    assert found["adafed"].loss is not None
    assert found["power(VP)^2"].power == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("onlin", "did you mean 'online'"),
        ("DS>XX", "'XX'"),
        ("DS>DS", "each criterion once"),
        ("online(DS)", "two criteria or more"),
        (" , ", "got nothing"),
        ("mean(QQ)", "'QQ'"),
    ],
)
def test_a_word_that_is_no_rule_is_named(text, message):
    with pytest.raises(UserError, match=r"--rules") as caught:
        parse_rules([text], BASE)
    assert message in str(caught.value)


def test_rules_are_written_into_the_experiment_and_read_back(tmp_path):
    compared = with_rules(BASE, ["fedavg", "online", "DS>LD>MD"])
    assert list(compared.rules()) == ["fedavg", "online(LD>DS>MD)", "DS>LD>MD"]
    path = tmp_path / "again.toml"
    path.write_text(to_toml(compared))
    assert load(path) == compared
    assert with_rules(compared, ["recipe"]).rules() == compared.rules()


def test_a_comparison_records_samples_and_writes_few_checkpoints():
    compared = load_comparison("quickstart")
    assert compared.rounds.samples
    assert compared.store.checkpoint_every == 2
    own = load_comparison("quickstart", ["store.checkpoint_every=1", "rounds.samples=false"], ["DS"], seed=9)
    assert (own.store.checkpoint_every, own.rounds.samples, own.seed) == (1, False, 9)


def test_every_recipe_is_valid_and_described():
    assert {"mnist-iid", "mnist-noniid", "femnist", "unipen62", "celeba", "mnist-writers"} <= set(recipes())
    assert {"adafed-1", "adafed-2", "adafed-3", "adafed-regression"} <= set(recipes())
    for name in recipes():
        if name.startswith(("adafed", "mnist", "femnist", "unipen", "celeba")):
            described = load(name)
            assert described.name == name
            assert described.description


def test_the_papers_settings():
    for name, rate in (("mnist-iid", 0.215), ("mnist-noniid", 0.1)):
        found = load(name).model_dump()
        assert (found["training"]["learning_rate"], found["training"]["epochs"]) == (rate, 5)
        assert found["training"]["batch_size"] == "full"
        assert (found["rounds"]["count"], found["rounds"]["fraction"]) == (1000, 0.1)
        assert found["rounds"]["targets"] == (0.7, 0.8, 0.9, 0.95)
        assert found["weighing"]["criteria"] == ("DS", "LD", "MD")
        slices = {key: found["partition"][key] for key in ("test", "test_samples", "test_labels", "test_order")}
        assert slices == {"test": "held-out", "test_samples": 100, "test_labels": "all", "test_order": "stored"}
    femnist = load("femnist").model_dump()
    assert (femnist["training"]["batch_size"], femnist["training"]["learning_rate"]) == (10, 0.01)
    assert load("celeba").model_dump()["rounds"]["count"] == 100


def test_the_tables_of_adafed():
    first = load("adafed-1").model_dump()["partition"]["table"]
    assert [sum(line) for line in first] == [5600, 11000, 5700, 11000, 11000, 5000]
    for name in ("adafed-2", "adafed-3"):
        partition = load(name).model_dump()["partition"]
        assert [sum(line) for line in partition["table"]] == [190, 1710, 1780, 1230, 2040, 3160]
    flaws = load("adafed-3").model_dump()["flaws"]
    assert [flaw["of"] for flaw in flaws if flaw["kind"] == "copy"] == ["client-002", "client-003"]
    assert [flaw["amount"] for flaw in flaws if flaw["kind"] == "labels-flipped"] == [0.5, 1.0]
    assert flaws[-1]["kind"] == "own-model"
    assert flaws[-1]["clients"] == ("client-006", "client-007")


def test_losses_are_wired_from_the_rule():
    rule = load("adafed-2").weighing
    assert loss_rule(rule.loss, load("adafed-2").local_loss) == ClassLoss("auto", 0.1)
    regression = load("adafed-regression")
    adaptive = loss_rule(regression.weighing.loss)
    assert isinstance(adaptive, BarronLoss)
    assert adaptive.adapts
    fixed = loss_rule(regression.beside["fedavg"].loss)
    assert not fixed.adapts
    assert fixed.first().scale == 80.0


MNIST = {"data": {"source": "mnist"}, "model": {"name": "cnn-adafed"}}
HELD = {"scheme": "iid", "clients": 4, "server": "held-out", "test": "held-out"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"weighing": {"criteria": ["VP"]}}, "leaves it without one"),
        ({**MNIST, "partition": HELD, "weighing": {"criteria": ["VP"]}}, "the same rows would weigh and report"),
        ({**MNIST, "partition": HELD, "weighing": {"loss": {}}}, "the same rows would weigh and report"),
        ({**MNIST, "partition": {**HELD, "server_report": "same"}, "weighing": {"criteria": ["VE"]}}, "VP, VS, VF"),
        (
            {**MNIST, "partition": {**HELD, "server_report": "same"}, "weighing": {"loss": {"adapt": "barron"}}},
            "allowed: class-f1",
        ),
        (
            {"weighing": {"criteria": ["DS", "LD"], "adjust": {}}, "rounds": {"evaluate_every": 2}},
            "rounds.evaluate_every: got 2",
        ),
        ({"partition": {"scheme": "iid", "clients": 2, "server_report": "apart"}}, "server_report: got 'apart'"),
    ],
)
def test_what_cannot_be_weighed_honestly_is_refused_before_any_data_is_read(document, message):
    with pytest.raises(ValueError, match=message):
        Experiment.model_validate(document)
