"""[store]: the section of an experiment that configures where and how often a run is written."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from steelyard.base.settings import Section


class StoreSettings(Section):
    """[store]: where the run folder is made and how often a checkpoint is written."""

    folder: Path = Path("runs")
    """Folder in which a run's own folder is made, unless --out names that folder itself."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Write a checkpoint each k rounds; a killed run repeats at most k rounds when resumed, to the same bits."""
    keep: Literal["models", "updates"] = "models"
    """models: the newest models, to go on from; updates: also what each client sent in each round and the model that
    came of it, so that what it added can be found later without training again, and `steelyard verify` computes every
    model again. How much room that takes is said before the run."""
    keep_as: Literal["float32", "bfloat16"] = "float32"
    """How kept updates are written; bfloat16 takes half the room and rounds them, so that values become approximate."""
    clients_every: int = Field(default=1, ge=1)
    """Write what single clients sent and weighed each k rounds, and in the last; for runs of many short rounds."""
    digests: Literal["cheap", "every"] = "cheap"
    """Digests of single updates in the chain of a simulation. cheap: where they take little beside training; every: all
    of them, which can take half as long as training again. Across machines all are taken."""
