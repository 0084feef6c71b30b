"""Code that an experiment names must have been written for it; no experiment file calls any function of any module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

import steelyard
from steelyard.cli.trust import asking
from steelyard.errors import UserError
from steelyard.learning import models
from steelyard.learning.settings import ModelSettings
from steelyard.usercode import NotAllowed, find_code, hand_over, only


class Written(nn.Linear):
    """A network in a module."""

    def __init__(self) -> None:
        super().__init__(2, 2)


@steelyard.model
def declared() -> nn.Module:
    return nn.Linear(2, 2)


@steelyard.loss
def declared_loss() -> None: ...


def undeclared() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.mark.parametrize("name", ["os:system", "subprocess:getoutput", "builtins:eval", "importlib:import_module"])
def test_the_standard_library_is_not_called(name: str):
    with pytest.raises(NotAllowed, match=r"model.name: '\w+' is part of Python"):
        find_code(name, "model.name", ["logistic"])
    with pytest.raises(NotAllowed):
        models.build(ModelSettings(name=name, arguments={"command": "true"}), (4,), 2, 0)


def test_a_function_of_a_library_is_not_called_either():
    with pytest.raises(
        NotAllowed, match=r"model.name: numpy:load was not written for this; allowed: a torch.nn.Module"
    ):
        find_code("numpy:load", "model.name", [])
    with pytest.raises(NotAllowed, match=r"a function marked with @steelyard.loss"):
        find_code(f"{__name__}:undeclared", "training.loss", [])
    import subprocess

    with pytest.raises(NotAllowed, match="belongs to an installed library"):
        find_code(f"{subprocess.__file__}:getoutput", "model.name", [])


def test_what_was_written_for_it_is_found():
    assert find_code(f"{__name__}:declared", "model.name", []) is declared
    assert find_code(f"{__name__}:declared_loss", "training.loss", []) is declared_loss
    assert isinstance(models.build(ModelSettings(name=f"{__name__}:Written"), (4,), 2, 0), nn.Module)


def test_in_a_file_it_must_be_defined_there(tmp_path: Path):
    file = tmp_path / "net.py"
    file.write_text("from os import system\nfrom torch import nn\n\ndef net():\n    return nn.Linear(1, 1)\n")
    assert find_code(f"{file}:net", "model.name", []).__name__ == "net"
    with pytest.raises(NotAllowed, match="was not written for this"):
        find_code(f"{file}:system", "model.name", [])


def test_what_is_handed_over_from_python_needs_no_mark():
    assert find_code(hand_over(undeclared), "model.name", []) is undeclared


def test_rules_end_where_they_were_set():
    with only(["a.py:net"]), pytest.raises(NotAllowed, match="is not run here"):
        find_code(f"{__name__}:declared", "model.name", ["logistic"])
    assert find_code(f"{__name__}:declared", "model.name", []) is declared
    with pytest.raises(UserError, match="did you mean 'logistic'"):
        find_code("logistik", "model.name", ["logistic"])


def test_code_that_ends_python_is_named(tmp_path: Path):
    (tmp_path / "ending.py").write_text("import sys\nsys.exit(5)\n")
    with pytest.raises(UserError, match=r"ending\.py' fails when loaded: SystemExit: 5"):
        find_code(f"{tmp_path / 'ending.py'}:net", "model.name", ["logistic"])
    (tmp_path / "later.py").write_text("def net(outputs):\n    raise SystemExit(4)\n")
    with pytest.raises(UserError, match=r"later\.py:net fails: SystemExit: 4"):
        models.build(ModelSettings(name=f"{tmp_path / 'later.py'}:net"), (2,), 2, 0)


def test_what_a_file_would_run_is_shown_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda *words, **options: True)
    asking(trust=False)("e.toml", {"model.name": "evil.py:net\x1b[2K\rgood.py:net"})
    shown = capsys.readouterr().err
    assert "evil.py:net\\x1b[2K\\rgood.py:net" in shown
    assert "\x1b" not in shown
