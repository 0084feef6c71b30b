"""How an epoch is counted: by the formula of the text, or as the thesis' tables were made."""

import numpy as np
import pytest
from tests.recommend.test_fpl import BRAZIL

from steelyard.errors import UserError
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.recommend import clients as module
from steelyard.recommend.fpl import MODES, Schedule, initial_table
from steelyard.report.recommender import open_run


@pytest.mark.parametrize(
    ("name", "users", "triples", "rounds"),
    [("sFPL", 1, 1, 1_000_209), ("sFPL+", 1, 166, 1_000_209), ("pFPL", 6040, 1, 166), ("pFPL+", 6040, 166, 166)],
)
def test_in_the_tables_the_plus_modes_have_as_many_rounds_as_the_plain_ones(name, users, triples, rounds):
    """MovieLens 1M: 6,040 users, 1,000,209 positives."""
    assert MODES[name].schedule(6040, 1_000_209, "tables") == Schedule(users, triples, rounds)


@pytest.mark.parametrize(
    ("name", "share", "epochs", "printed"),
    [
        ("sFPL+", 0.1, 50, 1.41913),
        ("sFPL+", 0.9, 50, 1.41996),
        ("pFPL+", 0.1, 35, 0.99339),
        ("pFPL+", 0.8, 35, 0.99390),
    ],
)
def test_the_totals_of_table_4_4_are_those_of_r_plus_visits(name, share, epochs, printed):
    # The table prints five decimals, in 10¹² vectors.
    found = MODES[name].cost_per_epoch(**BRAZIL, share=share, counted="tables") * epochs * 1e-12
    assert found == pytest.approx(printed, abs=5e-6)


@pytest.mark.parametrize("name", ["sFPL", "pFPL"])
def test_the_plain_modes_have_one_cost(name):
    assert MODES[name].cost_per_epoch(**BRAZIL, share=0.1, counted="tables") == MODES[name].cost_per_epoch(
        **BRAZIL, share=0.1
    )


def described(description: dict, **fpl):
    return build({**description, "fpl": {**description["fpl"], **fpl}, "rounds": {"epochs": 2}})


@pytest.mark.parametrize(("mode", "per_epoch", "rounds"), [("pFPL+", 8, 16), ("sFPL+", 24 * 8, 2)])
def test_runs_have_the_rounds_of_the_tables(description, tmp_path, mode, per_epoch, rounds):
    # 24 users with 8 training items each: T = 8.
    experiment = described(description, mode=mode, epoch="tables")
    assert experiment.schedule() == Schedule(24 if mode == "pFPL+" else 1, 8, per_epoch)
    run(experiment, out=tmp_path / "run")
    finished = open_run(tmp_path / "run")
    assert finished.round == rounds
    assert finished.communication()["sent_vectors_down"] == 2 * 24 * 8 * 40


def test_rounds_in_sequence_do_not_depend_on_how_many_are_drawn_together(description, tmp_path, monkeypatch):
    experiment = described(description, mode="sFPL+", epoch="tables", pi=0.5)
    run(experiment, out=tmp_path / "whole")
    monkeypatch.setattr(module, "_TRIPLES_AT_ONCE", 50)
    run(experiment, out=tmp_path / "parts")
    whole, parts = open_run(tmp_path / "whole"), open_run(tmp_path / "parts")
    # Groups of other sizes sum inner products in another order.
    np.testing.assert_allclose(whole.model.numpy(), parts.model.numpy(), rtol=1e-4, atol=1e-6)
    assert whole.communication() == parts.communication()


def test_custom_rounds_have_no_table(description):
    with pytest.raises(UserError, match=r"fpl.epoch: got 'tables'"):
        described(description, mode="custom", triples=3, epoch="tables")


def test_orders_that_adapt_need_a_test_every_round(description):
    document = {**description, "fpl": {**description["fpl"], "epoch": "tables"}}
    document["weighing"] = {"criteria": ["DS", "LD"], "adjust": {"strategy": "online"}}
    with pytest.raises(UserError, match=r"weighing.adjust: compares each round"):
        build(document)


def test_first_biases_are_zero_or_drawn(description):
    table = initial_table(7, 4000, 5, bias_spread=0.1)
    assert table[:, -1].std() == pytest.approx(0.1, rel=0.05)  # two standard errors are 0.022 of it
    assert abs(table[:, -1].mean()) < 0.005
    np.testing.assert_array_equal(table[:, :-1], initial_table(7, 4000, 5)[:, :-1])
    _, server = described(description, bias_spread=0.1).assemble()
    assert server.initial(3).reshape(40, 7)[:, -1].std() > 0.05
    _, usual = described(description).assemble()
    assert not usual.initial(3).reshape(40, 7)[:, -1].any()
