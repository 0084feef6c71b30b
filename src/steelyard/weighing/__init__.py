"""Criteria, scores and weights: how a client's say is weighed.

Importing this package registers all built-in criteria and policies.
"""

from __future__ import annotations

# The order of these lines is the order in which criteria are listed.
import steelyard.weighing.builtin as _builtin  # isort: skip
import steelyard.weighing.adafed as _adafed  # isort: skip
import steelyard.weighing.policies as _policies

del _builtin, _adafed, _policies
