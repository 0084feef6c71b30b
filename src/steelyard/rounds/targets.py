"""When a target counts as reached: a share of the devices has a local score of at least the target, or above it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from steelyard.messages import Floats


def devices_needed(share: float, devices: int) -> int:
    """Return ceil(share · n), the number of devices that must reach a target."""
    # 0.07 · 100 is 7.000000000000001 in binary: without the slack, ceil would ask for an eighth device.
    return math.ceil(share * devices - 1e-9)


def reached(scores: Floats, target: float, share: float, *, above: bool = False) -> NDArray[np.bool_]:
    """Say for each row of scores[..., devices] whether ceil(share · n) devices have a score of at least the target.

    Use it for the early stop and for rounds-to-target tables alike; without devices nothing is reached. `above` asks
    for more than the target, as the programme of the authors of papers 000 and 004 does.
    """
    devices = scores.shape[-1]
    if devices == 0:
        return np.zeros(scores.shape[:-1], dtype=np.bool_)
    good = scores > target if above else scores >= target
    return np.asarray(good.sum(axis=-1) >= devices_needed(share, devices))
