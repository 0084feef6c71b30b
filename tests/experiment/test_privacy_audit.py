"""The curious server on digits: it reads a lone sample, and not through noise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import CommandLine
from tests.privacy.seeded_source import SeededSource
from tests.warm import command_environment, warm_command
from typer.testing import CliRunner

from steelyard.cli.main import app
from steelyard.errors import UserError
from steelyard.experiment.extraction_audit import audit_extraction
from steelyard.experiment.membership_audit import audit_membership
from steelyard.experiment.privacy_audit import audit_inversion
from steelyard.experiment.privacy_sweeps import show_inversion, sweep_canaries, sweep_inversion
from steelyard.report.figures.audited import reconstruction
from steelyard.report.figures.writing import svg


def test_a_lone_sample_is_read_and_noise_hides_it() -> None:
    found = audit_inversion(batches=(1,), tries=4, steps=0, source=SeededSource(1))
    by = {(entry["model"], entry["protection"]): entry for entry in found}
    for model in ("linear", "MLP"):
        assert by[model, "none"]["read"] == 1.0
        assert by[model, "local noise, ε = 1"]["read"] == 0.0
        assert by[model, "local noise, ε = 1"]["likeness"] < by[model, "nothing is sent"]["likeness"]
        assert by[model, "sum of 10 clients"]["likeness"] < 0.99


def test_a_sample_is_known_to_be_among_the_clients_and_noise_hides_it() -> None:
    found = audit_membership(batches=(4,), tries=6, source=SeededSource(1))
    by = {(entry["model"], entry["protection"]): entry for entry in found}
    for model in ("linear", "MLP"):
        assert by[model, "none"]["ranked"] > 0.85
        assert by[model, "none"]["found"] > 0.15
        assert by[model, "sum of 100 clients"]["ranked"] < 0.75
        assert abs(by[model, "local noise, ε = 1"]["ranked"] - 0.5) < 0.25
        assert by[model, "local noise, ε = 1"]["found"] < 0.15


def test_a_linear_model_is_solved_for_and_a_class_alone_hides_it() -> None:
    found = {
        (row["model"], row["questions"], row["answer"]): (row["agrees"], row["apart"]) for row in audit_extraction(100)
    }
    # 64 pixels and a bias: 100 questions are more than the 65 equations that each class needs.
    same, apart = found["linear", "random pixels", "probabilities"]
    assert same == 1.0
    assert apart < 1e-5
    assert found["linear", "random pixels", "class alone"][0] < 0.9
    assert 0.6 < found["MLP", "digits of others", "probabilities"][0] < 1.0


def test_a_delta_too_large_for_the_canaries_is_refused() -> None:
    done = CliRunner().invoke(app, ["privacy", "audit", "--delta", "0.01", "--canaries", "200"])
    assert isinstance(done.exception, UserError)
    assert str(done.exception).startswith("--delta: got 0.01 with 200 clients")


@pytest.mark.slow  # that it starts and what it prints first is in tests/cli/test_cli.py
def test_the_audit_on_the_command_line(steelyard: CommandLine, tmp_path: Path) -> None:
    few = ("--tries", "1", "--steps", "0", "--canaries", "10")
    done = steelyard("privacy", "audit", *few, "--questions", "0", "--format", "json", "--figures", "figures")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["canary"]["lower"] <= found["canary"]["accounted"]
    assert {entry["protection"] for entry in found["inversion"]} >= {"none", "nothing is sent"}
    assert len(found["membership"]) == 24
    assert found["extraction"] == []
    made = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "figures").iterdir()}
    assert set(made) == {"inverted-images.svg", "inversion.svg", "canaries.svg"}
    assert "mean image of the class" in made["inversion.svg"]
    assert "ledger: at most" in made["canaries.svg"]
    assert "sum of 100" in made["inverted-images.svg"]
    command = ("privacy", "audit", *few, "--questions", "70", "--sampled", "fixed", "--sampling", "0.5")
    text = warm_command(*command, folder=tmp_path, environment=command_environment(COLUMNS="60")).stdout
    assert "canaries: 10 in 1 run, each stopped and resumed once;" in text
    assert "epsilon is at least" in text
    assert "by the ledger" in text
    assert "membership on digits" in text
    assert "copies of a model of digits" in text
    assert "refute" not in text
    assert "local noise, ε = 10" in text
    assert max(map(len, text.splitlines())) <= 60


def test_a_recommender_that_is_none_is_named() -> None:
    done = CliRunner().invoke(app, ["privacy", "audit", "--recommender", "quickstart"])
    assert isinstance(done.exception, UserError)
    assert "--recommender: 'quickstart' is not of kind 'recommend'" in str(done.exception)


def test_figures_that_cannot_be_written_are_refused_before_the_audit(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["privacy", "audit", "--figures", str(tmp_path / "file")])
    assert isinstance(done.exception, UserError)
    assert str(done.exception).startswith("--figures: ")
    assert "allowed: " in str(done.exception)


def test_more_noise_and_larger_sums_hide_more() -> None:
    found = sweep_inversion(tries=6, steps=0, source=SeededSource(3), epsilons=(1.0, 1e6), cohorts=(1, 100))
    alike = {(row["attack"], row["protection"], row["value"]): row["likeness"] for row in found["rows"]}
    for attack in ("linear, 1 sample, read off", "MLP, 1 sample, read off"):
        assert alike[attack, "sum", 1.0] == pytest.approx(1.0, abs=1e-4)
        assert alike[attack, "sum", 100.0] < found["guess"]
        assert alike[attack, "noise", 1e6] > 0.9
        assert abs(alike[attack, "noise", 1.0]) < 0.3
    assert 0.75 < found["guess"] < 0.9


def test_the_images_show_the_sample_and_what_the_update_tells_of_it() -> None:
    shown = show_inversion(steps=0, source=SeededSource(1), each=1)
    assert [entry["title"] for entry in shown[:3]] == ["sample", "the update", "sum of 10"]
    sample, told, *_, noisy = (np.array(entry["pixels"]) for entry in shown)
    assert sample.shape == (8, 8)
    np.testing.assert_allclose(told, sample, atol=1e-3)
    assert np.abs(noisy - sample).max() > 0.3
    assert shown[1]["likeness"] == pytest.approx(1.0, abs=1e-4)


def test_canaries_never_pass_the_accountant() -> None:
    first, second = sweep_canaries(noises=(0.5, 5.0), canaries=200, seed=2)
    assert first.lower > second.lower
    assert first.lower <= first.accounted
    assert second.lower <= second.accounted


def test_the_figure_of_a_recommender_names_each_protection() -> None:
    entries = [
        {"protection": name, "rounds": [{"round": round, "sum": {"precision": share}} for round in (1, 5)]}
        for name, share in (("everything sent", 1.0), ("noise, ε = 10", 0.1), ("π = 0", None))
    ]
    text = svg(reconstruction(entries, 0.096))
    assert "everything sent" in text
    assert "claimed at random" in text
    assert "π = 0" not in text  # where nothing can be claimed there is no line
