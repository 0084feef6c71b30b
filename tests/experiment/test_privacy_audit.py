"""The curious server on digits: it reads a lone sample, and not through noise."""

from __future__ import annotations

import json

from tests.conftest import CommandLine

from steelyard.experiment.privacy_audit import audit_inversion
from steelyard.privacy.source import SeededSource


def test_a_lone_sample_is_read_and_noise_hides_it() -> None:
    found = audit_inversion(batches=(1,), tries=4, steps=0, source=SeededSource(1))
    by = {(entry["model"], entry["protection"]): entry for entry in found}
    for model in ("linear", "MLP"):
        assert by[model, "none"]["read"] == 1.0
        assert by[model, "local noise, ε = 1"]["read"] == 0.0
        assert by[model, "local noise, ε = 1"]["likeness"] < by[model, "nothing is sent"]["likeness"]
        assert by[model, "sum of 10 clients"]["likeness"] < 0.99


def test_the_audit_on_the_command_line(steelyard: CommandLine) -> None:
    done = steelyard("privacy", "audit", "--tries", "2", "--steps", "0", "--trials", "100", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["canary"]["lower"] <= found["canary"]["accounted"]
    assert {entry["protection"] for entry in found["inversion"]} >= {"none", "nothing is sent"}
    text = steelyard("privacy", "audit", "--tries", "1", "--steps", "0", "--trials", "50").stdout
    assert "epsilon is at least" in text
    assert "local noise, ε = 10" in text
