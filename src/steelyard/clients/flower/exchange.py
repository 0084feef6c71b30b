"""Requests to nodes on behalf of tasks and questions: who is asked where, and what became of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from flwr.app import RecordDict

from steelyard.clients.flower.checks import clean, reading_one_answer
from steelyard.clients.flower.forms import Refused
from steelyard.clients.flower.requesting import Gone, Request, RequestSender, Silence
from steelyard.clients.flower.roster import Roster
from steelyard.messages.updates import Failure
from steelyard.proof.statements import Proof

_RESTING = "its node was silent and has not answered since"
_AWAY = "no connected node holds this client"


class NodeAnswer(Protocol):
    """What one node answered: of some clients, and why not of others."""

    @property
    def failures(self) -> Sequence[Failure]: ...


AnswerT = TypeVar("AnswerT", bound=NodeAnswer)


@dataclass(eq=False)
class TaskRequest:
    """One request on behalf of one task or question."""

    index: int
    """Which task or question it belongs to."""
    node: int
    asked: tuple[str, ...]
    message: Request
    proofs: Sequence[Proof] = ()
    """What signed heads say of the node in earlier rounds, which go with it."""


class Exchange:
    """Asks the nodes that hold some clients; a client without a proper answer is a failure with its reason."""

    def __init__(self, roster: Roster, sender: RequestSender) -> None:
        self._roster, self._sender = roster, sender
        self.all_gone = False
        """Whether no node at all was there any more when the last exchange ended."""

    def group(self, clients: Sequence[str], failures: list[Failure]) -> dict[int, tuple[str, ...]]:
        """Return who is to be asked where; a client whose node is away or silent is left out, with the reason."""
        homes = {client: self._roster.holder(client) for client in clients}
        awake = {node for node in homes.values() if node is not None and not self._roster.is_resting(node)}
        groups: dict[int, list[str]] = {}
        for client, node in homes.items():
            if node is None:
                failures.append(Failure(client, _AWAY))
            elif awake and node not in awake:  # Where all are silent, there is nobody else to ask.
                failures.append(Failure(client, _RESTING))
            else:
                groups.setdefault(node, []).append(client)
        return {node: tuple(sorted(groups[node])) for node in sorted(groups)}

    def send(
        self,
        requests: list[TaskRequest],
        seconds: float,
        read: Callable[[TaskRequest, RecordDict], AnswerT],
        failures: list[list[Failure]],
    ) -> dict[int, list[AnswerT]]:
        """Send all requests, read what comes back, and put the blame where an answer is missing or refused."""
        parts: dict[int, list[AnswerT]] = {}

        def take(index: int, content: RecordDict) -> AnswerT | str:
            # Each answer is read as it arrives and let go of, so that not all of them lie in memory at once.
            try:
                with reading_one_answer():
                    return read(requests[index], content)
            except Refused as refusal:
                return str(refusal)

        answers = self._sender.ask([request.message for request in requests], seconds, read=take)
        self.all_gone = bool(answers) and all(isinstance(answer, Gone) for answer in answers)
        for request, answer in zip(requests, answers, strict=True):
            # A node that sends nonsense or an error is there; one that is silent may not be.
            self._roster.heard(request.node, answered=not isinstance(answer, Silence))
            if isinstance(answer, str):
                reason = clean(answer)
                failures[request.index] += [Failure(client, reason) for client in request.asked]
            else:
                failures[request.index] += answer.failures
                parts.setdefault(request.index, []).append(answer)
        return parts
