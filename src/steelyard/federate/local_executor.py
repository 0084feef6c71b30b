"""A warm executor for nodes on one machine: Flower's SuperExec, with the libraries and the data already loaded.

Flower starts a new Python process for every message, which imports torch and reads the data before it can answer. For
several nodes on one machine that is nearly all of the time. This process stands in for their SuperExecs (Flower's
isolation mode "process"): it loads everything once and forks a ClientApp process per message.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import httpx
import torch
from flwr.app import Context, RecordDict
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import run_clientapp

from steelyard.errors import UserError
from steelyard.federate.client_app import node_clients


@dataclass(frozen=True)
class NodeSpec:
    """One SuperNode that this executor serves."""

    address: str
    """Host and port of the SuperNode's runtime API."""
    home: str
    """FLWR_HOME of this node; each has its own, because Flower unpacks the app there."""
    config: dict[str, Any]
    """The node's configuration, as given to the SuperNode."""


def serve(nodes: list[NodeSpec], run_config: dict[str, Any], pids: Path, poll: float) -> NoReturn:
    """Serve nodes until this process is ended; call it in a process of its own.

    It loads while the nodes are still to be started; their process ids then stand in the file `pids`.
    """
    _warm(nodes, run_config)
    while not pids.is_file():
        time.sleep(0.1)
    parents: list[int] = json.loads(pids.read_text(encoding="utf-8"))
    request = AcquireTaskRequest(supported_task_types=["flwr-clientapp"])
    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    links = [
        (node, pid, RuntimeHttpClient.from_server_address(node.address, True, None, interceptors=[version]))
        for node, pid in zip(nodes, parents, strict=True)
    ]
    while True:
        for node, pid, link in links:
            try:
                answer = link.AcquireTask(request)
            except httpx.HTTPError:
                continue  # The node is starting, busy, or gone; the others go on.
            if answer.HasField("task") and answer.token:
                _fork(node, pid, answer.token)
        _reap()
        time.sleep(poll)


def _warm(nodes: list[NodeSpec], run_config: dict[str, Any]) -> None:
    """Load the libraries and every node's clients before the first fork, so that all children have them."""
    # What torch loads, in two seconds, when the first optimiser is made.
    importlib.import_module("torch._dynamo")
    # Threads do not survive a fork: with one thread torch starts none.
    torch.set_num_threads(1)
    for node in nodes:
        try:
            node_clients(
                Context(run_id=0, node_id=0, node_config=node.config, state=RecordDict(), run_config=run_config)
            )
        except UserError as error:
            print(f"steelyard: {error}", flush=True)  # The node itself will say so to the server.


def _fork(node: NodeSpec, pid: int, token: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        return
    code = 1
    try:
        os.environ["FLWR_HOME"] = node.home
        run_clientapp(node.address, token, insecure=True, parent_pid=pid)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main() -> NoReturn:
    """Serve the nodes that a JSON file describes: python -m steelyard.federate.local_executor FILE."""
    document = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    nodes = [NodeSpec(**node) for node in document["nodes"]]
    serve(nodes, document["run_config"], Path(document["pids"]), float(document["poll"]))


if __name__ == "__main__":
    main()
