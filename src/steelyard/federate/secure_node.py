"""A node's part of a round with hidden updates: what it keeps between messages, and what it refuses.

The keys and the trained models wait on the node, in Flower's node state, from one message to the next; they never leave
it. A node that was restarted in between has forgotten them, and its clients count as dropped out. Which sums it has
opened outlives them on the disk: a server can end a node's worker, with a task for which it gives no time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import BaseModel

from steelyard.base.errors import first_names, in_words, told_as
from steelyard.base.journal import Journal
from steelyard.base.logs import logger
from steelyard.base.usercode import NotAllowed
from steelyard.clients.flower import wire
from steelyard.clients.flower.hidden_messages import (
    AnswerForm,
    Bytes,
    HideForm,
    KeysForm,
    KeyShares,
    OpenForm,
    RoundForm,
    ShareForm,
    asked_digest,
    rows,
)
from steelyard.clients.flower.wire import SURVEY, Refused, TaskForm, Vouchers, read_array
from steelyard.clients.node import NodeConfig
from steelyard.experiment.node_rows import own_seed
from steelyard.federate.book import ledger_name
from steelyard.messages.updates import Failure, Task, Updates
from steelyard.privacy.hidden import FixedPoint, Words, beyond
from steelyard.privacy.secure import (
    KEY_SHARES_BYTES,
    PUBLIC_BYTES,
    PublicKeys,
    SecureClient,
    Unreadable,
    Withdrawn,
    round_context,
    vector_digest,
)
from steelyard.privacy.settings import FEWEST, AggregationSettings
from steelyard.privacy.sharing import SHARE_BYTES
from steelyard.proof.signing import SigningKey, fields, holds

_log = logger(__name__)

ResultT = TypeVar("ResultT")


OPENED = "opened.jsonl"
"""The sums that a node has opened, in the folder where it remembers them."""


class OpenedSum(BaseModel, extra="forbid", frozen=True, strict=True):
    """A hidden sum that a node helped to open."""

    federation: str
    run: str
    round: int
    sum: str
    """Digest of who is in it, with the weights of all."""

    def round_of(self) -> tuple[str, int]:
        """Return of which round it is; a round has one sum, by whatever name of a rule."""
        return self.run, self.round


@dataclass(frozen=True)
class _Trained:
    """What a node remembers of a round beside the models, so that it can be tried again without training."""

    round: str
    clients: list[str]
    """Whose models are kept, row by row."""
    cohort: list[str]
    """Who was in the first try."""
    least: int
    """How many had to stay there, and must in every other try."""
    asked: str
    """Digest of what was asked."""


@dataclass(eq=False)
class HiddenRound:
    """The state of one federation's current round on this node; each message reads it and leaves it for the next."""

    state: RecordDict
    federation: str
    settings: AggregationSettings
    owner: NodeConfig | None = None
    """Whose limits hold; None: those of the experiment alone."""

    @property
    def folder(self) -> Path | None:
        """Where the sums that were opened are remembered; None: in Flower's node state, which then must not be lost."""
        return None if self.owner is None else self.owner.state or self.owner.memory

    @property
    def _name(self) -> str:
        return f"hidden/{self.federation}"

    def keys(self, form: KeysForm) -> RecordDict:
        """Make fresh keys for the clients that are asked, and forget those before, so that no sum of them is opened.

        For another try at a round what was trained stays, and as many clients must stay as in the first.
        """
        context = _context(form)
        fewest = self._trained(form).least if form.again else FEWEST
        clients = {name: SecureClient(name, context, self.settings, fewest=fewest) for name in sorted(form.clients)}
        if not form.again:
            self._forget()
        self._keep(clients, context)
        keys = {name: client.keys() for name, client in clients.items()}
        shown = rows([one.write() for one in keys.values()], PUBLIC_BYTES)
        return _answer(form, list(clients), {}, {"keys": shown}, vouchers=self._vouchers(context, keys))

    def _vouchers(self, context: bytes, keys: Mapping[str, PublicKeys]) -> Vouchers:
        if self.owner is None or self.owner.key is None:
            return {}
        signer = SigningKey.read(self.owner.key)
        return {signer.line: {name: signer.sign(_vouched(context, name, one)).hex() for name, one in keys.items()}}

    def trained(self, form: TaskForm, keys: Bytes, task: Task, updates: Updates) -> Updates:
        """Keep the trained models here, and return the clients' key shares in their place."""
        context = _context(form)
        clients = self._clients(context)
        payload = updates.payload.dense
        assert payload is not None
        cohort = _cohort(form.cohort, keys)
        limit = None if self.owner is None else self.owner.bound
        listed = self._listed(form.vouchers, context, cohort, clients)
        found = beyond(payload.models, task.parameters, min(self.settings.bound, limit or self.settings.bound))
        faults = dict(zip(updates.clients, found, strict=True))

        def share(name: str) -> dict[str, bytes]:
            if (fault := faults[name]) is not None:
                raise Withdrawn(fault)
            return _known(clients, name).share(cohort)

        shares, failures, _ = _each(updates.clients, share)
        keep = [row for row, name in enumerate(updates.clients) if name in shares]
        models = payload.models[keep].detach().cpu().float().numpy()
        self._keep({name: clients[name] for name in shares}, context, listed)
        least = max(FEWEST, self.settings.least(len(cohort)))
        asked = asked_digest(task, form.algorithm, form.experiment)
        trained = _Trained(_round_of(form), list(shares), sorted(cohort), least, asked)
        self.state[f"{self._name}/trained"] = ConfigRecord({"about": json.dumps(asdict(trained))})
        self.state[f"{self._name}/models"] = ArrayRecord(
            {"models": Array(models), "start": Array(task.parameters.detach().cpu().float().numpy())}
        )
        kept = updates.select(keep, [Failure(name, reason) for name, reason in failures.items()])
        return replace(kept, payload=KeyShares(_share_rows(shares, cohort)))

    def share(self, form: ShareForm, keys: Bytes) -> RecordDict:
        """Return key shares for another try at the round that was trained; nobody may be new in it."""
        context = _context(form)
        clients = self._clients(context)
        cohort = _cohort(form.cohort, keys)
        if strangers := sorted(set(cohort) - set(self._trained(form).cohort)):
            raise Refused(f"cohort: {first_names(strangers)} were not in the first try; allowed: those that were")
        listed = self._listed(form.vouchers, context, cohort, clients)
        shares, failures, _ = _each(sorted(form.clients), lambda name: _known(clients, name).share(cohort))
        self._keep({name: clients[name] for name in shares}, context, listed)
        return _answer(form, list(shares), failures, {"key_shares": _share_rows(shares, cohort)} if shares else {})

    def hide(self, form: HideForm, shares: Bytes) -> RecordDict:
        """Return the sum of these clients' weighted updates with all masks on.

        The models stay until the sum is opened: where others cannot read each other's key shares, the round is tried
        again with fresh keys, and noise that devices added must not be drawn a second time.
        """
        context = _context(form)
        clients = self._clients(context)
        if len(form.weights) != len(form.members) or not set(form.clients) <= set(form.members):
            raise Refused("weights: not one for each member, with this node's clients among them")
        weights = dict(zip(form.members, form.weights, strict=True))
        listed = self._about("listed")
        self._check(weights, clients, listed)
        trained, record = self._trained(form), self.state[f"{self._name}/models"]
        vector = vector_digest(form.members, weights, trained.asked)
        assert isinstance(record, ArrayRecord)
        models = read_array(record["models"], "models")
        start = read_array(record["start"], "start").astype(np.float64)
        row = {name: number for number, name in enumerate(trained.clients)}

        def hidden(name: str) -> Words:
            client, index = _known(clients, name), form.clients.index(name)
            weight = weights[name]
            if not 0 <= weight <= self.settings.largest_weight + 1e-9:
                raise Withdrawn(f"its weight would be {weight:.3g}; allowed: 0 to {self.settings.largest_weight:g}")
            received = {m: share.tobytes() for m, share in zip(form.members, shares[index], strict=True) if m != name}
            client.receive(form.members, received, vector)
            encoding = FixedPoint.of(self.settings.word_bits, self.settings.bound, client.cohort_size)
            return client.mask(encoding.encode((models[row[name]].astype(np.float64) - start) * weight))

        found, failures, unreadable = _each(sorted(form.clients), hidden)
        self._keep({name: clients[name] for name in found}, context, listed, weights)
        if not found:
            return _answer(form, [], failures, {}, unreadable)
        words = np.stack(list(found.values()))
        total = np.add.reduce(words, axis=0, dtype=words.dtype)
        return _answer(form, list(found), failures, {"words": total}, unreadable)

    def open(self, form: OpenForm) -> RecordDict:
        """Return the shares that open the sum of the survivors, and forget the round."""
        context = _context(form)
        clients = self._clients(context)
        told = self._about("weights")
        self._check({name: told.get(name, 0.0) for name in form.survivors}, clients, self._about("listed"))
        self._refuse_second(form, clients)

        def opened(name: str) -> Bytes:
            client = _known(clients, name)
            revealed = client.open(form.survivors)
            return rows([(revealed.seeds.get(m) or revealed.keys[m]) for m in client.members], SHARE_BYTES)

        found, failures, _ = _each(sorted(form.clients), opened)
        mine = ", ".join(f"{name} {told.get(name, 0.0):.3g}" for name in found)
        where = f"run {ledger_name(form.run)}, {in_words(ledger_name(form.federation))}, round {form.round}"
        _log.info(f"took part: {where}: helps to open the sum of {len(form.survivors)} clients; weights here: {mine}")
        self._forget()
        return _answer(form, list(found), failures, {"shares": np.stack(list(found.values()))} if found else {})

    def _refuse_second(self, form: OpenForm, clients: Mapping[str, SecureClient]) -> None:
        """Refuse to open a round again for other clients or weights: from two sums a single update may follow.

        A run that was killed between the opening and its record repeats the round, and may do so for the same sum.
        Only when this returns, with the sum on the disk, may what opens it leave.
        """
        members = sorted({member for client in clients.values() for member in client.members})
        summed: list[object] = [members, sorted(form.survivors), sorted(self._about("weights").items())]
        if form.federation == SURVEY:  # Under other words the same rows would be another sum.
            record = self.state[f"{self._name}/models"]
            assert isinstance(record, ArrayRecord)
            summed.append(hashlib.sha256(record["models"].data).hexdigest())
        refusal = "open: this round was opened before, for others or other weights; allowed: the same sum again"
        self._once(self._run_of(form.run), form.round, summed, refusal)

    def compare_once(self, run: str, others: object) -> None:
        """Refuse to compare columns with a second pool: by what is found beside many, the numbers here could be told.

        The node cannot know whether a server made the pool up.
        """
        refusal = "compare: these columns were compared before, with other sums; allowed: the same sums again"
        self._once(f"{self._run_of(run)} compared", 0, others, refusal)

    def _run_of(self, run: str) -> str:
        """Return by what a sum is remembered: those of columns by the file, of which every run has the same rows."""
        by_file = self.federation == SURVEY and self.owner is not None and self.owner.data is not None
        return f"columns {own_seed(self.owner)}" if by_file and self.owner is not None else run

    def _once(self, run: str, round: int, content: object, refusal: str) -> None:
        """Write down what a sum consists of before it leaves, or refuse one that differs from that before."""
        sum_of = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        opened = OpenedSum(federation=self.federation, run=run, round=round, sum=sum_of)
        before = [one for one in self._opened() if one.round_of() == opened.round_of()]
        if any(one != opened for one in before):
            raise Refused(refusal)
        if before:
            return
        if self.folder is None:
            known = [one.model_dump_json() for one in self._opened()]
            self.state[f"{self._name}/opened"] = ConfigRecord({"sums": [*known, opened.model_dump_json()]})
            return
        with told_as(f"node config state: {self.folder / OPENED} cannot be written, so nothing is opened"):
            Journal(self.folder / OPENED, private=True).append([opened.model_dump_json()])

    def _opened(self) -> list[OpenedSum]:
        if self.folder is not None:
            return list(Journal(self.folder / OPENED).read(OpenedSum.model_validate_json))
        record = self.state.get(f"{self._name}/opened")
        lines = record.get("sums", []) if isinstance(record, ConfigRecord) else []
        return [OpenedSum.model_validate_json(str(line)) for line in lines] if isinstance(lines, list) else []

    def _clients(self, context: bytes) -> dict[str, SecureClient]:
        record = self.state.get(self._name)
        if not isinstance(record, ConfigRecord) or record.get("context") != context:
            raise Refused("attempt: this node has no keys for it; allowed: the round that it made keys for last")
        found = {name[1:]: value for name, value in record.items() if name.startswith("/")}
        return {name: SecureClient.load(text) for name, text in sorted(found.items()) if isinstance(text, bytes)}

    def _keep(
        self,
        clients: Mapping[str, SecureClient],
        context: bytes,
        listed: Collection[str] = (),
        weights: Mapping[str, float] | None = None,
    ) -> None:
        held = {f"/{name}": client.dump() for name, client in clients.items()}
        about = {"listed": json.dumps(list(listed)), "weights": json.dumps(weights or {})}
        self.state[self._name] = ConfigRecord({"context": context, **about, **held})

    def _about(self, name: Literal["listed", "weights"]) -> Any:
        """Return who of the round is vouched for, or which weights its members have."""
        return json.loads(str(self.state[self._name][name]))

    def _listed(
        self, vouchers: Vouchers, context: bytes, cohort: Mapping[str, PublicKeys], own: Mapping[str, SecureClient]
    ) -> list[str]:
        """Return the clients whose keys are signed by nodes that the owner lists; refuse a cohort with too few of them.

        All others may be the server's inventions. Then it holds their shares, and must not have enough of them to open
        one client's masks, also where it tells one half that this client stayed and the other that it did not.
        """
        if self.owner is None or not self.owner.hides:
            return []
        found = {
            name
            for key in self.owner.peer_keys()
            for name, signature in vouchers.get(key, {}).items()
            if name in cohort and holds(key, bytes.fromhex(signature), _vouched(context, name, cohort[name]))
        }
        strangers = len(cohort.keys() - found - set(own))
        # By the clients' own settings: a server may name others with the task than with the keys.
        least = min(max(one.fewest, one.settings.least(len(cohort))) for one in own.values())
        if 2 * least <= len(cohort) + strangers:
            raise NotAllowed(
                f"peers: no listed node vouches for {strangers} of {len(cohort)} clients, with whose key shares a "
                "server could open a single update; allowed: fewer (or a higher privacy.aggregation.threshold)"
            )
        return sorted(found)

    def _check(self, weights: Mapping[str, float], own: Collection[str], listed: Collection[str]) -> None:
        """Refuse weights under which the sum of these clients would hide too little of those that live here."""
        if self.owner is None or not self.owner.hides:
            return
        terms, total = self.owner.terms, sum(weights.values())
        if not (all(weight >= 0 for weight in weights.values()) and total <= 1 + 1e-6):
            raise NotAllowed(f"weights: sum to {total:.6g}; allowed: numbers from 0 on that sum to 1 at most")
        known = {name: weight for name, weight in weights.items() if name in own or name in listed}
        equal = sum(known.values()) / max(len(known), 1)
        heaviest = max((known[name] for name in own if name in known), default=0.0)
        if heaviest > (terms.largest_weight or 1) * equal * (1 + 1e-9):
            raise NotAllowed(
                f"largest-weight: a client here would weigh {heaviest / equal:.3g} equal shares of the {len(known)} "
                f"clients that count; allowed: {terms.largest_weight:g}"
            )
        hiding = 1 + sum(weight > equal / 2 for name, weight in known.items() if name not in own)
        if hiding < (terms.least_cohort or FEWEST):
            raise NotAllowed(
                f"least-cohort: {hiding} of {len(weights)} clients count (this node's as one, and others that listed "
                f"nodes vouch for, with more than half an equal share); allowed: {terms.least_cohort} or more"
            )

    def _trained(self, form: RoundForm) -> _Trained:
        record = self.state.get(f"{self._name}/trained")
        if isinstance(record, ConfigRecord):
            found = _Trained(**json.loads(str(record["about"])))
            if found.round == _round_of(form):
                return found
        raise Refused("nothing was trained for this round; allowed: after its task")

    def _forget(self) -> None:
        for name in (self._name, f"{self._name}/models", f"{self._name}/trained"):
            if name in self.state:
                del self.state[name]


def _context(form: RoundForm | TaskForm) -> bytes:
    return round_context(form.run, form.federation, form.seed, form.round, form.attempt)


def _vouched(context: bytes, name: str, keys: PublicKeys) -> bytes:
    """Return what a node signs of a client's keys."""
    return fields(statement="round keys", context=context, client=name, keys=keys.write())


def _round_of(form: RoundForm | TaskForm) -> str:
    return json.dumps([form.run, form.federation, form.seed, form.round])


def _cohort(names: Sequence[str], keys: Bytes) -> dict[str, PublicKeys]:
    return {name: PublicKeys.read(row.tobytes()) for name, row in zip(names, keys, strict=True)}


def _share_rows(shares: Mapping[str, Mapping[str, bytes]], cohort: Iterable[str]) -> Bytes:
    """Return each client's key shares for all of the cohort: [clients, cohort, bytes]; zeros for itself."""
    names, empty = sorted(cohort), bytes(KEY_SHARES_BYTES)
    sent = [rows([mine.get(name, empty) for name in names], KEY_SHARES_BYTES) for mine in shares.values()]
    return np.stack(sent) if sent else np.zeros((0, len(names), KEY_SHARES_BYTES), np.uint8)


def _known(clients: Mapping[str, SecureClient], name: str) -> SecureClient:
    if name not in clients:
        raise Withdrawn("has no keys for this round")
    return clients[name]


def _each(
    names: Sequence[str], work: Callable[[str], ResultT]
) -> tuple[dict[str, ResultT], dict[str, str], dict[str, list[str]]]:
    """Do the work for each client; one that withdraws is left out, with its reason and whose shares it cannot read."""
    found: dict[str, ResultT] = {}
    failures: dict[str, str] = {}
    unreadable: dict[str, list[str]] = {}
    for name in names:
        try:
            found[name] = work(name)
        except Withdrawn as reason:
            failures[name] = str(reason)
            _log.warning(f"{name} withdraws: {reason}")
            if isinstance(reason, Unreadable):
                unreadable[name] = list(reason.senders)
    return found, failures, unreadable


def _answer(
    form: RoundForm,
    clients: Sequence[str],
    failures: Mapping[str, str],
    arrays: Mapping[str, np.ndarray],
    unreadable: dict[str, list[str]] | None = None,
    vouchers: Vouchers | None = None,
) -> RecordDict:
    answer = AnswerForm(
        federation=form.federation,
        round=form.round,
        clients=sorted(clients),
        failures=[Failure(name, reason) for name, reason in failures.items()],
        unreadable=unreadable or {},
        vouchers=vouchers or {},
    )
    return wire.content(answer, dict(arrays))
