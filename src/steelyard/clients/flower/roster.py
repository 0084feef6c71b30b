"""Who lives where: nodes come and go with ids of Flower's making, clients keep the names that their node gives them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flwr.app import RecordDict

from steelyard.clients.flower import wire
from steelyard.clients.flower.checks import reading_one_answer
from steelyard.clients.flower.courier import NOT_WAITED_FOR, Courier, Letter
from steelyard.clients.flower.forms import INTRODUCE, AskForm, IntroductionForm, Refused
from steelyard.errors import UserError

_INTRODUCTION_SECONDS = 30.0
_ASK_AGAIN_SECONDS = 600.0
_LONGEST_NAME = 128
_MOST_CLIENTS = 1_000_000
_LONGEST_INTRODUCTION = 100_000_000


class Roster:
    """Maps stable client ids to the nodes that hold them now; cohorts are drawn from the ids, never from nodes."""

    def __init__(self, courier: Courier, seconds: float = _INTRODUCTION_SECONDS, experiment: str = "") -> None:
        self.registered: set[str] = set()
        """Every client that ever introduced itself in this run, also while its node is away."""
        self.about: dict[str, int | list[int]] = {}
        """What the first node told about its data; a node that tells something else is not admitted."""
        self.notes: list[str] = []
        """What a reader of the run should know: nodes refused, clients claimed twice."""
        self._courier = courier
        self._seconds = seconds
        self._question = AskForm(experiment=experiment)
        self._claims: dict[int, tuple[str, ...]] = {}
        self._holders: dict[str, int] = {}
        self._silent: set[int] = set()
        self._refused: set[int] = set()
        self._later: dict[int, float] = {}

    @property
    def nodes(self) -> int:
        """Number of nodes that are connected and introduced."""
        return len(self._claims)

    def holder(self, client: str) -> int | None:
        """Return the node that holds a client now, or None while it is away."""
        return self._holders.get(client)

    def heard(self, node: int, *, answered: bool) -> None:
        """Note whether a node answered; one that did not loses its clients to another node that claims them."""
        (self._silent.discard if answered else self._silent.add)(node)

    def refresh(self, seconds: float | None = None, enough: int | None = None) -> None:
        """Ask newcomers who they are and let go of nodes that left; cheap when nothing changed.

        A newcomer that does not answer is left alone for a while, so that it does not hold up every round.
        """
        present = set(self._courier.grid.get_node_ids())
        self._claims = {node: clients for node, clients in self._claims.items() if node in present}
        self._refused &= present
        now = time.monotonic()
        waiting = {node for node, when in self._later.items() if when > now}
        newcomers = sorted(present - set(self._claims) - self._refused - waiting)
        letters = [Letter(node, INTRODUCE, wire.content(self._question, {})) for node in newcomers]
        answers = self._courier.ask(letters, seconds or self._seconds, enough) if letters else []
        for node, answer in zip(newcomers, answers, strict=True):
            try:
                with reading_one_answer():
                    self._claims[node] = self._admit(_introduction(answer))
                self._silent.discard(node)
            except Refused as refusal:
                if answer == NOT_WAITED_FOR:
                    continue
                self._note(f"node {node} was not admitted: {refusal}")
                if isinstance(answer, str):  # It may be slow, or its data not there yet: it may try again.
                    self._later[node] = time.monotonic() + _ASK_AGAIN_SECONDS
                else:  # It spoke, and not as it should.
                    self._refused.add(node)
        self._assign()

    def _admit(self, form: IntroductionForm) -> tuple[str, ...]:
        if self._claims and form.about != self.about:
            raise Refused(f"its data is of another kind: {form.about}; allowed: {self.about}"[:300])
        names = _names(form.clients)
        self.about = dict(form.about)
        return names

    def wait_for(self, nodes: int, seconds: float) -> None:
        """Wait until this many nodes have introduced themselves, or say how many there are."""
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            # Reading the data for the first time can take long, so nodes may use all of the time there is.
            self._later.clear()
            self.refresh(max(left, 1.0), nodes - self.nodes)
            if self.nodes >= nodes:
                return
            if left <= 0:
                raise UserError(
                    f"federate.nodes: {nodes} nodes are to take part, {self.nodes} connected within "
                    f"federate.start_timeout = {seconds:g} s{'; ' + self.notes[-1] if self.notes else ''}"
                )
            time.sleep(0.5)

    def _assign(self) -> None:
        claimants: dict[str, list[int]] = {}
        for node, clients in self._claims.items():
            for client in clients:
                claimants.setdefault(client, []).append(node)
        for client, nodes in claimants.items():
            current = self._holders.get(client)
            fit = [node for node in nodes if node not in self._silent] or nodes
            # Whoever holds a client and answers keeps it: a second claim must not displace it.
            chosen = current if current in fit else fit[0]
            self._holders[client] = chosen
            for other in nodes:
                if other != chosen:
                    self._note(f"client {client} is claimed by node {other}, but node {chosen} holds it")
        self._holders = {client: node for client, node in self._holders.items() if client in claimants}
        self.registered |= set(claimants)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _introduction(answer: RecordDict | str) -> IntroductionForm:
    if isinstance(answer, str):
        raise Refused(answer)
    text, arrays = wire.split(answer)
    if arrays:
        raise Refused("introduction: holds arrays; allowed: none")
    if isinstance(text, str) and len(text) > _LONGEST_INTRODUCTION:
        raise Refused(f"introduction: {len(text)} letters; allowed: at most {_LONGEST_INTRODUCTION}")
    return IntroductionForm.read(text)


def _names(clients: Sequence[str]) -> tuple[str, ...]:
    if not 1 <= len(clients) <= _MOST_CLIENTS or len(set(clients)) != len(clients):
        raise Refused(f"clients: {len(clients)} names; allowed: 1 to {_MOST_CLIENTS}, all different")
    for name in clients:
        if not (name.strip() and name.isprintable() and len(name) <= _LONGEST_NAME):
            raise Refused(f"clients: got {name[:40]!r}; allowed: printable names of at most {_LONGEST_NAME} letters")
    return tuple(sorted(clients))
