"""Going on with any run the way it was started: simulated here, or as a federation on this machine."""

from __future__ import annotations

from pathlib import Path

from steelyard.base import files
from steelyard.base.errors import UserError
from steelyard.experiment.named_files import Ask
from steelyard.experiment.resuming import accept_experiment
from steelyard.experiment.running import resume as resume_simulated
from steelyard.federate import require_flower
from steelyard.federate.server_folder import read_launch
from steelyard.runs.database import exists
from steelyard.runs.history import History


def resume(folder: Path, *, progress: bool = False, ask: Ask | None = None, accept_changes: bool = False) -> Path:
    """Go on with a run from its last whole round; what `steelyard resume` does.

    `ask` is called with the code that the folder names, before it runs.
    """
    files.check_run(folder)
    if read_launch(folder) is not None:
        require_flower()
        # For speed of start, and because a simulation needs no Flower.
        from steelyard.federate.local import resume_local

        if accept_changes and exists(folder):
            accept_experiment(folder)
        return resume_local(folder, progress=progress, ask=ask)
    if _is_federated(folder):
        raise UserError(
            f"{folder}: this run is a federation's, which its server goes on with: steelyard federate submit SERVER "
            f"{folder} (with Flower's own commands: flwr run APP --stream --run-config 'out=\"{folder.resolve()}\" "
            "resume=true')"
        )
    return resume_simulated(folder, progress=progress, ask=ask, accept_changes=accept_changes)


def _is_federated(folder: Path) -> bool:
    info = History(folder).info
    return info.get("clients") == "flower" and info.get("status") != "finished"
