"""One federation that somebody else runs: replies in, weights and the new model out, as in a round of ours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from steelyard.adapters.arrays import VARIANCES, Arrays, Layout, Spill
from steelyard.base.errors import UserError, expect, one_line, texts_of
from steelyard.base.settings import LARGEST_REAL, validated
from steelyard.base.tallies import Leading
from steelyard.clients.protocol import Server
from steelyard.learning import evaluation
from steelyard.messages.payloads import ServerTest
from steelyard.messages.updates import MOST_SAMPLES, Task, Updates
from steelyard.rounds.state import Draft, Federation, Plan, RoundState
from steelyard.rounds.weigh import weigh_soundly
from steelyard.weighing import criterion as registry
from steelyard.weighing.cohort import Memory
from steelyard.weighing.criterion import Capabilities, unmet
from steelyard.weighing.fact import read_fact
from steelyard.weighing.order import OrderState
from steelyard.weighing.rule import Rule, WeighingSettings
from steelyard.weighing.words import Frame, label, read_rule


class NoRows(Server):
    """A server without rows; criteria that need some are refused before the first round."""

    layout: Layout | None = None
    sent: Arrays | None = None
    """The model of the round; what is tested are changes of it."""

    def initial(self, seed: int) -> torch.Tensor:
        raise NotImplementedError  # the framework makes the first model

    def test(self, seed: int, models: torch.Tensor, measure: Leading | None = None) -> ServerTest:
        raise NotImplementedError  # rules that need rows are refused when they are read


class ServerRows(NoRows):
    """Rows of the task that the server holds and trusts; hand them over where a rule measures on them (VP, GA).

    `network` is a torch.nn.Module whose state_dict has the names that clients send, `labels` are classes 0, 1, 2, ...

        >>> rows = ServerRows(torch.nn.Linear(3, 2), numpy.zeros((4, 3)), [0, 1, 0, 1])  # [rows, ...], [rows]

    Raises:
        UserError: rows and labels differ in number, numbers are not finite, or the network is not the
            clients'.
    """

    def __init__(self, network: torch.nn.Module, features: Any, labels: Any) -> None:
        expect("rows: network", network, torch.nn.Module, "a torch.nn.Module")
        self._network = network
        self._features = _tensor("features", features)
        self._labels = _classes(_tensor("labels", labels))
        floating = [value.dtype for value in network.state_dict().values() if value.is_floating_point()]
        if floating and self._features.is_floating_point():
            self._features = self._features.to(floating[0])
        counts = [int(part.shape[0]) if part.ndim else 0 for part in (self._features, self._labels)]
        if counts[0] != counts[1] or not counts[0]:
            raise UserError(
                f"rows: {counts[0]} features and {counts[1]} labels; allowed: as many of both, and at least one"
            )
        if not bool(torch.isfinite(self._features).all()):
            raise UserError("rows: features hold NaN or infinity; allowed: finite numbers")
        self._counted(network.state_dict())  # rows of a wrong shape are refused before anybody trains

    def test(self, seed: int, models: torch.Tensor, measure: Leading | None = None) -> ServerTest:
        """Return accuracy and the figures of each class for each model, given as changes [models, parameters]."""
        state = self._network.state_dict()
        counts = [self._confusion(model, state) for model in models]
        stacked = np.stack(counts)
        return ServerTest(evaluation.accuracy(stacked), evaluation.f1(stacked), by_class=evaluation.by_class(stacked))

    def _confusion(self, model: torch.Tensor, state: dict[str, torch.Tensor]) -> Any:
        assert self.layout is not None
        # A copy: what the changes are added to must stay as it is.
        arrays = self.layout.arrays(model.clone(), None, self.sent)
        floating = [name for name, value in state.items() if value.is_floating_point()]
        for name in sorted({*floating} ^ {*arrays}):
            whose = "the network has '{}', which clients do not send" if name in floating else "clients send '{}' too"
            raise UserError(f"rows: {whose.format(name)}; allowed: the clients' network")
        given = {name: torch.from_numpy(array).to(state[name].dtype) for name, array in arrays.items()}
        return self._counted({**state, **given})

    def _counted(self, state: dict[str, torch.Tensor]) -> Any:
        """Return who is taken for what by the network with this state."""
        training = self._network.training
        self._network.eval()
        try:
            with torch.no_grad():
                outputs = torch.func.functional_call(self._network, state, (self._features,))
        except (RuntimeError, ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"rows: the network cannot look at them ({reason}); allowed: rows as clients have"
            ) from error
        finally:
            self._network.train(training)
        if not torch.is_tensor(outputs) or outputs.ndim > 2 or outputs.shape[:1] != self._labels.shape:
            found = list(outputs.shape) if torch.is_tensor(outputs) else type(outputs).__name__
            raise UserError(f"rows: the network makes {found} of {len(self._labels)} rows; allowed: [rows, classes]")
        classes = max(int(outputs.shape[-1]), 2)
        if int(self._labels.max()) >= classes:
            raise UserError(
                f"rows: labels hold class {int(self._labels.max())}, and the network tells {classes} classes apart; "
                f"allowed: 0 to {classes - 1}"
            )
        return evaluation.confusion(evaluation.predictions(outputs, classes), self._labels, classes)


def _tensor(name: str, values: Any) -> torch.Tensor:
    try:
        return values if torch.is_tensor(values) else torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"rows: {name} cannot be made a tensor ({error}); allowed: an array of numbers") from None


def _classes(labels: torch.Tensor) -> torch.Tensor:
    """Return labels as classes; what is none is named."""
    odd = labels[(labels < 0) | (labels != labels.long())]
    if len(odd):
        raise UserError(f"rows: labels hold {odd[0].item():g}; allowed: classes 0, 1, 2, ...")
    return labels.long()


SAMPLES = "DS"
_LONGEST_REASON = 500


def short(reason: str) -> str:
    """Return a reason as one short line, whatever a client wrote: it is shown and kept."""
    return one_line(reason)[:_LONGEST_REASON]


@dataclass(frozen=True, eq=False)
class Reply:
    """What one client sent: its model, how many samples it trained on, and measures of itself by name.

    >>> Reply("ann", {"layer": numpy.ones(2)}, samples=30, measures={"battery": 0.7}).samples
    30
    """

    client: str
    arrays: Arrays
    samples: float
    measures: Mapping[str, float] = field(default_factory=dict[str, float])
    is_change: bool = False
    """Whether the arrays are what the client changed of the model that it got, and not a whole model."""


@dataclass(frozen=True, eq=False)
class Combined:
    """What came of one round; `reasons` name every client that was left out.

    >>> combined = WeighedRounds("DS").combine({"layer": numpy.zeros(2)}, replies)
    >>> combined.arrays["layer"], combined.reasons  # the new model, and who was left out
    (array([0.5, 0.5]), {})
    """

    arrays: Arrays | None
    """The new model; None where the old one is kept."""
    weights: Mapping[str, float]
    scores: Mapping[str, float]
    measures: Mapping[str, Mapping[str, float]]
    """Raw measures of each client, by criterion."""
    reasons: Mapping[str, str]
    samples: Mapping[str, float] = field(default_factory=dict[str, float])
    untested: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why clients' tests of the new model do not count, where a framework asks for tests."""

    def means(self, metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return Σ wᵢmᵢ of the metrics that all weighed clients have; who gives no number does not count in a mean."""
        common = set.intersection(*(set(metrics[client]) for client in self.weights))
        found: dict[str, float] = {}
        for name in sorted(common):
            told = {client: metrics[client][name] for client in self.weights if math.isfinite(metrics[client][name])}
            share = sum(self.weights[client] for client in told) if len(told) < len(self.weights) else 1.0
            if share > 0:
                found[name] = sum(self.weights[client] * value for client, value in told.items()) / share
        return found


class WeighedRounds:
    """Weighs the replies of each round by one rule; keeps what criteria remember between rounds.

    `metrics` are measures that clients send and that are no criteria, by name; rules may then name them too.

        >>> replies = [Reply("ann", {"layer": numpy.ones(2)}, 30), Reply("bob", {"layer": -numpy.ones(2)}, 10)]
        >>> WeighedRounds("DS").combine({"layer": numpy.zeros(2)}, replies).weights
        {'ann': 0.75, 'bob': 0.25}

    Raises:
        UserError: the rule is not known, steers training itself, or needs `rows` that are not there.
    """

    def __init__(
        self,
        rule: str | WeighingSettings,
        rows: ServerRows | None = None,
        metrics: Sequence[str] = (),
        plugins: Sequence[str] = (),
    ) -> None:
        expect("rows", rows, (ServerRows, type(None)), "ServerRows(network, features, labels), or None")
        named = texts_of(metrics, "metrics", "a list of names, such as ['quality']")
        files = texts_of(plugins, "plugins", "a list of files or modules, such as ['own.py']")
        if files:
            registry.load_plugins(files)
        self._server = rows or NoRows()
        settings = rule if isinstance(rule, WeighingSettings) else self._read(rule, named)
        self.rule = Rule(settings, _criteria(settings, rows))
        self.name = label(settings)
        self.memory: Mapping[str, Memory] = {}
        """What criteria remember from the rounds so far."""
        self.round = 0
        """The last round that was weighed."""

    def go_on(self, round: int, memory: Mapping[str, Memory]) -> None:
        """Go on after the last round of a folder, with what criteria remembered then."""
        self.round, self.memory = max(round, 0), memory

    def _read(self, word: str, metrics: Sequence[str]) -> WeighingSettings:
        if not isinstance(word, str) or not word.strip():
            raise UserError(f"rule: got {word!r}; allowed: a rule in words, such as 'VP>DS/max', or settings")
        known = (*registry.known(), *metrics)
        has_rows = isinstance(self._server, ServerRows)
        frame = Frame(known, WeighingSettings(criteria=(SAMPLES,)), server_rows=has_rows, option="rule")
        return validated(WeighingSettings, read_rule(word.strip(), frame), "rule")

    @property
    def asked(self) -> list[str]:
        """The measures that clients must send, their number of samples apart."""
        return [c.name for c in self.rule.criteria if c.measured_by == "client" and c.name != SAMPLES]

    @property
    def needs_samples(self) -> bool:
        """Whether the rule looks at how many samples clients have."""
        return SAMPLES in self.rule.names

    def combine(self, sent: Arrays, replies: Iterable[Reply], failures: Mapping[str, str] | None = None) -> Combined:
        """Weigh the replies to a model and combine them; a reply that cannot be weighed is left out with its reason."""
        collected = self.begin(sent)
        for client, reason in (failures or {}).items():
            collected.refuse(client, reason)
        for reply in replies:
            collected.add(reply)
        return collected.combine()

    def begin(self, sent: Arrays, folder: Path | None = None) -> Collected:
        """Begin a round with the model that is sent; use it where replies come one by one and are not kept.

        Updates wait in temporary files, in `folder` or where this machine has such files.
        """
        return Collected(self, sent, folder)

    def weigh(self, layout: Layout, sent: Arrays, updates: Updates) -> Draft:
        """Weigh one cohort's updates, which are changes of the model that was sent, and remember what criteria do."""
        federation = Federation(self.name, self.name, 0, self.rule)
        # Changes begin from 0; this zero needs no memory, whatever the size of the model.
        start = torch.from_numpy(np.zeros(1, layout.precision)).expand(layout.size(layout.floating))
        task = Task(self.name, 0, updates.round, updates.clients, start, federation.loss, federation.algorithm)
        orders = OrderState(self.rule.start_order, 0.0)
        state = RoundState(updates.round - 1, start, task.loss, orders, memory=self.memory)
        self._server.layout, self._server.sent = layout, sent
        draft = weigh_soundly(federation, state, task, updates, self._server, Plan(1, 1.0, min_clients=0))
        self.memory = draft.memory
        return draft

    def lacks(self, reply: Reply) -> str:
        """Say what a reply lacks that the rule needs; empty where it has all."""
        if not 0 < reply.samples <= MOST_SAMPLES:
            return f"samples = {reply.samples:g}; allowed: 1 to {MOST_SAMPLES}"
        for name in self.asked:
            value = _sent(reply.measures, name)
            if value is None:
                return f"criterion {name} is missing"
            # What else may be wrong with a measure is looked at for all clients alike, when they are weighed.
            if value > LARGEST_REAL:
                return f"criterion {name} = {value:g}; allowed: 0 to {LARGEST_REAL:g}"
        return ""


class Collected:
    """The replies of one round, checked as they come; of each, only its update is kept, on the disk where it is large.

    Add replies in any order: sums run by client, so that the result does not depend on it.

        >>> collected = WeighedRounds("DS").begin({"layer": numpy.zeros(2)})
        >>> collected.add(Reply("ann", {"layer": numpy.ones(2)}, 30))
        ''
    """

    def __init__(self, weighing: WeighedRounds, sent: Arrays, folder: Path | None) -> None:
        self._weighing, self._sent = weighing, sent
        self._layout = Layout.of(sent)
        layout = self._layout
        self._updates = Spill(layout.size(layout.floating), layout.precision, folder)
        self._counted = Spill(layout.size(layout.counting), np.dtype(np.float64), folder)
        self._rows: dict[str, Reply] = {}
        self.reasons: dict[str, str] = {}
        """Why clients are left out."""

    def refuse(self, client: str, reason: str) -> None:
        """Leave a client out."""
        self.reasons[client] = short(reason)

    def add(self, reply: Reply) -> str:
        """Take a reply in; the result says why it is left out, and is empty where it is not."""
        reason = self._layout.refusal(reply.arrays) or self._weighing.lacks(reply)
        if reply.client in self._rows:
            reason = "answered twice"
        if reason := reason or self._negative(reply):
            self.refuse(reply.client, reason)
            return reason
        layout, base = self._layout, None if reply.is_change else self._sent
        self._updates.add(layout.changes(layout.floating, reply.arrays, base))
        self._counted.add(layout.changes(layout.counting, reply.arrays, base))
        self._rows[reply.client] = replace(reply, arrays={})
        return ""

    def _negative(self, reply: Reply) -> str:
        for name in self._layout.floating:
            if name.endswith(VARIANCES):
                array = reply.arrays[name] + self._sent[name] if reply.is_change else reply.arrays[name]
                if (array < 0).any():
                    return f"array {name} holds negative variances"
        return ""

    def combine(self, *, as_change: bool = False) -> Combined:
        """Weigh the replies and combine them, into a new model or into the change of the one that was sent."""
        self._weighing.round += 1
        order = {client: row for row, client in enumerate(self._rows)}
        clients = tuple(client for client in sorted(self._rows) if client not in self.reasons)
        if not clients:
            return Combined(None, {}, {}, {}, self.reasons)
        replies = [self._rows[client] for client in clients]
        updates = Updates(
            federation=self._weighing.name,
            round=self._weighing.round,
            clients=clients,
            samples=np.array([round(reply.samples) for reply in replies], dtype=np.int64),
            criteria={
                name: np.array([_sent(reply.measures, name) for reply in replies], dtype=np.float64)
                for name in self._weighing.asked
            }
            | {SAMPLES: np.array([float(reply.samples) for reply in replies])},
            losses=np.full(len(replies), math.nan),
            payload=self._updates.models([order[client] for client in clients]),
        )
        draft = self._weighing.weigh(self._layout, self._sent, updates)
        reasons = self.reasons | {failure.client: failure.reason for failure in draft.updates.failures}
        if draft.weighing is None or draft.kept_old:
            return Combined(None, {}, {}, {}, reasons)
        weighing, clients = draft.weighing, draft.updates.clients
        counted = self._counted.models([order[client] for client in clients]).combine(
            draft.model, weighing.weights / weighing.weights.sum()
        )
        return Combined(
            arrays=self._layout.arrays(draft.model, counted, None if as_change else self._sent),
            weights=dict(zip(clients, weighing.weights.tolist(), strict=True)),
            scores=dict(zip(clients, weighing.scores.tolist(), strict=True)),
            measures={
                client: dict(zip(weighing.criteria, row, strict=True))
                for client, row in zip(clients, weighing.raw.tolist(), strict=True)
            },
            reasons=reasons,
            samples=dict(zip(clients, draft.updates.samples.tolist(), strict=True)),
        )


def _sent(measures: Mapping[str, float], name: str) -> float | None:
    """Return a measure that a client sent by its own name, or a fact made of the number by the fact's name."""
    if name in measures or (fact := read_fact(name)) is None:
        return measures.get(name)
    return fact.among(measures)


def _criteria(settings: WeighingSettings, rows: ServerRows | None) -> list[registry.Criterion]:
    """Look the criteria up; any other name is a measure that clients send. What cannot be had here is refused."""
    unusable = (settings.adjust, settings.fit, settings.loss)
    if any(part is not None for part in unusable) or settings.trained_by == "server":
        raise UserError(f"rule: '{label(settings)}' steers training itself; allowed here: rules that weigh replies")
    if settings.defence is not None and settings.defence.needs_root:
        raise UserError(f"rule: '{label(settings)}' trains at the server; allowed here: rules that weigh replies")
    lacking = "" if rows is not None else "and no rows were given; allowed: rows=ServerRows(network, features, labels)"
    available = Capabilities(
        "this federation",
        lacks_test_set=lacking,
        label_counts=False,
        first_losses=False,
        slopes=False,
        layers=False,
        client_tests=False,
    )
    if settings.policy is not None and (fault := unmet(settings.policy.needs, available, {})):
        raise UserError(f"rule: {settings.policy.name} {fault}")
    found: list[registry.Criterion] = []
    for name in settings.criteria:
        known = registry.find(name)
        if known is not None and known.measured_by == "server":
            registry.check(known, available)
        found.append(known or registry.Criterion(name=name, measured_by="client", measure=lambda local: 0.0))
    return found
