"""Weighing inside a Flower app: `Weighed` is a strategy of Flower's that weighs its replies by a rule.

from flwr.serverapp.strategy import FedAvg
from steelyard.flower import ServerRows, Weighed

strategy = Weighed("VP>DS/max", FedAvg(fraction_train=0.5), rows=ServerRows(Net(), features, labels))
result = strategy.start(grid=grid, initial_arrays=ArrayRecord(Net().state_dict()), num_rounds=10)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from logging import getLogger
from typing import Any

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
    Strategy,
)

from steelyard.adapters.rounds import Combined, Reply, WeighedRounds
from steelyard.adapters.server_rows import ServerRows
from steelyard.errors import UserError
from steelyard.weighing.rule import WeighingSettings

_LOG = getLogger("flwr")
"""Flower's own, so that its settings hold."""

__all__ = ["ServerRows", "Weighed"]

_OTHER_SUMS = (Bulyan, FedMedian, FedTrimmedAvg, FedXgbBagging, FedXgbCyclic, Krum, MultiKrum, QFedAvg)


class Weighed(Strategy):
    """A Flower strategy in which a rule weighs the replies; use it around FedAvg, FedAdam and others that sum by a key.

    `rule`: in the words of `steelyard compare --rules`, or settings. Criteria that clients measure come from each
    reply's metrics by name (DS from its number of samples), MD, AG, VP and the like are computed here from the arrays
    and from `rows`. Names that are no criteria are metrics too, given in `metrics`. A reply that cannot be weighed is
    left out; `rounds` keeps weights, measures and reasons of every round.
    """

    def __init__(
        self,
        rule: str | WeighingSettings = "DS",
        strategy: FedAvg | None = None,
        *,
        rows: ServerRows | None = None,
        metrics: Sequence[str] = (),
        plugins: Sequence[str] = (),
    ) -> None:
        inner = FedAvg() if strategy is None else strategy
        if not isinstance(inner, FedAvg) or isinstance(inner, _OTHER_SUMS):
            raise UserError(
                f"strategy: got {type(inner).__name__}, which combines replies in its own way; allowed: FedAvg, "
                "FedProx, FedAvgM, FedAdam, FedAdagrad, FedYogi, and robust rules by name, such as 'median(DS)'"
            )
        self.strategy = inner
        self.rounds: dict[int, Combined] = {}
        """What came of each round: weights, scores, measures, and why clients were left out."""
        self._weighing = WeighedRounds(rule, rows, metrics, plugins)
        self._sent: ArrayRecord | None = None

    def summary(self) -> None:
        """Log the rule, then what the strategy inside says of itself."""
        _LOG.info("\t├──> Weighed by: %s", self._weighing.name)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask as the strategy inside does; the model is kept, since updates are measured against it."""
        self._sent = arrays
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask as the strategy inside does."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Combine tests as the strategy inside does."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Weigh the replies, and hand their combination to the strategy inside as the reply of one client."""
        if self._sent is None:
            raise UserError("strategy: has sent no model yet; allowed: aggregate_train after configure_train")
        found, failures, messages = self._read(replies)
        combined = self._weighing.combine(_numpy(self._sent), found, failures)
        self.rounds[server_round] = combined
        for client, reason in combined.reasons.items():
            _LOG.info("\t> Left out node %s: %s", client, reason)
        if combined.arrays is None:
            return None, None
        _LOG.info("\t└──> Weights: %s", {client: round(weight, 4) for client, weight in combined.weights.items()})
        whole = self._as_reply(combined, messages)
        arrays, metrics = self.strategy.aggregate_train(server_round, [whole])
        return None if arrays is None else self._typed(arrays), metrics

    def _read(self, replies: Iterable[Message]) -> tuple[list[Reply], dict[str, str], dict[str, Message]]:
        found: list[Reply] = []
        failures: dict[str, str] = {}
        messages: dict[str, Message] = {}
        for message in replies:
            client = str(message.metadata.src_node_id)
            reply = _reply(client, message, self.strategy.weighted_by_key)
            if isinstance(reply, str):
                failures[client] = reply
            else:
                found.append(reply)
                messages[client] = message
        return found, failures, messages

    def _as_reply(self, combined: Combined, messages: Mapping[str, Message]) -> Message:
        """Return one message that holds the combined model and the weighted means of the metrics."""
        assert combined.arrays is not None
        key = self.strategy.weighted_by_key
        records = {client: _metrics(messages[client]) for client in combined.weights}
        common = set.intersection(*(set(record) for record in records.values())) - {key}
        means: dict[str, float] = {
            name: sum(weight * float(records[client][name]) for client, weight in combined.weights.items())
            for name in sorted(common)
        }
        first = messages[next(iter(combined.weights))]
        metrics = MetricRecord({**means, key: sum(float(record[key]) for record in records.values())})
        arrays = ArrayRecord({name: Array(value) for name, value in combined.arrays.items()})
        names = (next(iter(first.content.array_records)), next(iter(first.content.metric_records)))
        first.content = RecordDict({names[0]: arrays, names[1]: metrics})
        return first

    def _typed(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return arrays in the types that were sent: the strategy inside multiplies whole numbers to fractions."""
        assert self._sent is not None
        types = {name: array.numpy().dtype for name, array in self._sent.items()}
        return ArrayRecord({name: Array(array.numpy().astype(types[name])) for name, array in arrays.items()})


def _numpy(record: ArrayRecord) -> dict[str, Any]:
    return {name: array.numpy() for name, array in record.items()}


def _metrics(message: Message) -> dict[str, float]:
    """Return a reply's plain metrics; lists are left out."""
    (record,) = message.content.metric_records.values()
    return {name: float(value) for name, value in record.items() if not isinstance(value, list)}


def _reply(client: str, message: Message, key: str) -> Reply | str:
    """Return what a node sent, or why it cannot be weighed."""
    if message.has_error():
        return f"answered with an error: {message.error.reason}"
    content = message.content
    if len(content.array_records) != 1 or len(content.metric_records) != 1:
        counts = f"{len(content.array_records)} and {len(content.metric_records)}"
        return f"sent {counts} records of arrays and metrics; allowed: one of each"
    metrics = _metrics(message)
    if key not in metrics:
        return f"metric {key} is missing"
    (arrays,) = content.array_records.values()
    try:
        return Reply(client, _numpy(arrays), metrics[key], metrics)
    except (ValueError, TypeError, OSError, EOFError) as error:
        return f"an array cannot be read: {error}"
