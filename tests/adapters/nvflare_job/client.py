"""A client of NVFlare's: thirty steps of softmax regression in numpy on its own digits."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from nvflare import client as flare
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType


def train(model: Any, x: Any, y: Any) -> Any:
    """Return the model after thirty steps on all rows."""
    x = np.hstack([x, np.ones((len(x), 1))])
    for _ in range(30):
        scores = x @ model.T
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        shares[np.arange(len(y)), y] -= 1
        model = model - 0.5 * (shares.T @ x) / len(y)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts")
    parser.add_argument("--transfer")
    parser.add_argument("--broken", action="store_true", help="the last client sends NaN")
    options = parser.parse_args()
    flare.init()
    client = int(flare.get_site_name().removeprefix("site-"))
    with np.load(options.parts) as parts:
        x, y = parts[f"x{client}"], parts[f"y{client}"]
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        sent = np.asarray(received.params["numpy_key"])
        model = train(sent, x, y)
        params = {"numpy_key": model - sent if options.transfer == "DIFF" else model}
        if client == 6 and options.broken:
            params["numpy_key"] = np.full_like(sent, np.nan)
        meta = {"NUM_STEPS_CURRENT_ROUND": len(y)}
        metrics = {"quality": 1.0 / client}
        flare.send(FLModel(params_type=ParamsType(options.transfer), params=params, metrics=metrics, meta=meta))


if __name__ == "__main__":
    main()
