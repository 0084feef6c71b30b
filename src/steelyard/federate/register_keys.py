"""Registering several node keys with a SuperLink in one process; `flwr supernode register` starts one for each key."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flwr.cli.app import app


def register(connection: str, keys: Sequence[str]) -> None:
    """Register public keys over one SuperLink connection of Flower's configuration."""
    for key in keys:
        app(["supernode", "register", key, connection], standalone_mode=False)


if __name__ == "__main__":
    register(sys.argv[1], sys.argv[2:])
