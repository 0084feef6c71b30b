"""What the warm process does once so that none of its forks need to: see `warm.py`, which has it read last."""

from __future__ import annotations

import functools

import typer.main

from steelyard.cli.main import command_line
from steelyard.data.bundled import read_digits
from steelyard.data.settings import DataSettings
from steelyard.experiment.run_notes import versions

# What typer finds in a function does not change; reading it from the annotations takes most of a quick command.
typer.main.get_params_from_function = functools.cache(  # pyright: ignore[reportPrivateImportUsage]
    typer.main.get_params_from_function  # pyright: ignore[reportPrivateImportUsage]
)
command_line()
versions()
read_digits(DataSettings())
