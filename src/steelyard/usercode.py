"""Code that users write: modules and files that an experiment names, loaded once each, and functions in them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from steelyard.errors import UserError, listed, nearest
from steelyard.randomness import stream_key

PYTHON = "python:"
"""How the names of functions begin that were handed over from Python and that no import finds."""

_loading = RLock()
_given: dict[str, Callable[..., Any]] = {}
"""Functions handed over from Python that no import path names."""


def load_code(code: str, field: str) -> ModuleType:
    """Import a user's module by dotted name or by the path of a .py file; `field` is who asks, for the error line.

    Use it for every piece of user code, so that a file named twice is run once.
    """
    if not code.endswith(".py"):
        try:
            return importlib.import_module(code)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{field}: cannot import '{code}': {type(error).__name__}: {error}") from error
    path = Path(code).resolve()
    if not path.is_file():
        raise UserError(
            f"{field}: no file '{code}', there is no such file; allowed: the path of a Python file, or a module name"
        )
    name = f"steelyard_user_{path.stem}_{stream_key(0, purpose=str(path)):x}"
    with _loading:  # threads that train ask for a loss at the same time
        if name in sys.modules:
            return sys.modules[name]
        return _run(name, path, code, field)


def _run(name: str, path: Path, code: str, field: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        if isinstance(error, UserError):
            raise
        raise UserError(f"{field}: '{code}' fails when loaded: {type(error).__name__}: {error}") from error
    return module


def hand_over(factory: Callable[..., Any]) -> str:
    """Return a name under which `find_code` finds what was given from Python; use it to name a model in settings."""
    module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", repr(factory))
    if module and module != "__main__" and "<" not in name:
        path = f"{module}:{name}"
        if _attribute(sys.modules.get(module), name) is factory:
            return path
    first = path = f"{PYTHON}{name}"
    number = 1
    while _given.get(path, factory) is not factory:  # another lambda, say, or a function that was defined anew
        number += 1
        path = f"{first}#{number}"
    _given[path] = factory
    return path


def hand_over_as(name: str, function: Callable[..., Any]) -> None:
    """Let a name of `hand_over`, from an earlier process, stand for a function again, if it is the function's name."""
    own = getattr(function, "__qualname__", repr(function))
    if name.removeprefix(PYTHON).partition("#")[0] == own:
        _given[name] = function


def find_code(name: str, field: str, known: Sequence[str]) -> Callable[..., Any]:
    """Return what "module:name", "file.py:name" or a handed-over name stands for; use it for user-written code."""
    if name in _given:
        return _given[name]
    if name.startswith(PYTHON):
        raise UserError(
            f"{field}: '{name}' was handed over from Python and is not known to this process; allowed: go on in "
            "Python, with steelyard.resume(folder, given=[the function])"
        )
    source, colon, attribute = name.rpartition(":")
    if not colon or not source:
        raise UserError(
            f"{field}: got '{name}'{nearest(name, known)}; allowed: {listed(known)}, "
            "'package.module:name' or 'path/to/file.py:name'"
        )
    found = _attribute(load_code(source, field), attribute)
    if not callable(found):
        raise UserError(f"{field}: {source} has no function or class '{attribute}'")
    return found


def _attribute(holder: object, dotted: str) -> Any:
    for part in dotted.split("."):
        holder = getattr(holder, part, None)
    return holder
