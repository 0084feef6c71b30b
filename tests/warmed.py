"""What the warm process does once so that none of its forks need to: see `warm.py`, which has it read last."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
import threading

import steelyard
from steelyard.base.errors import UserError
from steelyard.cli.main import command_line
from steelyard.data import DataSettings
from steelyard.experiment.resuming import versions

command_line()
versions()
DataSettings().read()

# Commands import late what they alone need. Rooms that read Flower are left out: a fork of gRPC is not to be trusted.
ROOMS = ("cli", "contributions", "experiment", "page", "report", "runs", "studies", "tracking")
for room in ROOMS:
    for found in pkgutil.walk_packages([f"{steelyard.__path__[0]}/{room}"], f"steelyard.{room}."):
        with contextlib.suppress(UserError):  # which names an extra that is not installed here
            importlib.import_module(found.name)
assert threading.active_count() == 1
assert "grpc" not in sys.modules
