"""Splits before anything is trained: drawn in letters that fit the terminal, as a figure, and by the command."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from steelyard.cli.main import app
from steelyard.errors import UserError
from steelyard.report.split import MOST_LINES, Split, account, draw_letters


def made(clients: int, classes: int) -> Split:
    labels = {f"c-{n:04d}": [(n + label) % 3 * 40 for label in range(classes)] for n in range(clients)}
    sizes = {name: sum(counts) or n + 1 for n, (name, counts) in enumerate(labels.items())}
    return Split(sizes, dict.fromkeys(sizes, 2), labels if classes else {}, 5)


@pytest.mark.parametrize("width", [40, 60, 120])
@pytest.mark.parametrize("classes", [0, 2, 10, 62, 300])
@pytest.mark.parametrize("clients", [1, 10, 500])
def test_lines_fit_whatever_the_number_of_classes(width, classes, clients):
    lines = draw_letters(made(clients, classes), width)
    assert len(lines) == 1 + min(clients, MOST_LINES)
    assert max(map(len, lines)) <= width


def test_a_letter_says_how_many_rows_of_a_class_there_are():
    drawn = draw_letters(Split({"a": 104, "b": 60}, {}, {"a": [100, 0, 4], "b": [0, 60, 0]}), 60)
    assert [line.split()[-1] for line in drawn[1:]] == ["█·░", "·▓·"]


def test_the_account_counts_all_clients_also_those_without_a_line():
    split = made(500, 10)
    assert account(split)[0].startswith("500 clients,")
    assert f"drawn: {MOST_LINES} of them" in account(split)[3]


def show(*words: str) -> str:
    return CliRunner().invoke(app, ["show", *words], catch_exceptions=False, env={"COLUMNS": "60"}).stdout


def test_show_draws_the_split_of_an_experiment_by_any_of_its_names(tmp_path):
    figure = tmp_path / "split.svg"
    scheme = ["--set", "partition.scheme='#C=3'", "--set", "partition.size_spread=0"]
    drawn = show("quickstart", "--split", *scheme, "--figure", str(figure))
    assert "classes of a client: 3 of 10" in drawn
    assert max(map(len, drawn.splitlines())) <= 60
    assert "<svg" in figure.read_text(encoding="utf-8")
    found = json.loads(show("quickstart", "--split", *scheme, "--seed", "9", "--format", "json"))
    assert sum(found["sizes"].values()) == sum(map(sum, found["labels"].values()))


def test_show_says_how_noise_grows_over_the_clients():
    drawn = " ".join(show("quickstart", "--split", "--set", "partition.noise=0.1").split())
    assert "feature noise: variance 0.005 (client-000) to 0.1 (client-019), pixels from 0 to 1" in drawn


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["quickstart", "--figure", "x.svg"], "show: got --figure; allowed with: --split"),
        (["quickstart", "--split", "--figure", "x.gif"], "figure: got 'x.gif'"),
        (["fpl-ml1m", "--split"], "show: got --split with a recommender"),
        (["--split"], "show: no experiment named"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(words, line):
    with pytest.raises(UserError, match=line):
        show(*words)
