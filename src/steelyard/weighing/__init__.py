"""Criteria, scores and weights: how a client's say is weighed.

Importing this package registers all built-in criteria, those of `criteria` first, then AdaFed's.
"""

from __future__ import annotations

import steelyard.weighing.adafed as _adafed
import steelyard.weighing.contribution as _contribution

del _adafed, _contribution
