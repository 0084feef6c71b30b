"""Running an experiment across machines, on Flower. Needs the extra `steelyard[flower]`.

The two Flower apps
    `server_app`        the ServerApp: the round loop, with clients on other machines
    `client_app`        the ClientApp: one node's clients answer one message
    `run_config`        the experiment inside Flower's run configuration
    `node_state`        what a node's clients keep between rounds
    `app_folder`        writes the folder that `flwr run` starts

On a node's machine
    `node`              takes part as the node's own file says; all nodes of a federation on one machine
    `node_link`         speaks to the server: fetches messages, sends answers
    `node_workers`      starts, asks and replaces the process that does the work
    `node_worker`       that process: the client app, warm between messages

On the server's machine
    `serving`           a SuperLink on loopback, the proxy, the keys of the register, the runs
    `proxy`             the only way in: calls of registered nodes, nothing else
    `superlink_calls`   how it passes them on to the SuperLink
    `contacts`          what the proxy heard of nodes, and what it refused
    `server_folder`     where everything of a server lies, and who serves it
    `server_runs`       the runs that were submitted: what, how they go, how they ended
    `server_nodes`      the registered nodes, as an operator sees them
    `run_queue`         starts the runs one after another, and notices when one ends
    `submitting`        puts a run into the queue and follows it
    `outcomes`          how a run goes, as its server app says

A federation on one machine
    `local`             run or resume an experiment with one, and show its rounds
    `local_federation`  its processes: SuperLink and nodes
    `local_launch`      how it was started, kept for a resume
    `processes`         starts processes and ends every one of them
    `own_superlink`     Flower's SuperLink, closed to other accounts of the machine

Around them
    `certificates`      certificates for TLS, and keys of nodes
    `resuming`          goes on with any run the way it was started
"""

from __future__ import annotations

from importlib.util import find_spec

from steelyard.base.errors import UserError


def require_flower() -> None:
    """Refuse in one line that says what to install where Flower is missing; call it before Flower is imported."""
    for module in ("flwr", "cryptography"):
        if find_spec(module) is None:
            raise UserError(f"federate: needs {module}, which is not installed; pip install 'steelyard[flower]'")
