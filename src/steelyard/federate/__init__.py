"""Running an experiment across machines, on Flower. Needs the extra `steelyard[flower]`.

The two Flower apps
    `server_app`        the ServerApp: the round loop, with clients on other machines
    `client_app`        the ClientApp: one node's clients answer one message; what they keep between rounds
    `hidden_node`       a node's part of a round with hidden updates
    `app_folder`        writes the folder that `flwr run` starts, with the experiment in its run configuration

On a node's machine
    `node`              takes part as the node's own file says: fetches messages, sends answers
    `node_worker`       the process that does the work: the client app, warm between messages
    `node_ledger`       every answer that left with noise, and the owner's limit
    `receipts`          what the node signed, what the server's heads say of it, and what both show

On the server's machine
    `serving`           a SuperLink on loopback, the proxy, the keys of the register, the runs one after another
    `proxy`             the only way in: calls of registered nodes, nothing else, passed on to the SuperLink
    `connections`       bounds on the proxy's connections; Flower's SuperLink, closed to other accounts of the machine
    `contacts`          what the proxy heard of nodes and refused; the registered nodes, as an operator sees them
    `server_folder`     where everything of a server lies; the runs: submitted, followed, ended

Around them
    `local`             a federation on this machine: its SuperLink and nodes, a run from its start to its end
    `workers`           starts processes and ends every one of them; asks and replaces the workers of nodes
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
