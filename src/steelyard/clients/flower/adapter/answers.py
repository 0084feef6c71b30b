"""The server app's look for answers on its SuperLink; Flower has no public way to look without fetching them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.superlink.grid import HttpGrid

from steelyard.clients.flower.adapter.messages import PartsTree
from steelyard.clients.flower.adapter.transport import bound_answers


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
