"""The kinds of experiments, by the word that an experiment's `kind` holds."""

from __future__ import annotations

from collections.abc import Mapping

from steelyard.errors import UserError, listed, nearest
from steelyard.experiment.description import Description
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.recommend import RecommendDescription

KINDS: Mapping[str, type[Description]] = {"learning": LearningDescription, "recommend": RecommendDescription}


def kind_of(kind: object) -> type[Description]:
    """Return the class of an experiment's kind: "learning" for models of images or tables, "recommend" for FPL."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(f"kind: got {kind!r}{nearest(str(kind), KINDS)}; allowed: {listed(KINDS)}")
    return KINDS[kind]
