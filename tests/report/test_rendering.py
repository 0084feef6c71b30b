"""Tables that fit a terminal, and what tables of runs say: directions, whose models were tested."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from steelyard import Experiment
from steelyard.experiment.loading import read_experiment
from steelyard.experiment.rules import with_rules
from steelyard.experiment.running import run
from steelyard.report.rendering import Table, as_csv, as_text, filled, spark
from steelyard.report.result import computed
from steelyard.report.tables import main_table


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(
            st.tuples(*[st.text(st.characters(codec="ascii", categories=("L", "N", "P", "Zs")), max_size=50)] * n),
            min_size=2,
            max_size=5,
        )
    ),
    st.integers(20, 90),
)
@example([("0" * 21, "", ""), ("", "", "")], 20)
def test_any_table_fits_and_keeps_its_letters(rows: list[tuple[str, ...]], width: int) -> None:
    table = Table("", rows[0], tuple(rows[1:]))
    text = as_text(table, width)
    assert all(len(line) <= width for line in text.splitlines())
    letters = "".join("".join(row) for row in rows)
    for letter in set(letters) - {" ", "-"}:
        assert text.count(letter) >= letters.count(letter)


def test_html_escapes_every_text_and_marks_the_best_row() -> None:
    evil = "<script>&"
    table = Table(evil, (evil, evil), ((evil, "1"), ("b", "2")), evil, best=1)
    text = filled("notebook.html.j2", headline=[evil], tables=[table], chart="<svg/>")
    assert "<script>" not in text
    assert text.count("&lt;script&gt;&amp;") == 11
    assert "<tr><td data-heading=" in text
    assert "<tr class=best><td data-heading=" in text


def test_csv_holds_no_formula_and_no_nan() -> None:
    text = as_csv(("rule", "=x"), [("=1+1", math.nan), ("a,b", 0.5), ("\x1b", None)])
    assert list(csv.reader(io.StringIO(text))) == [["rule", "'=x"], ["'=1+1", ""], ["a,b", "0.5"], ["\\x1b", ""]]


def test_sparks_cover_the_whole_curve() -> None:
    assert spark([0.0, 1.0], 0.0, 1.0) == "▁█"
    assert spark(list(range(100)), 0, 99, width=8) == "▁▂▃▄▅▆▇█"
    assert spark([0.5, 0.5], 0.5, 0.5) == "▁▁"


def test_where_clients_test_models_of_their_own_tables_say_so_and_their_scores_decide(tmp_path: Path) -> None:
    partition = {"clients": 4, "server": "fraction", "server_fraction": 0.2, "server_report": "same"}
    described = Experiment(partition=partition, model={"name": "logistic"}, rounds={"count": 2})
    folder = run(with_rules(described, ["fedavg,local-only,fine-tuned"]), out=tmp_path / "run")
    document = computed(folder, read_experiment(folder))
    tested = [(row[0], row[2]) for row in main_table(document).rows]
    assert ("fedavg", "global model") in tested
    assert ("fine-tuned", "own models") in tested
    # The server tests the global model: FedAvg's with and without fine-tuning, the first one where nobody sends.
    served = {rule.rule: rule.figures["server_accuracy"].mean for rule in document.rules}
    assert served["fedavg"] == served["fine-tuned"] != served["local-only"]
    for row in document.tested().rules:
        mean = sum(document.rule(row.rule).curve.mean) / 2  # of both rounds, on the clients
        assert row.value.mean == document.rule(row.rule).figures["late"].mean == pytest.approx(mean)
