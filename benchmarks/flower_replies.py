"""Peak memory of a Flower app's server process while it combines large replies.

    python -m benchmarks.flower_replies --megabytes 200 --clients 20

A reply comes into being when it is pulled, as one that lies on a SuperLink does. Flower's FedAvg has all of them in
memory; `Weighed` has a few, and the updates that do not fit wait in temporary files (TMPDIR; not in memory). Prints one
line of JSON for each strategy.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterable
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from steelyard.clients.flower.adapter.messages import enter_run, name_message
from steelyard.flower import Weighed

ARRAYS = 8
FLOWERS_OWN = "fedavg"


class Replies:
    """What strategies use of a grid: every node answers with a model of its own, made when it is pulled."""

    def __init__(self, clients: int, length: int) -> None:
        self._clients, self._length = clients, length
        self._sent: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        enter_run(1, 1)
        return list(range(2, 2 + self._clients))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        for message in messages:
            name_message(message, str(message.metadata.dst_node_id))
            self._sent[message.metadata.message_id] = message
        return list(self._sent)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._reply(self._sent.pop(name)) for name in list(message_ids)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _reply(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        enter_run(1, node)
        numbers = np.random.default_rng(node)
        arrays = {f"layer{i}": Array(numbers.standard_normal(self._length, dtype=np.float32)) for i in range(ARRAYS)}
        metrics = MetricRecord({"num-examples": 10 + node})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)


def measure(name: str, megabytes: float, clients: int) -> dict[str, object]:
    """Combine one round and return what it took; the peak is this process's own."""
    length = max(1, round(megabytes * 1e6 / 4 / ARRAYS))
    sent = ArrayRecord({f"layer{i}": Array(np.full(length, 0.01, np.float32)) for i in range(ARRAYS)})
    plain = FedAvg(fraction_evaluate=0.0)
    strategy = plain if name == FLOWERS_OWN else Weighed(name, plain)
    grid: Any = Replies(clients, length)
    before, begun = getrusage(RUSAGE_SELF).ru_maxrss, time.perf_counter()
    found = strategy.start(grid, sent, num_rounds=1)
    assert all(np.isfinite(array.numpy()).all() for array in found.arrays.values())
    if isinstance(strategy, Weighed):
        assert len(strategy.rounds[1].weights) == clients
    return {
        "strategy": name,
        "megabytes": megabytes,
        "clients": clients,
        "peak_gb": round(getrusage(RUSAGE_SELF).ru_maxrss / 1e6, 3),
        "before_the_first_reply_gb": round(before / 1e6, 3),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=200, help="size of one model, in float32")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--strategies", default=f"{FLOWERS_OWN},DS,MD>DS/max,median(DS)", help="rules, or fedavg")
    parser.add_argument("--here", action="store_true", help="in this process; one strategy")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    if options.here:
        print(json.dumps(measure(options.strategies, options.megabytes, options.clients)), flush=True)
        return
    for name in options.strategies.split(","):
        words = ["--strategies", name, "--megabytes", str(options.megabytes), "--clients", str(options.clients)]
        subprocess.run([sys.executable, "-m", "benchmarks.flower_replies", "--here", *words], check=True)


if __name__ == "__main__":
    main()
