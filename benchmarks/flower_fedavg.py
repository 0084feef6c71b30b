"""A federation of ours beside Flower's own FedAvg, one after the other, with real processes on this machine.

    python -m benchmarks.flower_fedavg --nodes 8 --rounds 3 --hidden 2530,2530 --out benchmarks/results/federation.md

Ours is `benchmarks.federation --served`: TLS, the proxy, keys, and clients that train. Flower's is its SuperLink and
SuperNodes without TLS, its FedAvg strategy, and clients that send the model back as it came, without torch. Both send
a model of the same length to every node and back, and then test it there, in every round. A SuperNode starts a process
for each message; the memory of a node of Flower's is that between messages. Prints a line of JSON for each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.federation import COLUMNS, about, experiment, family, peak, pss, served, show, took
from benchmarks.kit import start, whole_numbers

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "plain-fedavg"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["flwr", "numpy"]
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "steelyard"
[tool.flwr.app.components]
serverapp = "plain_fedavg.app:server"
clientapp = "plain_fedavg.app:client"
[tool.flwr.app.config]
parameters = 1
rounds = 1
nodes = 1
out = ""
"""
APP = '''
"""Flower's FedAvg, with clients that do no work."""

import json
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid, context):
    config, times = context.run_config, []

    def note(round, arrays):
        times.append(time.time())
        peak = getrusage(RUSAGE_SELF).ru_maxrss // 1024
        Path(config["out"]).write_text(json.dumps({"times": times, "peak_mb": peak}))

    model = ArrayRecord({"model": Array(np.zeros(config["parameters"], np.float32))})
    nodes = {f"min_{kind}_nodes": config["nodes"] for kind in ("train", "evaluate", "available")}
    FedAvg(**nodes).start(grid, model, num_rounds=config["rounds"], evaluate_fn=note)


@client.train()
def train(message, context):
    metrics = MetricRecord({"num-examples": 10})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)


@client.evaluate()
def evaluate(message, context):
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 10, "loss": 0.0})}), reply_to=message)
'''


def write(file: Path, text: str) -> None:
    """Write a text file, in a folder that is made where it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def flower(document: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Run Flower's own processes with its own strategy."""
    from steelyard.federate.app_folder import CONNECTION, connection_file
    from steelyard.federate.workers import Process, end_all, environment, reserved_port

    facts = about(document)
    with tempfile.TemporaryDirectory() as scratch:
        root, noted = Path(scratch), Path(scratch) / "noted.json"
        ports: list[str] = []
        for _ in range(nodes + 1):
            with reserved_port() as reserved:
                ports.append(str(reserved.getsockname()[1]))
        write(root / "app" / "pyproject.toml", PROJECT)
        write(root / "app" / "plain_fedavg" / "__init__.py", "")
        write(root / "app" / "plain_fedavg" / "app.py", APP)
        write(root / "home" / "config.toml", connection_file(f"127.0.0.1:{ports[0]}", None))
        env, commands = environment(root / "home", OMP_NUM_THREADS="1"), Path(sys.executable).parent
        words = [str(commands / "flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", ports[0]]
        words += ["--disable-runtime-dependency-installation"]
        begun = time.time()
        superlink = Process("superlink", words, env, root / "superlink.log", root)
        running = [superlink]
        try:
            superlink.wait_for_port(int(ports[0]), 120)
            for number, port in enumerate(ports[1:]):
                words = [str(commands / "flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{ports[0]}"]
                words += ["--port", port]
                running.insert(0, Process(f"node-{number}", words, env, root / f"node-{number}.log", root))
            config = f'parameters={facts["parameters"]} rounds={facts["rounds"]} nodes={nodes} out="{noted}"'
            command = ["flwr", "run", str(root / "app"), CONNECTION, "--run-config", config, "--stream"]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3000)
            found = json.loads(noted.read_text()) if noted.exists() else {"times": []}
            if len(found["times"]) <= facts["rounds"]:
                raise SystemExit(f"Flower's run did not end:\n{done.stdout[-2000:]}{done.stderr[-500:]}")
            memory = {"node_mb": sum(map(pss, family(running[0].pid))), "superlink_mb": peak(superlink.pid)}
            ended = time.time()
        finally:
            end_all(running)
    seconds = took(begun, found["times"], ended)
    return {**facts, "through": "Flower's FedAvg, no TLS", **seconds, "server_app_mb": found["peak_mb"], **memory}


def main(
    nodes: int = 8,
    rounds: int = 3,
    hidden: Annotated[str, typer.Option(help="hidden units of the model")] = "2530,2530",
    out: Annotated[Path | None, typer.Option(help="Markdown file that gets two rows more")] = None,
) -> None:
    """Measure as the command line says."""
    document = experiment(nodes, nodes, rounds, whole_numbers(hidden), "digits")
    for measure in (served, flower):
        show(measure(document, nodes), COLUMNS, out)


if __name__ == "__main__":
    start(main)
