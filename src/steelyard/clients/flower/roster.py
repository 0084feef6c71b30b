"""Who lives where: nodes come and go with ids of Flower's making, clients keep the names that their node gives them.

Nodes are asked in the background who they are: one that hangs holds up neither rounds nor the others.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from cryptography.hazmat.primitives import serialization
from flwr.app import RecordDict

from steelyard.base.errors import UserError
from steelyard.base.logs import logger
from steelyard.clients.flower import wire
from steelyard.clients.flower.mailbox import Request, RequestSender, reaching_superlink
from steelyard.clients.flower.register import Register, bare
from steelyard.clients.flower.wire import INTRODUCE, AskForm, IntroductionForm, Refused, clean, reading_one_answer
from steelyard.clients.node import Terms

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
        self.ask_for(experiment)
        self._later: dict[int, tuple[float, float]] = {}
        """When a node may be asked again, and the pause before that."""
        self._answers: queue.SimpleQueue[tuple[int, RecordDict | str]] = queue.SimpleQueue()

    def ask_for(self, experiment: str) -> None:
        """Ask nodes from now on for this experiment."""
        self._question = AskForm(experiment=experiment)

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


_log = logger(__name__)

_INTRODUCTION_SECONDS = 30.0
_LOOK_SECONDS = 0.1
_MOST_CLIENTS = 10_000
_MOST_NOTES = 200
_MOST_ROUNDS_LEFT_ALONE = 64
_QUIET_SECONDS = 5.0
"""How long a start waits before it says for whom."""


@dataclass(frozen=True)
class _Claim:
    """What a node said of itself."""

    clients: tuple[str, ...]
    about: About
    terms: Terms
    samples: Mapping[str, int]


class Roster:
    """Maps stable client ids to the nodes that hold them now; cohorts are drawn from the ids, never from nodes.

    `register` returns the register as it is now: a key that is entered during a run takes part from the next round.
    With a register, a client belongs to the key that its entry names, or else to the key that first had it. What the
    data look like is what the experiment says (`known`), and what it leaves open is what most nodes say; nodes that
    say otherwise are not admitted.
    """

    def __init__(
        self,
        sender: RequestSender,
        seconds: float = _INTRODUCTION_SECONDS,
        experiment: str = "",
        register: Callable[[], Register] | None = None,
        most_clients: int = _MOST_CLIENTS,
        known: Mapping[str, int | list[int]] | None = None,
    ) -> None:
        self.registered: set[str] = set()
        """Every client that ever introduced itself in this run, also while its node is away."""
        self.owners: dict[str, str] = {}
        """With a register: the key that each client belongs to, for the whole run."""
        self.notes: list[str] = []
        """What a reader of the run should know: nodes refused, clients claimed twice."""
        self.round = 0
        """The round that is going on, for the notes."""
        self._sender = sender
        self._introducing = Introducing(sender, seconds, experiment)
        self._read_register, self._most_clients = register, most_clients
        self._register = None if register is None else register()
        self._known = dict(known or {})
        self._keys: dict[int, str] = {}
        self._claims: dict[int, _Claim] = {}
        self.samples: dict[str, int] = {}
        """How many samples each client trains on, as far as the node that holds it has said so."""
        self._agreed: About | None = None
        self._any = False
        """Whether nodes count whose data look otherwise: what is agreed on next may make them alike."""
        self._holders: dict[str, int] = {}
        self._silent: set[int] = set()
        self._strikes: dict[int, int] = {}
        """How often in a row a node was silent when it was asked to work."""
        self._until: dict[int, int] = {}
        """The round in which a node that was silent may work again."""
        self._refused: set[int] = set()
        self._reasons: dict[str, str] = {}
        """By key, why a node of the register was last not admitted."""
        self._noted: set[str] = set()

    @property
    def about(self) -> About:
        """What the data look like: what most nodes say, settled when the run begins."""
        if self._agreed is not None:
            return self._agreed
        counted = Counter(json.dumps(claim.about, sort_keys=True) for claim in self._claims.values())
        return json.loads(max(sorted(counted), key=lambda text: counted[text])) if counted else {}

    @property
    def settled(self) -> bool:
        """Whether it is settled what the data look like."""
        return self._agreed is not None

    @property
    def nodes(self) -> int:
        """Number of nodes that are connected and introduced, and whose data look as most say."""
        about = self.about
        return sum(self._any or claim.about == about for claim in self._claims.values())

    @property
    def terms(self) -> dict[str, Terms]:
        """What the owners of the nodes that take part limit, by node."""
        return {self._name(node): claim.terms for node, claim in sorted(self._claims.items())}

    def telling(self, *terms: str) -> list[str]:
        """Return the clients of nodes whose owners let them tell as much of their columns."""
        told = [node for node, claim in self._claims.items() if claim.terms.statistics in terms]
        return sorted(client for client, node in self._holders.items() if node in told)

    def ask_for(self, experiment: str, *, anew: bool = False) -> None:
        """Ask whoever comes from now on for this experiment; `anew`: those who are there too, whose data it changes."""
        self._introducing.ask_for(experiment)
        if anew:
            self._claims.clear()

    def holder(self, client: str) -> int | None:
        """Return the node that holds a client now, or None while it is away."""
        return self._holders.get(client)

    def clients_of(self, node: int) -> tuple[str, ...]:
        """Return the clients that a node says it holds."""
        return self._claims[node].clients if node in self._claims else ()

    @property
    def signs(self) -> bool:
        """Whether nodes are known by keys, with which they can sign."""
        return self._register is not None

    def key(self, node: int) -> str | None:
        """Return the public key by which a node is known; None without a register."""
        return None if self._register is None else self._keys.get(node, "")

    def is_resting(self, node: int) -> bool:
        """Whether a node was silent and is to be left alone in this round; it is asked in the background meanwhile."""
        return node in self._silent or self.round < self._until.get(node, 0)

    def heard(self, node: int, *, answered: bool) -> None:
        """Note whether a node answered; one that did not is left alone until it answers, the longer the more often.

        Without a register it also loses its clients to another node that claims them.
        """
        if answered:
            self._silent.discard(node)
            self._strikes.pop(node, None)
            self._until.pop(node, None)
        else:
            self._silent.add(node)
            self._strikes[node] = strikes = self._strikes.get(node, 0) + 1
            self._until[node] = self.round + min(2 ** (strikes - 1), _MOST_ROUNDS_LEFT_ALONE)

    def refresh(self, patience: float = 0.0) -> None:
        """Take note of who came, left and answered since; newcomers are asked in the background.

        With `patience`, those who are asked now have so many seconds to answer before the round begins.
        """
        present = self._present()
        self._hear(present, 0.0)
        self._claims = {node: claim for node, claim in self._claims.items() if node in present}
        self._refused &= present
        self._silent &= present
        asked = self._introducing.ask((present - set(self._claims) - self._refused) | self._silent, self.round)
        # Whoever is there answers at once and takes part in this round already; nobody else is waited for.
        deadline = time.monotonic() + patience
        while asked & self._introducing.asked and (left := deadline - time.monotonic()) > 0:
            self._hear(present, left)
        self._assign()

    def _hear(self, present: set[int], seconds: float) -> None:
        """Take in what nodes said of themselves; waits for the first of them so long, and for no other."""
        for node, answer in self._introducing.answers(seconds):
            if node in present:
                self._take(node, answer)

    def _present(self) -> set[int]:
        grid = self._sender.grid
        with reaching_superlink():
            if self._read_register is None:
                return set(grid.get_node_ids())
            nodes = list(grid.get_nodes())  # type: ignore[attr-defined]
        register = self._read_register()
        if register != self._register:
            self._register = register
            self._refused.clear()  # What was wrong with a node may be right now.
        self._keys = {int(node.node_id): key_line(bytes(node.public_key)) for node in nodes}
        return set(self._keys)

    def _take(self, node: int, answer: RecordDict | str) -> None:
        try:
            with reading_one_answer():
                self._claims[node] = self._admit(node, introduction(answer))
            self._silent.discard(node)
            self._introducing.welcome(node)
        except Refused as refusal:
            if node in self._claims and isinstance(answer, str):
                self._introducing.leave_alone(node)  # A node of ours that is still silent.
                return
            self._note_refusal(node, str(refusal))
            if isinstance(answer, str):  # It may be slow, or its data not there yet: it may try again.
                self._introducing.leave_alone(node)
            else:  # It spoke, and not as it should.
                self._refused.add(node)

    def _name(self, node: int) -> str:
        """Return a node's name in the register; without one, Flower's number."""
        entry = None if self._register is None else self._register.entries.get(self._keys.get(node, ""))
        return str(node) if entry is None else entry.name

    def _admit(self, node: int, form: IntroductionForm) -> _Claim:
        about = facts(form.about)
        for name, value in self._known.items():
            if about.get(name) != value:
                raise Refused(f"its data has {name} = {about.get(name)}; allowed: {value}, as the experiment says")
        if self._agreed is not None and about != self._agreed:
            raise Refused(f"its data is of another kind: {about}; allowed: {self._agreed}")
        named = client_names(form.clients, self._most_clients if self._register is None else _MOST_CLIENTS)
        if self._register is not None:
            self._bind(self._register, self._keys.get(node, ""), named)
        return _Claim(named, about, form.terms, {name: form.samples[name] for name in named if name in form.samples})

    def _bind(self, register: Register, key: str, names: tuple[str, ...]) -> None:
        """Let a key have these clients for the whole run, or refuse; nobody takes over a name of another key."""
        entry = register.entries.get(key)
        if entry is None:
            raise Refused("its key is not in the register")
        refusal = entry.refusal(names)
        if refusal is not None:
            raise Refused(refusal)
        for name in names:
            owner = register.owner(name) or self.owners.get(name, key)
            if owner != key:
                other = register.entries.get(owner)
                raise Refused(f"client {name} belongs to the key of {'another node' if other is None else other.name}")
        self.owners |= dict.fromkeys(names, key)

    def wait_for(self, nodes: int, seconds: float, *, alike: bool = True) -> None:
        """Wait until this many nodes have introduced themselves, or say how many there are; settles `about`.

        Without `alike` nodes count whatever their data look like, and nothing is settled yet.
        """
        begun, named, self._any = time.monotonic(), "", not alike
        # Reading the data for the first time can take long, so nodes may use all of the time there is.
        usual, self._introducing.seconds = self._introducing.seconds, max(self._introducing.seconds, seconds)
        while True:
            self.refresh()
            if self.nodes >= nodes:
                self._introducing.seconds = usual
                if alike:
                    self._settle()
                return
            waited, missing = time.monotonic() - begun, self._absent()
            if waited >= seconds:
                raise UserError(
                    f"federate.nodes: {nodes} nodes are to take part, {self.nodes} admitted within "
                    f"federate.start_timeout = {seconds:g} s{missing and f'; {missing}'}"
                )
            if waited > _QUIET_SECONDS and missing != named:
                named = missing
                _log.info(f"still waiting: {missing}")
            time.sleep(_LOOK_SECONDS)

    def _absent(self) -> str:
        """Say who of the register does not take part, and why; without a register, what was noted last."""
        if self._register is None:
            return "".join(self.notes[-1:])
        said = {self._keys.get(node, ""): claim.about for node, claim in self._claims.items()}
        return absent(self._register, set(self._keys.values()), said, self.about, self._reasons)

    def wait_back(self, nodes: int, seconds: float) -> None:
        """Wait until so many nodes are there again, for at most so many seconds; then it goes on with who is there."""
        deadline = time.monotonic() + seconds
        while self.nodes < nodes and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            self.refresh()

    def _settle(self) -> None:
        self._agreed = self.about
        for node, claim in list(self._claims.items()):
            if claim.about != self._agreed:
                self._note_refusal(node, f"its data is of another kind: {claim.about}")
                self._refused.add(node)
                del self._claims[node]
                self.registered -= set(claim.clients)
        self._assign()

    def _assign(self) -> None:
        claimants: dict[str, list[int]] = {}
        about = self.about
        for node, claim in self._claims.items():
            for client in claim.clients if self._any or claim.about == about else ():
                claimants.setdefault(client, []).append(node)
        for client, nodes in claimants.items():
            current = self._holders.get(client)
            fit = [node for node in nodes if node not in self._strikes] or nodes
            # Whoever holds a client and answers keeps it: a second claim must not displace it.
            chosen = current if current in fit else fit[0]
            self._holders[client] = chosen
            if client in (said := self._claims[chosen].samples):
                self.samples[client] = said[client]
            for other in nodes:
                if other != chosen:
                    claimed, held = self._name(other), self._name(chosen)
                    self.note(f"client {client} is claimed by node {claimed}, but node {held} holds it")
        self._holders = {client: node for client, node in self._holders.items() if client in claimants}
        self.registered |= set(claimants)

    def _note_refusal(self, node: int, why: str) -> None:
        self._reasons[self._keys.get(node, "")] = clean(f"was not admitted: {why}")
        self.note(f"node {self._name(node)} was not admitted: {why}")

    def note(self, text: str) -> None:
        """Note and say what a reader of the run should know, each line once; of very many only the first."""
        line = clean(text)
        if line not in self._noted and len(self.notes) < _MOST_NOTES:
            self._noted.add(line)
            self.notes.append(line if self.round == 0 else f"round {self.round}: {line}")
            _log.warning(self.notes[-1])
