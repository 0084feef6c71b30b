"""The live page over the runs in a folder: a small web server on this machine."""

from __future__ import annotations

from importlib.util import find_spec

from steelyard.base.errors import UserError


def require_page() -> None:
    """Say in one line what to install where the page's packages are missing."""
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(f"watch: needs {' and '.join(missing)}, which is not installed; pip install 'steelyard[page]'")
