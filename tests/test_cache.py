"""Where things are kept that can be made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.cache import cache_folder


def test_the_first_that_is_set_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("STEELYARD_CACHE", "/ours")
    assert cache_folder() == Path("/ours")
    monkeypatch.setenv("STEELYARD_CACHE", "")
    assert cache_folder() == Path("/xdg/steelyard")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/someone/.cache/steelyard")
