"""Peer: Flower's simulation (Ray), one core per client, FedAvg; a round runs from configure to aggregate."""

import logging
import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # not behind other processes of a shared machine
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import flwr
from flower_client import app as client_app
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from plain import network
from work import Gate, chosen, pick

bench = chosen()
server_app = ServerApp()
logging.getLogger("flwr").setLevel(logging.WARNING)


class Gated(FedAvg):
    """FedAvg that trains the clients which the benchmark names, when it is its turn."""

    def __init__(self, gate: Gate, **settings) -> None:
        super().__init__(**settings)
        self.gate = gate

    def configure_train(self, server_round, arrays, config, grid):
        round = self.gate.wait()
        if round is None:
            os._exit(0)
        messages = super().configure_train(server_round, arrays, config, grid)
        return [
            Message(
                content=RecordDict({"arrays": arrays, "config": ConfigRecord({"client": client})}),
                message_type=message.metadata.message_type,
                dst_node_id=message.metadata.dst_node_id,
            )
            for message, client in zip(messages, pick(bench, round), strict=True)
        ]

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        failed = [reply for reply in replies if reply.has_error()]
        if failed or len(replies) != bench.cohort:
            raise RuntimeError(f"{len(replies)} replies, {len(failed)} failed: {[r.error for r in failed[:1]]}")
        result = super().aggregate_train(server_round, replies)
        self.gate.done()
        return result


@server_app.main()
def serve(grid, context) -> None:
    strategy = Gated(
        Gate(peer="flower", flwr=flwr.__version__),
        fraction_train=bench.cohort / bench.clients,
        min_train_nodes=bench.cohort,
        min_available_nodes=bench.clients,
        fraction_evaluate=0.0,
    )
    strategy.start(grid=grid, num_rounds=10**6, initial_arrays=ArrayRecord(network(bench).state_dict()), timeout=3600)


run_simulation(
    server_app,
    client_app,
    num_supernodes=bench.clients,
    backend_config={
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 2, "log_to_driver": False},
    },
)
