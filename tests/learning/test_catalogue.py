"""The table of built-in networks says what the networks are."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.conftest import CommandLine
from tests.warm import command_environment

from steelyard import UserError
from steelyard.learning.catalogue import BUILT_IN, NAMES, BuiltIn, count
from steelyard.learning.models import build
from steelyard.learning.settings import ModelSettings


@pytest.mark.parametrize("model", BUILT_IN, ids=lambda model: model.name)
def test_parameters_are_those_of_the_network(model: BuiltIn) -> None:
    module = build(ModelSettings(name=model.name), model.shape, model.outputs, seed=0)
    assert model.parameters == sum(weights.numel() for weights in module.parameters())
    assert set(model.fields) <= set(ModelSettings.model_fields)


def test_the_papers_sizes() -> None:
    assert count("cnn-mnist", (1, 28, 28), 10) == 1_663_370
    assert count("logistic", (20,), 2) == 42
    assert count("mlp", (20,), 2) == 21 * 64 + 65 * 2


def test_lenet_in_other_sizes_is_pfllibs_network() -> None:
    settings = ModelSettings(name="lenet", arguments={"first": 32, "second": 64, "hidden": [512]})
    assert sum(weights.numel() for weights in build(settings, (1, 28, 28), 10, seed=0).parameters()) == 582_026
    with pytest.raises(UserError, match=r"model\.name: lenet fails: TypeError"):
        build(ModelSettings(name="lenet", arguments={"hidden": 512}), (1, 28, 28), 10, seed=0)


def test_every_network_is_listed_once() -> None:
    assert sorted(model.name for model in BUILT_IN) == sorted(NAMES)


def test_the_command_lists_them_without_torch(steelyard: CommandLine) -> None:
    found = json.loads(steelyard("models", "--format", "json").stdout)
    assert [entry["name"] for entry in found] == [model.name for model in BUILT_IN]
    assert found[0]["parameters"] == 1_663_370
    assert set(found[0]) == {"name", "purpose", "typical_shape", "typical_outputs", "parameters", "fields"}
    text = steelyard("models").stdout
    assert "1,663,370 parameters for samples of 1×28×28 and 10 outputs" in text


def test_reading_the_table_needs_no_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from steelyard.cli.main import app; "
        "assert CliRunner().invoke(app, ['models']).exit_code == 0; "
        "assert not {'torch', 'pandas'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=command_environment(), check=False
    )
    assert done.returncode == 0, done.stderr
