"""The run folder of a federation that somebody else runs: written round by round, whole after every round.

    recorder = Recorder("runs/hospitals", WeighedRounds("VP>DS/max").rule, framework="Flower", rounds=10)
    recorder.write(weights={"a": 0.4, "b": 0.6}, measures={"a": {"DS": 20.0, "VP": 0.7}, "b": {"DS": 30.0, "VP": 0.8}})
    recorder.finish()

`steelyard report`, `watch`, `weigh`, `export` and whatever else looks at runs work on the folder. An app that is
started again opens the same folder and goes on with the round after the last one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from steelyard.adapters.arrays import Arrays, Layout, described
from steelyard.adapters.rounds import Combined, WeighedRounds
from steelyard.base.errors import UserError, listed, own_folder, path_of
from steelyard.base.settings import validated
from steelyard.experiment.description import READING
from steelyard.experiment.loading import RUN_FILE, RecordedDescription, read_experiment
from steelyard.experiment.resuming import check_rules, versions, why
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import MOST_SAMPLES, Evaluations, Failure, Updates
from steelyard.proof.signing import head_key, model_digest
from steelyard.rounds.state import Federation, RoundRecord, RoundState
from steelyard.runs.checkpoint import Restored
from steelyard.runs.database import LARGEST_FIGURE, exists
from steelyard.runs.facts import RunFacts
from steelyard.runs.glance import this_process
from steelyard.runs.history import History
from steelyard.runs.joining import set_up
from steelyard.runs.store import Store
from steelyard.weighing.cohort import Memory
from steelyard.weighing.order import OrderState
from steelyard.weighing.rule import Rule, trust_warnings, trusted
from steelyard.weighing.weights import Weighing
from steelyard.weighing.words import label


@dataclass(frozen=True)
class ClientTest:
    """One client's test of a round's new model; more is better in `score`.

    >>> ClientTest(0.9, samples=50).score
    0.9
    """

    score: float
    samples: int = 1
    loss: float = math.nan
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further figures by name."""


@dataclass(frozen=True, eq=False)
class Model:
    """A model as arrays, and arrays that its app keeps beside it between rounds, by name."""

    arrays: Arrays
    states: Arrays = field(default_factory=dict[str, "np.ndarray[Any, Any]"])


class _NotSeen(DenseModels):
    """Updates that stay with the framework: the chain holds no digests of them."""

    def content(self) -> None:
        return None


def _vector(model: torch.Tensor | Arrays | None) -> torch.Tensor:
    """Return a model's floating numbers as one vector, float64 where any of them is."""
    if isinstance(model, torch.Tensor):
        return model.detach().cpu().reshape(-1)
    floating = [array.reshape(-1) for array in (model or {}).values() if array.dtype.kind == "f"]
    kind = np.float64 if any(array.itemsize > 4 for array in floating) else np.float32
    return torch.from_numpy(np.concatenate(floating, dtype=kind) if floating else np.zeros(0, kind))


WHOLE = "whole/"
"""How the names begin of a model's arrays of whole numbers, which are no part of its vector."""


def _figure(value: float) -> float:
    """Return a figure of a test; one beyond what readers of a folder take is no number."""
    return float(value) if abs(value) <= LARGEST_FIGURE else math.nan


class Recorder:
    """Writes one run folder for a federation of another framework; use it from one thread.

    `rule`: what weighs the clients (`WeighedRounds(...).rule`); `rounds`: how many there will be, where known;
    `measure`: what clients' scores are; `keep_models`: keep the models that `write` is given (the newest two).
    A folder that holds a run of the same rule is gone on with, which its notes say, and any other run is refused.
    `begins`: the model and the states that an app would begin with. Where the folder goes on they become the kept ones.
    Where none are kept, or `replaces` is False, another model than the folder's last is refused.

        >>> recorder = Recorder("runs/theirs", WeighedRounds("DS").rule, framework="ours")
        >>> recorder.write({"ann": 0.75, "bob": 0.25}, {"ann": {"DS": 30}, "bob": {"DS": 10}})
        1

    Raises:
        UserError: `folder` holds another run, or goes on from another model; (in `write`) a client lacks a measure
            or claims impossible samples.
    """

    def __init__(
        self,
        folder: str | Path,
        rule: Rule,
        *,
        framework: str,
        rounds: int | None = None,
        measure: str = "accuracy",
        keep_models: bool = False,
        begins: Model | None = None,
        replaces: bool = True,
    ) -> None:
        self.folder = own_folder(Path(folder), "folder")
        self._rule = rule
        name = label(rule.settings)
        self._federation = Federation(name, name, 0, rule)
        document = {
            "name": "recorded",
            "kind": "recorded",
            "framework": framework,
            "measure": measure,
            "keep_models": keep_models,
            "weighing": rule.settings.model_dump(mode="json", exclude_none=True),
        } | ({} if rounds is None else {"rounds": {"count": rounds}})
        described = validated(RecordedDescription, document, "folder", READING)
        self._notes = trust_warnings([rule])
        if exists(self.folder):
            self._check_same(described)
        else:
            text = tomli_w.dumps(document)
            facts = RunFacts(experiment_text=text, code_files={}, data={}, clients="recorded", others=versions())
            set_up(self.folder, {RUN_FILE: text}, facts, [self._federation])
        self._store = Store(self.folder, keep_models=keep_models, signer=head_key())
        try:
            self._go_on(rounds, measure, begins, replaces=replaces)
        except BaseException:
            self._store.close()
            raise

    def _check_same(self, described: RecordedDescription) -> None:
        """Refuse a folder of another kind of run, or of another rule; hold what was written against its chain."""
        history, before = History(self.folder), read_experiment(self.folder)
        if not isinstance(before, RecordedDescription):
            raise UserError(f"folder: {self.folder} holds a run of Steelyard's own; allowed: a folder without a run")
        check_rules(history, [self._federation])
        for name in ("framework", "measure", "keep_models", "weighing"):
            if getattr(before, name) != getattr(described, name):
                raise UserError(f"folder: {self.folder} began with another {name}; allowed: the same, or a new folder")
        if history.chain.problem:
            raise UserError(f"folder: {self.folder}: {history.chain.problem}; allowed: as it was, or a new folder")
        self._notes = [history.notes] if history.notes else []

    def _go_on(self, rounds: int | None, measure: str, begins: Model | None, *, replaces: bool) -> None:
        self._store.register([self._federation])
        restored = self._store.resume()
        self.round: int = restored.round
        """The last round that was written; 0 is the first model, before any training."""
        state = restored.states.get(self._federation.name)
        self.memory: Mapping[str, Memory] = {} if state is None else state.memory
        """What criteria remembered when that round ended; hand it to `WeighedRounds.go_on`."""
        self.begins = begins
        if self.round > 0 and begins is not None:
            self.begins = self._kept(restored, begins) if self._store.keep_models and replaces else None
            if self.begins is None:
                self._check_last(restored, begins)
        if self.round >= 0:
            from_what = "" if begins is None else f", from {'its own' if self.begins is None else 'the kept'} model"
            self._notes.append(f"started again after round {self.round}{from_what}")
        self._store.note(
            RunFacts(
                status="running",
                measure=measure,
                writer=this_process().text(),
                measured_by={criterion.name: criterion.measured_by for criterion in self._rule.criteria},
                trust={self._federation.rule_name: dict(trusted(self._rule))},
                notes="; ".join(self._notes),
            )
        )
        self._begun = time.monotonic()
        if self.round < 0:
            self._commit(RoundRecord(self._federation.name, 0, 0.0), torch.zeros(0))
        if rounds is not None:
            self._store.note(RunFacts(rounds=self.round + rounds))

    def _kept(self, restored: Restored, begins: Model) -> Model:
        """Return the model and the states that the folder keeps."""
        layout, vector = Layout.of(begins.arrays), restored.states[self._federation.name].parameters
        if len(vector) != layout.size(layout.floating):
            raise UserError(
                f"folder: {self.folder} keeps a model of {len(vector)} numbers, and the app begins with one of "
                f"{layout.size(layout.floating)}; allowed: the same network, or a new folder"
            )
        states = {name: tensor.numpy() for name, tensor in restored.kept.items()}
        found = {**begins.arrays, **layout.arrays(vector, None, None)}
        whole = {name: states.pop(WHOLE + name) for name in layout.counting if WHOLE + name in states}
        return Model({**found, **{name: array.astype(layout.types[name]) for name, array in whole.items()}}, states)

    def _check_last(self, restored: Restored, begins: Model) -> None:
        """Refuse a model that is not the folder's last, and states that were not kept."""
        lost = sorted(set(restored.kept) - set(begins.states)) if not self._store.keep_models else []
        last = History(self.folder).models.get((self._federation.rule_name, 0))
        if lost or model_digest(_vector(begins.arrays)) != last:
            what = (
                f"what the strategy kept ({lost[0].partition('/')[0]})" if lost else f"the model of round {self.round}"
            )
            raise UserError(
                f"folder: {self.folder} ends with round {self.round}, and the app begins without {what}; allowed: that "
                "model, keep_models=True from the first start on where the app takes models over, or a new folder"
            )

    def write(
        self,
        weights: Mapping[str, float],
        measures: Mapping[str, Mapping[str, float]],
        *,
        scores: Mapping[str, float] | None = None,
        samples: Mapping[str, float] | None = None,
        reasons: Mapping[str, str] | None = None,
        tests: Mapping[str, ClientTest] | None = None,
        accuracy: float | None = None,
        server: Mapping[str, float] | None = None,
        untested: Mapping[str, str] | None = None,
        model: torch.Tensor | Arrays | None = None,
        states: Arrays | None = None,
        memory: Mapping[str, Memory] | None = None,
    ) -> int:
        """Write the next round, whole or not at all, and return its number.

        `weights` and `measures` (raw values by criterion) are of each client that was weighed, `reasons` of each that
        was left out; without weights the old model was kept. `scores` and what is normalised follow from the rule,
        unless given. `tests`: how clients tested the new model; `accuracy`: over all of them, by default the mean by
        samples; `untested`: why a test does not count; `server`: figures of the server's own test, "accuracy" among
        them. Of `model`, the new one as a flat vector or as arrays, the digest is kept, and where the folder keeps
        models the model itself with `states`, arrays that the app needs beside it to go on.
        """
        number = self.round + 1
        clients = sorted(weights)
        weighing = self._weighing(clients, weights, measures, scores) if clients else None
        counts = samples or {client: measures[client].get("DS", 0.0) for client in clients}
        for client in clients:
            if not 0 <= counts.get(client, 0.0) <= MOST_SAMPLES:
                raise UserError(f"samples: client {client} has {counts[client]:g}; allowed: 0 to {MOST_SAMPLES}")
        updates = Updates(
            federation=self._federation.name,
            round=number,
            clients=tuple(clients),
            samples=np.array([round(counts.get(client, 0.0)) for client in clients], dtype=np.int64),
            criteria={},
            losses=np.full(len(clients), np.nan),
            payload=_NotSeen(torch.zeros(len(clients), 0)),
            failures=tuple(Failure(client, reason) for client, reason in sorted((reasons or {}).items())),
        )
        sound = {client: test for client, test in (tests or {}).items() if not math.isnan(_figure(test.score))}
        answer = self._tested(number, sound, untested or {}) if sound or untested else None
        if accuracy is None and answer is not None:
            accuracy = float(answer.overall()[0])
        # In a folder "f1" has a number for each class; a single one is their mean.
        figures = {"macro_f1" if name == "f1" else name: value for name, value in (server or {}).items()}
        figures = {name: _figure(value) for name, value in figures.items()}
        record = RoundRecord(
            self._federation.name,
            number,
            time.monotonic() - self._begun,
            updates=updates,
            weighing=weighing,
            order=self._rule.start_order,
            kept_old=not clients,
            evaluations=answer,
            accuracy=None if accuracy is None or math.isnan(_figure(accuracy)) else accuracy,
            server_accuracy=figures.pop("accuracy", None),
            server_metrics=dict(sorted(figures.items())),
        )
        self.memory = self.memory if memory is None else memory
        arrays = {} if model is None or isinstance(model, torch.Tensor) else model
        whole = {WHOLE + name: array.astype(np.int64) for name, array in arrays.items() if array.dtype.kind != "f"}
        if self._store.keep_models and arrays:
            self._store.note(RunFacts(arrays=described(arrays)))
        self._commit(record, _vector(model), {**(states or {}), **whole})
        return number

    def _weighing(
        self,
        clients: Sequence[str],
        weights: Mapping[str, float],
        measures: Mapping[str, Mapping[str, float]],
        scores: Mapping[str, float] | None,
    ) -> Weighing:
        for client in clients:
            lacking = [name for name in self._rule.names if name not in measures.get(client, {})]
            if lacking:
                raise UserError(f"measures: client {client} has no {lacking[0]}; allowed: {listed(self._rule.names)}")
        raw = np.array([[float(measures[client][name]) for name in self._rule.names] for client in clients])
        given = np.array([float(weights[client]) for client in clients])
        scored = None if scores is None else np.array([float(scores[client]) for client in clients])
        policy = self._rule.policy
        if scored is None and policy is not None and not policy.of_measures:
            scored = given  # what else the policy looked at stays with the framework
        return replace(self._rule.weigh(raw, clients=clients, scores=scored), weights=given)

    def _tested(self, number: int, tests: Mapping[str, ClientTest], untested: Mapping[str, str]) -> Evaluations:
        clients = sorted(tests)
        names = sorted({name for test in tests.values() for name in test.metrics})
        return Evaluations(
            federation=self._federation.name,
            round=number,
            clients=tuple(clients),
            samples=np.array([tests[client].samples for client in clients], dtype=np.int64),
            scores=np.array([[tests[client].score for client in clients]]),
            losses=np.array([[_figure(tests[client].loss) for client in clients]]),
            metrics={
                name: np.array([_figure(tests[client].metrics.get(name, math.nan)) for client in clients])
                for name in names
            },
            failures=tuple(Failure(client, reason) for client, reason in sorted(untested.items())),
        )

    def _commit(self, record: RoundRecord, model: torch.Tensor, kept: Arrays | None = None) -> None:
        state = RoundState(
            record.round,
            model,
            self._federation.loss,
            OrderState(self._rule.start_order, 0.0),
            memory=self.memory,
        )
        # Without models their names alone are kept: an app that goes on without its states is refused.
        tensors = {name: torch.from_numpy(np.array(array, order="C")) for name, array in (kept or {}).items()}
        if not self._store.keep_models:
            tensors = {n: tensor.reshape(-1)[:0] for n, tensor in tensors.items() if not n.startswith(WHOLE)}
        self._store.commit(record.round, [record], {record.federation: state}, lambda: tensors, last=False)
        self.round, self._begun = record.round, time.monotonic()

    def finish(self) -> None:
        """Say that the federation is at its end, and close the folder; it may be opened and gone on with later."""
        self._store.finish(RunFacts(rounds=self.round))
        self._store.close()

    def stop(self, error: BaseException | None = None) -> None:
        """Say that the federation stopped before its end, with the reason, and close the folder."""
        self._store.note(RunFacts(status="stopped", stopped="" if error is None else why(error)))
        self._store.close()


@dataclass(eq=False)
class PendingRound:
    """A round until all of it is known."""

    combined: Combined
    model: Model
    tests: dict[str, ClientTest] = field(default_factory=dict[str, ClientTest])
    server: dict[str, float] = field(default_factory=dict[str, float])
    untested: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(eq=False)
class Journal:
    """The folder of one federation; without a folder it notes the round under way and writes nothing.

    `replaces`: whether the app takes over the model that the folder keeps.
    """

    weighing: WeighedRounds
    folder: str | Path | None
    framework: str
    measure: str
    keep_models: bool
    replaces: bool = True
    pending: PendingRound | None = None
    before: int = 0
    """The round after which this start goes on."""
    _recorder: Recorder | None = None

    def __post_init__(self) -> None:
        self.folder = None if self.folder is None else path_of(self.folder, "folder")

    def open(self, begins: Callable[[], Model], rounds: int | None = None) -> Model | None:
        """Open the folder, unless it is open, and go on after its last round; return the model that it keeps."""
        if self.folder is None or self._recorder is not None:
            return None
        given = begins()
        self._recorder = Recorder(
            self.folder,
            self.weighing.rule,
            framework=self.framework,
            rounds=rounds,
            measure=self.measure,
            keep_models=self.keep_models,
            begins=given,
            replaces=self.replaces,
        )
        self.before = max(self._recorder.round, 0)
        self.weighing.go_on(self.before, self._recorder.memory)
        return None if self._recorder.begins is given else self._recorder.begins

    def end_round(self, combined: Combined, model: Model) -> None:
        """Note what came of a round, and the model after it; tests may follow before the next one ends."""
        self.write()
        self.pending = PendingRound(combined, model)

    def write(self) -> None:
        """Write the round that is at its end."""
        pending, self.pending = self.pending, None
        if pending is None or self._recorder is None:
            return
        found = pending.combined
        self._recorder.write(
            found.weights,
            found.measures,
            scores=found.scores,
            samples=found.samples,
            reasons=found.reasons,
            tests=pending.tests,
            untested=pending.untested,
            server=pending.server,
            model=pending.model.arrays,
            states=pending.model.states,
            memory=self.weighing.memory,
        )

    def close(self) -> None:
        """Write the last round, say that the federation is at its end, and close the folder."""
        self.write()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.finish()

    def stop(self, error: BaseException | None = None) -> None:
        """Write the last round, say that the federation stopped before its end, and close the folder."""
        if self._recorder is None:
            return
        for step in (self.write, partial(self._recorder.stop, error)):
            with suppress(UserError):  # what went wrong first is what is reported
                step()
        self._recorder = None
