"""Code that users write: modules and files that an experiment names, loaded once each."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from threading import RLock
from types import ModuleType

from steelyard.errors import UserError
from steelyard.randomness import stream_key

_loading = RLock()


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
