"""Kind "recorded": a federation that another framework runs, or that a file records; its folder can be looked at."""

from __future__ import annotations

from typing import Literal

from steelyard.base.errors import UserError
from steelyard.base.settings import PrintedName
from steelyard.experiment.description import Description
from steelyard.weighing.rule import WeighingSettings

FILE = "file"
"""What stands for the framework of a federation that was read from a file."""


class RecordedDescription(Description):
    """What a recorded federation says of itself, in place of an experiment: it can be looked at, and not run here."""

    kind: Literal["recorded"] = "recorded"
    framework: PrintedName = "Flower"
    """Who runs the federation: "Flower", "NVFlare", or "file" for one that was imported."""
    measure: PrintedName = "accuracy"
    """What the clients' scores are in their tests of a model."""
    keep_models: bool = False
    """Whether the folder holds the newest models; their digests are in its chain in any case."""

    def check_runs_here(self, where: str) -> None:
        owner = "was imported from a file" if self.framework == FILE else f"belongs to a {self.framework} app"
        again = "import it again into a new folder" if self.framework == FILE else "start it again there"
        raise UserError(f"{where}: this run {owner}: {again}")

    def check_rule(self, rule: WeighingSettings) -> None:
        """Take any rule: it was followed elsewhere."""

    @property
    def score_name(self) -> str:
        return self.measure
