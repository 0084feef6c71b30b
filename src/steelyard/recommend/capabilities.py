"""What users of a recommender offer to criteria."""

from __future__ import annotations

from dataclasses import replace

from steelyard.weighing.needs import Capabilities

USER_CAPABILITIES = Capabilities(
    "a recommender",
    task="ranking",
    classes=0,
    marks=frozenset(),
    lacks_test_set="and the server of a recommender holds no interactions; allowed: criteria without a test set",
    label_counts=False,
    first_losses=False,
    slopes=False,
    layers=False,
    client_tests=False,
)
"""Labels are the items or categories that a user took; single updates are seen, but there are no classes or marks."""
KGFLEX_CAPABILITIES = replace(USER_CAPABILITIES, name="KGFlex", expertise=True)
"""Users of KGFlex also know how many features tell their items from others."""
