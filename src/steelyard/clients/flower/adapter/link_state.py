"""What a SuperLink keeps, in memory: nodes, runs and messages; the parts of messages in files.

Nothing of it outlives the SuperLink: keys are registered anew at every start, and runs go on from their own folders.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

from steelyard.base.logs import logger
from steelyard.clients.flower.parts import largest_answer

_log = logger(__name__)

_START_SECONDS = 120.0
"""Seconds that a server app has for its start beyond Flower's 30: on a busy machine it needs them. Flower starts
another one where they have passed, and soon three that keep each other from starting."""
_MOST_TRIES = 20
"""How often a node may announce its answer to one message; an honest one does so again where a call was lost."""


@dataclass
class _AnswerLimit:
    """What a node may still send in answer to one message."""

    node: int
    left: int
    tries: int = _MOST_TRIES
    taken: set[str] = field(default_factory=set[str])
    """Parts that have been counted; who sends one again fills nothing."""
    full: bool = False


@dataclass
class _Push:
    """Messages that are being sent in one go."""

    nodes: list[str] = field(default_factory=list[str])
    missing: set[str] = field(default_factory=set[str])
    """Parts that have not arrived yet."""


class NodeMessages(InMemoryLinkState):
    """Flower's state in memory, which says for which nodes a message has come once all of its parts are there.

    A node sends no more in answer to a message than the message allows, so that no node can fill the server's disk.
    """

    def __init__(self, manager: Any, store: Any, note: Callable[[list[str]], None]) -> None:
        super().__init__(manager, store)
        self._note = note
        self._pushes: dict[str, _Push] = {}
        self._limits: dict[str, _AnswerLimit] = {}
        """By message that is being answered."""
        self._answers: dict[str, str] = {}
        """Which message is answered in a push."""

    def store_message_and_object_tree(self, message: Any, object_tree: Any, session_id: str) -> tuple[bool, list[str]]:
        """Keep a message whose parts will follow."""
        if (asked := message.metadata.reply_to_message_id) and not self._has_tries(asked):
            return False, []
        stored, missing = super().store_message_and_object_tree(message, object_tree, session_id)
        node = self.nodes.get(message.metadata.dst_node_id)
        if stored and node is not None and not message.metadata.reply_to_message_id:
            push = self._pushes.setdefault(session_id, _Push())
            push.nodes.append(b64encode(node.public_key).decode("ascii"))
            push.missing.update(missing)
        if stored and asked:
            self._answers[session_id] = asked
        return stored, missing

    def store_object(self, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        """Keep a part of a message; of an answer, while there is room for it."""
        # Flower takes parts without the name of a push for any that wants them. Nobody here sends such.
        if not session_id or not self._within_limit(session_id, object_id, len(object_content)):
            return False
        stored = super().store_object(run_id, session_id, object_id, object_content)
        push = self._pushes.get(session_id)
        if stored and push is not None:
            push.missing.discard(object_id)
            if not push.missing:
                del self._pushes[session_id]
                self._note(push.nodes)
        return stored

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        """Let go of messages and of the answers to them."""
        super().delete_messages(message_ins_ids)
        if any(self._limits.pop(name, None) for name in message_ins_ids):
            self._answers = {session: name for session, name in self._answers.items() if name in self._limits}

    def claim_task(self, task_id: int) -> str | None:
        """Let a server app start, with time enough for it."""
        token = super().claim_task(task_id)
        if token is not None:
            self.task_token_store[task_id].active_until += timedelta(seconds=_START_SECONDS)
        return token

    def _has_tries(self, asked: str) -> bool:
        message = self.message_ins_store.get(asked)
        if message is None:
            return True  # Flower itself refuses such an answer.
        known = message.metadata
        limit = self._limits.setdefault(asked, _AnswerLimit(known.dst_node_id, largest_answer(known.group_id)))
        limit.tries -= 1
        return limit.tries >= 0

    def _within_limit(self, session: str, part: str, size: int) -> bool:
        limit = self._limits.get(self._answers.get(session, ""))
        if limit is None or part in limit.taken:
            return True
        if size > limit.left:
            if not limit.full:
                _log.error(f"node {limit.node}: its answer is larger than what was asked for; the rest is not kept")
            limit.full = True
            return False
        limit.left -= size
        limit.taken.add(part)
        return True


class PartsInFiles(InMemoryObjectStore):
    """Flower's store in memory, with the parts themselves in files: large models must not fill the memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def put(self, object_id: str, object_content: bytes) -> None:
        """Keep a part that was announced."""
        super().put(object_id, object_content)
        with self.lock_store:
            entry = self.store[object_id]
            if entry.content:
                try:
                    (self._folder / object_id).write_bytes(entry.content)
                except OSError:
                    entry.is_available = False
                    raise
                finally:
                    entry.content = b""

    def get(self, object_id: str) -> bytes | None:
        """Return a part; None where it was never announced, nothing where it has not arrived."""
        with self.lock_store:
            entry = self.store.get(object_id)
            if entry is None:
                return None
            return (self._folder / object_id).read_bytes() if entry.is_available else b""

    def delete(self, object_id: str) -> None:
        """Let go of a part, and of those that only it needs."""
        with self.lock_store:
            known = object_id in self.store  # Only such a name is a file of ours.
            super().delete(object_id)
            if known and object_id not in self.store:
                (self._folder / object_id).unlink(missing_ok=True)
