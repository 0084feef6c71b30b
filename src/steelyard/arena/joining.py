"""Putting the parts of an arena together: a folder with all of its scenes, as if one command had run them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from steelyard import files
from steelyard.arena.figures import FAILED, scene_folder
from steelyard.arena.plan import read_arena
from steelyard.errors import UserError, own_folder
from steelyard.experiment.job_array import in_order
from steelyard.sweeps.plan_file import differing, write_plan
from steelyard.sweeps.running import finished


def join_arenas(folders: Sequence[Path], out: Path) -> Path:
    """Make one arena in a new folder of all parts of one, given in any order; returns the folder.

    The parts stay as they are. What is missing, doubled, not done or of another arena is named.
    """
    arenas = {folder: read_arena(folder) for folder in folders}
    parts = in_order({folder: arena.part for folder, arena in arenas.items()})
    whole = replace(arenas[parts[0]], part=None)
    scenes: dict[str, Path] = {}
    for folder in parts:
        if (field := differing(whole.document(), replace(arenas[folder], part=None).document())) is not None:
            raise UserError(
                f"{folder}: is a part of another arena than {parts[0]}, which differs in {field}; allowed: parts of one"
            )
        for name in arenas[folder].own:
            if not finished(scene_folder(folder, name)) and not files.is_file(_failure(folder, name)):
                raise UserError(f"{folder}: scene {name} is not done; allowed: `steelyard resume {folder}` first")
            scenes[name] = folder
    out = own_folder(out, "--out")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out: {out} is not empty; allowed: a new folder")
    try:
        for name, folder in scenes.items():
            if files.is_file(_failure(folder, name)):
                files.write(_failure(out, name), files.read_bytes(_failure(folder, name)))
            if (run := scene_folder(folder, name)).exists():
                files.refuse_links(run)
                shutil.copytree(run, scene_folder(out, name))
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}; allowed: a writable folder") from error
    # Last: a folder without it is no arena.
    write_plan(out / files.ARENA_FILE, whole.document())
    return out


def _failure(folder: Path, scene: str) -> Path:
    run = scene_folder(folder, scene)
    return run.with_name(f"{run.name}{FAILED}")
