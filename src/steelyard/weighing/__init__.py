"""Criteria, scores and weights: how a client's say is weighed.

Importing this package registers all built-in criteria, those of `built_in` first, then AdaFed's.
"""

from __future__ import annotations

# The order of these lines is the order in which criteria are listed.
import steelyard.weighing.built_in as _built_in  # isort: skip
import steelyard.weighing.kernel_divergence as _kernel_divergence  # isort: skip
import steelyard.weighing.adafed as _adafed  # isort: skip
import steelyard.weighing.contribution as _contribution  # isort: skip
import steelyard.weighing.root_direction as _root_direction  # isort: skip
import steelyard.weighing.track_record as _track_record  # isort: skip

del _built_in, _kernel_divergence, _adafed, _contribution, _root_direction, _track_record
