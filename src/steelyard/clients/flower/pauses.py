"""How long to wait before the part of a message that has not arrived yet is asked for again.

A message is there before its parts, so this happens in every round. Flower's own pause is a second at first and ten in
the end, which is longer than the work itself where models are small.
"""

from __future__ import annotations

FIRST_PULL_PAUSE, LONGEST_PULL_PAUSE = 0.05, 1.0
"""Seconds, the first time and at most; each pause is twice as long as the last."""
