"""Putting the parts of an arena together: a folder with all of its scenes, as if one command had run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from steelyard.arena.figures import FAILED, RIVALS
from steelyard.arena.plan import SCENES, read_arena
from steelyard.base.files import ARENA_FILE
from steelyard.sweeps.joining import Share, join_shares


def join_arenas(folders: Sequence[Path], out: Path) -> Path:
    """Make one arena in a new folder of all parts of one, given in any order; returns the folder."""
    arenas = {folder: read_arena(folder) for folder in folders}
    shares = {
        folder: Share(
            arena.part,
            replace(arena, part=None).document(),
            [f"{SCENES}/{name}" for name in arena.own],
            [f"{SCENES}/{name}{RIVALS}" for name in arena.own],
        )
        for folder, arena in arenas.items()
    }
    return join_shares("arena", shares, out, ARENA_FILE, FAILED)
