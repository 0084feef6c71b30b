"""Asking nodes who they are, and reading what they say: clients, what their data look like, keys; false claims refused.

They are asked in the background: one that hangs holds up neither rounds nor the others.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from cryptography.hazmat.primitives import serialization
from flwr.app import RecordDict

from steelyard.clients.flower import wire
from steelyard.clients.flower.forms import INTRODUCE, AskForm, IntroductionForm, Refused
from steelyard.clients.flower.register import Register, bare
from steelyard.clients.flower.requesting import Request, RequestSender

About = dict[str, int | list[int]]
"""What a server without data must know of the nodes' data, such as the shape of a sample."""

LARGEST_INTRODUCTION = 4 << 20
"""Most bytes of what a node says of itself, as it is sent and as it is read."""
_LONGEST_NAME = 128
_LARGEST_FACT = 10**8
_MOST_DIMENSIONS = 8
_MOST_NAMED = 5
_ASK_AGAIN_SECONDS, _LONGEST_PAUSE = 5.0, 600.0


class Introducing:
    """Asks nodes to introduce themselves, and keeps their answers until somebody listens; `seconds` is their time."""

    def __init__(self, sender: RequestSender, seconds: float, experiment: str) -> None:
        self.seconds = seconds
        self.asked: set[int] = set()
        """Nodes whose answer is still to come."""
        self._sender = sender
        self._question = AskForm(experiment=experiment)
        self._later: dict[int, tuple[float, float]] = {}
        """When a node may be asked again, and the pause before that."""
        self._answers: queue.SimpleQueue[tuple[int, RecordDict | str]] = queue.SimpleQueue()

    def ask(self, nodes: set[int], round: int) -> set[int]:
        """Ask those of some nodes who have not been asked and are not to be left alone yet; returns whom."""
        now = time.monotonic()
        asked = nodes - self.asked - {node for node, (when, _) in self._later.items() if when > now}
        if asked:
            self.asked |= asked
            threading.Thread(target=self._ask, args=(sorted(asked), round), daemon=True, name="introductions").start()
        return asked

    def answers(self, seconds: float) -> Iterator[tuple[int, RecordDict | str]]:
        """Return what nodes have said of themselves; waits for the first of them so long, and for no other."""
        while True:
            try:
                node, answer = self._answers.get(timeout=seconds) if seconds > 0 else self._answers.get_nowait()
            except queue.Empty:
                return
            seconds = 0.0
            self.asked.discard(node)
            yield node, answer

    def leave_alone(self, node: int) -> None:
        """Ask a node later, after a pause that is twice the one before."""
        pause = min(2 * self._later.get(node, (0.0, _ASK_AGAIN_SECONDS / 2))[1], _LONGEST_PAUSE)
        self._later[node] = (time.monotonic() + pause, pause)

    def welcome(self, node: int) -> None:
        """Forget that a node was to be left alone."""
        self._later.pop(node, None)

    def _ask(self, nodes: list[int], round: int) -> None:
        question, heard = wire.content(self._question, {}), set[int]()
        requests = [Request(node, INTRODUCE, question, round, LARGEST_INTRODUCTION) for node in nodes]

        def take(index: int, answer: RecordDict | str) -> RecordDict | str:
            heard.add(nodes[index])
            self._answers.put((nodes[index], answer))
            return answer

        try:
            answers = self._sender.ask(requests, self.seconds, read=take, failed=take)
        except Exception as error:
            answers = [f"could not be asked: {type(error).__name__}"] * len(nodes)
        for node, answer in zip(nodes, answers, strict=True):
            if node not in heard:
                self._answers.put((node, answer))


def introduction(answer: RecordDict | str) -> IntroductionForm:
    """Return what a node said of itself, or refuse it."""
    if isinstance(answer, str):
        raise Refused(answer)
    text, arrays = wire.split(answer)
    if arrays:
        raise Refused("introduction: holds arrays; allowed: none")
    return IntroductionForm.read(text, LARGEST_INTRODUCTION)


def facts(about: Mapping[str, int | list[int]]) -> About:
    """Return what a node says of its data; sizes that no data have are refused."""
    for name, value in about.items():
        numbers = value if isinstance(value, list) else [value]
        large = any(not 0 <= number <= _LARGEST_FACT for number in numbers) or prod(numbers) > _LARGEST_FACT
        if len(about) > _MOST_DIMENSIONS or len(numbers) > _MOST_DIMENSIONS or len(name) > _LONGEST_NAME or large:
            raise Refused(f"about {name[:40]}: no data have such sizes; allowed: a product of at most {_LARGEST_FACT}")
    return dict(about)


def key_line(pem: bytes) -> str:
    """Return a node's public key as the register writes it; a node without one has no key that could be in it."""
    try:
        key = serialization.load_pem_public_key(pem)
        return bare(key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode())
    except ValueError:
        return ""


def client_names(clients: Sequence[str], most: int) -> tuple[str, ...]:
    """Return a node's clients, ascending, or refuse names that cannot be stored and shown."""
    if not 1 <= len(clients) <= most or len(set(clients)) != len(clients):
        raise Refused(f"clients: {len(clients)} names; allowed: 1 to {most}, all different")
    for name in clients:
        if not (name.strip() and name.isprintable() and len(name) <= _LONGEST_NAME):
            raise Refused(f"clients: got {name[:40]!r}; allowed: printable names of at most {_LONGEST_NAME} letters")
    return tuple(sorted(clients))


def absent(
    register: Register, connected: Collection[str], said: Mapping[str, About], about: About, reasons: Mapping[str, str]
) -> str:
    """Say who of a register does not take part, and why, in one line; all but the register are by key.

    `said` is what those who introduced themselves said of their data, `reasons` why others were not admitted.
    """
    missing: list[str] = []
    for key, entry in register.entries.items():
        if key not in said:
            unknown = "is connected and has not said who it is" if key in connected else "is not connected"
            missing.append(f"{entry.name} {reasons.get(key, unknown)}")
        elif said[key] != about:
            missing.append(f"{entry.name} has data of another kind: {said[key]}; most have {about}")
    more = len(missing) - _MOST_NAMED
    return "; ".join(missing[:_MOST_NAMED] + ([f"{more} others are missing"] if more > 0 else []))
