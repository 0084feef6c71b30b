"""Flower's SuperLink as a process, and what is asked of it on its own machine: keys of nodes, and runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives import serialization
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StopRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor


class SuperLinkControl:
    """Registers nodes' keys with a SuperLink on this machine, and ends its runs; calls raise what httpx raises."""

    def __init__(self, address: str, authority: bytes) -> None:
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        self._client = ControlHttpClient.from_server_address(address, False, authority, [version])

    def register(self, key: str, name: str) -> None:
        """Make a public key, a line as in its .pub file, known under a name."""
        public = serialization.load_ssh_public_key(key.encode())
        pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        self._client.RegisterNode(RegisterNodeRequest(public_key=pem, name=name))

    def stop(self, run: int) -> None:
        """Stop the run of this number; its server app notices when it next speaks to the SuperLink."""
        self._client.StopRun(StopRunRequest(run_id=run))

    def ended(self, run: int) -> str | None:
        """Return how the run of this number ended, in Flower's words; None while it has not."""
        found = self._client.ListRuns(ListRunsRequest(run_id=run)).run_dict
        status = found[run].status if run in found else None
        return f"{status.sub_status}: {status.details}" if status is not None and status.status == "finished" else None


def run_superlink(serve: Callable[..., None]) -> None:
    """Run Flower's SuperLink with the options of this process's command line, its web application served by `serve`."""
    # Flower has no setting for how its server is made. The package names a function as it names this module.
    superlink: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    superlink.uvicorn = SimpleNamespace(run=serve)
    superlink.flower_superlink()
