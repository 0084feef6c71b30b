"""The command line, built once: for processes that are forked to run one command each.

Typer builds all commands from the types of all their parameters: a tenth of a second.
"""

from __future__ import annotations

from steelyard.cli.main import command_line

BUILT = command_line()
