"""A client of NVFlare's that adds its own number to the model; the last one sends NaN."""

from __future__ import annotations

import numpy as np
from nvflare import client as flare
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType


def main() -> None:
    flare.init()
    client = int(flare.get_site_name().removeprefix("site-"))
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        model = np.asarray(received.params["numpy_key"]) + (client if client < 4 else np.nan)
        meta = {"NUM_STEPS_CURRENT_ROUND": 10 * client}
        metrics = {"quality": 1.0 / client}
        flare.send(FLModel(params_type=ParamsType.FULL, params={"numpy_key": model}, metrics=metrics, meta=meta))


if __name__ == "__main__":
    main()
