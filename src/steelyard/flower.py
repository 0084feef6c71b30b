"""Weighing inside a Flower app: `Weighed` is a strategy of Flower's that weighs its replies by a rule.

from flwr.serverapp.strategy import FedAvg
from steelyard.flower import ServerRows, Weighed

rows = ServerRows(Net(), features, labels)
strategy = Weighed("VP>DS/max", FedAvg(fraction_train=0.5), rows=rows, folder="runs/first")
result = strategy.start(grid=grid, initial_arrays=ArrayRecord(Net().state_dict()), num_rounds=10)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.adapters.arrays import VARIANCES, Arrays
from steelyard.adapters.recorder import Journal, Model
from steelyard.adapters.rounds import Collected, Combined, ServerRows, WeighedRounds
from steelyard.base.errors import UserError
from steelyard.weighing.rule import WeighingSettings

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import (
        Bulyan,
        FedAvg,
        FedMedian,
        FedTrimmedAvg,
        FedXgbBagging,
        FedXgbCyclic,
        Krum,
        MultiKrum,
        QFedAvg,
        Result,
        Strategy,
    )

    from steelyard.adapters.flower_replies import (
        SCORES,
        FewAtATime,
        is_masked,
        plain_metrics,
        read_reply,
        read_tests,
        refuse_noise,
    )
except ImportError as error:
    raise UserError(
        f"steelyard.flower: {error}; install Flower, 1.29 or newer (tried up to 1.42): pip install 'steelyard[flower]'"
    ) from None

_LOG = getLogger("flwr")
"""Flower's own, so that its settings hold."""

__all__ = ["ServerRows", "Weighed"]

_SECURE_AGGREGATION = "Flower's secure aggregation (secaggplus_mod), which hides single replies"
_OTHER_SUMS = (Bulyan, FedMedian, FedTrimmedAvg, FedXgbBagging, FedXgbCyclic, Krum, MultiKrum, QFedAvg)


class Weighed(Strategy):
    """A Flower strategy in which a rule weighs the replies; use it around FedAvg, FedAdam and others that sum by a key.

    `rule`: in the words of `steelyard compare --rules`, or settings. Criteria that clients measure come from each
    reply's metrics by name (DS from its number of samples), MD, AG, VP and the like are computed here from the arrays
    and from `rows`. Names that are no criteria are metrics too, given in `metrics`. A reply that cannot be weighed is
    left out; `rounds` keeps weights, measures and reasons of every round. With a `folder`, every round is also written
    there as a run for `steelyard report`, `watch` and `weigh`. `measure` names the metric of clients' tests that is
    their score there; without it, it is one called accuracy, acc or the like. `keep_models` keeps the newest models in
    the folder too, with what the strategy inside keeps: an app that is started again goes on from there. Without it,
    an app that begins with another model than the folder's last is refused.

        >>> strategy = Weighed("LD>DS", FedAvg(fraction_train=0.5))

    Raises:
        UserError: the rule is not known or steers training itself, or `folder` holds another run, or one that this
            app cannot go on with.
    """

    def __init__(
        self,
        rule: str | WeighingSettings = "DS",
        strategy: FedAvg | None = None,
        *,
        rows: ServerRows | None = None,
        metrics: Sequence[str] = (),
        plugins: Sequence[str] = (),
        folder: str | Path | None = None,
        measure: str | None = None,
        keep_models: bool = False,
    ) -> None:
        inner = FedAvg() if strategy is None else strategy
        if isinstance(inner, type):
            raise UserError(f"strategy: got the class {inner.__name__}; allowed: one that is made, {inner.__name__}()")
        if not isinstance(inner, FedAvg) or isinstance(inner, _OTHER_SUMS):
            raise UserError(
                f"strategy: got {type(inner).__name__}, which combines replies in its own way; allowed: FedAvg, "
                "FedProx, FedAvgM, FedAdam, FedAdagrad, FedYogi, and robust rules by name, such as 'median(EQ)'"
            )
        self.strategy = inner
        self.rounds: dict[int, Combined] = {}
        """What came of each round: weights, scores, measures, and why clients were left out; models are not kept."""
        self._weighing = WeighedRounds(rule, rows, metrics, plugins)
        self._measure = measure
        self._journal = Journal(self._weighing, folder, "Flower", measure or SCORES[0], keep_models)
        self._sent: ArrayRecord | None = None
        self._asked: set[str] = set()
        self._asked_to_test: set[str] = set()

    def summary(self) -> None:
        """Log the rule, then what the strategy inside says of itself."""
        _LOG.info("\t├──> Weighed by: %s", self._weighing.name)
        self.strategy.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds as every strategy does; replies are pulled a few at a time, and the folder is written."""

        def noted(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            assert evaluate_fn is not None
            found = evaluate_fn(number, arrays)
            if found is not None and number in self.rounds and self._journal.pending is not None:
                self._journal.pending.server = self._named(found)
            return found

        configs = (train_config, evaluate_config, None if evaluate_fn is None else noted)
        initial_arrays = self.resume(initial_arrays, num_rounds)
        try:
            found = super().start(FewAtATime(grid), initial_arrays, num_rounds, timeout, *configs)
        except BaseException as error:
            self._journal.stop(error)
            raise
        self.close()
        return found

    def resume(self, arrays: ArrayRecord, rounds: int | None = None) -> ArrayRecord:
        """Open the folder and return the model to begin with: the one that it keeps, or else `arrays`.

        `start` does so; call it before rounds that `start` does not run.
        """
        kept = self._journal.open(lambda: Model(_plain(arrays), _states(self.strategy)), rounds)
        if kept is None:
            return arrays
        try:
            _give_back(self.strategy, kept.states)
        except UserError as error:
            self._journal.stop(error)
            raise
        return ArrayRecord({name: Array(kept.arrays[name]) for name in arrays})

    def close(self) -> None:
        """Write the last round and close the folder; call it at the end of rounds that `start` does not run."""
        self._journal.close()

    def _number(self, server_round: int) -> int:
        """Return the number of a round in the folder: Adam's steps, and what clients read, go on with it."""
        return self._journal.before + server_round

    def _named(self, record: MetricRecord) -> dict[str, float]:
        """Return the server's figures, the score under the name that the folder has for it."""
        found = {name: float(value) for name, value in record.items() if not isinstance(value, list)}
        score = next((name for name in (self._measure, *SCORES) if name in found), None)
        if score is not None:
            found["accuracy"] = found.pop(score)
        return found

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask as the strategy inside does; the model is kept, since updates are measured against it."""
        refuse_noise(config)
        arrays = self.resume(arrays)
        self._journal.write()
        self._sent = arrays
        messages = list(self.strategy.configure_train(self._number(server_round), arrays, config, grid))
        self._asked = {str(message.metadata.dst_node_id) for message in messages}
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask as the strategy inside does."""
        messages = list(self.strategy.configure_evaluate(self._number(server_round), arrays, config, grid))
        self._asked_to_test = {str(message.metadata.dst_node_id) for message in messages}
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Combine tests as the strategy inside does; one that cannot count is left out, with its reason in `rounds`."""
        answers = {str(message.metadata.src_node_id): message for message in replies}
        asked = self._asked_to_test
        # The server itself says that a reply was lost of a node that was not asked.
        known = {node: message for node, message in answers.items() if node in asked or not message.has_error()}
        found = read_tests(known, self.strategy.weighted_by_key, self._measure)
        reasons = {**dict.fromkeys(sorted(asked - set(answers)), "no reply came"), **found.reasons}
        for node, reason in reasons.items():
            _LOG.info("\t> Left out the test of node %s: %s", node, reason)
        if server_round in self.rounds:
            self.rounds[server_round] = replace(self.rounds[server_round], untested=reasons)
        if self._journal.pending is not None:
            self._journal.pending.tests, self._journal.pending.untested = found.scores, reasons
        return self.strategy.aggregate_evaluate(self._number(server_round), found.replies)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Weigh the replies, and hand their combination to the strategy inside as the reply of one client."""
        if self._sent is None:
            raise UserError("strategy: has sent no model yet; allowed: aggregate_train after configure_train")
        collected = self._weighing.begin({name: array.numpy() for name, array in self._sent.items()})
        messages = self._collect(collected, replies)
        combined = collected.combine()
        del collected
        self.rounds[server_round] = replace(combined, arrays=None)
        for client, reason in combined.reasons.items():
            _LOG.info("\t> Left out node %s: %s", client, reason)
        if combined.arrays is None:
            self._end_round(combined, self._sent)
            return None, None
        _LOG.info("\t└──> Weights: %s", {client: round(weight, 4) for client, weight in combined.weights.items()})
        whole = self._as_reply(combined, messages)
        found, metrics = self.strategy.aggregate_train(self._number(server_round), [whole])
        arrays = None if found is None else self._typed(found, combined.arrays)
        self._end_round(combined, arrays or self._sent)
        return arrays, metrics

    def _end_round(self, combined: Combined, arrays: ArrayRecord) -> None:
        """Note a round with the model after it, which the strategy inside has made."""
        model = Model({}) if self._journal.folder is None else Model(_plain(arrays), _states(self.strategy))
        self._journal.end_round(replace(combined, arrays=None), model)

    def _collect(self, collected: Collected, replies: Iterable[Message]) -> dict[str, Message]:
        """Take the replies in, each when it comes, and return their messages, which hold no arrays any more."""
        messages: dict[str, Message] = {}
        masked = False
        for message in replies:
            client = str(message.metadata.src_node_id)
            if is_masked(message):
                collected.refuse(client, f"its app uses {_SECURE_AGGREGATION}")
                masked = True
                continue
            if message.has_error() and client not in self._asked:
                continue  # The server itself says that a node's reply was lost.
            reply = read_reply(client, message, self.strategy.weighted_by_key)
            if isinstance(reply, str):
                collected.refuse(client, reply)
            else:
                collected.add(reply)
                messages[client] = message
            del message, reply
        if masked and not messages:
            raise UserError(
                f"strategy: the nodes' app uses {_SECURE_AGGREGATION}; allowed: apps without it, or "
                "[privacy.aggregation] of Steelyard"
            )
        for client in sorted(self._asked - set(messages) - set(collected.reasons)):
            collected.refuse(client, "no reply came")
        return messages

    def _as_reply(self, combined: Combined, messages: Mapping[str, Message]) -> Message:
        """Return one message that holds the combined model and the weighted means of the metrics."""
        assert combined.arrays is not None
        key = self.strategy.weighted_by_key
        records = {client: plain_metrics(messages[client]) for client in combined.weights}
        first = messages[next(iter(combined.weights))]
        metrics = MetricRecord({**combined.means(records), key: sum(record[key] for record in records.values())})
        arrays = ArrayRecord({name: Array(value) for name, value in combined.arrays.items()})
        names = (next(iter(first.content.array_records)), next(iter(first.content.metric_records)))
        first.content = RecordDict({names[0]: arrays, names[1]: metrics})
        return first

    def _typed(self, record: ArrayRecord, means: Arrays) -> ArrayRecord:
        """Return arrays in the types that were sent: the strategy inside multiplies whole numbers to fractions.

        Where its steps take a variance of batch norm below 0, which makes a network give NaN, the mean of them stays.
        """
        assert self._sent is not None
        types, arrays = {name: array.numpy().dtype for name, array in self._sent.items()}, _plain(record)
        negative = [name for name, array in arrays.items() if name.endswith(VARIANCES) and (array < 0).any()]
        found = {**arrays, **{name: means[name] for name in negative}}
        return ArrayRecord({name: Array(array.astype(types[name])) for name, array in found.items()})


def _plain(record: ArrayRecord) -> Arrays:
    return {name: array.numpy() for name, array in record.items()}


def _states(strategy: Strategy) -> Arrays:
    """Return the arrays that a strategy keeps between rounds, such as moments; each is named by its attribute."""
    found: dict[str, Any] = {}
    for name, value in vars(strategy).items():
        parts = {}
        if isinstance(value, list):
            parts = {f"list/{place:06d}": each for place, each in enumerate(value)}
        elif isinstance(value, dict) and name != "current_arrays":  # That is the model, sent anew.
            parts = {f"dict/{key}": each for key, each in value.items()}
        arrays = {key: np.asarray(each) for key, each in parts.items() if isinstance(each, np.ndarray | np.generic)}
        found |= {f"{name}/{key}": array for key, array in arrays.items()}
    return found


def _give_back(strategy: Strategy, states: Arrays) -> None:
    """Give a strategy what `_states` found in it."""
    kept: dict[str, Any] = {}
    for key in sorted(states):
        name, kind, place = key.split("/", 2)
        if kind == "list":
            kept.setdefault(name, []).append(states[key])
        else:
            kept.setdefault(name, {})[place] = states[key]
    for name, value in kept.items():
        if name not in vars(strategy):
            raise UserError(
                f"strategy: got {type(strategy).__name__}, and the folder keeps '{name}' of another one; allowed: the "
                "strategy with which it began, or a new folder"
            )
        setattr(strategy, name, value)
