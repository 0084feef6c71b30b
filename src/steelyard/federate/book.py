"""What a node writes down in its `state` folder before an answer leaves: receipts, heads, and the ledger of its noise.

A receipt is what the node signed in a round; heads, which come with later tasks and after the last round, are what the
server signed of it. With both the node shows that it took part, or did not, without the server.

The ledger holds every answer that left with noise, whoever asked, and the ε of all of them together. A server names its
own rounds, rules and runs, so a node that limits what it discloses counts for itself. Each answer counts as one more
release about all data here, whichever clients were asked: within one answer a row is one client's, but under another
name, seed or split it may be another's. An answer that is asked for twice is noised anew, and counts twice. A mark
beside it, written after it, says how far it had come: a file that was cut, an older copy, or one with other lines
differs.
"""

from __future__ import annotations

import fcntl
import json
import math
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from steelyard.base import files
from steelyard.base.errors import UserError, first_names, in_words, told_as, writable
from steelyard.base.files import owners_only
from steelyard.base.journal import DamagedLine, Journal, Mark
from steelyard.base.logs import logger
from steelyard.base.usercode import NotAllowed
from steelyard.clients.node import NodeConfig
from steelyard.messages.updates import Question, Signed, Task, Updates
from steelyard.privacy.accounting import Mechanism, Release, spent
from steelyard.privacy.settings import OWNERS_DELTA, Noise, Positive
from steelyard.proof.signing import SERVER, Keys, SigningKey, fingerprint, holds
from steelyard.proof.statements import UNSIGNED, Hash, Proof, Statement, stated
from steelyard.runs.chain import Records
from steelyard.runs.database import reading

RECEIPTS, PROOFS, ASKED = "receipts.jsonl", "proofs.jsonl", "asked.jsonl"
"""In a node's `state` folder: what it signed, what servers' heads say of it, and all that it was asked for."""
_FARTHEST = 1 << 24
"""Bytes from the end up to which a statement of the same run is looked for: what is older is a run long ended."""

_log = logger(__name__)

_ROOM = "room and the right to write"


class Receipt(BaseModel, extra="forbid", frozen=True, strict=True):
    """A node's statement of one rule and round, as it signed it; bytes in hexadecimal digits."""

    run: str
    federation: str
    round: int
    task: str
    before: Hash
    digests: dict[str, Hash]
    salts: dict[str, str]
    """By client: with its salt and its update a digest can be made again."""
    key: str
    """The node's public key, as one line of OpenSSH."""
    signature: str

    @property
    def statement(self) -> Statement:
        """What was signed."""
        digests = {client: bytes.fromhex(digest) for client, digest in self.digests.items()}
        return Statement(self.run, self.federation, self.round, self.task, self.before, digests)

    def holds(self) -> bool:
        """Whether its signature is its key's."""
        try:
            return holds(self.key, bytes.fromhex(self.signature), self.statement.content())
        except ValueError:
            return False


def sign_answer(
    key: SigningKey, state: Path | None, run: str, task: Task, asked: str, updates: Updates, *, hidden: bool
) -> Signed | None:
    """Sign what a node sends; with a state folder, the receipt is on the disk when this returns. None: nothing is sent.

    `asked` is the digest of the task. Only with a state folder does a statement name the one before it.
    """
    before = "" if state is None else last_statement(state, run, task.federation, task.round)
    signed = stated(key, run, task, asked, updates, before, hidden=hidden)
    if state is not None and signed is not None:
        keep_receipt(state, run, task, asked, signed)
    return signed


def keep_receipt(folder: Path, run: str, task: Task, asked: str, signed: Signed) -> None:
    """Write down what a node signed; only when this returns may the answer leave."""
    digests = {client: digest.hex() for client, digest in signed.digests.items()}
    salts = {client: salt.hex() for client, salt in signed.salts.items()}
    receipt = Receipt(
        run=run, federation=task.federation, round=task.round, task=asked, before=signed.before, digests=digests,
        salts=salts, key=signed.key, signature=signed.signature.hex(),
    )  # fmt: skip
    with told_as(f"node config state: {folder / RECEIPTS} cannot be written, so nothing is answered", _ROOM):
        Journal(folder / RECEIPTS, private=True).append([receipt.model_dump_json()])


def last_statement(folder: Path, run: str, federation: str, round: int) -> str:
    """Return the digest of the node's last statement of an earlier round; empty where there is none.

    A round that is repeated follows the one before it, as it did the first time. Lines are read from the end and only
    as far as needed, so that a task late in a long run costs no more than an early one.
    """
    of_run = f'{{"run":{json.dumps(run, ensure_ascii=False)},'.encode()
    for line in Journal(folder / RECEIPTS).backwards(_FARTHEST):
        if not line.startswith(of_run):
            continue
        try:
            one = Receipt.model_validate_json(line)
        except ValidationError:
            continue
        if (one.run, one.federation) == (run, federation) and one.round < round:
            return one.statement.digest()
    return ""


def keep_proofs(folder: Path, run: str, key: str, proofs: Sequence[Proof]) -> list[str]:
    """Keep what signed heads say of the node with this public key; returns in words what shows nothing."""
    sound: list[Proof] = []
    faults: list[str] = []
    for proof in proofs:
        try:
            if (proof.run, proof.node) != (run, key):
                raise ValueError("it is of another node or run")
            proof.check()
            sound.append(proof)
        except ValueError as error:
            faults.append(f"the head of round {proof.round} is not kept: {error}")
    try:
        Journal(folder / PROOFS, private=True).append([one.model_dump_json() for one in sound])
    except OSError as error:
        faults.append(f"{folder / PROOFS} cannot be written: {error.strerror}")
    return faults


class Asked(BaseModel, extra="forbid", frozen=True, strict=True):
    """Work that a node was asked for and agreed to do."""

    time: str
    what: Literal["round", "question", "statistics"]
    run: str
    federation: str
    round: int
    count: int
    """How many clients train, how many models are tested, or how many columns are told of."""


def take_part(config: NodeConfig, what: Literal["round", "question"], asked: Task | Question, run: str) -> None:
    """Write down and log what a node takes part in, or refuse more of it than its owner allows in 24 hours.

    Call it before the work: what fails counts as well, since a server may ask as often as it likes.
    """
    most, key = (config.rounds_per_day, "rounds-per-day")
    if what == "question":
        most, key = (config.questions_per_day, "questions-per-day")
    count = len(asked.clients) if isinstance(asked, Task) else len(asked.models)
    now, weight = datetime.now(UTC), 1 if what == "round" else count
    line = Asked(
        time=now.isoformat(timespec="seconds"), what=what, run=ledger_name(run),
        federation=ledger_name(asked.federation), round=asked.round, count=count,
    )  # fmt: skip
    words = f"{what} {line.round} of {in_words(line.federation)}, run {line.run}"
    if config.state is not None and most is not None:
        journal = Journal(config.state / ASKED, private=True)
        if (done := _since(journal, what, now - timedelta(days=1))) + weight > most:
            raise NotAllowed(f"{key}: {done} in the last 24 hours and {weight} more; allowed: {most}")
    _keep_asked(config, line)
    _log.info(f"takes part: {words}, {count} {'clients' if what == 'round' else 'models'}")


def tell(config: NodeConfig, what: str, columns: int, run: str) -> None:
    """Write down and log what leaves of a node's columns before the first round; only then may it leave."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    line = Asked(time=now, what="statistics", run=ledger_name(run), federation="", round=0, count=columns)
    _keep_asked(config, line)
    _log.info(f"statistics: tells run {line.run} {what}")


def _keep_asked(config: NodeConfig, line: Asked) -> None:
    if config.state is not None:
        journal = Journal(config.state / ASKED, private=True)
        with told_as(f"node config state: {journal.path} cannot be written, so nothing is answered", _ROOM):
            journal.append([line.model_dump_json()])


def _since(journal: Journal, what: str, begin: datetime) -> int:
    """Return how much was asked since then: rounds, or models that were tested."""
    done = 0
    for content in journal.backwards(_FARTHEST):
        one = Asked.model_validate_json(content) if content else None
        if one is not None and datetime.fromisoformat(one.time) < begin:
            break
        if one is not None and one.what == what:
            done += 1 if what == "round" else one.count
    return done


def read_receipts(folder: Path) -> list[Receipt]:
    """Return a node's receipts in the order in which they were written; a statement that was signed twice counts once.

    None where it has signed nothing yet.
    """
    found = Journal(folder / RECEIPTS).read(Receipt.model_validate_json)
    return list({one.statement.digest(): one for one in found}.values())


def read_proofs(folder: Path) -> list[Proof]:
    """Return what heads say of a node, each once."""
    found = Journal(folder / PROOFS).read(Proof.model_validate_json)
    return list({one.model_dump_json(): one for one in found}.values())


def written(folder: Path, proofs: Iterable[Proof]) -> None:
    """Add proofs that are not there yet."""
    known = {one.model_dump_json() for one in read_proofs(folder)}
    with told_as(f"{folder / PROOFS}: cannot be written", "a writable folder"):
        lines = [one.model_dump_json() for one in proofs]
        Journal(folder / PROOFS, private=True).append([line for line in lines if line not in known])


Outcome = Literal["signed", "took part", "absent", "did not take part", "differs"]
CODES: dict[Outcome, int] = {"signed": 0, "took part": 0, "absent": 0, "did not take part": 1, "differs": 2}
"""What `steelyard federate receipts` ends with: the largest of its lines. "signed": by the node, and no head yet;
"absent": the node signed nothing, and the head holds nothing of it; "did not take part": it signed, and the head holds
nothing of it."""
Place = tuple[str, str, int]
"""Run, rule and round."""
CheckedProof = tuple[Proof, str]
"""A proof, and why it shows nothing; empty where it does."""


@dataclass(frozen=True)
class Shown:
    """What is known of a node in one round of one rule."""

    place: Place
    clients: tuple[str, ...]
    """For whom the node signed."""
    outcome: Outcome
    why: str

    def line(self) -> str:
        """Return it in words: where, who, what is known."""
        run, federation, round = self.place
        who = f", client{'s' if len(self.clients) > 1 else ''} {first_names(self.clients)}" if self.clients else ""
        return f"run {run}, {federation}, round {round}{who}: {self.outcome}: {self.why}"


def receipts_of(folder: Path, trusted: Keys | None = None) -> list[Shown]:
    """Return what a node's own files show of each round: its receipts, and the heads that were kept with them."""
    return _answers(_receipts(folder), _checked(read_proofs(folder), trusted))


def prove_receipts(folder: Path, run: Path, trusted: Keys | None = None) -> list[Shown]:
    """Hold a node's receipts against a run's folder, and keep what its signed heads say of the node."""
    files.check_run(run)
    receipts = _receipts(folder)
    with reading(run) as db:
        records = Records(db)
        name = records.run
        nodes = sorted({one.key for one in receipts if one.run == name})
        if not nodes:
            known = f"no receipt is of run '{name}' ({run})"
            raise UserError(f"{folder}: {known}; allowed: the folder of a run that the node signed in")
        rules = [rule for (rule,) in db.execute("SELECT name FROM federations ORDER BY name").fetchall()]
        rounds = [round for (round,) in db.execute("SELECT round FROM chain WHERE round > 0 ORDER BY round").fetchall()]
        sealed = [one for round in rounds if (one := records.sealed(round)) is not None]
    proofs = _checked([one.proof(rule, node) for one in sealed for rule in rules for node in nodes], trusted)
    written(folder, [proof for proof, fault in proofs if not fault])
    beyond = "the run's chain does not reach this round"
    return [
        Shown(one.place, one.clients, "did not take part", beyond) if one.outcome == "signed" else one
        for one in _answers(receipts, proofs)
        if one.place[0] == name
    ]


def _receipts(folder: Path) -> list[Receipt]:
    if not files.is_file(folder / RECEIPTS) and not files.is_file(folder / PROOFS):
        raise UserError(
            f"{folder}: holds no {RECEIPTS}; allowed: the state folder of a node that has a key and took part"
        )
    return read_receipts(folder)


def _answers(receipts: Sequence[Receipt], proofs: Sequence[CheckedProof]) -> list[Shown]:
    last: dict[Place, CheckedProof] = {(one[0].run, one[0].federation, one[0].round): one for one in proofs}
    signed: dict[Place, list[Receipt]] = {}
    for one in receipts:
        signed.setdefault((one.run, one.federation, one.round), []).append(one)
    heads: dict[tuple[str, int], set[str]] = {}
    for proof, fault in proofs:
        if not fault:
            heads.setdefault((proof.run, proof.round), set()).add(proof.head)
    places = sorted({*last, *signed})
    return [_answer(place, signed.get(place, []), last.get(place), heads) for place in places]


def _answer(
    place: Place, receipts: Sequence[Receipt], last: CheckedProof | None, heads: Mapping[tuple[str, int], set[str]]
) -> Shown:
    """Say what is known of one round: it may have been repeated, then any of its receipts counts."""
    clients = tuple(sorted({client for one in receipts for client in one.digests}))

    def answer(outcome: Outcome, why: str) -> Shown:
        return Shown(place, clients, outcome, why)

    if any(not one.holds() for one in receipts):
        return answer("differs", "the node's own signature does not hold")
    if last is None:
        return answer("signed", "no head of the server is kept with it yet")
    both = heads.get((place[0], place[2]), set[str]())
    if len(both) > 1:
        return answer("differs", f"the server signed two heads: {' and '.join(f'{one[:16]}…' for one in sorted(both))}")
    proof, fault = last
    if fault not in ("", UNSIGNED):
        return answer("differs", fault)
    held = proof.statement if proof.own else ""
    shown = fault or f"head {proof.head[:16]}… is signed"
    if not held:
        nothing = f"{shown} and holds nothing of this node"
        return answer("did not take part" if receipts else "absent", nothing)
    if held not in {one.statement.digest() for one in receipts}:
        return answer("differs", f"{shown} and holds another statement, {held[:16]}…")
    return answer("took part", shown if fault else f"{shown} and its path holds")


def _checked(proofs: Sequence[Proof], trusted: Keys | None) -> list[CheckedProof]:
    return [(proof, _fault(proof, trusted)) for proof in proofs]


def _fault(proof: Proof, trusted: Keys | None) -> str:
    """Say why a proof shows nothing; empty where it does."""
    try:
        proof.check()
    except ValueError as error:
        return str(error)
    if trusted is not None and trusted.named.get(SERVER) != proof.key:
        return f"the head is signed by {fingerprint(proof.key)}, not by {SERVER}.pub"
    return ""


# Node ledger: A node's ledger: every answer that left it with noise, whoever asked, and the ε of all of them together.


LEDGER = "ledger.jsonl"
"""The ledger's file in a node's `state` folder."""
MARK = "ledger.mark"
"""Beside it: how far the ledger had come after the last answer but, where a node was killed just then, one."""
_LONGEST_NAME = 200


class Disclosure(BaseModel, extra="forbid", frozen=True, strict=True, allow_inf_nan=False):
    """What one answer of a node discloses, and to whom; names are the server's own and are cut to a length."""

    run: str
    federation: str
    """The rule, with its seed where there are several."""
    round: int
    clients: int
    """How many clients of this node were asked."""
    clip: Positive
    noise: Noise
    """Noise on the update, in units of its sensitivity 2·clip; of records on each batch's sum, in units of clip."""
    rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of records: with which probability a sample is in a batch."""
    steps: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Of records: how many batches there were; None where one noisy update was sent."""
    criteria: Annotated[int, Field(ge=0)] = 0
    """How many criteria were sent with noise beside each update."""
    criteria_noise: Noise | None = None
    """Noise on a criterion, in units of its bound; None where none was sent."""
    criteria_mechanism: Mechanism = "gaussian"
    """How a criterion was noised; pure: by what is private by ε = 1/criteria_noise alone."""

    def releases(self) -> Counter[Release]:
        """Return what it discloses of any one client."""
        update = Release(self.noise) if self.steps is None else Release(self.noise, "poisson", self.rate)
        found = Counter({update: self.steps or 1})
        if self.criteria and self.criteria_noise is not None:
            found[Release(self.criteria_noise, mechanism=self.criteria_mechanism)] += self.criteria
        return found


class Entry(Disclosure, frozen=True):
    """One line of the ledger."""

    number: int
    time: str
    delta: Annotated[float, Field(gt=0, lt=1)]
    epsilon: Annotated[float, Field(ge=0)]
    """ε of all entries up to this one together, at δ."""


_MARK = TypeAdapter(Mark)


class NodeLedger:
    """The ledger of one node; ask `check` before work is done, and `charge` before its answer leaves.

    `most` is the owner's ε. Any number of processes may use one folder.
    """

    def __init__(self, folder: Path, most: float) -> None:
        self.path, self.most = folder / LEDGER, most
        self._journal = Journal(self.path, private=True)

    @classmethod
    def of(cls, config: NodeConfig) -> NodeLedger | None:
        """Return the ledger of a node whose every answer carries noise, in its state folder; None for all others."""
        if config.state is None or config.epsilon is None:
            return None
        return cls(config.state, config.epsilon)

    def open(self) -> str:
        """Return in words the total so far; a ledger that cannot be read or written is refused. For the start."""
        writable(self.path.parent, "node config state")
        return f"{standing(self.entries(), self.most)} so far (delta {OWNERS_DELTA:g})"

    def entries(self) -> list[Entry]:
        """Return all entries, in order; a damaged file is refused."""
        return self._read()[1]

    def check(self, planned: Disclosure) -> None:
        """Refuse an answer that would take the total over the owner's ε; nothing is written."""
        self._next(planned, self.entries())

    def charge(self, planned: Disclosure) -> Entry:
        """Write an answer down, or refuse it; when this returns it is on the disk, and only then may it leave."""
        told = told_as(f"node config state: {self.path} cannot be written, so nothing is answered", _ROOM)
        with told, self._locked():
            content, entries = self._read()
            entry = self._next(planned, entries)
            line = entry.model_dump_json()
            self._journal.append([line])
            mark = Mark.of(content + line.encode() + b"\n")
            files.write(self.path.with_name(MARK), json.dumps(asdict(mark)).encode())
        return entry

    def _next(self, planned: Disclosure, entries: Sequence[Entry]) -> Entry:
        total = epsilon_of([*entries, planned])
        if total > self.most:
            # The server learns this much; what others learned before is none of its business.
            section = "privacy.local" if planned.steps is None else "privacy.records"
            raise NotAllowed(
                f"{section}: round {planned.round} would take the total of this node's answers over its epsilon "
                f"{self.most:g}; allowed: no further answer"
            )
        return Entry(
            **planned.model_dump(),
            number=len(entries) + 1,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            delta=OWNERS_DELTA,
            epsilon=total,
        )

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Keep other processes from writing between our reading and our writing."""
        with owners_only(self.path.parent), self.path.with_name("ledger.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self) -> tuple[bytes, list[Entry]]:
        # The mark first: another process may charge meanwhile, and the ledger is never behind its mark.
        mark = self._mark()
        with told_as(f"node config state: {self.path} cannot be read"):
            content = self._journal.content()
        if not content and files.is_file(self.path):
            raise self._damaged("it is empty")
        entries = self._parsed(content)
        if mark is None and len(entries) > 1:
            raise self._damaged(f"its mark, {MARK}, is gone")
        if mark is not None and (difference := self._journal.first_difference([mark])):
            raise self._damaged(f"it {difference[1]} when the last answer left")
        return content, entries

    def _mark(self) -> Mark | None:
        try:
            return _MARK.validate_json(self.path.with_name(MARK).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError):
            raise self._damaged(f"its mark, {MARK}, cannot be read") from None

    def _parsed(self, content: bytes) -> list[Entry]:
        try:
            entries = list(self._journal.read(Entry.model_validate_json, content))
        except DamagedLine as damaged:
            raise self._damaged(damaged.why) from None
        for number, entry in enumerate(entries, 1):
            if entry.number != number:
                raise self._damaged(f"line {number} is number {entry.number}")
        if entries:
            last = entries[-1]
            total = epsilon_of(entries, last.delta)
            if not math.isclose(total, last.epsilon, rel_tol=1e-6):
                raise self._damaged(f"it says epsilon {last.epsilon:.6g} and its lines add up to {total:.6g}")
        return entries

    def _damaged(self, what: str) -> UserError:
        return UserError(
            f"node config state: {self.path} is damaged ({what}), so the total so far is unknown; allowed: the file as "
            "it was"
        )


def ledger_name(name: str) -> str:
    """Return a name that a server gave as the ledger keeps it."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def epsilon_of(entries: Sequence[Disclosure], delta: float = OWNERS_DELTA) -> float:
    """Return the ε at δ of these answers together, for any one client."""
    spending: Counter[Release] = Counter()
    for entry in entries:
        spending.update(entry.releases())
    return spent(spending, delta)


def standing(entries: Sequence[Entry], most: float | None = None) -> str:
    """Return in words the ε of some answers together, and of how much."""
    limit = "" if most is None else f" of {most:g}"
    answers = "1 answer" if len(entries) == 1 else f"{len(entries):,} answers"
    return f"epsilon {epsilon_of(entries):.4g}{limit} in {answers}"
