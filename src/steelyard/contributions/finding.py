"""What `steelyard contributions` does: take what a run has, or find it out, or have the run measure it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from steelyard.base import files
from steelyard.base.errors import UserError
from steelyard.contributions.document import Contributions, stored_contributions
from steelyard.experiment.checks import check_private
from steelyard.experiment.loading import RUN_FILE, own_text, read_experiment
from steelyard.proof.signing import head_key
from steelyard.rounds.plan import ContributionSettings, Measure, Method
from steelyard.runs.history import History

if TYPE_CHECKING:
    from steelyard.contributions.replaying import Without
    from steelyard.data.dataset import DatasetOrSeeded
    from steelyard.experiment.loading import Ask


def contributions(
    folder: str | Path,
    rule: str | None = None,
    measure: Measure | None = None,
    method: Method = "shapley",
    *,
    retrained: bool = False,
    dataset: DatasetOrSeeded | None = None,
    ask: Ask | None = None,
) -> Contributions:
    """Return what each client of a run added: as measured while it went, else from kept updates, else by a replay.

    What had to be found out is put into the run's folder, where the next call, the report and the record find it. Runs
    with differential privacy or secure aggregation are refused: their promise covers no such values. `retrained` trains
    every coalition of up to ten clients instead: the truth that the estimate is held against.
    """
    folder = Path(folder)
    experiment = read_experiment(folder)
    check_private(experiment.privacy, f"{folder}")
    if retrained and method == "classes":
        raise UserError("--method: got 'classes' with --retrain; allowed: shapley, leave-one-out")
    found = stored_contributions(folder, rule, measure, method, retrained=retrained)
    if not isinstance(found, str) and (retrained or len(found["rounds"]) >= History(folder).last_round):
        return found
    # For speed of start: what is there already needs no torch.
    from steelyard.contributions.replaying import Repetition

    check_private(experiment.privacy, f"{folder}", again=True)
    settings = ContributionSettings(measure=measure or experiment.default_measure, method=method)
    again = Repetition(folder, rule, dataset, ask)
    problem = again.retrain(settings) if retrained else again.replay(settings)
    if problem:
        raise UserError(problem)
    found = stored_contributions(folder, rule, settings.measure, method, retrained=retrained)
    if isinstance(found, str):
        raise UserError(f"{folder}: no client was weighed in any round, so there is nothing to share out")
    return found


def without(
    folder: str | Path,
    client: str,
    rule: str | None = None,
    measure: Measure | None = None,
    *,
    retrained: bool = False,
    dataset: DatasetOrSeeded | None = None,
    ask: Ask | None = None,
) -> Without:
    """Return how a run's model would do without one client: its rounds weighed again, or trained again.

    Weighing again is approximate: the others' updates stay those that they sent while the client took part.
    """
    # For speed of start, as above.
    from steelyard.contributions.replaying import Repetition, check_client

    folder = Path(folder)
    if retrained:
        experiment = read_experiment(folder)
        check_private(experiment.privacy, f"{folder}", again=True)
        settings = ContributionSettings(measure=measure or experiment.default_measure)
        return Repetition(folder, rule, dataset, ask).without(client, settings)
    found = contributions(folder, rule, measure, "leave-one-out", dataset=dataset, ask=ask)
    check_client(client, sorted(row["client"] for row in found["clients"]))
    row = next(row for row in found["clients"] if row["client"] == client)
    sign = 1 if found["measure"].endswith("loss") else -1
    ends = sorted(found["after"] + sign * row[end] for end in ("low", "high"))
    return {
        "run": str(folder),
        "rule": found["rule"],
        "client": client,
        "measure": found["measure"],
        "unit": found["unit"],
        "seeds": found["seeds"],
        "after": found["after"],
        "without": found["after"] + sign * row["value"],
        "low": ends[0],
        "high": ends[1],
        "source": "each round weighed again without it, approximate: the others trained with it; --retrain trains anew",
    }


def switch_on(folder: Path) -> None:
    """Have a run measure what each client adds, from the round with which it goes on; one that does stays as it is.

    The section is added to the run's own experiment file. No model changes by it.
    """
    # For speed of start, as above.
    from steelyard.contributions.replaying import check_simulated
    from steelyard.experiment.resuming import changed_experiment
    from steelyard.runs.facts import RunFacts
    from steelyard.runs.store import Store

    files.check_run(folder)
    experiment = read_experiment(folder)
    if experiment.contributions is not None:
        return
    history = History(folder)
    check_simulated(history)
    if history.facts.status == "finished":
        raise UserError(
            f"--contributions: {folder} has finished; allowed: a run that goes on, or `steelyard contributions "
            f"{folder}`, which finds it out afterwards"
        )
    changed_experiment(history.folder, history.facts, accept=False)
    section = {"contributions": {"measure": experiment.default_measure}}
    experiment.changed(section)  # refuses what cannot be measured
    with closing(Store(folder, signer=head_key())) as store:
        text = f"{own_text(folder / RUN_FILE)}\n{tomli_w.dumps(section)}"
        files.write(folder / RUN_FILE, text.encode())
        store.note(RunFacts(experiment_text=text))
