"""One federation that somebody else runs: replies in, weights and the new model out, as in a round of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from steelyard.adapters.arrays import Arrays, Layout
from steelyard.adapters.server_rows import NoRows, ServerRows
from steelyard.errors import UserError
from steelyard.messages import DenseModels, Task, Updates
from steelyard.rounds.drafting import weigh_soundly
from steelyard.rounds.state import Federation, Plan, RoundState
from steelyard.settings import validated
from steelyard.weighing import criteria as registry
from steelyard.weighing.needs import Capabilities
from steelyard.weighing.priorities import OrderState
from steelyard.weighing.rule import Rule, WeighingSettings, label
from steelyard.weighing.view import Memory
from steelyard.weighing.words import Frame, read_rule

SAMPLES = "DS"


@dataclass(frozen=True, eq=False)
class Reply:
    """What one client sent: its model, how many samples it trained on, and measures of itself by name."""

    client: str
    arrays: Arrays
    samples: float
    measures: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, eq=False)
class Combined:
    """What came of one round; `reasons` name every client that was left out."""

    arrays: Arrays | None
    """The new model; None where the old one is kept."""
    weights: Mapping[str, float]
    scores: Mapping[str, float]
    measures: Mapping[str, Mapping[str, float]]
    """Raw measures of each client, by criterion."""
    reasons: Mapping[str, str]


class WeighedRounds:
    """Weighs the replies of each round by one rule; keeps what criteria remember between rounds."""

    def __init__(
        self,
        rule: str | WeighingSettings,
        rows: ServerRows | None = None,
        measures: Sequence[str] = (),
        plugins: Sequence[str] = (),
        option: str = "rule",
    ) -> None:
        if plugins:
            registry.load_plugins(tuple(plugins))
        self._server = rows or NoRows()
        settings = rule if isinstance(rule, WeighingSettings) else self._read(rule, measures, option)
        self.rule = Rule(settings, _criteria(settings, rows, option))
        self.name = label(settings)
        self._memory: Mapping[str, Memory] = {}
        self._round = 0

    def _read(self, word: str, measures: Sequence[str], option: str) -> WeighingSettings:
        if not isinstance(word, str) or not word.strip():
            raise UserError(f"{option}: got {word!r}; allowed: a rule in words, such as 'VP>DS/max', or settings")
        known = (*registry.known(), *measures)
        has_rows = not isinstance(self._server, NoRows)
        frame = Frame(known, WeighingSettings(criteria=(SAMPLES,)), server_rows=has_rows, option=option)
        return validated(WeighingSettings, read_rule(word.strip(), frame), option)

    @property
    def asked(self) -> list[str]:
        """The measures that clients must send, their number of samples apart."""
        return [c.name for c in self.rule.criteria if c.measured_by == "client" and c.name != SAMPLES]

    def combine(self, sent: Arrays, replies: Sequence[Reply], failures: Mapping[str, str] | None = None) -> Combined:
        """Weigh the replies to a model and combine them; a reply that cannot be weighed is left out with its reason."""
        self._round += 1
        layout = Layout.of(sent)
        kept, reasons = self._sound(layout, replies)
        reasons = {**(failures or {}), **reasons}
        if not kept:
            return Combined(None, {}, {}, {}, reasons)
        models = torch.empty(len(kept), layout.size, dtype=layout.precision)
        for row, reply in zip(models, kept, strict=True):
            row.copy_(layout.vector(reply.arrays))
        federation = Federation(self.name, self.name, 0, self.rule)
        start = layout.vector(sent)
        names = tuple(reply.client for reply in kept)
        task = Task(self.name, 0, self._round, names, start, federation.loss.first(), federation.algorithm)
        state = RoundState(
            self._round - 1, start, task.loss, OrderState(self.rule.start_order, 0.0), memory=self._memory
        )
        updates = Updates(
            federation=self.name,
            round=self._round,
            clients=names,
            samples=np.array([round(reply.samples) for reply in kept], dtype=np.int64),
            criteria={name: np.array([float(reply.measures[name]) for reply in kept]) for name in self.asked}
            | {SAMPLES: np.array([float(reply.samples) for reply in kept])},
            losses=np.full(len(kept), math.nan),
            payload=DenseModels(models),
        )
        self._server.layout = layout
        draft = weigh_soundly(federation, state, task, updates, self._server, Plan(1, 1.0, min_clients=0))
        self._memory = draft.memory
        reasons |= {failure.client: failure.reason for failure in draft.updates.failures}
        if draft.weighing is None or draft.kept_old:
            return Combined(None, {}, {}, {}, reasons)
        weighing, clients = draft.weighing, draft.updates.clients
        by_name = {reply.client: reply.arrays for reply in kept}
        counted = layout.counted([by_name[name] for name in clients], weighing.weights)
        return Combined(
            arrays=layout.arrays(draft.model, counted),
            weights=dict(zip(clients, weighing.weights.tolist(), strict=True)),
            scores=dict(zip(clients, weighing.scores.tolist(), strict=True)),
            measures={
                client: dict(zip(weighing.criteria, row, strict=True))
                for client, row in zip(clients, weighing.raw.tolist(), strict=True)
            },
            reasons=reasons,
        )

    def _sound(self, layout: Layout, replies: Sequence[Reply]) -> tuple[list[Reply], dict[str, str]]:
        """Return the replies that have the right arrays and every measure, by client, and why others have not."""
        kept: list[Reply] = []
        reasons: dict[str, str] = {}
        for reply in sorted(replies, key=lambda reply: reply.client):
            reason = layout.refusal(reply.arrays) or self._missing(reply)
            if reason:
                reasons[reply.client] = reason
            elif kept and kept[-1].client == reply.client:
                reasons[reply.client] = "answered twice"
            else:
                kept.append(reply)
        return [reply for reply in kept if reply.client not in reasons], reasons

    def _missing(self, reply: Reply) -> str:
        if not math.isfinite(reply.samples):
            return f"samples = {reply.samples}; allowed: a number from 1 on"
        lacking = [name for name in self.asked if name not in reply.measures]
        return f"criterion {lacking[0]} is missing" if lacking else ""


def _criteria(settings: WeighingSettings, rows: ServerRows | None, option: str) -> list[registry.Criterion]:
    """Look the criteria up; any other name is a measure that clients send. What cannot be had here is refused."""
    unusable = (settings.adjust, settings.fit, settings.loss)
    if any(part is not None for part in unusable) or settings.trained_by == "server":
        raise UserError(f"{option}: '{label(settings)}' steers training itself; allowed here: rules that weigh replies")
    if settings.defence is not None and settings.defence.needs_root:
        raise UserError(f"{option}: '{label(settings)}' trains at the server; allowed here: rules that weigh replies")
    lacking = "" if rows is not None else "and no rows were given; allowed: rows=ServerRows(network, features, labels)"
    available = Capabilities("this federation", lacks_test_set=lacking, label_counts=False, first_losses=False)
    known = registry.known()
    found: list[registry.Criterion] = []
    for name in settings.criteria:
        if name not in known:
            found.append(registry.Criterion(name, "client", "data", "sent by clients", lambda local: 0.0))
            continue
        if known[name].measured_by == "server":
            registry.check(known[name], available)
        found.append(known[name])
    return found
