"""Style and scripts of the report and the page, as files of their own."""

from __future__ import annotations

from importlib.resources import files


def text(name: str) -> str:
    """Return one of the files beside this one as text."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
