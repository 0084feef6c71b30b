"""Code that an experiment names must have been written for it; no experiment file calls any function of any module."""

from __future__ import annotations

import functools
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Generator
from importlib import import_module
from pathlib import Path

import pytest
from tests.warm import warm_command
from torch import nn

import steelyard
from steelyard.base.errors import UserError
from steelyard.base.usercode import NotAllowed, find_code, load_code, only
from steelyard.cli.options import asking
from steelyard.learning import models
from steelyard.learning.settings import ModelSettings
from steelyard.weighing.criterion import load_plugins


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


@pytest.mark.parametrize("name", ["os:system", "subprocess:getoutput", "builtins:eval"])
def test_the_standard_library_is_not_called(name: str):
    with pytest.raises(NotAllowed, match=r"model.name: '\w+' is part of Python"):
        models.build(ModelSettings(name=name, arguments={"command": "true"}), (4,), 2, 0)


def test_a_function_of_a_library_is_not_called_either():
    for name in ("numpy:load", "torch.hub:load", "torch.nn:Linear"):  # Loaded already, but nobody declared them.
        with pytest.raises(NotAllowed, match=rf"model.name: '{name}' is not declared for Steelyard; allowed: 'path/"):
            find_code(name, "model.name", [])
    with pytest.raises(NotAllowed, match=r"a function marked with @steelyard.loss"):
        find_code(f"{__name__}:undeclared", "training.loss", [])
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


NET = """
import os
from torch import nn
import steelyard

open(os.environ["MARK"], "a").write(__name__ + "\\n")

class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

@steelyard.model
def net(feature_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(feature_shape[-1] * feature_shape[-2], classes))

@steelyard.loss
def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels, reduction="none")

def undeclared():
    return nn.Linear(2, 2)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A folder that Python imports from, with a package whose import leaves a mark; returns the file of the mark."""
    package = tmp_path / "lib" / "ward"
    package.mkdir(parents=True)
    for name in ("__init__", "nets", "others"):
        (package / f"{name}.py").write_text(NET)
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'lib'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.delitem(sys.modules, "steelyard_app", raising=False)  # a test before may have run it in this process
    yield tmp_path / "mark"
    for name in [name for name in sys.modules if name.partition(".")[0] == "ward"]:
        del sys.modules[name]


def importing_from(folder: Path) -> None:
    """Let a warm process import from a folder, as PYTHONPATH lets a new one."""
    sys.path.insert(0, str(folder))


def declare(mark: Path, text: str) -> None:
    folder = mark.parent / "lib" / "ward-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ward\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(text)


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("model.name", "ward.nets:Net"),
        ("training.loss", "ward.nets:loss"),
        ("training.loss", "steelyard_app.code.nets:loss"),
        ("model.name", "nowhere.at.all:net"),
    ],
)
def test_a_module_that_nobody_declared_is_not_even_imported(installed: Path, field: str, name: str):
    shutil.copytree(installed.parent / "lib" / "ward", installed.parent / "lib" / "steelyard_app" / "code")
    (installed.parent / "lib" / "steelyard_app" / "__init__.py").write_text(NET)
    with pytest.raises(
        NotAllowed, match=rf"^{field}: '{name}' is not declared for Steelyard; .* steelyard\.(model|loss)"
    ):
        find_code(name, field, [])
    assert not installed.exists()


def test_what_an_installed_package_declares_is_imported(installed: Path):
    declare(installed, "[steelyard.models]\na = ward.nets\nb = ward.others:net\n[steelyard.losses]\nc = ward:loss\n")
    with pytest.raises(NotAllowed, match=r"'ward.others:Net' is not declared"):  # Only the one name is.
        find_code("ward.others:Net", "model.name", [])
    with pytest.raises(NotAllowed, match=r"'ward.nets:loss' is not declared"):  # As a model, not as a loss.
        find_code("ward.nets:loss", "training.loss", [])
    assert not installed.exists()
    assert find_code("ward.nets:net", "model.name", []).__name__ == "net"
    assert find_code("ward.others:net", "model.name", []).__module__ == "ward.others"
    assert find_code("ward:loss", "training.loss", []).__name__ == "loss"
    with pytest.raises(NotAllowed, match=r"ward.nets:undeclared was not written for this"):
        find_code("ward.nets:undeclared", "model.name", [])


def test_a_module_that_the_users_own_script_imported_may_be_named(installed: Path):
    import_module("ward.nets")
    assert find_code("ward.nets:net", "model.name", []).__name__ == "net"
    with pytest.raises(NotAllowed, match=r"'ward.others:Net' is not declared"):
        find_code("ward.others:Net", "model.name", [])


def test_a_node_imports_what_its_owner_allows_by_name(installed: Path):
    with only(["ward.nets:net"]):
        for name in ("ward.nets:Net", "ward.others:net"):
            with pytest.raises(NotAllowed, match="is not run here"):
                find_code(name, "model.name", [])
        with pytest.raises(NotAllowed, match="is not declared"):
            load_plugins(["ward.nets"])
        assert not installed.exists()
        assert find_code("ward.nets:net", "model.name", []).__name__ == "net"


def test_not_even_with_trust_does_an_experiment_import_any_module(installed: Path):
    file = installed.parent / "e.toml"
    file.write_text('[model]\nname = "ward.nets:net"\n[training]\nloss = "ward:loss"\n[rounds]\ncount = 1\n')

    def run() -> subprocess.CompletedProcess[str]:
        before = functools.partial(importing_from, installed.parent / "lib")
        return warm_command("run", file, "--trust", "--out", "run", folder=installed.parent, before=before)

    refused = run()
    assert refused.returncode == 2
    line_told = refused.stderr.splitlines()[-1]  # On a slow machine, what takes long is named before it.
    assert "is not declared for Steelyard; allowed: 'path/to/file.py:name' of your own" in line_told
    assert not installed.exists()
    assert not (installed.parent / "run").exists()
    declare(installed, "[steelyard.models]\nn = ward.nets:net\n[steelyard.losses]\nl = ward:loss\n")
    done = run()
    assert done.returncode == 0, done.stderr
    assert set(installed.read_text().split()) == {"ward", "ward.nets"}


def test_code_that_ends_python_is_named(tmp_path: Path):
    (tmp_path / "ending.py").write_text("import sys\nsys.exit(5)\n")
    with pytest.raises(UserError, match=r"ending\.py' fails when loaded: SystemExit: 5"):
        find_code(f"{tmp_path / 'ending.py'}:net", "model.name", ["logistic"])


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


def test_work_that_ends_late_takes_no_rules_of_others_along(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text("ran = True")
    late = only(["a:net"])
    late.__enter__()  # It outlasts its time, and goes on in its thread,
    with only(["a:net", "b:net"]):  # while the next task has begun.
        late.__exit__(None, None, None)
        with pytest.raises(NotAllowed, match="is not run here"):
            load_code(str(file), "plugin", "steelyard.criteria")
        nested = only(None)
        with nested, pytest.raises(NotAllowed):  # A task that trusts its server frees no other.
            load_code(str(file), "plugin", "steelyard.criteria")
    assert load_code(str(file), "plugin", "steelyard.criteria").ran


def test_bytecode_beside_a_file_is_not_run_in_its_place(tmp_path: Path) -> None:
    """Whoever agrees to a file has read the file; a folder from elsewhere may hold other bytecode under its name."""
    file = tmp_path / "losses.py"
    file.write_text("SAID = 'no'\n")
    py_compile.compile(str(file), doraise=True)
    when = file.stat()
    file.write_text("SAID = 'ok'\n")
    os.utime(file, ns=(when.st_atime_ns, when.st_mtime_ns))
    assert load_code(str(file), "training.loss", "steelyard.losses").SAID == "ok"
    assert list((tmp_path / "__pycache__").iterdir())


def test_no_bytecode_is_written_beside_a_file(tmp_path: Path) -> None:
    """The folder for it may be a link that leads elsewhere."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "__pycache__").symlink_to(tmp_path / "theirs")
    (tmp_path / "losses.py").write_text("SAID = 'ok'\n")
    assert load_code(str(tmp_path / "losses.py"), "training.loss", "steelyard.losses").SAID == "ok"
    assert not list((tmp_path / "theirs").iterdir())
