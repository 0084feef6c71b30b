"""The Flower ClientApp: reads a message, lets this node's clients do the work, writes the answer.

The experiment comes from the server, as data: what it may name and read is what the node's own configuration says, and
what goes wrong goes back as the class of the error and the field, never as text that may hold what is in a file.

What clients keep to themselves between rounds stays on the node: in Flower's node state, and in a file where asked for.
A state is what the clients' `snapshot` returns, stamped with the round after which it was taken. The last few are kept,
because a resumed run may repeat a round: it must start from the state before that round, not from the one after it.
What did not change from one to the next is written once.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from steelyard import __version__
from steelyard.base.errors import UserError, brief, in_words, listed, told_as
from steelyard.base.files import owners_only
from steelyard.base.logs import logger, show
from steelyard.base.usercode import NotAllowed, only
from steelyard.clients.flower import survey, tasks, wire
from steelyard.clients.flower.hidden_messages import (
    Bytes,
    HideForm,
    KeysForm,
    KeySharesCodec,
    OpenForm,
    RoundForm,
    ShareForm,
)
from steelyard.clients.flower.wire import (
    AskForm,
    ComparisonForm,
    FindingsForm,
    HeadsForm,
    IntroductionForm,
    Refused,
    StatisticsForm,
    TaskForm,
    read_array,
    tensor,
)
from steelyard.clients.node import NodeClients, NodeConfig
from steelyard.clients.protocol import Noise, Sending, SendingClients, Step, in_order
from steelyard.data.site_sums import SiteColumns
from steelyard.experiment.data_check import looked_at, said
from steelyard.experiment.description import Description
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.node_rules import agreed, agreed_question, agreed_task, public_error, public_reason
from steelyard.federate import book, received
from steelyard.federate.book import Disclosure, NodeLedger, ledger_name
from steelyard.federate.secure_node import HiddenRound
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Evaluations, Failure, Question, Task, Updates
from steelyard.privacy.planning import criteria_release
from steelyard.proof.signing import SigningKey, digest_of_task
from steelyard.proof.statements import Proof
from steelyard.runs.checkpoint import read_tensors, write_tensors

State = Mapping[str, torch.Tensor]
_PREFIX, _ABOUT, _TENSORS = "steelyard/", "/about", "/tensors"


class NodeStates:
    """The states of one federation on one node; use `before` to go on from one and `keep` after training.

    `run` names the run: what another run left behind is never used. With `folder`, states outlive the process.
    """

    def __init__(self, node: RecordDict, run: str, federation: str, keep: int, folder: Path | None = None) -> None:
        self._node, self._name = node, f"{_PREFIX}{federation}"
        self._run, self._most = run, max(2, keep)
        stem = hashlib.sha256(federation.encode()).hexdigest()[:16]
        self._file = None if folder is None else folder / f"{stem}.safetensors"
        self._forget_other_runs()
        self._states = self._from_node()
        if not self._states and self._file is not None:
            self._states = self._from_file(self._file)

    def before(self, round: int) -> State:
        """Return the newest state that was taken before this round; empty where there is none."""
        stamps = [stamp for stamp in self._states if stamp < round]
        return self._states[max(stamps)] if stamps else {}

    def keep(self, round: int, state: State) -> None:
        """Keep the state after this round; what a resumed run has overtaken is dropped."""
        states = {stamp: kept for stamp, kept in self._states.items() if stamp < round}
        states[round] = {name: tensor.detach().cpu() for name, tensor in state.items()}
        self._states = {stamp: states[stamp] for stamp in sorted(states)[-self._most :]}
        if not any(self._states.values()) and self._name + _ABOUT not in self._node:
            return  # Nothing private: leave no trace.
        about, tensors = self._table()
        arrays = {number: Array(tensor.contiguous().numpy()) for number, tensor in tensors.items()}
        self._node[self._name + _TENSORS] = ArrayRecord(arrays)
        self._node[self._name + _ABOUT] = ConfigRecord({"run": self._run, "states": about})
        if self._file is not None:
            self._to_file(self._file, about, tensors)

    def _table(self) -> tuple[str, dict[str, torch.Tensor]]:
        """Return which tensor of which state is which, as JSON, and every tensor once, by number."""
        numbers: dict[object, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        table: dict[int, dict[str, str]] = {}
        for stamp, state in self._states.items():
            table[stamp] = {}
            for key, kept in state.items():
                # What is held is never written into: the same memory is the same content.
                number = numbers.setdefault((kept.data_ptr(), kept.shape, kept.dtype), str(len(numbers)))
                table[stamp][key], tensors[number] = number, kept
        return json.dumps(table), tensors

    def _forget_other_runs(self) -> None:
        for name, record in list(self._node.items()):
            other = isinstance(record, ConfigRecord) and record.get("run") != self._run
            if name.startswith(_PREFIX) and name.endswith(_ABOUT) and other:
                del self._node[name], self._node[name.removesuffix(_ABOUT) + _TENSORS]

    def _from_node(self) -> dict[int, State]:
        about, arrays = self._node.get(self._name + _ABOUT), self._node.get(self._name + _TENSORS)
        if not isinstance(about, ConfigRecord) or not isinstance(arrays, ArrayRecord):
            return {}
        tensors = {number: tensor(read_array(array, number)) for number, array in arrays.items()}
        return _read_states(str(about["states"]), tensors)

    def _to_file(self, file: Path, about: str, tensors: Mapping[str, torch.Tensor]) -> None:
        text = json.dumps({"run": self._run, "states": about})
        written = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        with told_as(f"node config state: {file} cannot be written"), owners_only(file.parent):
            write_tensors(file, {**tensors, "about": written})

    def _from_file(self, file: Path) -> dict[int, State]:
        if not file.is_file():
            return {}
        try:
            tensors = read_tensors(file)
            about = json.loads(tensors["about"].numpy().tobytes().decode())
            return _read_states(about["states"], tensors) if about["run"] == self._run else {}
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"node config state: {file} is not a file of states of this version; allowed: without it"
            ) from error


def _read_states(about: str, tensors: Mapping[str, torch.Tensor]) -> dict[int, State]:
    table: dict[str, dict[str, str]] = json.loads(about)
    return {int(stamp): {key: tensors[number] for key, number in state.items()} for stamp, state in table.items()}


_log = logger(__name__)

ResultT = TypeVar("ResultT")

_MOST_BUILT = 2
_LONGEST_EXPERIMENT = 1_000_000
_built: dict[tuple[str, str], tuple[Description, NodeClients]] = {}
_looked: set[Path | None] = set()
"""Tables whose findings are in the log."""


class NodeFault(Exception):
    """Something went wrong on a node; the text is all that the server learns."""


def node_clients(text: str, config: NodeConfig) -> tuple[Description, NodeClients]:
    """Return an experiment as this node does it, and its clients; built once, so that a warm process has the data."""
    key = (text, repr(config))
    if key not in _built:
        experiment = agreed(_document(text), config)
        _look(experiment, config)
        built = experiment.on_node(config)
        for note in built.notes:
            _log.warning(note)
        while len(_built) >= _MOST_BUILT:
            del _built[next(iter(_built))]
        _built[key] = (experiment, built)
    return _built[key]


def _look(experiment: Description, config: NodeConfig) -> None:
    """Log what `steelyard check` finds in this node's own table, once: its owner reads it, and nobody else."""
    if config.data in _looked or not config.own_data or not isinstance(experiment, LearningDescription):
        return
    _looked.add(config.data)
    if experiment.table is not None:
        for finding in looked_at(experiment.of_table(config), most_cells=0)[0].findings:
            _log.warning(f"{finding.level}: {said(finding)}{finding.mend and f'; {finding.mend}'}")


def _document(text: str) -> dict[str, Any]:
    if len(text) > _LONGEST_EXPERIMENT:
        raise UserError(f"experiment: {len(text)} letters; allowed: at most {_LONGEST_EXPERIMENT}")
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise UserError("experiment: not JSON; is the server of the same version?") from None
    if not isinstance(document, dict):
        raise UserError("experiment: not a JSON object")
    return document


def on_this_node(context: Context, work: Callable[[NodeConfig], ResultT], seconds: float) -> ResultT:
    """Do the work by the rules of this node and in the time there is; the server learns only the kind of an error."""

    def guarded() -> ResultT:
        config = NodeConfig.read(context.node_config)
        with only(None if config.trusts else config.allow):
            return work(config)

    try:
        show()  # Flower starts this process, and nothing else of ours runs in it before.
        return within(seconds, guarded)
    except Refused as error:  # About what the server sent, so it may know.
        raise NodeFault(f"refused: {error}") from None
    except Exception as error:
        # The owner of the node reads what happened in its own log.
        if isinstance(error, UserError):
            _log.error(f"not answered: {error}")
        else:
            _log.error("not answered", exc_info=True)
        raise NodeFault(public_error(error)) from None


def within(seconds: float, work: Callable[[], ResultT]) -> ResultT:
    """Do the work, but no longer than the server waits: a node that hangs would miss the next round as well."""
    results: list[ResultT] = []
    faults: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=run, daemon=True, name="work")
    thread.start()
    thread.join(seconds)
    if faults:
        raise faults[0]
    if not results:
        raise TimeoutError(f"took longer than the {seconds:g} s that the server waits")
    return results[0]


def _states(context: Context, config: NodeConfig, experiment: Description, run: str, federation: str) -> NodeStates:
    keep = experiment.store.checkpoint_every * 2 + 1  # a resume may go back two checkpoints
    return NodeStates(context.state, run, federation, keep, config.state)


def _introduce(message: Message, context: Context) -> RecordDict:
    def work(config: NodeConfig) -> RecordDict:
        text, _ = wire.split(message.content)
        experiment, node = node_clients(AskForm.read(text).experiment, config)
        known = experiment.privacy is not None and experiment.privacy.records is not None
        sizes = node.clients.samples(experiment.seed) if known else {}
        form = IntroductionForm(
            version=__version__,
            clients=list(node.names),
            about=dict(node.about),
            terms=config.terms,
            samples={name: sizes[name] for name in node.names if name in sizes},
        )
        return wire.content(form, {})

    return on_this_node(context, work, message.metadata.ttl)


def _train(message: Message, context: Context) -> RecordDict:
    task, form = tasks.read_task(message.content)

    def work(config: NodeConfig) -> RecordDict:
        experiment, node = node_clients(form.experiment, config)
        hides = _hides_updates(experiment)
        if hides != bool(form.cohort):
            raise Refused("cohort: its keys go with a task where updates are hidden, and with no other")
        if len(set(task.clients)) != len(task.clients):  # Each time would be an answer of its own.
            raise Refused("clients: one is named twice; allowed: each once")
        if hides and task.federation == wire.SURVEY:
            hidden = _hidden_round(context, config, experiment, task.federation)
            return _add_up(task, form, config, hidden, tasks.read_keys(message.content, form))
        own = agreed_task(task, form.algorithm, experiment)
        received.keep(config, experiment, form.experiment, form.run, own, own.round - 1, own.parameters)
        _keep_proofs(config, form.run, form.proofs)
        charge = _ledger(config, node, own, form.run)
        book.take_part(config, "round", own, form.run)
        states = _states(context, config, experiment, form.run, own.federation)
        kept = states.before(own.round)
        node.clients.restore(kept)
        (updates,) = node.clients.train([own])
        if updates.clients:
            charge()  # Only now: work that fails or takes too long discloses nothing.
        states.keep(own.round, node.clients.snapshot())
        failures = tuple(Failure(failure.client, public_reason(failure.reason)) for failure in updates.failures)
        over = updates.clients if own.algorithm.keeps and not kept else ()
        updates = replace(updates, failures=failures, started_over=over)
        steps: list[Step[Sending]] = []
        if config.key is not None:
            asked = digest_of_task(task, form.algorithm)
            steps.append(_Sign(SigningKey.read(config.key), config.state, form.run, asked, hides))
        if hides:
            hidden = _hidden_round(context, config, experiment, task.federation)
            steps.append(_Hide(hidden, form, tasks.read_keys(message.content, form)))
        sending = Sending(own, updates)
        for step in in_order(steps):
            step.out(sending)
        codec = KeySharesCodec(len(form.cohort)) if hides else experiment.codec()
        return tasks.write_updates(sending.updates, codec)

    return on_this_node(context, work, form.seconds)


@dataclass(frozen=True)
class _Sign(Step[Sending]):
    """The node signs what its clients send; of hidden updates it keeps the salts."""

    name = "sign"
    key: SigningKey
    state: Path | None
    run: str
    asked: str
    """Digest of the task."""
    hidden: bool

    def out(self, sending: Sending) -> None:
        given = (self.key, self.state, self.run, sending.task, self.asked, sending.updates)
        signed = book.sign_answer(*given, hidden=self.hidden)
        sending.updates = replace(sending.updates, signed=() if signed is None else (signed,))


@dataclass(frozen=True)
class _Hide(Step[Sending]):
    """Models stay on the node; shares of the keys that will hide them leave."""

    name = "hide"
    hidden: HiddenRound
    form: TaskForm
    keys: Bytes

    def out(self, sending: Sending) -> None:
        sending.updates = self.hidden.trained(self.form, self.keys, sending.task, sending.updates)


def _keep_proofs(config: NodeConfig, run: str, proofs: Sequence[Proof]) -> None:
    """Keep what a server's signed heads say of this node; the owner reads of those that show nothing."""
    if config.key is None or config.state is None or not proofs:
        return
    for fault in book.keep_proofs(config.state, run, SigningKey.read(config.key).line, proofs):
        _log.warning(fault)


def _heads(message: Message, context: Context) -> RecordDict:
    form = HeadsForm.read(wire.split(message.content)[0])

    def work(config: NodeConfig) -> RecordDict:
        _keep_proofs(config, form.run, form.proofs)
        return wire.content(HeadsForm(run=form.run, proofs=[], seconds=form.seconds), {})

    return on_this_node(context, work, form.seconds)


def _statistics(message: Message, context: Context) -> RecordDict:
    form = StatisticsForm.read(wire.split(message.content)[0])

    def work(config: NodeConfig) -> RecordDict:
        experiment, columns = _columns(form.experiment, config)
        pools = experiment.table is not None and experiment.table.pools
        sums = columns.sums if pools else columns.sums.without_scales()
        what = survey.words(sums, scales=pools)
        if _hides_updates(experiment):
            sums, what = sums.names_alone(), survey.words(sums, scales=False, counts=False)
        book.tell(config, what, len(sums.columns) + len(sums.words), form.run)
        return survey.write_sums(sums)

    return on_this_node(context, work, form.seconds)


def _hides_updates(experiment: Description) -> bool:
    return experiment.privacy is not None and experiment.privacy.aggregation is not None


def _add_up(task: Task, form: TaskForm, config: NodeConfig, hidden: HiddenRound, keys: Bytes) -> RecordDict:
    """Answer a task about columns with key shares; what this node tells of them leaves in a sum with others' alone."""
    _, columns = _columns(form.experiment, config)
    shares = columns.sums.shares() * hidden.settings.bound
    if len(task.clients) != 1 or task.round or bool(task.parameters.any()) or len(shares) != len(task.parameters):
        raise Refused(f"columns: {len(task.parameters)} numbers of {len(task.clients)} clients; allowed: {len(shares)}")
    updates = Updates(
        *(task.federation, 0, task.clients, np.array([columns.sums.rows]), {}, np.zeros(1)),
        DenseModels(torch.from_numpy(shares[None].astype(np.float32))),
    )
    what = survey.words(columns.sums, scales=True)
    book.tell(config, f"{what}, hidden in a sum of {len(form.cohort)} nodes", len(columns.sums.columns), form.run)
    return tasks.write_updates(hidden.trained(form, keys, task, updates), KeySharesCodec(len(form.cohort)))


def _columns(text: str, config: NodeConfig) -> tuple[Description, SiteColumns]:
    """Return the columns of this node, or refuse a server that its owner or the experiment lets know nothing."""
    experiment, node = node_clients(text, config)
    if config.terms.statistics in (None, "no"):
        raise NotAllowed("statistics: this node's owner lets nobody know any; allowed: training")
    if reason := experiment.refuses_statistics:
        raise NotAllowed(f"statistics: {reason}; allowed: training")
    if node.columns is None or len(node.columns.sums.columns) > survey.MOST_COLUMNS:
        raise NotAllowed(f"statistics: no table of at most {survey.MOST_COLUMNS} columns is here; allowed: training")
    return experiment, node.columns


def _compare(message: Message, context: Context) -> RecordDict:
    text, arrays = wire.split(message.content)
    others = survey.read_sums(text, arrays, ComparisonForm)
    form = ComparisonForm.read(text)

    def work(config: NodeConfig) -> RecordDict:
        experiment, columns = _columns(form.experiment, config)
        if others.columns != columns.sums.columns:
            raise Refused("columns: not those of this node; allowed: these")
        if hides := _hides_updates(experiment):
            hidden = _hidden_round(context, config, experiment, wire.SURVEY)
            numbers = [each.tolist() for each in (others.mean, others.deviation, others.bins)]
            hidden.compare_once(form.run, [others.rows, form.words, form.weight, numbers])
        own = columns.sums.as_of(round(form.weight * others.rows))
        findings = columns.findings(others.minus(own) if hides else others)
        for finding in findings:
            _log.warning(f"{finding.level}: {finding.sentence}")
        told = []
        if config.terms.statistics == "findings":
            told = survey.write_findings(findings, columns.least)
            shown = ", ".join(f"{one.name} {one.column}".strip() for one in told) or "that nothing seems wrong"
            book.tell(config, shown, len(told), form.run)
        return wire.content(FindingsForm(findings=told), {})

    return on_this_node(context, work, form.seconds)


def _ledger(config: NodeConfig, node: NodeClients, task: Task, run: str) -> Callable[[], None]:
    """Refuse a task whose answer would disclose more than the owner allows; return what writes it down."""
    ledger = NodeLedger.of(config)
    if ledger is None:
        return lambda: None
    assert isinstance(node.clients, SendingClients), "an experiment without noise is refused"
    (noise,) = (step.noise for step in node.clients.steps if isinstance(step, Noise))
    assert noise.settings.noisy is not None
    rate, steps, least = 1.0, None, noise.noise
    if node.records is not None:
        sizes = list(node.clients.samples(task.seed).values())
        (rate, steps), least = node.records.worst(sizes), min(map(node.records.noise, sizes))
    planned = Disclosure(
        run=ledger_name(run),
        federation=ledger_name(task.federation),
        round=task.round,
        clients=len(task.clients),
        clip=noise.settings.noisy.clip,
        noise=least,
        rate=rate,
        steps=steps,
        criteria=noise.criteria_count,
        criteria_noise=noise.criteria_noise if noise.criteria_count else None,
        criteria_mechanism=criteria_release(noise.settings, noise.criteria_noise).mechanism,
    )
    ledger.check(planned)

    def charge() -> None:
        entry = ledger.charge(planned)
        words = f"answer {entry.number} (run {entry.run}, {in_words(entry.federation)}, round {entry.round})"
        _log.info(f"ledger: {words} takes epsilon to {entry.epsilon:.4g} of {ledger.most:g}")

    return charge


def _evaluate(message: Message, context: Context) -> RecordDict:
    question, form = tasks.read_question(message.content)

    def work(config: NodeConfig) -> RecordDict:
        experiment, node = node_clients(form.experiment, config)
        if len(question.models) == 1:
            received.keep(config, experiment, form.experiment, form.run, question, question.round, question.models[0])
        if not config.tests:
            return tasks.write_evaluations(_untested(question, node.names).without(question.withdrawn))
        book.take_part(config, "question", question, form.run)
        states = _states(context, config, experiment, form.run, question.federation)
        node.clients.restore(states.before(question.round + 1))
        with nullcontext() if form.algorithm else torch.no_grad():  # Some train their own models before they test.
            (answer,) = node.clients.evaluate([agreed_question(question, form.algorithm, experiment)])
        return tasks.write_evaluations(answer.without(question.withdrawn))

    return on_this_node(context, work, form.seconds)


def _untested(question: Question, names: Sequence[str]) -> Evaluations:
    """Return the answer of a node whose owner lets nobody test there: of each client why there is no test.

    An answer and no error: the server knows that the node is there, and a run in which nobody is tested goes on.
    """
    refusal = NotAllowed("tests: this node's clients are never tested; allowed: training")
    _log.error(f"not answered: {refusal}")
    none = np.zeros((len(question.models), 0))
    return Evaluations(
        federation=question.federation,
        round=question.round,
        clients=(),
        samples=np.zeros(0, dtype=np.int64),
        scores=none,
        losses=none,
        right=np.zeros(0, dtype=np.bool_) if question.detailed else None,
        failures=tuple(Failure(client, public_error(refusal)) for client in names),
    )


def _hidden_round(context: Context, config: NodeConfig, experiment: Description, federation: str) -> HiddenRound:
    if experiment.privacy is None or experiment.privacy.aggregation is None:
        raise Refused("privacy.aggregation: this experiment hides no updates; allowed: its task")
    if federation not in (*experiment.rules(), wire.SURVEY):  # By another name it would be another sum of the same.
        raise NotAllowed(f"federation: got {brief(federation)}; allowed: {listed(experiment.rules())}")
    return HiddenRound(context.state, federation, experiment.privacy.aggregation, config)


app = ClientApp()


@app.query("introduce")
def introduce(message: Message, context: Context) -> Message:
    """Say which clients live on this node."""
    return Message(_introduce(message, context), reply_to=message)


@app.query("heads")
def heads(message: Message, context: Context) -> Message:
    """Keep what the server's signed heads say of this node."""
    return Message(_heads(message, context), reply_to=message)


@app.query("statistics")
def statistics(message: Message, context: Context) -> Message:
    """Tell of this node's columns what its owner allows."""
    return Message(_statistics(message, context), reply_to=message)


@app.query("compare")
def compare(message: Message, context: Context) -> Message:
    """Compare this node with the others, and tell of it what its owner allows."""
    return Message(_compare(message, context), reply_to=message)


@app.train("task")
def train(message: Message, context: Context) -> Message:
    """Train those of this node's clients that the server asks for."""
    return Message(_train(message, context), reply_to=message)


@app.evaluate("question")
def evaluate(message: Message, context: Context) -> Message:
    """Test the server's models on the test sets of all clients of this node."""
    return Message(_evaluate(message, context), reply_to=message)


def _hides(of: type[RoundForm], answer: Callable[..., RecordDict]) -> None:
    """Answer a message of a round with hidden updates, for the clients that live here."""

    def take(message: Message, context: Context) -> Message:
        form, found = of.receive(message.content)

        def work(config: NodeConfig) -> RecordDict:
            experiment, node = node_clients(form.experiment, config)
            if strangers := set(form.clients) - set(node.names):
                raise Refused(f"clients: {', '.join(sorted(strangers))[:100]} live elsewhere")
            return answer(_hidden_round(context, config, experiment, form.federation), form, *found)

        return Message(on_this_node(context, work, form.seconds), reply_to=message)

    category, _, action = of.kind.partition(".")
    (app.train if category == "train" else app.query)(action)(take)


_hides(KeysForm, HiddenRound.keys)
_hides(ShareForm, HiddenRound.share)
_hides(HideForm, HiddenRound.hide)
_hides(OpenForm, HiddenRound.open)
