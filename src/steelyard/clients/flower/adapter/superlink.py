"""Flower's SuperLink as a process, and what is asked of it: keys of nodes, runs, and a server app's answers."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from cryptography.hazmat.primitives import serialization
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StopRunRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.superlink.grid import HttpGrid

from steelyard.base.logs import logger
from steelyard.clients.flower.adapter.fleet import bound_answers
from steelyard.clients.flower.adapter.messages import PartsTree

_log = logger(__name__)

_AGAIN_SECONDS = 1.0
"""How long after its end, at most, a SuperExec is started again."""


class SuperLinkControl:
    """Registers nodes' keys with a SuperLink on this machine, and ends its runs; calls raise what httpx raises.

    `authority` is the certificate by which it is known; None: without TLS.
    """

    def __init__(self, address: str, authority: bytes | None) -> None:
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        self._client = ControlHttpClient.from_server_address(address, authority is None, authority, [version])

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


def run_superlink(serve: Callable[..., None], parts: Path | None) -> None:
    """Run Flower's SuperLink with the options of this process's command line, its web application served by `serve`.

    With a folder, the parts of messages are kept in files there and not in memory.
    """
    # For speed of start: whoever only speaks to a SuperLink need not load all of it.
    from steelyard.clients.flower.adapter.direct_calls import DirectCalls
    from steelyard.clients.flower.adapter.link_state import NodeMessages, PartsInFiles

    started: list[DirectCalls] = []

    def note(names: list[str]) -> None:
        for calls in started:
            calls.note(names)

    def run(app: Any, **options: Any) -> None:
        started.append(DirectCalls(app))
        serve(started[0], **options)

    # Flower has no settings for any of this. The package names a function as it names this module.
    superlink: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    superlink.uvicorn = SimpleNamespace(run=run)
    superlink.SuperLinkLifespan = _watched(superlink.SuperLinkLifespan)
    states: Any = importlib.import_module("flwr.server.superlink.linkstate.linkstate_factory")
    states.InMemoryLinkState = lambda manager, store: NodeMessages(manager, store, note)
    if parts is not None:
        stores: Any = importlib.import_module("flwr.supercore.object_store.object_store_factory")
        stores.InMemoryObjectStore = lambda: PartsInFiles(parts)
    superlink.flower_superlink()


def _watched(lifespan: Any) -> Any:
    """Return Flower's class that starts the SuperExec, which starts runs: one that ended is started again.

    Flower itself would take runs further on and start none of them.
    """

    class Watched(lifespan):
        def startup(self) -> None:
            self._closing = threading.Event()
            super().startup()
            threading.Thread(target=self._watch, daemon=True, name="superexec").start()

        def shutdown(self) -> None:
            self._closing.set()
            super().shutdown()

        def _watch(self) -> None:
            while not self._closing.wait(_AGAIN_SECONDS):
                code = None if self.superexec_process is None else self.superexec_process.poll()
                if code is not None and not self._closing.is_set():
                    _log.error(f"the SuperExec, which starts runs, ended (code {code}); it is started again")
                    self._start_superexec_if_needed()

    return Watched


class FoundAnswer(NamedTuple):
    """An answer that lies on the SuperLink: its name, which message it answers, and the names of its parts."""

    name: str
    answers: str
    tree: PartsTree


class AnswerSource:
    """The answers behind one grid; one call takes at most `largest` bytes beside parts."""

    def __init__(self, grid: HttpGrid, largest: int) -> None:
        self._grid: Any = grid
        bound_answers(self._client, largest)

    @classmethod
    def of(cls, grid: Grid, largest: int) -> AnswerSource | None:
        """Return what looks for answers behind a grid; None where it is no SuperLink over HTTP."""
        return cls(grid, largest) if isinstance(grid, HttpGrid) else None

    def look(self, names: Iterable[str]) -> list[FoundAnswer]:
        """Return the answers that are there to the messages of these names; none of them is fetched."""
        found = self._client.PullMessages(PullAppMessagesRequest(message_ids=sorted(names)))
        return [
            FoundAnswer(message.metadata.message_id, message.metadata.reply_to_message_id, tree)
            for message, tree in zip(found.messages_list, found.message_object_trees, strict=True)
        ]

    def part_puller(self) -> Callable[[str], bytes]:
        """Return what fetches one part of an answer, by name."""
        return make_pull_object_fn_protobuf(self._client.PullObject, self._grid.node, self._grid.run.run_id)

    def confirm(self, name: str) -> None:
        """Say that an answer has arrived, so that the SuperLink need not keep it."""
        run, node = self._grid.run.run_id, self._grid.node
        request = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=name)
        self._client.ConfirmMessageReceived(request)

    @property
    def _client(self) -> Any:
        return self._grid._runtime_client
