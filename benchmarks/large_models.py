"""Peak memory of weighing large models one by one, as NVFlare's server hands them over.

    python -m benchmarks.large_models --megabytes 1000 --clients 20

The model that was sent and one client's model at a time are in memory, as they are in a job; updates wait on the disk
(`--folder`, or where this machine has temporary files: not in memory). Prints one line of JSON for each rule.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from resource import RUSAGE_SELF, getrusage

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType

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
    imported, begun = getrusage(RUSAGE_SELF).ru_maxrss, time.perf_counter()
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
        "peak_gb": round(getrusage(RUSAGE_SELF).ru_maxrss / 1e6, 3),
        "before_the_first_client_gb": round(imported / 1e6, 3),
        "seconds_to_take_them_in": round(taken, 1),
        "seconds_to_weigh": round(time.perf_counter() - begun - taken, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=1000, help="size of one model, in float32")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rules", default="DS,MD>DS/max,median(DS)", help="with commas; each in a process of its own")
    parser.add_argument("--folder", help="where updates wait")
    parser.add_argument("--here", action="store_true", help="in this process; one rule")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.rules, options.megabytes, options.clients, options.folder)), flush=True)
        return
    for rule in options.rules.split(","):
        words = ["--here", "--rules", rule, "--megabytes", str(options.megabytes), "--clients", str(options.clients)]
        words += ["--folder", options.folder] if options.folder else []
        subprocess.run([sys.executable, "-m", "benchmarks.large_models", *words], check=True)


if __name__ == "__main__":
    main()
