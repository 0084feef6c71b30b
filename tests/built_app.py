"""The command line, built once: importing this has `main()` use it again, for tests that call it hundreds of times.

Typer builds all commands anew for every call, from the types of all their parameters: a tenth of a second.
"""

from __future__ import annotations

import functools

import typer.main

from steelyard.cli.main import app

typer.main.get_command = functools.cache(typer.main.get_command)
BUILT = typer.main.get_command(app)
