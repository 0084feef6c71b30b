"""What `steelyard contributions` and `Result.contributions` do: take what a run has, or find it out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.contributions.document import Contributions, stored_contributions
from steelyard.errors import UserError
from steelyard.experiment.contribution_checks import check_private
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import read_experiment
from steelyard.rounds.contributions import ContributionSettings, Measure, Method

if TYPE_CHECKING:
    from steelyard.data.dataset import DatasetOrSeeded
    from steelyard.experiment.code import Ask
    from steelyard.rounds.loop import Progress


def contributions(
    folder: str | Path,
    rule: str | None = None,
    measure: Measure | None = None,
    method: Method = "shapley",
    *,
    dataset: DatasetOrSeeded | None = None,
    ask: Ask | None = None,
    progress: Progress | None = None,
) -> Contributions:
    """Return what each client of a run added: as measured while it went, else from kept updates, else by a replay.

    What had to be found out is put into the run's folder, where the next call, the report and the record find it. Runs
    with differential privacy or secure aggregation are refused: their promise covers no such values.
    """
    folder = Path(folder)
    experiment = read_experiment(folder)
    check_private(experiment.privacy, f"{folder}")
    found = stored_contributions(folder, rule, measure, method)
    if not isinstance(found, str) and _whole(found):
        return found
    # For speed of start: what is there already needs no torch.
    from steelyard.contributions.replaying import replay

    settings = ContributionSettings(measure=measure or default_measure(folder), method=method)
    problem = replay(folder, settings, rule, dataset=dataset, ask=ask, progress=progress)
    if problem:
        raise UserError(problem)
    found = stored_contributions(folder, rule, settings.measure, method)
    if isinstance(found, str):
        raise UserError(f"{folder}: no client was weighed in any round, so there is nothing to share out")
    return found


def _whole(found: Contributions) -> bool:
    """Whether values cover all rounds in which clients were weighed."""
    return not any(note.startswith("Measured in ") for note in found["notes"])


def default_measure(folder: Path) -> Measure:
    """Return the measure that is taken unless another is named: the loss on the server's rows, or else on clients'."""
    experiment = read_experiment(folder)
    on_clients = isinstance(experiment, LearningDescription) and experiment.partition.server == "none"
    return "local-loss" if on_clients else "loss"
