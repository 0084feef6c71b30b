"""A report begins with the recommendation, says what stands against one, and shows by a sign what weighing did."""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit import made_once, small
from tests.report.made_run import make_run, shared_run
from tests.runs.contents import chain_again, change

from steelyard.base.errors import UserError
from steelyard.base.measures import estimate
from steelyard.cli.printing import print_json, show_result
from steelyard.experiment.loading import read_experiment
from steelyard.page.overview import Figures
from steelyard.report.curves import RecordedRule, read_run
from steelyard.report.decide import Verdict, more_seeds, verdict_of
from steelyard.report.html import Sign, headlines, html, sign, tilt
from steelyard.report.result import computed
from steelyard.report.tables import headline, main_table
from steelyard.report.view import RunView
from steelyard.result import Result
from steelyard.runs.facts import RunFacts
from steelyard.runs.history import History
from steelyard.runs.store import Store

WHY = "no client's model is finite"
SCORES = {"VP>DS": (0.5, 0.6, 0.2), "fedavg": (0.4, 0.52, 0.9), "online(DS>LD)": (0.1, 0.1, 0.1)}
SEEDS = (1, 2, 3)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three seeds in which the last scores on the server's rows are known."""
    folder = make_run(tmp_path / "run", rounds=2, clients=4, seeds=SEEDS)
    for rule, found in SCORES.items():
        for seed in SEEDS:
            score(folder, rule, seed, found[seed - 1])
    return folder


def score(folder: Path, rule: str, seed: int, accuracy: float | None) -> None:
    change(
        folder,
        "UPDATE rounds SET server_accuracy = ? WHERE federation = "
        "(SELECT id FROM federations WHERE rule = ? AND seed = ?)",
        *(accuracy, rule, seed),
    )
    chain_again(folder)


def recommended(folder: Path) -> Verdict:
    (document,) = RunView([folder]).documents
    return document.tested()


def test_the_report_begins_with_the_recommendation(run: Path) -> None:
    """VP>DS is ahead by 10 and 8 points and behind by 70: the mean is -17.3, the deviation 45.6."""
    found = recommended(run)
    assert found["sentence"] == headlines(RunView([run]))[0]
    assert found["sentence"].startswith(
        "Keep fedavg: with 3 seeds no rule is significantly better on the server's clean test samples."
    )
    tested = {row["rule"]: row for row in found["rules"]}
    assert tested["VP>DS"]["difference"]["values"] == pytest.approx([0.1, 0.08, -0.7])
    assert tested["VP>DS"]["ahead"] == 2


@pytest.mark.parametrize("rule", ["VP>DS", "fedavg"])
def test_a_rule_whose_model_exploded_is_not_recommended(run: Path, rule: str) -> None:
    """It exploded before the server first tested it, as `rounds.evaluate_every` makes possible."""
    for seed in SEEDS:
        score(run, "VP>DS", seed, 0.95 + seed / 100)
    assert headlines(RunView([run]))[0].startswith("Keep fedavg")  # .9 in the third seed, .4 and .52 before
    score(run, rule, 3, None)
    change(run, "INSERT INTO ended SELECT id, 2, ? FROM federations WHERE rule = ? AND seed = 3", WHY, rule)
    chain_again(run)
    lines = headlines(RunView([run]))
    assert any(line.startswith(f"{rule}, seed 3, ended in round 2: {WHY}.") for line in lines)
    left_out = {row["rule"]: row["left_out"] for row in recommended(run)["rules"]}
    if rule == "fedavg":
        assert lines[0].startswith("No recommendation: training with fedavg, the baseline, diverged in 1 of 3 seeds")
    else:
        assert "1 of 3 seeds" in left_out.pop("VP>DS")
        assert left_out == {"fedavg": "", "online(DS>LD)": ""}


def test_a_run_that_goes_on_recommends_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=2, clients=4, seeds=SEEDS, status="stopped")
    assert headlines(RunView([folder]))[0] == "No recommendation: the run is stopped, after round 2 of 2."


def test_a_damaged_run_is_not_called_untested(run: Path) -> None:
    change(run, "UPDATE rounds SET server_metrics = '{'")
    chain_again(run)
    with pytest.raises(UserError, match="damaged"):
        headlines(RunView([run]))


def test_rows_that_chose_do_not_decide(run: Path) -> None:
    """Online adjustment picks its order by the clients' tests, and 'same' weighs clients on the rows that report."""
    assert recommended(run)["where"] == "on the server's clean test samples"
    toml = run / "experiment.toml"
    text = toml.read_text(encoding="utf-8")
    toml.write_text(text.replace('server_report = "apart"', 'server_report = "same"'), encoding="utf-8")
    found = recommended(run)
    assert found["where"] == "on the clients' 40 test samples"
    left_out = {row["rule"]: row["left_out"] for row in found["rules"]}
    assert left_out["online(DS>LD)"]
    assert not left_out["VP>DS"]


def test_few_rows_recommend_nothing_and_the_clients_tests_choose(run: Path) -> None:
    def found(rows: int) -> str:
        store = Store(run)
        store.note(RunFacts(report_rows=dict.fromkeys(map(str, SEEDS), rows)))
        store.close()
        return recommended(run)["sentence"]

    assert found(29).startswith("No recommendation: 29 test samples are too few")
    assert found(29).endswith("set partition.server_fraction = 0.11.")
    for rule, gain in (("fedavg", 0), ("VP>DS", 0.05), ("online(DS>LD)", 0.04)):
        for seed in SEEDS:
            score(run, rule, seed, 0.5 + seed / 100 + gain * (1 + seed / 500))
    assert found(30).startswith("Use ")
    assert "(40 client test samples)." in found(30)


def test_run_says_what_the_report_says(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    lines = headlines(RunView([run]))
    assert lines[0].startswith("Keep fedavg")
    assert lines[-1].startswith("2 of 4 clients were faulty (simulated): ")
    assert "VP>DS gave them " in lines[-1]
    show_result(computed(run, read_experiment(run)))
    shown = capsys.readouterr().out
    assert [line for line in lines if line not in shown] == []
    # The figure that decides stands in the table: the mean of the last rounds, over the seeds.
    assert "the server's clean test samples, mean of the last 2 tested rounds" in shown
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("VP>DS ")][:1]
    assert row[1] == "43.3±51.7"


@pytest.fixture(scope="session")
def one_seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one seed and two rules, which the server tests on 180 samples; made once."""
    server = {"server": "fraction", "server_fraction": 0.2, "server_report": "apart"}
    made = small(partition=server, beside={"equal": {"criteria": ["EQ"]}}, rounds={"count": 1})
    return made_once(tmp_path_factory, "one-seed", lambda folder: made.run(out=folder))


def test_five_places_give_one_answer(
    one_seed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same winner, difference, figures, samples and rounds in terminal, report, page, notebook and JSON."""
    monkeypatch.setenv("COLUMNS", "300")
    result = Result(one_seed)
    found, table = result.comparison.tested(), main_table(result.comparison)
    assert re.search(r"the server's \d+ test samples", found.sentence)
    page = Figures(one_seed.parent).overview([one_seed.name])
    show_result(result.comparison)
    shown = {"terminal": capsys.readouterr().out, "page": f"{page['headline']} {page['table']}"}
    shown |= {"report": text_of(html(RunView([one_seed]))), "notebook": text_of(result._repr_html_())}
    for place, text in shown.items():
        assert found.sentence in text.replace('\\"', "'"), place
        for words in (table.title, *(row[1] for row in table.rows)):
            assert words in text, (place, words)
    print_json(result.comparison)
    document = json.loads(capsys.readouterr().out)
    said = document["recommendation"]
    assert said["sentence"] == found.sentence
    assert [f"{100 * row['value']['mean']:.1f}" for row in said["rules"]] == [row[1] for row in table.rows]
    assert said["where"] in table.title
    assert f"after round {document['rounds']}" in table.title


def text_of(page: str) -> str:
    return unescape(re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", page, flags=re.S))


def test_the_command_for_more_seeds_names_another_baseline(one_seed: Path) -> None:
    """tests/cli/test_compare.py runs the command as it is printed."""
    (line,) = more_seeds(computed(one_seed, read_experiment(one_seed), "equal").recommendation)
    assert shlex.split(line)[-4:-2] == ["--baseline", "equal"]


@pytest.mark.parametrize(("accuracy", "expected"), [(0.1, "at chance"), (0.11, "at chance"), (0.3, "too few seeds")])
def test_models_that_learnt_nothing_are_named_as_such(one_seed: Path, accuracy: float, expected: str) -> None:
    """Ten classes and 180 samples: guessing is right in 10 %, give or take 2.2."""
    run = read_run(History(one_seed))
    curves = [replace(curve, server={"accuracy": [accuracy]}) for curve in run.curves]
    found = verdict_of(replace(run, curves=curves), read_experiment(one_seed))
    assert found.answer == expected
    assert (found.command == "") == (expected == "at chance")


def test_a_client_that_fails_and_one_that_is_never_right_are_named(run: Path) -> None:
    change(run, "INSERT INTO clients (id, name) VALUES (99, 'client-9')")
    failed = "INSERT INTO failures SELECT id, ?, 99, 'no route' FROM federations"
    for number in (1, 2):
        change(run, failed, number)
    chain_again(run)
    document = computed(run, read_experiment(run))
    assert "client-9 failed to send 18 of its 18 updates: no route." in headline(document)
    # "fedavg" is kept: only its clients count, and those with ten samples or more.
    wrong = [document.rules[0].clients[0].model_copy(update={"score": 0.0, "rows": rows}) for rows in (9, 10)]
    rules = tuple(rule.model_copy(update={"clients": tuple(wrong)}) for rule in document.rules)
    (line,) = [line for line in headline(document.model_copy(update={"rules": rules})) if "0 of" in line]
    assert line.startswith("With fedavg, ")
    assert "0 of 10" in line
    assert "0 of 9" not in line


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"normalise": "max"}, True),
        ({"normalise": "rank"}, False),
        ({"score": "power", "power": 3}, False),
        ({"trained_by": "server"}, False),
        ({"loss": {"adapt": "class-f1"}}, False),
        ({"criteria": ["DS", "LD"]}, False),
    ],
)
def test_fedavg_is_dataset_size_alone(settings: Any, expected: bool) -> None:
    assert RecordedRule.model_validate({"criteria": ["DS"], **settings}).fedavg is expected


def test_the_sentence_and_the_sign_tell_of_flawed_clients(tmp_path_factory: pytest.TempPathFactory) -> None:
    view = RunView([shared_run(tmp_path_factory)])
    second = headlines(view)[1]
    assert "2 of 8 clients were faulty (simulated)" in second
    (document,) = view.documents
    means = {rule.rule: rule.figures["flawed_weight"].mean for rule in document.rules}  # over both seeds
    for name in ("fedavg", "VP>DS"):
        assert f"{name} gave them {means[name]:.0%}" in second
    figures = view.rule("VP>DS").figures
    shares = {name: figures[f"flawed_{name}"].mean for name in ("weight", "updates")}
    shown = sign(view)
    assert f"{shares['updates']:.0%} of participants but got {shares['weight']:.0%} of the weight." in shown.title
    page = html(view)
    drawn = re.search(r'<svg class="sign".*?</svg>', page, re.S)
    assert drawn is not None
    root = ET.fromstring(drawn.group())
    moved = {group.get("class"): group.get("transform") for group in root.iter("g")}
    angle = tilt(shares["updates"], shares["weight"])
    assert moved["beam"] == f"rotate({angle:.1f} 70 28)"
    # The load hangs straight down from the beam; the weight slides out as theirs falls.
    assert moved["load"] == f"rotate({-angle:.1f} 34 28)"
    circle, title = root.find(".//circle"), root.find("title")
    assert circle is not None
    assert title is not None
    assert float(circle.get("cx", "")) == pytest.approx(192 - 96 * shares["weight"], abs=0.05)
    assert title.text == shown.title  # its rule is "VP>DS": text, not markup
    assert "VP&gt;DS" in drawn.group()


@pytest.mark.parametrize(
    ("number", "weight", "words", "angle", "poise"),
    [
        (0.3, 0.1, "30% of participants but got 10% of the weight.", 8.0, 182.4),
        (0.005, 0.0, "0% of participants and got 0% of the weight.", 0.2, 192.0),  # half a point more is no more
        (1.0, 0.0, "100% of participants but got 0% of the weight.", 14.0, 192.0),  # and not over
        (0.0, 1.0, "0% of participants and got 100% of the weight.", -14.0, 96.0),
        (0.25, 0.5, "25% of participants and got 50% of the weight.", -10.0, 144.0),
        (0.1, 0.123, "10% of participants and got 12% of the weight.", -0.9, 180.2),
    ],
)
def test_the_sign_by_hand(number: float, weight: float, words: str, angle: float, poise: float) -> None:
    """The beam turns by 40 degrees for each whole share, and the weight hangs at 192 less 96 for each."""
    shares = {"flawed_weight": estimate([weight]), "flawed_updates": estimate([number])}
    view: Any = SimpleNamespace(
        federation=lambda: SimpleNamespace(label="EQ"), rule={"EQ": SimpleNamespace(figures=shares)}.__getitem__
    )
    assert sign(view) == Sign(f"Under EQ faulty clients were {words}", angle, poise)
    shares.clear()
    assert sign(view) == Sign("A steelyard, level.", 0.0, 150.0, plain=True)


def test_without_flawed_clients_the_beam_is_level(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=1, clients=4, seeds=(1,))
    store = Store(folder)
    store.note(RunFacts(flaws={}))
    store.close()
    assert sign(RunView([folder])).plain
    page = html(RunView([folder]))
    assert 'class="sign plain"' in page
    assert "rotate(0.0 70 28)" in page
    assert 'class="tilt"' not in page
