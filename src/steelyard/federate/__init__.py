"""Running an experiment across machines, on Flower. Needs the extra `steelyard[federate]`.

The two Flower apps
    `server_app`        the ServerApp: the round loop, with clients on other machines
    `client_app`        the ClientApp: one node's clients answer one message; what they keep between rounds
    `secure_node`       a node's part of a round with hidden updates
    `app_folder`        writes the folder that `flwr run` starts, with the experiment in its run configuration

On a node's machine
    `node`              takes part as the node's own file says: fetches messages, sends answers
    `node_worker`       the process that does the work: the client app, warm between messages
    `received`          the last global model that the node received, which it keeps
    `own_model`         that model, as the node's owner takes it
    `book`              what the node keeps: each answer that left with noise, what it signed, what heads say of it

On the server's machine
    `server`            a SuperLink on loopback, the proxy, the keys of the register, the runs one after another
    `proxy`             the only way in: calls of registered nodes, nothing else, passed on to the SuperLink
    `queue`             where everything of a server lies; its runs: submitted, followed, ended
    `standing`          how each registered node stands

Around them
    `local`             a federation on this machine: its SuperLink and nodes, a run from its start to its end
    `workers`           starts processes and ends every one of them; asks and replaces the workers of nodes
    `certificates`      certificates for TLS, and keys of nodes
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.base import files
from steelyard.base.errors import UserError
from steelyard.clients.flower import check_version

if TYPE_CHECKING:
    from steelyard.experiment.loading import Ask


def require_flower() -> None:
    """Refuse in one line that says what to install where Flower is missing, or one that we do not know is there.

    Call it before Flower is imported.
    """
    for module in ("flwr", "cryptography", "urllib3", "uvicorn"):
        if find_spec(module) is None:
            raise UserError(f"federate: needs {module}, which is not installed; pip install 'steelyard[federate]'")
    check_version()


def resume(folder: Path, *, progress: bool = False, ask: Ask | None = None, accept_changes: bool = False) -> Path:
    """Go on with a run from its last whole round, the way it was started; what `steelyard resume` does.

    `ask` is called with the code that the folder names, before it runs.
    """
    # For speed of start: whoever needs one part of this package waits for no torch.
    from steelyard.experiment.resuming import accept_experiment
    from steelyard.experiment.running import resume as resume_simulated
    from steelyard.federate.queue import read_launch
    from steelyard.runs.database import exists
    from steelyard.runs.history import History

    files.check_run(folder)
    if read_launch(folder) is not None:
        require_flower()
        # For speed of start, and because a simulation needs no Flower.
        from steelyard.federate.local import resume_local

        if accept_changes and exists(folder):
            accept_experiment(folder)
        return resume_local(folder, progress=progress, ask=ask)
    facts = History(folder).facts
    if facts.clients == "flower" and facts.status != "finished":
        raise UserError(
            f"{folder}: this run is a federation's, which its server goes on with: steelyard federate submit SERVER "
            f"{folder} (with Flower's own commands: flwr run APP --stream --run-config 'out=\"{folder.resolve()}\" "
            "resume=true')"
        )
    return resume_simulated(folder, progress=progress, ask=ask, accept_changes=accept_changes)
