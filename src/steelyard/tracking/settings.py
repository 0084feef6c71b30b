"""[tracking]: the section of an experiment that names a tracker."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from steelyard.base.settings import Section


class TrackingSettings(Section):
    """[tracking]: where else the figures of each round go; the run folder holds everything in any case."""

    to: Literal["trackio", "wandb", "mlflow"] | None = None
    """The tracker; default: none. Each is an extra: pip install 'steelyard[wandb]'."""
    project: str = Field(default="steelyard", min_length=1, max_length=128)
    """Project (for MLflow: experiment) that the run belongs to."""
    name: str | None = Field(default=None, min_length=1, max_length=128)
    """Name of the run there; default: the name of its folder."""
