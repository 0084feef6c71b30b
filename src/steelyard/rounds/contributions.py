"""[contributions]: what each client added to the model, measured while a run goes; and what a round's measure holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from steelyard.base.settings import Section
from steelyard.messages.updates import Counts, Floats

Measure = Literal["loss", "accuracy", "local-loss", "local-accuracy"]
Method = Literal["shapley", "leave-one-out", "classes"]
AGREEMENT = "agreement"
"""What the method "classes" measures, whatever else is asked for: a cosine, no loss."""


class ContributionSettings(Section):
    """[contributions]: have every round say what each client added; without the section it is not measured."""

    measure: Measure = "loss"
    """loss, accuracy: on the server's rows, those that only report where there are some; local-loss, local-accuracy: on
    all clients' test rows."""
    method: Method = "shapley"
    """shapley: the mean over all orders in which clients could come, exact up to 12 in a cohort; leave-one-out: the
    model with all against the model without one; classes: agreement by class in the last layer (ShapFed)."""

    @property
    def on_clients(self) -> bool:
        """Whether clients' own test rows are measured on."""
        return self.measure.startswith("local-") and self.method != "classes"


@dataclass(frozen=True, eq=False)
class RoundValues:
    """What each client of a cohort added in one round, by one measure and one method; more is better."""

    measure: str
    method: str
    clients: tuple[str, ...]
    values: Floats
    """[clients, 1 + groups]: over all test rows, then over each group of them."""
    error: Floats
    """[clients]: standard error from drawing coalitions; 0 where all of them were tested."""
    sizes: Counts
    """[groups]: how many test rows a group has."""
    before: float
    """The measure of the model that the cohort received."""
    after: float
    """The measure of the model that the round ended with."""
