"""Peak memory of weighing large models one by one, as NVFlare's server hands them over.

    python -m benchmarks.large_models --megabytes 1000 --clients 20

The model that was sent and one client's model at a time are in memory, as they are in a job; updates wait on the disk
(`--folder`, or where this machine has temporary files: not in memory). Prints one line of JSON for each rule.
"""

from __future__ import annotations

import json
import time
from typing import Annotated

import numpy as np
import typer
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType

from benchmarks.kit import alone, peak_mb, start, words
from steelyard.nvflare import WeighedAggregator

ARRAYS = 8


def answer(client: int, sent: dict[str, np.ndarray]) -> FLModel:
    """Return a whole model of a client's own."""
    numbers = np.random.default_rng(client)
    params = {name: numbers.standard_normal(len(array), dtype=np.float32) for name, array in sent.items()}
    meta = {"client_name": f"client{client:03}", "NUM_STEPS_CURRENT_ROUND": 10 + client}
    return FLModel(ParamsType.FULL, params, meta=meta)


def measure(rule: str, megabytes: float, clients: int, folder: str | None) -> dict[str, object]:
    """Weigh one round and return what it took; the peak is this process's own, whatever it did before."""
    length = max(1, round(megabytes * 1e6 / 4 / ARRAYS))
    sent = {f"layer{i}": np.zeros(length, np.float32) + np.float32(0.01) for i in range(ARRAYS)}
    aggregator = WeighedAggregator(rule, temporary=folder)
    context = FLContext()
    task = DXO(DataKind.WEIGHTS, sent).to_shareable()
    context.set_prop(AppConstants.TRAIN_SHAREABLE, task, private=True, sticky=False)
    aggregator.handle_event(AppEventType.BEFORE_TRAIN_TASK, context)
    imported, begun = peak_mb(), time.perf_counter()
    for client in range(clients):
        aggregator.accept_model(answer(client, sent))
    taken = time.perf_counter() - begun
    found = aggregator.aggregate_model()
    assert len(aggregator.rounds[0].weights) == clients
    assert all(np.isfinite(array).all() for array in found.params.values())
    return {
        "rule": rule,
        "megabytes": megabytes,
        "clients": clients,
        "peak_gb": round(peak_mb() / 1e3, 3),
        "before_the_first_client_gb": round(imported / 1e3, 3),
        "seconds_to_take_them_in": round(taken, 1),
        "seconds_to_weigh": round(time.perf_counter() - begun - taken, 1),
    }


def main(
    megabytes: Annotated[float, typer.Option(help="size of one model, in float32")] = 1000,
    clients: int = 20,
    rules: Annotated[str, typer.Option(help="with commas; each in a process of its own")] = "DS,MD>DS/max,median(DS)",
    folder: Annotated[str | None, typer.Option(help="where updates wait")] = None,
    here: Annotated[bool, typer.Option("--here", help="in this process; one rule")] = False,
) -> None:
    if here:
        print(json.dumps(measure(rules, megabytes, clients, folder)), flush=True)
        return
    waits = ["--folder", folder] if folder else []
    for rule in words(rules):
        given = ("--rules", rule, "--megabytes", megabytes, "--clients", clients, *waits)
        print(json.dumps(alone("large_models", "--here", *given)), flush=True)


if __name__ == "__main__":
    start(main)
