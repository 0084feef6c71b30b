"""Replies of a Flower app's nodes: pulled a few at a time, and read into what can be weighed."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from steelyard.adapters.recorder import ClientTest
from steelyard.adapters.rounds import Reply, short
from steelyard.base.errors import UserError
from steelyard.clients.flower.register import FederateSettings
from steelyard.clients.flower.wire import Refused, most_counted, read_array
from steelyard.messages.updates import MOST_SAMPLES
from steelyard.runs.database import LARGEST_FIGURE

AT_ONCE = 1 << 28
"""Bytes of replies that are pulled with one call: small models come together, large ones one by one."""
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.05, 3.0, 1.5
"""Seconds between looks for replies; the longest is Flower's own."""
_SECURE = "secaggplus"
"""How the records of Flower's secure aggregation begin, and the error of a node that expects them."""
_CLIPPING = "clipping_norm"
"""What Flower's strategies that add noise put into the configuration of a round."""
SCORES = ("accuracy", "acc", "eval_acc", "eval_accuracy", "test_accuracy")
_MOST_METRICS = 50
"""Further metrics of a node's test that are taken in."""
_LOSSES = ("loss", "eval_loss", "test_loss")


class FewAtATime(Grid):
    """A grid whose replies are pulled while they are read, so that never more than a few of them are in memory."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Send messages and yield the replies as they come, until all are there or the time is over."""
        given = list(messages)
        size = max((_size(message) for message in given), default=0)
        waiting = [name for name in self._grid.push_messages(given) if name]
        given.clear()
        return self._pulled(waiting, max(1, AT_ONCE // max(size, 1)), timeout)

    def _pulled(self, waiting: list[str], at_once: int, timeout: float | None) -> Iterator[Message]:
        end = None if timeout is None else time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while waiting and (end is None or time.monotonic() < end):
            answered: set[str] = set()
            for begin in range(0, len(waiting), at_once):
                for message in self._grid.pull_messages(waiting[begin : begin + at_once]):
                    answered.add(message.metadata.reply_to_message_id)
                    yield message
                    del message
            waiting = [name for name in waiting if name not in answered]
            pause = _FIRST_PAUSE if answered else min(pause * _GROWTH, _LONGEST_PAUSE)
            if waiting:
                time.sleep(pause)

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        return self._grid.create_message(*arguments, **options)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)


def _size(message: Message) -> int:
    return sum(len(array.data) for record in message.content.array_records.values() for array in record.values())


def refuse_noise(config: Iterable[str]) -> None:
    """Refuse a round of a strategy that clips at the nodes and adds noise: it counts on weights that are equal."""
    if _CLIPPING in config:
        raise UserError(
            f"strategy: the configuration holds '{_CLIPPING}', so a strategy of Flower's that adds noise stands around "
            "Weighed, and its noise is for equal weights; allowed: Weighed on its own, or Steelyard's [privacy.central]"
        )


def is_masked(message: Message) -> bool:
    """Whether a reply is of Flower's secure aggregation: a single one means nothing and cannot be weighed."""
    shown = message.error.reason if message.has_error() else " ".join(message.content)
    return _SECURE in str(shown)


def plain_metrics(message: Message) -> dict[str, float]:
    """Return a reply's metrics; lists are left out."""
    return {name: float(value) for name, value in _metrics(message).items() if not isinstance(value, list)}


def read_reply(client: str, message: Message, key: str) -> Reply | str:
    """Return what a node sent, or why it cannot be weighed; its arrays are taken out of the message one by one."""
    if message.has_error():
        return f"answered with an error: {message.error.reason}"
    content = message.content
    if len(content.array_records) != 1 or len(content.metric_records) != 1:
        counts = f"{len(content.array_records)} and {len(content.metric_records)}"
        return f"sent {counts} records of arrays and metrics; allowed: one of each"
    metrics = plain_metrics(message)
    if key not in metrics:
        return f"metric {key} is missing"
    (record,) = content.array_records.values()
    arrays: dict[str, Any] = {}
    try:
        for name in list(record):
            # The bytes go as their array comes: a model is in memory once.
            arrays[name] = read_array(record.pop(name), name)
    except Refused as error:
        return str(error)
    return Reply(client, arrays, metrics[key], metrics)


class NodeTests(NamedTuple):
    """Nodes' tests of one model: as replies that a strategy can combine, and as what a folder keeps of them."""

    replies: list[Message]
    reasons: dict[str, str]
    """Why a node's test does not count."""
    scores: dict[str, ClientTest]


def read_tests(answers: Mapping[str, Message], key: str, measure: str | None) -> NodeTests:
    """Read nodes' tests by the metric `key`, their number of samples; what cannot count is left out with a reason.

    What most nodes send is asked of each, and nothing else counts: one node can neither add a metric nor take one
    away. Of its samples no more count than of a node of Steelyard's own (`federate.test_bound`). `measure` names the
    metric that is the score, or it is called as most do.
    """
    reasons = {client: why for client, message in answers.items() if (why := _fault(message, key))}
    records = {client: _metrics(message) for client, message in answers.items() if client not in reasons}
    forms = Counter((name, _form(value)) for record in records.values() for name, value in record.items())
    asked = dict(form for form, count in forms.items() if 2 * count > len(records))
    for client, record in list(records.items()):
        odd = next((name for name, form in asked.items() if name not in record or _form(record[name]) != form), None)
        if odd is not None:
            reasons[client] = f"metric {odd} is missing, or not as most nodes send it"
            del records[client]
    most = most_counted([round(record[key]) for record in records.values()], FederateSettings().test_bound)
    scores: dict[str, ClientTest] = {}
    for client, record in records.items():
        record[key] = min(record[key], most)
        test = _score({name: float(record[name]) for name, form in asked.items() if form is None}, key, measure)
        if test is not None and not abs(test.score) <= LARGEST_FIGURE:
            reasons[client] = f"score = {test.score:g}; allowed: a finite number"
        elif test is not None:
            scores[client] = test
    replies = [_with_metrics(answers[client], alike) for client, alike in _filled(records, sorted(asked), key).items()]
    return NodeTests(replies, {client: short(reason) for client, reason in reasons.items()}, scores)


def _fault(message: Message, key: str) -> str:
    if message.has_error():
        return f"answered with an error: {message.error.reason}"
    if len(message.content.metric_records) != 1:
        return f"sent {len(message.content.metric_records)} records of metrics; allowed: one"
    samples = _metrics(message).get(key)
    if samples is None or isinstance(samples, list):
        return f"metric {key} is missing, or a list"
    return "" if 0 < samples <= MOST_SAMPLES else f"{key} = {samples:g}; allowed: 1 to {MOST_SAMPLES}"


def _metrics(message: Message) -> dict[str, Any]:
    (record,) = message.content.metric_records.values()
    return dict(record)


def _form(value: Any) -> int | None:
    """Return how long a metric's list is; None for a number."""
    return len(value) if isinstance(value, list) else None


def _filled(records: Mapping[str, dict[str, Any]], names: Iterable[str], key: str) -> dict[str, dict[str, Any]]:
    """Return records of these metrics in which what is no number is the mean of the others, so that it leaves it."""
    found = {client: dict[str, Any]() for client in records}
    samples = np.array([[float(record[key])] for record in records.values()])
    for name in names:
        values = np.array([np.atleast_1d(record[name]) for record in records.values()], dtype=float)
        known = np.abs(values) <= LARGEST_FIGURE
        total = (samples * known).sum(axis=0)
        if not total.all():
            continue  # Nobody gives a number.
        mean = (samples * np.where(known, values, 0.0)).sum(axis=0) / total
        filled = np.where(known, values, mean)
        for row, (client, record) in enumerate(records.items()):
            whole = filled[row].tolist() if isinstance(record[name], list) else float(filled[row, 0])
            found[client][name] = record[name] if known[row].all() else whole
    return found


def _with_metrics(message: Message, metrics: Mapping[str, Any]) -> Message:
    """Return a reply whose metrics are these, in a record of one name."""
    others = {name: record for name, record in message.content.items() if not isinstance(record, MetricRecord)}
    message.content = RecordDict({**others, "metrics": MetricRecord(dict(metrics))})
    return message


def _score(metrics: dict[str, float], key: str, measure: str | None) -> ClientTest | None:
    """Return a node's test as a folder keeps it, where one of its metrics is a score."""
    score = _first(metrics, SCORES if measure is None else (measure,))
    samples, loss = metrics.pop(key), _first(metrics, _LOSSES)
    if score is None:
        return None
    kept = {name: metrics[name] for name in sorted(metrics)[:_MOST_METRICS]}
    return ClientTest(score, round(samples), math.nan if loss is None else loss, kept)


def _first(metrics: dict[str, float], names: Iterable[str]) -> float | None:
    """Take the first of these metrics that there is."""
    return next((metrics.pop(name) for name in names if name in metrics), None)
